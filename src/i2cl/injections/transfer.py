"""Transfer: a new task is calibrated once more, from what related tasks were calibrated to.

Source: paper, section "Enhance New Task with Existing Anchors" and appendix "Implementation of Transfer
Learning Method".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import Field

from i2cl.core.calibration import calibrate
from i2cl.core.context import ContextVector, ExtractConfig, Writers, extract
from i2cl.core.edits import Positions
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Example, Task

# Index of each related anchor, ascending, with its weight. The weights sum to one.
AnchorWeights = tuple[tuple[int, float], ...]


class TransferConfig(Settings):
    """Which anchors are related, and how much each counts. Defaults are those of the paper's appendix.

    Attributes:
        threshold: h, the cosine that an anchor has to exceed.
        temperature: tau of the softmax over the cosines; the lower, the more the closest anchor counts.
    """

    threshold: float = Field(0.8, ge=-1, le=1)
    temperature: float = Field(0.5, gt=0)


@dataclass(frozen=True, eq=False)
class Transferred:
    """What a transfer led to.

    Attributes:
        injection: the one to use: the related anchors' vector with coefficients calibrated on the new
            task, or `first` itself where no anchor is related.
        first: calibrated on the new task alone.
        weights: the related anchors; empty where there are none.
    """

    injection: Injection
    first: Injection
    weights: AnchorWeights


def similarity(one: Injection, other: Injection) -> float:
    """Cosine of two injections' coefficients, each read as one row: all layers, writers, lambda and beta.

    Coefficients that hardly moved from a common start are alike whatever their tasks. Raises I2CLError if
    they have different shapes.
    """
    shapes = tuple(one.coefficients.shape), tuple(other.coefficients.shape)
    if shapes[0] != shapes[1]:
        cure = "fit both on one model with the same writers"
        raise I2CLError(f"coefficients of shapes {shapes[0]} and {shapes[1]} cannot be compared: {cure}")
    rows = [injection.coefficients.flatten().double() for injection in (one, other)]
    return float(torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=0))


def related(
    new: Injection, anchors: Sequence[Injection], config: TransferConfig | None = None
) -> AnchorWeights:
    """The anchors whose cosine with the new task exceeds the threshold, weighted by softmax(cosine / tau).

    This is the equation of the paper's text. Its algorithm box closes a parenthesis early and divides the
    exponential by tau instead, which would not sum to one. Raises I2CLError on an anchor of another model,
    other writers or other positions.
    """
    config = config or TransferConfig()
    _require_alike(anchors, new.base, new.context.config.writers, new.positions)
    cosines = [similarity(new, anchor) for anchor in anchors]
    kept = [index for index, cosine in enumerate(cosines) if cosine > config.threshold]
    logits = torch.tensor([cosines[index] for index in kept], dtype=torch.float64) / config.temperature
    return tuple(zip(kept, logits.softmax(0).tolist(), strict=True))


def transfer(
    decoder: Decoder,
    task: Task,
    demonstrations: Sequence[Example],
    anchors: Sequence[Injection],
    config: TransferConfig | None = None,
    *,
    calibration: CalibrationConfig | None = None,
    extraction: ExtractConfig | None = None,
    seed: int = 0,
    first: Injection | None = None,
    progress: StepProgress | None = None,
) -> Transferred:
    """Calibrate a new task, then once more with the averaged vector and coefficients of related tasks.

    A label bias belongs to what it was measured on: those of anchors are not carried over.

    Args:
        decoder: the frozen model that all anchors were made on.
        task: the new one.
        demonstrations: its labelled examples.
        anchors: injections of other tasks. One of the new task itself is the caller's to leave out: it
            would be found most related of all.
        config: what related means.
        calibration: recipe of both calibrations. Sites that it leaves out stay (0, 1), whatever the
            anchors have there.
        extraction: how the new task's own vector is made; unused where `first` is given.
        seed: of extraction and of both calibrations.
        first: an injection already calibrated on the new task, to save doing so again.
        progress: called after each epoch of each calibration; its counts are of that calibration.

    Raises:
        I2CLError: on an anchor, or a first injection, of another model, other writers or other positions,
            on a first injection of another task, and where extraction or calibration raises it.
    """
    calibration = calibration or CalibrationConfig()
    if calibration.formula != "linear":
        what = f"transfer starts from linear coefficients, but formula={calibration.formula!r}"
        raise I2CLError(f"{what}: use formula='linear'")
    extraction = first.context.config if first else extraction or ExtractConfig()
    _require_alike(anchors, decoder, extraction.writers, calibration.positions)  # before any work
    fit = partial(calibrate, decoder, task, demonstrations, config=calibration, seed=seed, progress=progress)
    if first is None:
        first = fit(extract(decoder, task, demonstrations, extraction, seed=seed))
    else:
        _require_first(first, task, decoder, calibration.positions)
    weights = related(first, anchors, config)
    if not weights:
        return Transferred(first, first, weights)
    chosen, shares = [anchors[index] for index, _ in weights], [weight for _, weight in weights]
    context = ContextVector.mean([one.context for one in chosen], shares)
    start = torch.stack([weight * anchors[index].coefficients for index, weight in weights]).sum(0)
    return Transferred(fit(context, start=start, scoring=first.scoring), first, weights)


def _require_alike(
    anchors: Sequence[Injection], base: Decoder | ModelIdentity, writers: Writers, positions: Positions
) -> None:
    for number, anchor in enumerate(anchors, start=1):
        what = f"anchor {number} ({anchor.task.name!r})"
        _require_base(what, anchor, base)
        mine, theirs = (anchor.context.config.writers, anchor.positions), (writers, positions)
        if mine != theirs:
            cure = "fit both with the same ones"
            raise I2CLError(f"{what} has (writers, positions) {mine}, the new task {theirs}: {cure}")


def _require_first(first: Injection, task: Task, decoder: Decoder, positions: Positions) -> None:
    what = f"the first injection ({first.task.name!r})"
    _require_base(what, first, decoder)
    if (first.task.labels, first.task.template) != (task.labels, task.template):
        raise I2CLError(f"{what} has other labels or another template than task {task.name!r}: leave it out")
    if first.positions != positions:
        cure = "give both the same"
        raise I2CLError(f"{what} has positions={first.positions!r}, the calibration {positions!r}: {cure}")


def _require_base(what: str, injection: Injection, base: Decoder | ModelIdentity) -> None:
    known = base.base if isinstance(base, Decoder) else base
    difference = injection.base.difference(known)
    if injection.settings.get("method") == "anchored":  # whose coefficients are 1 for every task
        raise I2CLError(f"{what} is anchored, so its coefficients tell no tasks apart: fit it with i2cl")
    if difference:
        why = f"{what} was made on {injection.base.name!r}, not {base.name!r} ({difference})"
        raise I2CLError(f"{why}: fit it again on this model")
