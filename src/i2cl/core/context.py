"""Context vectorization: average what the sublayers write to the residual stream for demonstrations.

Source: paper, subsection "Context Vectorization".
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import LONE_SURROGATE, I2CLError
from i2cl.models.batching import Batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import HookPoint
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task
from i2cl.tasks.task import group_by_label

Sublayers = Literal["both", "mha", "mlp", "hidden"]

# Whether each output of a layer has a vector: the sublayers (mha, mlp), or the block's output alone.
ACTIVE_SUBLAYERS = {"both": (True, True), "mha": (True, False), "mlp": (False, True), "hidden": (True,)}


class ExtractConfig(Settings):
    """How demonstrations become a context vector. Defaults are the paper's.

    Attributes:
        sublayers: whose outputs are captured and later edited: both sublayers, one of them, or each block's
            output, called hidden ("Target Module" ablation).
        token: which token of a demonstration is kept.
        separator: end each demonstration with the template's separator, whose token is then the last one (as
            in the released code behind all published numbers), or with the label.
    """

    sublayers: Sublayers = "both"
    token: Literal["last", "first", "random"] = "last"
    separator: bool = True

    @property
    def hook_point(self) -> HookPoint:
        """Modules to hook for `sublayers`."""
        return "hidden" if self.sublayers == "hidden" else "sublayers"


@dataclass(frozen=True, eq=False)
class ContextVector:
    """One vector per layer and sublayer.

    Attributes:
        values: axes [layer, (mha, mlp), d]; for ``sublayers="hidden"`` the second axis has length 1.
        config: how the values were extracted.
        demonstrations: number of examples they are the mean of.
        base: the model they were extracted on; None for values that fit any model.
    """

    values: Float[Tensor, "layers sublayers d"]
    config: ExtractConfig = field(default_factory=ExtractConfig)
    demonstrations: int = 0
    base: ModelIdentity | None = None

    def require_base(self, decoder: Decoder) -> None:
        """Raise I2CLError, naming the difference, if it was extracted on another model."""
        shape = (decoder.layers, len(ACTIVE_SUBLAYERS[self.config.sublayers]), decoder.d_model)
        hint = "extract it on this model"
        if self.values.shape != shape:
            sizes = f"(layers, sublayers, width) {tuple(self.values.shape)}"
            raise I2CLError(f"the context vector has {sizes}, the model needs {shape}: {hint}")
        if self.base and (difference := self.base.difference(decoder.base)):
            models = f"{self.base.name!r}, not {decoder.name!r} ({difference})"
            raise I2CLError(f"the context vector was extracted on {models}: {hint}")

    @classmethod
    def mean(
        cls, vectors: Sequence["ContextVector"], weights: Sequence[float] | Sequence[int] | None = None
    ) -> "ContextVector":
        """Average context vectors in float64; the result has the first vector's config.

        With weights equal to their ``demonstrations``, this is the mean over all demonstrations.

        Args:
            vectors: at least one.
            weights: one per vector, nonnegative, not all 0; only their proportions count. Default: equal.

        Raises:
            I2CLError: without vectors, on invalid weights, or if shapes, sublayers or models differ.
        """
        shares = torch.tensor([1.0] * len(vectors) if weights is None else list(weights), dtype=torch.float64)
        if len(shares) != len(vectors) or not (shares >= 0).all() or not 0 < shares.sum() < torch.inf:
            what = f"{len(vectors)} context vector(s) with weights {shares.tolist()} have no mean"
            raise I2CLError(f"{what}: give at least one vector, and one nonnegative weight each, not all 0")
        base, first = _common_base(vectors), vectors[0]
        kinds = [f"{one.config.sublayers} {tuple(one.values.shape)}" for one in vectors]
        if other := next((kind for kind in kinds if kind != kinds[0]), None):
            hint = "extract both from one model with the same settings"
            raise I2CLError(f"context vectors do not match: {kinds[0]} and {other}; {hint}")
        pairs = zip(shares / shares.sum(), vectors, strict=True)
        values = torch.stack([share * one.values.double() for share, one in pairs]).sum(0)
        count = sum(one.demonstrations for one in vectors)
        return replace(first, values=values.to(first.values.dtype), demonstrations=count, base=base)


def extract(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    config: ExtractConfig | None = None,
    *,
    seed: int = 0,
) -> ContextVector:
    """Run each demonstration separately and average the sublayers' outputs at its last token.

    The mean is updated batch by batch, so memory does not grow with the number of demonstrations. Their order
    does not matter.

    Args:
        decoder: the model.
        task: gives template and label words.
        demonstrations: labelled examples.
        config: what is captured.
        seed: of ``token="random"``.

    Raises:
        I2CLError: without demonstrations, if one has an unknown label or does not fit into the context, or if
            the model's blocks do not simply add their sublayers' outputs.
    """
    config = config or ExtractConfig()
    require_demonstrations(task, demonstrations)
    decoder.require_identity()
    builds = [
        partial(task.template.demonstration, label_word=task.labels[one.label], separator=config.separator)
        for one in demonstrations
    ]
    ids = sorted(decoder.encoder.encode(builds, [one.text for one in demonstrations], decoder.max_length))
    picker = random.Random(seed)
    ends = [(len(row) - 1) * (config.token == "last") for row in ids]
    places = [picker.randrange(len(row)) for row in ids] if config.token == "random" else ends

    def captured_at(batch: Batch) -> Float[Tensor, "batch layers sublayers d"]:
        at = torch.tensor([places[row] for row in batch.rows], device=batch.last.device)
        return decoder.capture(batch, at, hook_point=config.hook_point)

    mean, seen = torch.zeros(()), 0
    for _, captured in decoder.run_batches(ids, captured_at):
        seen += len(captured)
        mean = mean + (captured - mean).sum(0) / seen
    return ContextVector(mean, config, len(demonstrations), decoder.base)


def _common_base(vectors: Sequence[ContextVector]) -> ModelIdentity | None:
    """Return the model that all were extracted on, if known. Raises I2CLError if there are two."""
    known = [vector.base for vector in vectors if vector.base is not None]
    for other in known[1:]:
        if difference := known[0].difference(other):
            models = f"{known[0].name!r} and {other.name!r} ({difference})"
            raise I2CLError(f"context vectors come from two models, {models}: extract all on one")
    return known[0] if known else None


def extract_classes(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    config: ExtractConfig | None = None,
    *,
    seed: int = 0,
) -> tuple[ContextVector, ...]:
    """Run `extract` for each class separately, in the order of the task's labels.

    Source: paper, appendix "Visualization of In-task Context Vectors". Their `ContextVector.mean`, weighted
    by their ``demonstrations``, is the context vector of the paper. Raises I2CLError if a class has no
    demonstration, and as `extract`.
    """
    require_demonstrations(task, demonstrations)
    groups = group_by_label(demonstrations, len(task.labels))
    for word, group in zip(task.labels, groups, strict=True):
        if not group:
            raise I2CLError(
                f"class {word!r} of task {task.name!r} has no demonstration: give at least one of each class"
            )
    return tuple(extract(decoder, task, group, config, seed=seed) for group in groups)


def require_demonstrations(task: Task, demonstrations: Examples) -> None:
    """Raise I2CLError without demonstrations, or as `require_labels`."""
    if not demonstrations:
        raise I2CLError("no demonstrations: give at least one")
    require_labels(task, demonstrations)


def require_labels(task: Task, demonstrations: Examples) -> None:
    """Raise I2CLError if a demonstration has an unknown label, or text that is not valid Unicode."""
    task.require_single_label("this method", "use the method anchored")
    for number, example in enumerate(demonstrations, start=1):
        if not 0 <= example.label < len(task.labels):
            known = f"task {task.name!r} has labels 0 to {len(task.labels) - 1}"
            raise I2CLError(f"demonstration {number} has label {example.label}, {known}: correct it")
        if LONE_SURROGATE.search(example.text):
            raise I2CLError(f"demonstration {number} contains a lone surrogate: repair its text")
