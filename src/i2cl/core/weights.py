"""Class weights and sample weights of the demonstrations in the loss of a fit."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, PlainSerializer
from torch import Tensor
from torch.nn.functional import cross_entropy

from i2cl.errors import I2CLError
from i2cl.tasks import Example


def _parse(value: Any) -> Any:
    """Turn a dict, or a string such as ``"bad=5,good=1"``, into pairs."""
    if isinstance(value, str) and "=" in value:
        parts = [part.rpartition("=") for part in value.split(",")]
        value = {label.strip(): weight for label, _, weight in parts}
    if value is None or value == "balanced":
        return value
    try:
        weights = {str(label): float(weight) for label, weight in dict(value).items()}
    except (TypeError, ValueError):
        weights = {}
    if not weights:
        raise ValueError("give 'balanced', or a number for each label, such as bad=5,good=1")
    if not all(0 < weight < math.inf for weight in weights.values()):
        raise ValueError("weights are finite and above 0")
    return tuple(weights.items())


def _serialize(value: Any) -> Any:
    return dict(value) if isinstance(value, tuple) else value


ClassWeight = Annotated[
    Literal["balanced"] | tuple[tuple[str, float], ...] | None,
    BeforeValidator(_parse),
    PlainSerializer(_serialize),
]
"""``"balanced"``, weights by label word, or None. Pairs instead of a dict keep configurations hashable."""


def apply_class_weight(
    demonstrations: Sequence[Example], labels: Sequence[str], class_weight: ClassWeight
) -> tuple[Example, ...]:
    """Multiply each example's weight by its class weight, as scikit-learn does.

    Args:
        demonstrations: labelled examples.
        labels: the task's label words.
        class_weight: ``"balanced"`` for total weight / (number of classes x the class's weight), which is 1
            if classes are equally frequent; or (label word, weight) pairs.

    Raises:
        I2CLError: if some class has no weight, and a weight names no label: probably a typing error.
    """
    if class_weight is None:
        return tuple(demonstrations)
    totals: dict[int, float] = defaultdict(float)
    for example in demonstrations:
        totals[example.label] += example.weight
    if class_weight == "balanced":
        mean_total = sum(totals.values()) / len(totals)
        factors = {label: mean_total / total for label, total in totals.items()}
    else:
        by_word = dict(class_weight)
        unknown = sorted(by_word.keys() - set(labels))
        if unknown and any(labels[label] not in by_word for label in totals):
            known = ", ".join(map(repr, labels))
            raise I2CLError(f"class_weight names {unknown[0]!r}, which is not a label: labels are {known}")
        factors = {label: by_word.get(labels[label], 1.0) for label in totals}
    return tuple(
        replace(example, weight=example.weight * factors[example.label]) for example in demonstrations
    )


def example_weights(demonstrations: Sequence[Example]) -> Float[Tensor, " n"] | None:
    """Return the weights of the examples in float64, or None if all are 1."""
    weights = [example.weight for example in demonstrations]
    return None if all(weight == 1 for weight in weights) else torch.tensor(weights, dtype=torch.float64)


def mean_cross_entropy(
    scores: Float[Tensor, "n labels"], gold: Tensor, weights: Float[Tensor, " n"] | None
) -> float:
    """Return the weighted mean cross-entropy among the labels, in nats."""
    if weights is None:
        return cross_entropy(scores.double(), gold).item()
    losses = cross_entropy(scores.double(), gold, reduction="none")
    return float(weights @ losses / weights.sum())
