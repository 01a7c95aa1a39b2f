"""Transfer: calibrate a new task again, starting from the injections of related tasks.

Source: paper, section "Enhance New Task with Existing Anchors" and appendix "Implementation of Transfer
Learning Method".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from pydantic import Field

from i2cl.core.ablations import Positions
from i2cl.core.calibration import calibrate
from i2cl.core.context import extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig, ExtractConfig, Sublayers
from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.scoring import require_decoder_and_task
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Example, Task

# (index, weight) of each related anchor, in ascending order; weights sum to 1.
AnchorWeights = tuple[tuple[int, float], ...]


class TransferConfig(Settings):
    """Selection and weighting of anchors. Defaults are those of the paper's appendix.

    Attributes:
        threshold: h, the cosine similarity above which an anchor is related.
        temperature: tau of the softmax over the cosines; low values favour the most similar anchor.
    """

    threshold: float = Field(0.8, ge=-1, le=1)
    temperature: float = Field(0.5, gt=0)


@dataclass(frozen=True, eq=False)
class Transferred:
    """Result of a transfer.

    Attributes:
        injection: the averaged context vector of the related anchors, with coefficients calibrated on the new
            task; ``first`` if no anchor is related.
        first: injection fitted to the new task only.
        weights: the related anchors.
    """

    injection: Injection
    first: Injection
    weights: AnchorWeights


def similarity(first: Injection, second: Injection) -> float:
    """Return the cosine similarity of all coefficients (lambda and beta) of two injections.

    Coefficients that hardly moved from a common initialization are similar regardless of their tasks.

    Raises:
        I2CLError: if the shapes differ.
    """
    shapes = tuple(first.coefficients.shape), tuple(second.coefficients.shape)
    if shapes[0] != shapes[1]:
        hint = "fit both on one model with the same option 'sublayers'"
        raise I2CLError(f"coefficients of shapes {shapes[0]} and {shapes[1]} cannot be compared: {hint}")
    vectors = [injection.coefficients.flatten().double() for injection in (first, second)]
    return float(torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0))


def related(
    new: Injection, anchors: Sequence[Injection], config: TransferConfig | None = None
) -> AnchorWeights:
    """Return the anchors above the similarity threshold, weighted by softmax(cosine / tau).

    This is the equation in the paper's text. Its algorithm box closes a parenthesis early and divides the
    exponential by tau instead; such weights would not sum to 1.

    Raises:
        I2CLError: on an anchor with another model, other sublayers or other positions.
    """
    config = TransferConfig.or_default(config)
    _require_compatible(anchors, new.base, new.extraction.sublayers, new.positions)
    cosines = [similarity(new, anchor) for anchor in anchors]
    indices = [index for index, cosine in enumerate(cosines) if cosine > config.threshold]
    logits = torch.tensor([cosines[index] for index in indices], dtype=torch.float64) / config.temperature
    return tuple(zip(indices, logits.softmax(0).tolist(), strict=True))


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
    """Calibrate a new task, then again with the averaged vector and coefficients of related tasks.

    Label biases of anchors are not used, since they were measured on other tasks.

    Args:
        decoder: the frozen model that all anchors were fitted on.
        task: the new task.
        demonstrations: its labelled examples.
        anchors: injections of other tasks. The caller must leave out injections of the new task itself, which
            would be the most similar ones.
        config: selection and weighting of anchors.
        calibration: recipe of both calibrations. Sublayers that it does not train keep (0, 1), not the
            anchors' coefficients.
        extraction: options of the new task's context vector; ignored if ``first`` is given.
        seed: seed of the extraction and of both calibrations.
        first: an injection already calibrated on the new task, instead of the first calibration.
        progress: called after each epoch of each calibration, with counts of that calibration.

    Raises:
        I2CLError: if an anchor or ``first`` has another model, other sublayers or other positions; if
            ``first`` has another task; or as `extract` and `calibrate`.
    """
    require_decoder_and_task(decoder, task)
    config = TransferConfig.or_default(config)
    calibration = CalibrationConfig.or_default(calibration, "calibration")
    if calibration.formula != "linear":
        problem = f"transfer starts from linear coefficients, but formula={calibration.formula!r}"
        raise I2CLError(f"{problem}: use formula='linear'")
    extraction = first.extraction if first else ExtractConfig.or_default(extraction, "extraction")
    _require_compatible(anchors, decoder, extraction.sublayers, calibration.positions)  # before any fit
    fit = partial(calibrate, decoder, task, demonstrations, config=calibration, seed=seed, progress=progress)
    if first is None:
        first = fit(extract(decoder, task, demonstrations, extraction, seed=seed))
    else:
        _require_same_task(first, task, decoder, calibration.positions)
    weights = related(first, anchors, config)
    if not weights:
        return Transferred(first, first, weights)
    pairs = [(weight, anchors[index]) for index, weight in weights]
    vector = torch.stack([weight * anchor.context.double() for weight, anchor in pairs]).sum(0)
    count = sum(anchor.demonstrations for _, anchor in pairs)
    context = replace(pairs[0][1], context=vector.float(), demonstrations=count)
    start = torch.stack([weight * anchor.coefficients for weight, anchor in pairs]).sum(0)
    return Transferred(fit(context, start=start, scoring=first.head.scoring), first, weights)


def _require_compatible(
    anchors: Sequence[Injection], base: Decoder | ModelIdentity, sublayers: Sublayers, positions: Positions
) -> None:
    for number, anchor in enumerate(anchors, start=1):
        name = f"anchor {number} ({anchor.task.name!r})"
        _require_base(name, anchor, base)
        actual, required = (anchor.extraction.sublayers, anchor.positions), (sublayers, positions)
        if actual != required:
            hint = "fit both with the same values"
            raise I2CLError(f"{name} has (sublayers, positions) {actual}, the new task {required}: {hint}")


def _require_same_task(first: Injection, task: Task, decoder: Decoder, positions: Positions) -> None:
    name = f"the first injection ({first.task.name!r})"
    _require_base(name, first, decoder)
    if (first.task.labels, first.task.template) != (task.labels, task.template):
        raise I2CLError(f"{name} has other labels or another template than task {task.name!r}: leave it out")
    if first.positions != positions:
        raise I2CLError(
            f"{name} has positions={first.positions!r}, the calibration {positions!r}: use the same for both"
        )


def _require_base(name: str, injection: Injection, base: Decoder | ModelIdentity) -> None:
    injection.require_llm()
    identity = base.base if isinstance(base, Decoder) else base
    if injection.report.settings.get("method") == "anchored":  # coefficients are 1 for every task
        raise I2CLError(f"the coefficients of {name} do not depend on its task (anchored): fit it with i2cl")
    if difference := injection.base.difference(identity):
        fitted = f"{name} was fitted on {injection.base.name!r}, not {base.name!r} ({difference})"
        raise I2CLError(f"{fitted}: fit it again on this model")
