"""Task vector: the hidden state behind demonstrations and a dummy query replaces the query's own.

Source: paper, appendix "Implementation of Baseline Methods"; Hendel et al. 2023,
https://arxiv.org/abs/2310.15916.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.methods.base import Cost, Method
from i2cl.methods.prompts import PromptPredictor, encode_prompts, fitting
from i2cl.models.batching import Batch, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.scoring import Questions
from i2cl.tasks import Example, Task

HELD_OUT = 32


class ReplaceLast(Edit):
    """One layer's block output at the query's last token becomes ``state``."""

    site = "hidden"

    def __init__(self, layer: int, state: Float[Tensor, " d"]) -> None:
        self.layer = layer
        self.state = state

    def output(
        self, layer: int, _index: int, output: Float[Tensor, "batch tokens d"], batch: Batch
    ) -> Float[Tensor, "batch tokens d"] | None:
        """The replacement at one token of one layer."""
        if layer != self.layer:
            return None
        tokens = torch.arange(output.shape[1], device=output.device)
        last = (tokens == batch.last.to(output.device)[:, None])[..., None]
        return torch.where(last, self.state.to(output.device, output.dtype), output)


@dataclass(frozen=True)
class TaskVector(Method):
    """The state's layer is the one that does best on held-out examples, ties going to the earliest."""

    name: ClassVar[str] = "task_vector"
    summary: ClassVar[str] = "state behind the demonstrations replaces the query's at one layer"
    row: ClassVar[str] = "Task-vector"
    needs: ClassVar[str] = f"demonstrations, {HELD_OUT} held-out examples (layer) and a dummy query"
    formula: ClassVar[str] = "D"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Take the states of all layers at once, then try each on the held-out examples.

        Raises:
            I2CLError: if the training split has too few further examples, or the context is too small.
        """
        dummy, *held_out = task.held_out(HELD_OUT + 1, demonstrations, seed)
        questions = Questions(decoder, task)
        (prompt,) = encode_prompts(questions, fitting(questions, demonstrations), [dummy.text])
        states = decoder.capture(make_batch([prompt], decoder.device), site="hidden")[0, :, 0]
        tried = [_predictor(questions, layer, state) for layer, state in enumerate(states)]
        gold = torch.tensor([example.label for example in held_out])
        texts = [example.text for example in held_out]
        right = [int((candidate.scores(texts).argmax(-1) == gold).sum()) for candidate in tried]
        return tried[right.index(max(right))]


def _predictor(questions: Questions, layer: int, state: Float[Tensor, " d"]) -> PromptPredictor:
    cost = Cost.of(state, held_out=HELD_OUT + 1)
    return PromptPredictor(questions, edit=ReplaceLast(layer, state), cost=cost)
