"""I2CL with class vectors: one context vector for each class, each with a lambda of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from i2cl.calibration import calibrate
from i2cl.classes import extract_classes
from i2cl.decoder import Decoder
from i2cl.methods.injection_base import InjectionMethod
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class I2CLClasses(InjectionMethod):
    """Calibrates classes + 1 scalars a site; the weighted sum of the vectors is fixed from then on."""

    name: ClassVar[str] = "i2cl_classes"
    summary: ClassVar[str] = "I2CL with one vector for each class, each with a coefficient of its own"
    needs: ClassVar[str] = "demonstrations of every class"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Extract class by class and calibrate.

        Raises:
            I2CLError: if a class has no demonstration.
        """
        vectors = extract_classes(decoder, task, demonstrations, self.extraction, seed=seed)
        injection = calibrate(decoder, task, demonstrations, vectors, self.calibration, seed=seed)
        return self.predictor(decoder, task, injection)
