"""Task vectors: the state after demonstrations and a dummy query replaces the state of a query's last token.

Source: paper, appendix "Implementation of Baseline Methods"; Hendel et al. 2023,
https://arxiv.org/abs/2310.15916. See docs/reference/fidelity.md for details that the sources leave open.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.methods.base import Cost, Method, count_correct
from i2cl.methods.prompting import PromptPredictor, encode_prompts, fit_to_context
from i2cl.models.batching import Batch, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Examples, Task

HELD_OUT_EXAMPLES = 32


class ReplaceLast(Edit):
    """Replaces the output of one block at the query's last token."""

    hook_point = "hidden"

    def __init__(self, layer: int, state: Float[Tensor, " d"]) -> None:
        self.layer = layer
        self.state = state

    def output(self, layer: int, _index: int, output: States, batch: Batch) -> States | None:
        """Replace the last token's state in the chosen layer."""
        if layer != self.layer:
            return None
        tokens = torch.arange(output.shape[1], device=output.device)
        last = tokens == batch.last.to(output.device)[:, None]
        return torch.where(last[..., None], self.state.to(output.device, output.dtype), output)


@dataclass(frozen=True)
class TaskVector(Method):
    """Injects at the layer with the best held-out accuracy; ties go to the earliest layer."""

    name = "task_vector"
    summary = "state after the demonstrations replaces the query's at one layer"
    needs = f"demonstrations, {HELD_OUT_EXAMPLES} held-out examples (layer) and a dummy query"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Capture the states of all layers, then choose a layer. Raises I2CLError on too few examples."""
        dummy, *held_out = task.held_out(HELD_OUT_EXAMPLES + 1, demonstrations, seed)
        scorer = LabelScorer(decoder, task)
        (prompt,) = encode_prompts(scorer, fit_to_context(scorer, demonstrations), [dummy.text])
        states = decoder.capture(make_batch([prompt], decoder.device), hook_point="hidden")[0, :, 0]
        cost = Cost.of(states[0], held_out=HELD_OUT_EXAMPLES + 1)
        edits = [ReplaceLast(layer, state) for layer, state in enumerate(states)]
        candidates = [PromptPredictor(scorer, edit=edit, cost=cost) for edit in edits]
        return max(candidates, key=lambda candidate: count_correct(candidate, held_out))
