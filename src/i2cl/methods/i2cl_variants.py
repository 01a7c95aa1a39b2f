"""Variants of I2CL that the paper uses as controls: other vectors, other demonstrations, or a full prompt."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from i2cl.core.calibration import calibrate
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig, ExtractConfig
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost
from i2cl.methods.i2cl import I2CL, CalibrationData
from i2cl.methods.prompting import PromptPredictor, common_prefix_ids, fit_to_context
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer
from i2cl.models.training import Settings
from i2cl.tasks import Example, Examples, Task, Template


def noise_like(injection: Injection, seed: int) -> Injection:
    """Replace an injection's context vector by Gaussian noise of unit variance and the same shape."""
    noise_seed = random.Random(f"noise vector {seed}").getrandbits(63)  # independent of calibration's seed
    noise = torch.randn(injection.context.shape, generator=torch.Generator().manual_seed(noise_seed))
    return replace(injection, context=noise)


@dataclass(frozen=True)
class Noise(I2CL):
    """Control: measures what the context vector itself contributes (paper, "Noise Vector")."""

    name = "noise"
    summary = "I2CL with a Gaussian vector in place of the context vector"

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CalibrationData:
        """Replace the context vector by noise."""
        noise = noise_like(self.extract(decoder, task, demonstrations, seed), seed)
        return CalibrationData(task, demonstrations, noise, noise)


@dataclass(frozen=True)
class I2CLUnseen(I2CL):
    """Calibrates on the demonstrations, then injects the context vector of as many other examples.

    Source: paper, section "Linear Coefficients Are Generalizable".
    """

    name = "i2cl_unseen"
    summary = "I2CL whose injected vector comes from other demonstrations"
    needs = "demonstrations, as many held-out examples"

    def fit_cost(self, injection: Injection) -> Cost:
        """Return the number of trained coefficients and of other examples."""
        return super().fit_cost(injection) + Cost(held_out=injection.demonstrations)

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CalibrationData:
        """Extract both context vectors. Raises I2CLError if too few held-out examples remain."""
        unseen = task.held_out(len(demonstrations), demonstrations, seed)
        calibrated = self.extract(decoder, task, demonstrations, seed)
        injected = self.extract(decoder, task, unseen, seed)
        return CalibrationData(task, demonstrations, calibrated, injected)


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
        template = replace(Template.plain(), separator=task.template.separator)
        return replace(task, template=template), tuple(demonstrations)
    if config.corruption == "random_label":
        return task, tuple(
            replace(example, label=rng.randrange(len(task.labels))) for example in demonstrations
        )
    examples_and_words = [(example, example.text.split()) for example in demonstrations]
    return task, tuple(
        replace(example, text=" ".join(rng.sample(words, len(words))))
        for example, words in examples_and_words
    )


@dataclass(frozen=True)
class I2CLCorrupted(I2CL):
    """Extracts from corrupted demonstrations and calibrates on intact ones, or the other way round.

    Source: paper, section "Influencing Factors of the Context Vector Generation".
    """

    name = "i2cl_corrupted"
    summary = "I2CL with demonstrations corrupted in one of its two stages"
    settings = (ExtractConfig, CalibrationConfig, CorruptionConfig)
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CalibrationData:
        """Extract from one set of demonstrations, and return the other for calibration."""
        extracted = calibrated = (task, tuple(demonstrations))
        if self.corruption.stage == "vectorization":
            extracted = corrupt(task, demonstrations, self.corruption, seed)
        else:
            calibrated = corrupt(task, demonstrations, self.corruption, seed)
        context = self.extract(decoder, *extracted, seed)
        return CalibrationData(*calibrated, context, context)


@dataclass(frozen=True)
class I2CLOverICL(I2CL):
    """Injects at every token, including the cached demonstrations.

    Source: paper, appendix "Apply I2CL over ICL".
    """

    name = "i2cl_over_icl"
    summary = "I2CL with the demonstrations still in the prompt"

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
        shown = fit_to_context(scorer, demonstrations)
        context = self.extract(decoder, task, demonstrations, seed)
        prompt = partial(task.template.prompt, shown)
        injection = calibrate(
            decoder, task, demonstrations, context, self.calibration, seed=seed, prompt=prompt
        )
        prefix = decoder.prefix(common_prefix_ids(scorer, shown), edit=injection.edit())
        cost = self.fit_cost(injection) + Cost.of(context.context, prefix)
        return PromptPredictor(scorer, shown, prefix, injection.edit(), injection, cost)
