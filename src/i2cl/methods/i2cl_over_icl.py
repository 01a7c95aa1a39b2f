"""I2CL over ICL: the demonstrations stay in the prompt during calibration and prediction.

Source: paper, appendix "Apply I2CL over ICL".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from i2cl.calibration import calibrate
from i2cl.context import extract
from i2cl.decoder import Decoder
from i2cl.methods.injection_base import InjectionMethod
from i2cl.methods.prompt_base import PromptPredictor, fitting, shared_ids
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class I2CLOverICL(InjectionMethod):
    """Injects at every token, demonstrations included; their injected keys and values are cached once."""

    name: ClassVar[str] = "i2cl_over_icl"
    summary: ClassVar[str] = "I2CL with the demonstrations still in the prompt"
    row: ClassVar[str] = "ICL+I2CL"
    formula: ClassVar[str] = "2MDL + 2DL"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Extract, then calibrate behind the demonstrations.

        Raises:
            I2CLError: if not even one demonstration per class fits into the context.
        """
        pairs = fitting(decoder, task, demonstrations)
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        prompt = partial(task.template.prompt, pairs)
        injection = calibrate(
            decoder, task, demonstrations, context, self.calibration, seed=seed, prompt=prompt
        )
        prefix = decoder.prefix(shared_ids(decoder, task, pairs), edit=injection.edit())
        return self.predictor(decoder, task, injection, shown=pairs, prefix=prefix)
