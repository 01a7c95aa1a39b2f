"""Task vectors: the state after demonstrations and a dummy query replaces the state of a query's last token.

Source: paper, appendix "Implementation of Baseline Methods"; Hendel et al. 2023,
https://arxiv.org/abs/2310.15916. See docs/reference/fidelity.md for details that the sources leave open.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.methods.base import Cost, Method
from i2cl.methods.prompting import PromptPredictor, encode_prompts, fit_to_context
from i2cl.models.batching import Batch, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.scoring import LabelScorer, score
from i2cl.tasks import Examples, Task

HELD_OUT = 32


class ReplaceLast(Edit):
    """Replaces the output of one block at the query's last token."""

    hook_point = "hidden"

    def __init__(self, layer: int, state: Float[Tensor, " d"]) -> None:
        self.layer = layer
        self.state = state

    def output(self, layer: int, _index: int, output: States, batch: Batch) -> States | None:
        """Replace the last token's state in the chosen layer."""
        return _replace_last(output, batch, self.state) if layer == self.layer else None


class ReplaceEach(Edit):
    """Replaces the output of block l at the last token of query l, by ``states[l]``."""

    hook_point = "hidden"

    def __init__(self, states: Float[Tensor, "layers d"]) -> None:
        self.states = states

    def output(self, layer: int, _index: int, output: States, batch: Batch) -> States:
        """Replace the last token's state in the row of this layer's query."""
        rows = torch.tensor([row == layer for row in batch.rows], device=output.device)
        return torch.where(rows[:, None, None], _replace_last(output, batch, self.states[layer]), output)


def _replace_last(output: States, batch: Batch, state: Float[Tensor, " d"]) -> States:
    tokens = torch.arange(output.shape[1], device=output.device)
    last = tokens == batch.last.to(output.device)[:, None]
    return torch.where(last[..., None], state.to(output.device, output.dtype), output)


@dataclass(frozen=True)
class TaskVector(Method):
    """Injects at the layer with the best held-out accuracy; ties go to the earliest layer."""

    name = "task_vector"
    summary = "state after the demonstrations replaces the query's at one layer"
    paper_row = "Task-vector"
    needs = f"demonstrations, {HELD_OUT} held-out examples (layer) and a dummy query"
    formula = "D"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Capture the states of all layers, then choose a layer. Raises I2CLError on too few examples."""
        dummy, *held_out = task.held_out(HELD_OUT + 1, demonstrations, seed)
        scorer = LabelScorer(decoder, task)
        (prompt,) = encode_prompts(scorer, fit_to_context(scorer, demonstrations), [dummy.text])
        states = decoder.capture(make_batch([prompt], decoder.device), hook_point="hidden")[0, :, 0]
        scores = layer_scores(scorer, states, [example.text for example in held_out])
        gold = torch.tensor([example.label for example in held_out])
        correct = (scores.argmax(-1) == gold).sum(1)
        layer = int((correct == correct.max()).nonzero()[0])
        cost = Cost.of(states[layer], held_out=HELD_OUT + 1)
        return PromptPredictor(scorer, edit=ReplaceLast(layer, states[layer]), cost=cost)


def layer_scores(
    scorer: LabelScorer, states: Float[Tensor, "layers d"], texts: Sequence[str]
) -> Float[Tensor, "layers texts labels"]:
    """Return the label scores of each text with its last state replaced, separately for each layer.

    If the model can resume from cached keys, a text runs only once up to its last token, since a replaced
    last state does not change earlier keys.
    """
    decoder, labels = scorer.decoder, scorer.labels
    queries = scorer.queries(texts)
    if not decoder.can_split or decoder.rope_limits or min(map(len, queries)) < 2:
        each = (score(decoder, queries, labels, edit=ReplaceLast(*one)) for one in enumerate(states))
        return torch.stack(list(each))
    edit, layers = ReplaceEach(states), len(states)
    with torch.no_grad():
        scores = [
            score(decoder, [query[-1:]] * layers, labels, edit=edit, prefix=decoder.prefix(query[:-1]))
            for query in queries
        ]
    return torch.stack(scores, dim=1)
