"""In-context vector: the direction from sentences to their answers, added to every layer's state.

Source: paper, appendix "Implementation of Baseline Methods"; Liu et al. 2024,
https://arxiv.org/abs/2311.06668.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.scoring import Questions
from i2cl.tasks import Example, Task

HELD_OUT = 32
COARSE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FINE = tuple(step / 100 for step in range(1, 11))
PAPER_STRENGTHS: Mapping[str, float] = MappingProxyType(
    {
        "sst2": 0.01,
        "sst5": 0.02,
        "trec": 0.02,
        "agnews": 0.0001,
        "subj": 0.02,
        "hate_speech18": 0.02,
        "dbpedia": 0.001,
        "emoc": 0.02,
        "mr": 0.02,
    }
)
"""The paper's table of strengths, found on Llama2-7b."""


class ICVConfig(BaseModel):
    """Where the strength comes from.

    Attributes:
        strength: ``search`` (the paper's two-stage grid, here on held-out examples), ``paper`` (its
            table, for the paper's tasks), or a number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strength: float | Literal["search", "paper"] = "search"


class AddPreservingNorm(Edit):
    """Adds a scaled unit vector to each unit state, then gives the state its norm back."""

    site = "hidden"

    def __init__(self, directions: Float[Tensor, "layers d"], strength: float) -> None:
        self.directions = directions
        self.strength = strength

    def output(
        self, layer: int, _index: int, output: Float[Tensor, "batch tokens d"], _batch: Batch
    ) -> Float[Tensor, "batch tokens d"]:
        """The turned state, at every token of every layer."""
        norm = output.norm(dim=-1, keepdim=True)
        direction = self.directions[layer].to(output.device, output.dtype)
        turned = output / norm.clamp(min=1e-12) + self.strength * direction
        turned = turned / turned.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        added: Tensor = norm * turned
        return added


@dataclass(frozen=True)
class ICV(Method):
    """The first principal direction of answer state minus sentence state, per layer."""

    name: ClassVar[str] = "icv"
    summary: ClassVar[str] = "direction from sentence to answer added to every layer, norm preserved"
    row: ClassVar[str] = "ICV"
    needs: ClassVar[str] = f"demonstrations, {HELD_OUT} held-out examples to search the strength"
    formula: ClassVar[str] = "DL"
    settings = (ICVConfig,)

    config: ICVConfig = field(default_factory=ICVConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Find directions, then the strength.

        Raises:
            I2CLError: if too few held-out examples remain, or the paper has no strength for the task.
        """
        questions = Questions(decoder, task)
        found = directions(decoder, task, demonstrations)
        strength = self.config.strength
        if strength == "search":
            held_out = task.held_out(HELD_OUT, demonstrations, seed)
            return _searched(questions, found, held_out)
        if strength == "paper":
            if task.name not in PAPER_STRENGTHS:
                raise I2CLError(f"the paper gives no ICV strength for {task.name!r}: use strength=search")
            strength = PAPER_STRENGTHS[task.name]
        return _predictor(questions, found, strength)


def _searched(
    questions: Questions, found: Float[Tensor, "layers d"], held_out: Sequence[Example]
) -> PromptPredictor:
    """Best of the coarse and the fine grid; ties go to the first tried, the smaller."""
    tried = [_predictor(questions, found, strength, len(held_out)) for strength in COARSE + FINE]
    gold = torch.tensor([example.label for example in held_out])
    texts = [example.text for example in held_out]
    right = [int((candidate.scores(texts).argmax(-1) == gold).sum()) for candidate in tried]
    return tried[right.index(max(right))]


def _predictor(
    questions: Questions, found: Float[Tensor, "layers d"], strength: float, held_out: int = 0
) -> PromptPredictor:
    cost = Cost.of(found, held_out=held_out)
    return PromptPredictor(questions, edit=AddPreservingNorm(found, strength), cost=cost)


def directions(decoder: Decoder, task: Task, demonstrations: Sequence[Example]) -> Float[Tensor, "layers d"]:
    """Unit vector per layer along which answer and sentence states differ most, pointing to the answer.

    The state is the block output at the last token of the sentence alone, and of the label word alone.
    Differences are not centred: the direction maximises their mean squared projection.
    """
    texts = [example.text for example in demonstrations]
    words = [task.labels[example.label] for example in demonstrations]
    difference = _states(decoder, words) - _states(decoder, texts)  # (demonstrations, layers, d)
    by_layer = difference.transpose(0, 1)
    _, _, axes = torch.linalg.svd(by_layer, full_matrices=False)
    first = axes[:, 0]
    towards = (first * by_layer.mean(1)).sum(-1, keepdim=True).sign()
    oriented: Tensor = first * torch.where(towards == 0, 1.0, towards)
    return oriented


def _states(decoder: Decoder, texts: Sequence[str]) -> Float[Tensor, "texts layers d"]:
    ids: list[Ids] = decoder.encoder.fitted(str, texts, decoder.max_length)
    states = torch.empty(len(ids), decoder.layers, decoder.d_model)
    for batch, captured in decoder.run_batches(ids, partial(decoder.capture, site="hidden")):
        states[list(batch.rows)] = captured[:, :, 0]
    return states
