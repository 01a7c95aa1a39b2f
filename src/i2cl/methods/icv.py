"""In-context vector: the direction from sentences to their answers, added in every layer.

Source: paper, appendix "Implementation of Baseline Methods"; Liu et al. 2024,
https://arxiv.org/abs/2311.06668, and for ``variant="released"`` https://github.com/shengliu66/ICV.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from i2cl.core.context import require_demonstrations
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method, right_answers
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.scoring import Questions, in_order
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

# How a direction is found and added: as Liu et al. write, or as their released code does.
Variant = Literal["paper", "released"]
HELD_OUT = 32
COARSE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FINE = tuple(step / 100 for step in range(1, 11))
PAPER_STRENGTHS: Mapping[str, float] = MappingProxyType(
    dict.fromkeys(("sst5", "trec", "subj", "hate_speech18", "emoc", "mr"), 0.02)
    | {"sst2": 0.01, "agnews": 0.0001, "dbpedia": 0.001}
)
"""The paper's table of strengths, found on Llama2-7b."""


class ICVConfig(Settings):
    """Where the direction and its strength come from."""

    # ``paper`` (the first principal direction of the differences, not centred, added to block outputs) or
    # ``released`` (that of the centred differences plus their mean, added to what the MLP puts out, up to
    # twice as much the more that points the other way)
    variant: Variant = "paper"
    # ``search`` (the paper's two-stage grid, here on held-out examples), ``paper`` (its table, for the
    # paper's tasks), or a number
    strength: Annotated[float, Field(allow_inf_nan=False)] | Literal["search", "paper"] = "search"


class AddPreservingNorm(Edit):
    """Adds a scaled unit vector to each unit state, then gives the state its norm back."""

    everywhere = True

    def __init__(
        self, directions: Float[Tensor, "layers d"], strength: float, variant: Variant = "paper"
    ) -> None:
        self.directions = directions
        self.strength = strength
        self.released = variant == "released"
        self.site = "writers" if self.released else "hidden"

    def output(self, layer: int, index: int, output: States, _batch: Batch) -> States | None:
        """The turned block output, or the turned output of the MLP alone, at every token of every layer."""
        if self.released and index == 0:
            return None
        state = output.float()  # half precision would round more than a small strength adds
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

    name: ClassVar[str] = "icv"
    summary: ClassVar[str] = "direction from sentence to answer added in every layer, norm preserved"
    row: ClassVar[str] = "ICV"
    needs: ClassVar[str] = f"demonstrations, {HELD_OUT} held-out examples to search the strength"
    formula: ClassVar[str] = "DL"
    settings = (ICVConfig,)
    config: ICVConfig = field(default_factory=ICVConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Find directions, then the strength. Raises I2CLError on too few examples, or no strength."""
        questions = Questions(decoder, task)
        variant, strength = self.config.variant, self.config.strength
        axes = directions(decoder, task, demonstrations, variant)

        def make(strength: float, held_out: int = 0) -> PromptPredictor:
            edit = AddPreservingNorm(axes, strength, variant)
            return PromptPredictor(questions, edit=edit, cost=Cost.of(axes, held_out=held_out))

        if strength == "search":  # ties go to the first tried, the smaller
            rows = task.held_out(HELD_OUT, demonstrations, seed)
            tried = [make(one, len(rows)) for one in COARSE + FINE]
            return max(tried, key=lambda one: right_answers(one, rows))
        if strength == "paper":
            if task.name not in PAPER_STRENGTHS:
                raise I2CLError(f"the paper gives no ICV strength for {task.name!r}: use strength=search")
            strength = PAPER_STRENGTHS[task.name]
        return make(strength)


def directions(
    decoder: Decoder, task: Task, demonstrations: Examples, variant: Variant = "paper"
) -> Float[Tensor, "layers d"]:
    """Unit vector per layer along which answer and sentence states differ, pointing to the answer.
    The state is the block output at the last token of the sentence alone, and of the label word alone. One
    principal direction is sought in all layers' states put together, and cut into layers then. In the paper
    it maximises the mean squared projection of the differences; in the released code their variance, with the
    furthest demonstration on its positive side, and the mean is added.
    """
    require_demonstrations(task, demonstrations)
    texts = [example.text for example in demonstrations]
    words = [task.labels[example.label] for example in demonstrations]
    difference = _states(decoder, words) - _states(decoder, texts)  # (demonstrations, layers, d)
    joint = difference.flatten(1)
    mean = joint.mean(0)
    if variant == "released":
        first, projected = _first(joint - mean)
        axis = mean + first * projected[projected.abs().argmax()].sign()
    else:
        first, projected = _first(joint)
        axis = first if projected.sum() >= 0 else -first
    return normalize(axis.view(difference.shape[1:]), dim=-1)


def _first(rows: Float[Tensor, "rows wide"]) -> tuple[Float[Tensor, " wide"], Float[Tensor, " rows"]]:
    """First right singular vector, and how far each row goes along it."""
    _, _, axes = torch.linalg.svd(rows, full_matrices=False)
    return axes[0], rows @ axes[0]


def _states(decoder: Decoder, texts: Sequence[str]) -> Float[Tensor, "texts layers d"]:
    front = _front(decoder)
    limit = None if decoder.max_length is None else decoder.max_length - len(front)
    ids = [front + row for row in decoder.encoder.fitted(str, texts, limit)]
    captured = decoder.run_batches(ids, partial(decoder.capture, site="hidden"))
    return in_order((batch.rows, states[:, :, 0]) for batch, states in captured)


def _front(decoder: Decoder) -> Ids:
    """What stands before a text that runs alone, where the tokenizer itself puts nothing there.
    The first token of a row is where attention gathers, and its state is of its own kind, a hundred times
    longer and much the same whatever the token: that of a one-token label would tell nothing of the label.
    """
    encoder, tokenizer = decoder.encoder, decoder.tokenizer
    if encoder.front:
        return ()
    known = [one for one in (tokenizer.bos_token_id, tokenizer.eos_token_id) if one is not None]
    return (int(known[0]),) if known else encoder(["\n"])[0]
