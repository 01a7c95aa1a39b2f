"""I2CL, and its variants, which change what the vector or the coefficients come from."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import pydantic
import torch

from i2cl.core.calibration import calibrate, calibrate_many
from i2cl.core.context import ContextVector, ExtractConfig, extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.prompts import PromptPredictor, fitting, shared_ids
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import Questions
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Example, Examples, Task, Template


class NoiseConfig(Settings):
    """How large the noise vector is."""

    # entries of variance one (``standard``, released code), or the norm of the context vector it replaces,
    # per layer and writer (``matched``)
    noise_vector: Literal["standard", "matched"] = "standard"


def noise_like(real: ContextVector, config: NoiseConfig, seed: int) -> ContextVector:
    """A Gaussian vector in place of a context vector."""
    number = random.Random(f"noise vector {seed}").getrandbits(63)  # calibration draws from the seed itself
    drawn = torch.randn(real.values.shape, generator=torch.Generator().manual_seed(number))
    if config.noise_vector == "matched":
        drawn = drawn / drawn.norm(dim=-1, keepdim=True) * real.values.norm(dim=-1, keepdim=True)
    return replace(real, values=drawn)


class CorruptionConfig(Settings):
    """What is spoilt, and for whom."""

    # a label drawn uniformly from the task's, the true one among them (``random_label``); the words of each
    # text, split at whitespace, in random order (``random_order``, the paper's random-token); or no words of
    # the template (``without_format``)
    corruption: Literal["random_label", "random_order", "without_format"] = "random_label"
    # the one that gets to see it. The other stage has the intact demonstrations, and queries the task's own
    # template, always
    stage: Literal["vectorization", "calibration"] = "vectorization"


def corrupted(
    task: Task, demonstrations: Examples, config: CorruptionConfig, seed: int
) -> tuple[Task, tuple[Example, ...]]:
    """The task and demonstrations that the chosen stage gets to see."""
    rng = random.Random(f"corrupted demonstrations {seed}")  # batches are drawn from the seed itself
    if config.corruption == "without_format":
        plain = replace(Template.plain(), separator=task.template.separator)
        return replace(task, template=plain), tuple(demonstrations)
    if config.corruption == "random_label":
        return task, tuple(replace(one, label=rng.randrange(len(task.labels))) for one in demonstrations)
    split = [(one, one.text.split()) for one in demonstrations]
    return task, tuple(replace(one, text=" ".join(rng.sample(words, len(words)))) for one, words in split)


@dataclass(frozen=True)
class InjectionMethod(Method):
    """Extracts, calibrates and injects; how exactly is up to the variant."""

    formula: ClassVar[str] = "2DL"
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = (ExtractConfig, CalibrationConfig)
    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def cost(self, injection: Injection, prefix: Prefix | None = None, held_out: int = 0) -> Cost:
        """What the injection takes, behind demonstrations or not."""
        trained = self.calibration.parameters(injection.base.layers, self.extraction.writers)
        return Cost.of(injection.context.values, prefix, trained=trained, held_out=held_out)


class Plan(NamedTuple):
    """What one seed is calibrated on; ``injected`` is what predicts, where that is another vector."""

    task: Task
    demonstrations: Examples
    context: ContextVector
    injected: ContextVector | None = None
    held_out: int = 0


@dataclass(frozen=True)
class I2CL(InjectionMethod):
    """A context vector injected with calibrated coefficients. Source: paper, section "Methodology"."""

    name: ClassVar[str] = "i2cl"
    summary: ClassVar[str] = "context vector injected with calibrated coefficients"
    row: ClassVar[str] = "I2CL (ours)"

    @property
    def joint(self) -> bool:
        """Whether their steps can be taken together."""
        return self.calibration.joint

    @property
    def rounds(self) -> int:
        """How often progress is told."""
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
        """Extract and calibrate."""
        seen = self.plan(decoder, task, demonstrations, seed)[:3]
        return calibrate(decoder, *seen, self.calibration, seed=seed, scoring=scoring, progress=progress)

    def plan(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Plan:
        """The demonstrations, and the context vector that they make."""
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        return Plan(task, demonstrations, context)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Extract and calibrate."""
        (predictor,) = self.fit_many(decoder, task, [demonstrations], [seed])
        return predictor

    def fit_many(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Examples], seeds: Sequence[int]
    ) -> list[PromptPredictor]:
        """Extract seed by seed and calibrate all of them together."""
        questions = Questions(decoder, task)  # the real task, whatever calibration sees
        pairs = zip(demonstrations, seeds, strict=True)
        plans = [self.plan(decoder, task, shown, seed) for shown, seed in pairs]
        tasks, shown, contexts = zip(*(plan[:3] for plan in plans), strict=True)
        injections = calibrate_many(decoder, tasks, shown, contexts, self.calibration, seeds=seeds)
        fitted = zip(plans, injections, strict=True)
        finals = [(plan, replace(one, context=plan.injected or one.context)) for plan, one in fitted]
        return [
            PromptPredictor(questions, edit=final.edit(), cost=self.cost(final, held_out=plan.held_out))
            for plan, final in finals
        ]


@dataclass(frozen=True)
class Noise(I2CL):
    """The control that tells what the context vector itself contributes (paper, "Noise Vector")."""

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "I2CL with a Gaussian vector in place of the context vector"
    row: ClassVar[str] = "Noise vector"
    settings = (ExtractConfig, CalibrationConfig, NoiseConfig)
    vector: NoiseConfig = field(default_factory=NoiseConfig)

    def plan(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Plan:
        """A vector of the context vector's shape."""
        real = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        return Plan(task, demonstrations, noise_like(real, self.vector, seed))


@dataclass(frozen=True)
class I2CLUnseen(I2CL):
    """Coefficients are calibrated on the demonstrations; as many others make the vector that is injected.
    Source: paper, section "Linear Coefficients Are Generalizable".
    """

    name: ClassVar[str] = "i2cl_unseen"
    summary: ClassVar[str] = "I2CL whose injected vector comes from other demonstrations"
    row: ClassVar[str] = "Unseen demo. (figure on robustness)"
    needs: ClassVar[str] = "demonstrations, as many held-out examples"

    def plan(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Plan:
        """Calibrate on one set, inject the other's vector; raises I2CLError if too few examples remain."""
        others = task.held_out(len(demonstrations), demonstrations, seed)
        seen = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        unseen = extract(decoder, task, others, self.extraction, seed=seed)
        return Plan(task, demonstrations, seen, unseen, len(others))


@dataclass(frozen=True)
class I2CLCorrupted(I2CL):
    """Extracts from corrupted demonstrations and calibrates on intact ones, or the other way round.
    Source: paper, section "Influencing Factors of the Context Vector Generation".
    """

    name: ClassVar[str] = "i2cl_corrupted"
    summary: ClassVar[str] = "I2CL with demonstrations corrupted in one of its two stages"
    row: ClassVar[str] = "Influencing factors (figure on formation)"
    settings = (ExtractConfig, CalibrationConfig, CorruptionConfig)
    spoilt: CorruptionConfig = field(default_factory=CorruptionConfig)

    def plan(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Plan:
        """Extract from the ones, calibrate on the others."""
        intact, bad = (task, tuple(demonstrations)), corrupted(task, demonstrations, self.spoilt, seed)
        seen, learnt = (bad, intact) if self.spoilt.stage == "vectorization" else (intact, bad)
        return Plan(*learnt, extract(decoder, *seen, self.extraction, seed=seed))


@dataclass(frozen=True)
class I2CLOverICL(InjectionMethod):
    """Injects at every token, cached demonstrations too. Source: paper, appendix "Apply I2CL over ICL"."""

    name: ClassVar[str] = "i2cl_over_icl"
    summary: ClassVar[str] = "I2CL with the demonstrations still in the prompt"
    row: ClassVar[str] = "ICL+I2CL"
    formula: ClassVar[str] = "2MDL + 2DL"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Extract, then calibrate behind the demonstrations. Raises I2CLError if not one per class fits, or
        on positions other than all: in front of a cache nothing tells a query's first or last token.
        """
        if self.calibration.positions != "all":
            cure = f"leave out positions={self.calibration.positions}"
            raise I2CLError(f"{self.name} injects at every token: {cure}")
        questions = Questions(decoder, task)
        pairs = fitting(questions, demonstrations)
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        prompt = partial(task.template.prompt, pairs)
        injection = calibrate(
            decoder, task, demonstrations, context, self.calibration, seed=seed, prompt=prompt
        )
        prefix = decoder.prefix(shared_ids(questions, pairs), edit=injection.edit())
        return PromptPredictor(questions, pairs, prefix, injection.edit(), self.cost(injection, prefix))
