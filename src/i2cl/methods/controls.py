"""What controls put in the place of demonstrations or of their context vector: corrupted ones, and noise.

Source: paper, "Noise Vector" and section "Influencing Factors of the Context Vector Generation".
"""

import random
from dataclasses import replace
from typing import Literal

import torch

from i2cl.core.context import ContextVector
from i2cl.models.training import Settings
from i2cl.tasks import Example, Examples, Task, Template


class NoiseConfig(Settings):
    """How large the noise vector is."""

    # entries of variance one (``standard``, released code), or the norm of the context vector it replaces,
    # per layer and writer (``matched``)
    noise_vector: Literal["standard", "matched"] = "standard"


def noise_like(real: ContextVector, config: NoiseConfig, seed: int) -> ContextVector:
    """A Gaussian vector in place of a context vector."""
    own = random.Random(f"noise vector {seed}").getrandbits(63)  # calibration draws from the seed itself
    drawn = torch.randn(real.values.shape, generator=torch.Generator().manual_seed(own))
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
    own = random.Random(f"corrupted demonstrations {seed}")  # batches are drawn from the seed itself
    if config.corruption == "without_format":
        plain = replace(Template.plain(), separator=task.template.separator)
        return replace(task, template=plain), tuple(demonstrations)
    if config.corruption == "random_label":
        return task, tuple(
            replace(example, label=own.randrange(len(task.labels))) for example in demonstrations
        )
    split = [(example, example.text.split()) for example in demonstrations]
    return task, tuple(replace(one, text=" ".join(own.sample(words, len(words)))) for one, words in split)
