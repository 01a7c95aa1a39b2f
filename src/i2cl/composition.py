"""Composition: several injections on one model become one.

Where the model writes ``a``, an injection writes ``lambda v + beta a``: a change of
``lambda v + (beta - 1) a``. Changes are added here. Folded into weights (`i2cl.export`), that adds the
differences of the checkpoints from the base model, as task arithmetic does (Ilharco et al. 2023,
https://arxiv.org/abs/2212.04089). `i2cl.transfer` averages vectors and coefficients apart instead, as a
start for calibration.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from i2cl.classes import mixture
from i2cl.errors import I2CLError
from i2cl.injection import Injection
from i2cl.tasks import Task


def combine(
    injections: Sequence[Injection],
    weights: Sequence[float] | Sequence[int] | None = None,
    *,
    task: Task | None = None,
) -> Injection:
    """Add up the weighted changes that injections make; exact, and as cheap to run as one of them.

    The result writes ``sum_i w_i lambda_i v_i + (1 + sum_i w_i (beta_i - 1)) a``. Its settings name the
    parts; class vectors of theirs are not kept.

    Args:
        injections: made on one model, at the same sites and tokens, with the same scoring.
        weights: one each, of any sign, taken as they are: weights that add up to 1 average the
            injections, ones add all of their changes. Default: the mean.
        task: label words and template to answer with; needed where theirs differ in more than the
            order of the words. Default: the first's.

    Raises:
        I2CLError: without injections, on weights that are not one finite number each, and on injections
            that differ in model, writers, positions, scoring or, unless a task is given, label words or
            template.
    """
    numbers = _weights(len(injections), weights)
    _require_alike(injections)
    task = task.without_data() if task else _common_task(injections)
    shares = torch.tensor(numbers, dtype=torch.float64)
    vectors = torch.stack([one.context.values.double() for one in injections])
    pairs = torch.stack([one.coefficients.double() for one in injections], dim=-1)
    values, amount, _ = mixture(vectors, shares * pairs[:, :, 0])
    beta = 1 + (shares * (pairs[:, :, 1] - 1)).sum(-1)
    first = injections[0]
    total = sum(one.context.demonstrations for one in injections)
    return replace(
        first,
        context=replace(first.context, values=values.float(), demonstrations=total),
        coefficients=torch.stack([amount, beta], dim=-1).float(),
        task=task,
        settings={"combined": [_part(one, weight) for one, weight in zip(injections, numbers, strict=True)]},
        history=(),
        classes=None,
        metrics={},
        command="",
    )


def _weights(count: int, weights: Sequence[float] | Sequence[int] | None) -> list[float]:
    if not count:
        raise I2CLError("no injections were given: at least one is needed")
    found = [1 / count] * count if weights is None else [float(weight) for weight in weights]
    if len(found) != count or not all(math.isfinite(weight) for weight in found):
        raise I2CLError(f"weights {found} do not fit {count} injection(s): give one finite number each")
    return found


def _require_alike(injections: Sequence[Injection]) -> None:
    first = injections[0]
    for number, other in enumerate(injections[1:], start=2):
        what = f"injection {number} ({other.task.name!r})"
        difference = first.base.difference(other.base)
        if difference:
            raise I2CLError(
                f"{what} was made on another model than the first ({difference}): fit both on one model"
            )
        for name, mine, theirs in zip(
            ("writers", "positions", "scoring", "seed of random positions"),
            _kind(first),
            _kind(other),
            strict=True,
        ):
            if mine != theirs:
                raise I2CLError(f"{what} has {name} {theirs!r}, the first {mine!r}: fit both with the same")


def _kind(injection: Injection) -> tuple[object, ...]:
    """What has to agree for a sum of injections to be an injection."""
    seed = injection.seed if injection.positions == "random" else None
    return injection.context.config.writers, injection.positions, injection.scoring, seed


def _common_task(injections: Sequence[Injection]) -> Task:
    first = injections[0].task
    for other in (one.task for one in injections[1:]):
        if (set(first.labels), first.template) != (set(other.labels), other.template):
            raise I2CLError(
                f"tasks {first.name!r} and {other.name!r} have different label words or templates: "
                "say which to answer with (task=, or --task-from)"
            )
    names = list(dict.fromkeys(one.task.name for one in injections))
    return first if len(names) == 1 else replace(first, name="+".join(names), title="", description="")


def _part(injection: Injection, weight: float) -> dict[str, object]:
    """What a combined injection says of one of its parts."""
    return {
        "task": injection.task.name,
        "weight": weight,
        "demonstrations": injection.context.demonstrations,
        "extraction": injection.context.config.model_dump(),
        "seed": injection.seed,
        "calibration": injection.settings,
    }
