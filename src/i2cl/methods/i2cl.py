"""I2CL, and variants that change the source of the context vector or of the coefficients."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import pydantic
import torch

from i2cl.core.calibration import calibrate
from i2cl.core.context import ContextVector, ExtractConfig, extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.prompts import PromptPredictor, common_prefix_ids, fit_to_context
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import LabelScorer
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Example, Examples, Task, Template


class NoiseConfig(Settings):
    """Scale of the noise vector."""

    # ``standard`` (unit variance, as in the released code), or ``matched`` (norm of the context vector that
    # it replaces, separately for each layer and writer)
    noise_vector: Literal["standard", "matched"] = "standard"


def noise_like(real: ContextVector, config: NoiseConfig, seed: int) -> ContextVector:
    """Return a Gaussian vector of the same shape as a context vector."""
    noise_seed = random.Random(f"noise vector {seed}").getrandbits(63)  # independent of calibration's seed
    noise = torch.randn(real.values.shape, generator=torch.Generator().manual_seed(noise_seed))
    if config.noise_vector == "matched":
        noise = noise / noise.norm(dim=-1, keepdim=True) * real.values.norm(dim=-1, keepdim=True)
    return replace(real, values=noise)


class CorruptionConfig(Settings):
    """Kind of corruption, and the stage that sees corrupted demonstrations."""

    # ``random_label`` (uniform over all labels, including the true one), ``random_order`` (shuffled
    # whitespace-separated words, the paper's random-token) or ``without_format`` (template without words)
    corruption: Literal["random_label", "random_order", "without_format"] = "random_label"
    # the other stage sees intact demonstrations; queries always use the task's own template
    stage: Literal["vectorization", "calibration"] = "vectorization"


def corrupt(
    task: Task, demonstrations: Examples, config: CorruptionConfig, seed: int
) -> tuple[Task, tuple[Example, ...]]:
    """Return the task and demonstrations as the corrupted stage sees them."""
    rng = random.Random(f"corrupted demonstrations {seed}")  # independent of the seed of the batches
    if config.corruption == "without_format":
        plain = replace(Template.plain(), separator=task.template.separator)
        return replace(task, template=plain), tuple(demonstrations)
    if config.corruption == "random_label":
        return task, tuple(replace(one, label=rng.randrange(len(task.labels))) for one in demonstrations)
    split = [(example, example.text.split()) for example in demonstrations]
    return task, tuple(replace(one, text=" ".join(rng.sample(words, len(words)))) for one, words in split)


@dataclass(frozen=True)
class InjectionMethod(Method):
    """Base class: extracts a context vector, calibrates its coefficients and injects it."""

    formula: ClassVar[str] = "2DL"
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = (ExtractConfig, CalibrationConfig)
    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def cost(self, injection: Injection, prefix: Prefix | None = None, held_out: int = 0) -> Cost:
        """Return the cost of an injection, together with cached demonstrations if there are any."""
        trained = self.calibration.parameters(injection.base.layers, self.extraction.writers)
        return Cost.of(injection.context.values, prefix, trained=trained, held_out=held_out)


class CalibrationData(NamedTuple):
    """Inputs of the calibration of one seed."""

    task: Task
    demonstrations: Examples
    context: ContextVector
    injected: ContextVector | None = None  # vector used for prediction. Default: ``context``
    held_out: int = 0  # labelled examples used besides the demonstrations


@dataclass(frozen=True)
class I2CL(InjectionMethod):
    """A context vector injected with calibrated coefficients. Source: paper, section "Methodology"."""

    name: ClassVar[str] = "i2cl"
    summary: ClassVar[str] = "context vector injected with calibrated coefficients"
    row: ClassVar[str] = "I2CL (ours)"

    @property
    def rounds(self) -> int:
        """Number of progress updates of a calibration."""
        return self.calibration.rounds

    def injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Examples,
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Extract a context vector and calibrate its coefficients."""
        inputs = self.prepare(decoder, task, demonstrations, seed)[:3]
        return calibrate(decoder, *inputs, self.calibration, seed=seed, scoring=scoring, progress=progress)

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CalibrationData:
        """Extract the context vector. Raises I2CLError as `extract`."""
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        return CalibrationData(task, demonstrations, context)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Extract, calibrate, and return a predictor that injects."""
        scorer = LabelScorer(decoder, task)  # the intact task, also if calibration sees a corrupted one
        data = self.prepare(decoder, task, demonstrations, seed)
        calibrated = calibrate(decoder, *data[:3], self.calibration, seed=seed)
        injection = replace(calibrated, context=data.injected or calibrated.context)
        cost = self.cost(injection, held_out=data.held_out)
        return PromptPredictor(scorer, edit=injection.edit(), injection=injection, cost=cost)


@dataclass(frozen=True)
class Noise(I2CL):
    """Control: measures what the context vector itself contributes (paper, "Noise Vector")."""

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "I2CL with a Gaussian vector in place of the context vector"
    row: ClassVar[str] = "Noise vector"
    settings = (ExtractConfig, CalibrationConfig, NoiseConfig)
    vector: NoiseConfig = field(default_factory=NoiseConfig)

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CalibrationData:
        """Replace the context vector by noise."""
        real = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        return CalibrationData(task, demonstrations, noise_like(real, self.vector, seed))


@dataclass(frozen=True)
class I2CLUnseen(I2CL):
    """Calibrates on the demonstrations, then injects the context vector of as many other examples.

    Source: paper, section "Linear Coefficients Are Generalizable".
    """

    name: ClassVar[str] = "i2cl_unseen"
    summary: ClassVar[str] = "I2CL whose injected vector comes from other demonstrations"
    row: ClassVar[str] = "Unseen demo. (figure on robustness)"
    needs: ClassVar[str] = "demonstrations, as many held-out examples"

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CalibrationData:
        """Extract both context vectors. Raises I2CLError if too few held-out examples remain."""
        others = task.held_out(len(demonstrations), demonstrations, seed)
        seen = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        unseen = extract(decoder, task, others, self.extraction, seed=seed)
        return CalibrationData(task, demonstrations, seen, unseen, len(others))


@dataclass(frozen=True)
class I2CLCorrupted(I2CL):
    """Extracts from corrupted demonstrations and calibrates on intact ones, or the other way round.

    Source: paper, section "Influencing Factors of the Context Vector Generation".
    """

    name: ClassVar[str] = "i2cl_corrupted"
    summary: ClassVar[str] = "I2CL with demonstrations corrupted in one of its two stages"
    row: ClassVar[str] = "Influencing factors (figure on formation)"
    settings = (ExtractConfig, CalibrationConfig, CorruptionConfig)
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CalibrationData:
        """Extract from one set of demonstrations, and return the other for calibration."""
        extracted = calibrated = (task, tuple(demonstrations))
        if self.corruption.stage == "vectorization":
            extracted = corrupt(task, demonstrations, self.corruption, seed)
        else:
            calibrated = corrupt(task, demonstrations, self.corruption, seed)
        return CalibrationData(*calibrated, extract(decoder, *extracted, self.extraction, seed=seed))


@dataclass(frozen=True)
class I2CLOverICL(InjectionMethod):
    """Injects at every token, including the cached demonstrations.

    Source: paper, appendix "Apply I2CL over ICL".
    """

    name: ClassVar[str] = "i2cl_over_icl"
    summary: ClassVar[str] = "I2CL with the demonstrations still in the prompt"
    row: ClassVar[str] = "ICL+I2CL"
    formula: ClassVar[str] = "2MDL + 2DL"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Extract, then calibrate with the demonstrations in the prompt.

        Raises:
            I2CLError: if the context cannot hold one demonstration per class, or ``positions`` is not
                ``"all"``: in cached demonstrations, first and last tokens of queries are not defined.
        """
        if self.calibration.positions != "all":
            raise I2CLError(
                f"{self.name} injects at every token: leave out positions={self.calibration.positions}"
            )
        scorer = LabelScorer(decoder, task)
        pairs = fit_to_context(scorer, demonstrations)
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        prompt = partial(task.template.prompt, pairs)
        injection = calibrate(
            decoder, task, demonstrations, context, self.calibration, seed=seed, prompt=prompt
        )
        prefix = decoder.prefix(common_prefix_ids(scorer, pairs), edit=injection.edit())
        return PromptPredictor(
            scorer, pairs, prefix, injection.edit(), injection, self.cost(injection, prefix)
        )
