"""In-context vector: the direction from sentences to their answers, added in every layer.

Source: paper, appendix "Implementation of Baseline Methods"; Liu et al. 2024,
https://arxiv.org/abs/2311.06668.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from i2cl.core.context import require_demonstrations
from i2cl.methods.base import Cost, Method, count_correct
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.scoring import LabelScorer, stack_rows
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

HELD_OUT_EXAMPLES = 32
COARSE_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FINE_STRENGTHS = tuple(step / 100 for step in range(1, 11))


class ICVConfig(Settings):
    """Strength: ``search`` (the paper's two-stage grid, on held-out examples), or a number."""

    strength: Annotated[float, Field(allow_inf_nan=False)] | Literal["search"] = "search"


class AddPreservingNorm(Edit):
    """Adds a scaled unit vector to each normalized state, then restores the norm of the state."""

    everywhere = True
    hook_point = "hidden"

    def __init__(self, directions: Float[Tensor, "layers d"], strength: float) -> None:
        self.directions = directions
        self.strength = strength

    def output(self, layer: int, _index: int, output: States, _batch: Batch) -> States:
        """Rotate the output of the block at every token."""
        state = output.float()  # a small strength is below the rounding error of half precision
        rotated = normalize(state, dim=-1) + self.strength * self.directions[layer].to(output.device)
        edited: Tensor = state.norm(dim=-1, keepdim=True) * normalize(rotated, dim=-1)
        return edited.to(output.dtype)


@dataclass(frozen=True)
class ICV(Method):
    """The first principal direction of answer state minus sentence state, over all layers at once."""

    name = "icv"
    summary = "direction from sentence to answer added in every layer, norm preserved"
    needs = f"demonstrations, {HELD_OUT_EXAMPLES} held-out examples to search the strength"
    settings = (ICVConfig,)
    config: ICVConfig = field(default_factory=ICVConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Find the directions, then the strength.

        Raises:
            I2CLError: if too few held-out examples remain.
        """
        scorer, strength = LabelScorer(decoder, task), self.config.strength
        unit_vectors = directions(decoder, task, demonstrations)

        def make_predictor(strength: float, held_out: int = 0) -> PromptPredictor:
            edit = AddPreservingNorm(unit_vectors, strength)
            return PromptPredictor(scorer, edit=edit, cost=Cost.of(unit_vectors, held_out=held_out))

        if strength != "search":
            return make_predictor(strength)
        rows = task.held_out(HELD_OUT_EXAMPLES, demonstrations, seed)
        candidates = [make_predictor(value, len(rows)) for value in COARSE_STRENGTHS + FINE_STRENGTHS]
        # ties go to the smaller strength, which comes first
        return max(candidates, key=lambda candidate: count_correct(candidate, rows))


def directions(decoder: Decoder, task: Task, demonstrations: Examples) -> Float[Tensor, "layers d"]:
    """Return one unit vector per layer, pointing from the states of sentences to the states of answers.

    A state is the block output at the last token of the sentence alone, or of the label word alone. The
    principal direction maximizes the mean squared projection of the differences. It is computed over the
    concatenated states of all layers, then split by layer.
    """
    require_demonstrations(task, demonstrations)
    texts = [example.text for example in demonstrations]
    words = [task.labels[example.label] for example in demonstrations]
    differences = _states(decoder, words) - _states(decoder, texts)  # (demonstrations, layers, d)
    concatenated = differences.flatten(1)
    _, _, principal_directions = torch.linalg.svd(concatenated, full_matrices=False)
    direction = principal_directions[0]
    if (concatenated @ direction).sum() < 0:  # the sign of a singular vector is arbitrary
        direction = -direction
    return normalize(direction.view(differences.shape[1:]), dim=-1)


def _states(decoder: Decoder, texts: Sequence[str]) -> Float[Tensor, "texts layers d"]:
    """Return the block outputs at the last token of each text, which runs without a template."""
    start_ids = _start_ids(decoder)
    limit = None if decoder.max_length is None else decoder.max_length - len(start_ids)
    ids = [start_ids + row for row in decoder.encoder.encode(str, texts, limit)]
    captured = decoder.run_batches(ids, partial(decoder.capture, hook_point="hidden"))
    return stack_rows((batch.rows, states[:, :, 0]) for batch, states in captured)


def _start_ids(decoder: Decoder) -> Ids:
    """Return tokens to put before a text that runs alone, if the tokenizer adds none.

    The first token of a row is an attention sink: its state is a hundred times as long as others and hardly
    depends on the token, so a label of one token must not come first.
    """
    encoder, tokenizer = decoder.encoder, decoder.tokenizer
    if encoder.leading_ids:
        return ()
    special = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    return (int(special[0]),) if special else encoder(["\n"])[0]
