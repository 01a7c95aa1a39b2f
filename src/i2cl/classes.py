"""Class vectors: one context vector for each class, and the one vector that a weighted sum of them is.

Source of vectors by class: paper, appendix "Visualization of In-task Context Vectors". Injecting their
weighted sum goes beyond it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.context import ContextVector, ExtractConfig, extract, require_demonstrations
from i2cl.decoder import Decoder
from i2cl.errors import I2CLError
from i2cl.tasks import Example, Task
from i2cl.tasks.sampling import group_by_label


@dataclass(frozen=True, eq=False)
class ClassVectors:
    """What an injected context vector is the weighted sum of.

    Attributes:
        values: one vector for each class, in the order of the task's labels.
        weights: each class's share at each site. Sizes add up to one; where all coefficients had one
            sign, all shares are positive.
    """

    values: Float[Tensor, "classes layers sites d"]
    weights: Float[Tensor, "layers sites classes"]

    def tensors(self) -> dict[str, Tensor]:
        """What an artefact stores, by name."""
        return {"class_vectors": self.values.contiguous(), "class_weights": self.weights.contiguous()}

    @classmethod
    def stored(cls, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> "ClassVectors | None":
        """Those of an artefact, or None where it has none.

        Args:
            tensors: all that the artefact stores.
            shape: (classes, layers, sites, d) as it is described.

        Raises:
            I2CLError: if one of the two is missing or has another shape.
        """
        names = ("class_vectors", "class_weights")
        found = [tuple(tensors[name].shape) for name in names if name in tensors]
        if not found:
            return None
        wanted = [shape, (*shape[1:3], shape[0])]
        if found != wanted:
            raise I2CLError(
                f"{' and '.join(names)} have shapes {found}, {wanted} are described: copy or fit it again"
            )
        return cls(*(tensors[name] for name in names))


def extract_classes(
    decoder: Decoder,
    task: Task,
    demonstrations: Sequence[Example],
    config: ExtractConfig | None = None,
    *,
    seed: int = 0,
) -> tuple[ContextVector, ...]:
    """`extract` for the demonstrations of each class alone, in the order of the task's labels.

    Their `ContextVector.mean`, weighted by their ``demonstrations``, is the context vector of the paper.

    Raises:
        I2CLError: if a class has no demonstration, and where `extract` raises it.
    """
    require_demonstrations(task, demonstrations)
    groups = group_by_label(demonstrations, len(task.labels))
    for word, group in zip(task.labels, groups, strict=True):
        if not group:
            raise I2CLError(
                f"class {word!r} of task {task.name!r} has no demonstration: give at least one of each class"
            )
    return tuple(extract(decoder, task, group, config, seed=seed) for group in groups)


def require_vectors(
    decoder: Decoder, task: Task, context: ContextVector | Sequence[ContextVector]
) -> tuple[ContextVector, ...]:
    """One context vector or those of all classes, as a tuple.

    Raises:
        I2CLError: if they are not one for each class, do not match, or do not fit the decoder.
    """
    vectors = (context,) if isinstance(context, ContextVector) else tuple(context)
    if not isinstance(context, ContextVector) and len(vectors) != len(task.labels):
        raise I2CLError(
            f"{len(vectors)} class vectors were given, but task {task.name!r} has {len(task.labels)} labels: "
            "give one for each, as extract_classes does"
        )
    for vector in vectors:
        vectors[0].require_match(vector)
        vector.require_sizes(decoder)
    return vectors


def injected(
    vectors: Float[Tensor, "vectors layers sites d"], scalars: Float[Tensor, "layers sites scalars"]
) -> tuple[Float[Tensor, "layers sites d"], Float[Tensor, "layers sites 2"]]:
    """The vector and the (lambda, beta) that inject the mean of ``lambda_i v_i``; gradients flow to both.

    Args:
        vectors: v_i.
        scalars: axes [layer, (mha, mlp), (lambda_1, ..., lambda_K, beta)].
    """
    if len(vectors) == 1:
        return vectors[0], scalars
    beta = scalars[..., -1]
    total = _weighted_sum(vectors, scalars[..., :-1])
    return total / len(vectors), torch.stack([torch.ones_like(beta), beta], dim=-1)


def mixture(
    vectors: Float[Tensor, "vectors layers sites d"], amounts: Float[Tensor, "layers sites vectors"]
) -> tuple[
    Float[Tensor, "layers sites d"], Float[Tensor, "layers sites"], Float[Tensor, "layers sites vectors"]
]:
    """Write ``sum_i c_i v_i`` as ``lambda v``, with ``v = sum_i w_i v_i`` and sizes of w that add up to one.

    Where all c_i have one sign, lambda is their sum and v a mean. The split is exact for one vector, and
    never divides by a sum that cancels out.

    Args:
        vectors: v_i.
        amounts: c_i.

    Returns:
        v, lambda, and w.
    """
    size = amounts.abs().sum(-1)
    size = torch.where(amounts.sum(-1) < 0, -size, size)
    even = torch.full_like(amounts, 1 / len(vectors))
    weights = torch.where(size[..., None] == 0, even, amounts / size[..., None])
    return _weighted_sum(vectors, weights), size, weights


def _weighted_sum(
    vectors: Float[Tensor, "vectors layers sites d"], weights: Float[Tensor, "layers sites vectors"]
) -> Float[Tensor, "layers sites d"]:
    return (vectors * weights.movedim(-1, 0)[..., None]).sum(0)


def settled(
    vectors: Sequence[ContextVector], scalars: Float[Tensor, "layers sites scalars"]
) -> tuple[ContextVector, Float[Tensor, "layers sites 2"], ClassVectors | None]:
    """Context vector, coefficients and class vectors of an injection, from scalars as `injected` takes."""
    if len(vectors) == 1:
        return vectors[0], scalars, None
    values = torch.stack([vector.values.cpu() for vector in vectors])
    mixed, amount, weights = mixture(values, scalars[..., :-1] / len(vectors))
    total = sum(vector.demonstrations for vector in vectors)
    context = ContextVector(mixed, vectors[0].config, total)
    return context, torch.stack([amount, scalars[..., -1]], dim=-1), ClassVectors(values, weights)
