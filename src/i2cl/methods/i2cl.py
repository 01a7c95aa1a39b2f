"""What I2CL and its variants share: settings of extraction and calibration, and the injected predictor."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import pydantic
import torch
from pydantic import BaseModel, ConfigDict

from i2cl.core.calibration import calibrate
from i2cl.core.context import ContextVector, ExtractConfig, extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.methods.base import Method
from i2cl.methods.prompts import PromptPredictor, Shown, fitting, shared_ids
from i2cl.models.decoder import Decoder
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import Questions
from i2cl.tasks import Example, Task, Template


@dataclass(frozen=True)
class InjectionMethod(Method):
    """Extracts, calibrates and injects; how exactly is up to the variant."""

    formula: ClassVar[str] = "2DL"
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = (ExtractConfig, CalibrationConfig)

    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def predictor(
        self,
        decoder: Decoder,
        task: Task,
        injection: Injection,
        *,
        shown: Shown = (),
        prefix: Prefix | None = None,
        held_out: int = 0,
    ) -> PromptPredictor:
        """Scores under the injection, behind demonstrations or not."""
        return PromptPredictor(
            decoder,
            task,
            shown,
            prefix,
            injection.edit(),
            cached_values=injection.context.values.numel() + (prefix.values if prefix else 0),
            trainable_parameters=self.calibration.parameters(decoder.layers, self.extraction.writers),
            held_out=held_out,
        )


@dataclass(frozen=True)
class I2CL(InjectionMethod):
    """A context vector injected with calibrated coefficients (paper, section "Methodology")."""

    name: ClassVar[str] = "i2cl"
    summary: ClassVar[str] = "context vector injected with calibrated coefficients"
    row: ClassVar[str] = "I2CL (ours)"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Extract and calibrate."""
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        injection = calibrate(decoder, task, demonstrations, context, self.calibration, seed=seed)
        return self.predictor(decoder, task, injection)


@dataclass(frozen=True)
class I2CLUnseen(InjectionMethod):
    """Coefficients are calibrated on the demonstrations; as many others make the vector that is injected."""

    name: ClassVar[str] = "i2cl_unseen"
    summary: ClassVar[str] = "I2CL whose injected vector comes from other demonstrations"
    row: ClassVar[str] = "Unseen demo. (figure on robustness)"
    needs: ClassVar[str] = "demonstrations, as many held-out examples"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Calibrate on one set, extract from the other.

        Raises:
            I2CLError: if the training split has too few further examples.
        """
        others = task.held_out(len(demonstrations), demonstrations, seed)
        seen = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        injection = calibrate(decoder, task, demonstrations, seen, self.calibration, seed=seed)
        unseen = extract(decoder, task, others, self.extraction, seed=seed)
        return self.predictor(decoder, task, replace(injection, context=unseen), held_out=len(others))


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
        questions = Questions(decoder, task)
        pairs = fitting(questions, demonstrations)
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        prompt = partial(task.template.prompt, pairs)
        injection = calibrate(
            decoder, task, demonstrations, context, self.calibration, seed=seed, prompt=prompt
        )
        prefix = decoder.prefix(shared_ids(questions, pairs), edit=injection.edit())
        return self.predictor(decoder, task, injection, shown=pairs, prefix=prefix)


class CorruptionConfig(BaseModel):
    """What is spoilt, and for whom.

    Attributes:
        corruption: a label drawn uniformly from the task's, the true one among them (``random_label``);
            the words of each text, split at whitespace, in random order (``random_order``, the paper's
            random-token); or no words of the template (``without_format``).
        stage: the one that gets to see it. The other stage has the intact demonstrations, and queries
            the task's own template, always.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    corruption: Literal["random_label", "random_order", "without_format"] = "random_label"
    stage: Literal["vectorization", "calibration"] = "vectorization"


@dataclass(frozen=True)
class I2CLCorrupted(InjectionMethod):
    """Extracts from corrupted demonstrations and calibrates on intact ones, or the other way round."""

    name: ClassVar[str] = "i2cl_corrupted"
    summary: ClassVar[str] = "I2CL with demonstrations corrupted in one of its two stages"
    row: ClassVar[str] = "Influencing factors (figure on formation)"
    settings = (ExtractConfig, CalibrationConfig, CorruptionConfig)

    spoilt: CorruptionConfig = field(default_factory=CorruptionConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Extract and calibrate, one of them on the corrupted demonstrations."""
        intact, bad = (task, tuple(demonstrations)), corrupted(task, demonstrations, self.spoilt, seed)
        seen, learnt = (bad, intact) if self.spoilt.stage == "vectorization" else (intact, bad)
        context = extract(decoder, *seen, self.extraction, seed=seed)
        injection = calibrate(decoder, *learnt, context, self.calibration, seed=seed)
        return self.predictor(decoder, task, injection)  # the real task, whatever calibration has seen


def corrupted(
    task: Task, demonstrations: Sequence[Example], config: CorruptionConfig, seed: int
) -> tuple[Task, tuple[Example, ...]]:
    """The task and demonstrations that the chosen stage gets to see."""
    own = random.Random(f"corrupted demonstrations {seed}")  # batches are drawn from the seed itself
    if config.corruption == "without_format":
        plain = replace(Template.plain(), separator=task.template.separator)
        return replace(task, template=plain), tuple(demonstrations)
    if config.corruption == "random_label":
        return task, tuple(
            replace(example, label=own.randrange(len(task.labels))) for example in demonstrations
        )
    return task, tuple(replace(example, text=_shuffled(example.text, own)) for example in demonstrations)


def _shuffled(text: str, picker: random.Random) -> str:
    words = text.split()
    return " ".join(picker.sample(words, len(words)))


class NoiseConfig(BaseModel):
    """How large the noise vector is.

    Attributes:
        noise_vector: entries of variance one (``standard``, released code), or the norm of the context
            vector it replaces, per layer and writer (``matched``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    noise_vector: Literal["standard", "matched"] = "standard"


@dataclass(frozen=True)
class Noise(InjectionMethod):
    """The control that tells what the context vector itself contributes."""

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "I2CL with a Gaussian vector in place of the context vector"
    row: ClassVar[str] = "Noise vector"
    settings = (ExtractConfig, CalibrationConfig, NoiseConfig)

    vector: NoiseConfig = field(default_factory=NoiseConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Draw a vector of the context vector's shape, then calibrate as I2CL does."""
        real = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        context = noise_like(real, self.vector, seed)
        injection = calibrate(decoder, task, demonstrations, context, self.calibration, seed=seed)
        return self.predictor(decoder, task, injection)


def noise_like(real: ContextVector, config: NoiseConfig, seed: int) -> ContextVector:
    """A Gaussian vector in place of a context vector."""
    own = random.Random(f"noise vector {seed}").getrandbits(63)  # calibration draws from the seed itself
    drawn = torch.randn(real.values.shape, generator=torch.Generator().manual_seed(own))
    if config.noise_vector == "matched":
        drawn = drawn / drawn.norm(dim=-1, keepdim=True) * real.values.norm(dim=-1, keepdim=True)
    return replace(real, values=drawn)
