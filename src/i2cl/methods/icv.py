"""In-context vector: the direction from sentences to their answers, added in every layer.

Source: paper, appendix "Implementation of Baseline Methods"; Liu et al. 2024,
https://arxiv.org/abs/2311.06668, and for ``variant="released"`` https://github.com/shengliu66/ICV.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from i2cl.core.context import require_demonstrations
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method, count_correct
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.scoring import LabelScorer, in_order
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

# The direction as in Liu et al.'s paper, or as in their released code.
Variant = Literal["paper", "released"]
HELD_OUT = 32
COARSE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FINE = tuple(step / 100 for step in range(1, 11))
PAPER_STRENGTHS: Mapping[str, float] = MappingProxyType(
    dict.fromkeys(("sst5", "trec", "subj", "hate_speech18", "emoc", "mr"), 0.02)
    | {"sst2": 0.01, "agnews": 0.0001, "dbpedia": 0.001}
)
"""The paper's strengths by task, for Llama2-7b."""


class ICVConfig(Settings):
    """Variant and strength."""

    # ``paper`` (first principal direction of the uncentred differences, added to block outputs) or
    # ``released`` (that of the centred differences plus their mean, added to MLP outputs, and scaled up to
    # twofold where the output points away from it)
    variant: Variant = "paper"
    # ``search`` (the paper's two-stage grid, on held-out examples), ``paper`` (the paper's table, for its
    # tasks), or a number
    strength: Annotated[float, Field(allow_inf_nan=False)] | Literal["search", "paper"] = "search"


class AddPreservingNorm(Edit):
    """Adds a scaled unit vector to each normalized state, then restores the norm of the state."""

    everywhere = True

    def __init__(
        self, directions: Float[Tensor, "layers d"], strength: float, variant: Variant = "paper"
    ) -> None:
        self.directions = directions
        self.strength = strength
        self.released = variant == "released"
        self.hook_point = "sublayers" if self.released else "hidden"

    def output(self, layer: int, index: int, output: States, _batch: Batch) -> States | None:
        """Rotate the output of the block, or of the MLP alone, at every token of every layer."""
        if self.released and index == 0:
            return None
        state = output.float()  # a small strength is below the rounding error of half precision
        unit = normalize(state, dim=-1)
        direction = self.directions[layer].to(output.device)
        added = self.strength * direction
        if self.released:
            added = added * (1 - (unit @ direction).clamp(max=0))[..., None]
        states: Tensor = state.norm(dim=-1, keepdim=True) * normalize(unit + added, dim=-1)
        return states.to(output.dtype)


@dataclass(frozen=True)
class ICV(Method):
    """The first principal direction of answer state minus sentence state, over all layers at once."""

    name = "icv"
    summary = "direction from sentence to answer added in every layer, norm preserved"
    paper_row = "ICV"
    needs = f"demonstrations, {HELD_OUT} held-out examples to search the strength"
    formula = "DL"
    settings = (ICVConfig,)
    config: ICVConfig = field(default_factory=ICVConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Find the directions, then the strength.

        Raises:
            I2CLError: if too few held-out examples remain, or the paper has no strength for the task.
        """
        scorer = LabelScorer(decoder, task)
        variant, strength = self.config.variant, self.config.strength
        unit_vectors = directions(decoder, task, demonstrations, variant)

        def make_predictor(strength: float, held_out: int = 0) -> PromptPredictor:
            edit = AddPreservingNorm(unit_vectors, strength, variant)
            return PromptPredictor(scorer, edit=edit, cost=Cost.of(unit_vectors, held_out=held_out))

        if strength == "search":  # ties go to the smaller strength, which comes first
            rows = task.held_out(HELD_OUT, demonstrations, seed)
            candidates = [make_predictor(value, len(rows)) for value in COARSE + FINE]
            return max(candidates, key=lambda candidate: count_correct(candidate, rows))
        if strength == "paper":
            if task.name not in PAPER_STRENGTHS:
                raise I2CLError(f"the paper gives no ICV strength for {task.name!r}: use strength=search")
            strength = PAPER_STRENGTHS[task.name]
        return make_predictor(strength)


def directions(
    decoder: Decoder, task: Task, demonstrations: Examples, variant: Variant = "paper"
) -> Float[Tensor, "layers d"]:
    """Return one unit vector per layer, pointing from the states of sentences to the states of answers.

    A state is the block output at the last token of the sentence alone, or of the label word alone. The
    principal direction is computed over the concatenated states of all layers, then split by layer. In the
    paper it maximizes the mean squared projection of the differences. In the released code it maximizes their
    variance, its sign puts the demonstration with the largest projection on the positive side, and the mean
    difference is added.
    """
    require_demonstrations(task, demonstrations)
    texts = [example.text for example in demonstrations]
    words = [task.labels[example.label] for example in demonstrations]
    difference = _states(decoder, words) - _states(decoder, texts)  # (demonstrations, layers, d)
    joint = difference.flatten(1)
    mean = joint.mean(0)
    if variant == "released":
        axis, projections = _principal_direction(joint - mean)
        direction = mean + axis * projections[projections.abs().argmax()].sign()
    else:
        axis, projections = _principal_direction(joint)
        direction = axis if projections.sum() >= 0 else -axis
    return normalize(direction.view(difference.shape[1:]), dim=-1)


def _principal_direction(
    rows: Float[Tensor, "rows wide"],
) -> tuple[Float[Tensor, " wide"], Float[Tensor, " rows"]]:
    """Return the first right singular vector, and the projection of each row onto it."""
    _, _, right = torch.linalg.svd(rows, full_matrices=False)
    return right[0], rows @ right[0]


def _states(decoder: Decoder, texts: Sequence[str]) -> Float[Tensor, "texts layers d"]:
    front = _start_ids(decoder)
    limit = None if decoder.max_length is None else decoder.max_length - len(front)
    ids = [front + row for row in decoder.encoder.encode(str, texts, limit)]
    captured = decoder.run_batches(ids, partial(decoder.capture, hook_point="hidden"))
    return in_order((batch.rows, states[:, :, 0]) for batch, states in captured)


def _start_ids(decoder: Decoder) -> Ids:
    """Return tokens to put before a text that runs alone, if the tokenizer adds none.

    The first token of a row is an attention sink: its state is a hundred times as long as others and hardly
    depends on the token, so a label of one token must not come first.
    """
    encoder, tokenizer = decoder.encoder, decoder.tokenizer
    if encoder.front:
        return ()
    special = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    return (int(special[0]),) if special else encoder(["\n"])[0]
