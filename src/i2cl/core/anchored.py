"""Anchored calibration: fit a vector for every sublayer, starting at and regularized towards the plain model.

Beyond the paper. "Noisy Self-calibration" minimizes the cross-entropy over the whole vocabulary, which mostly
teaches the model to say some label word, and its coefficients may move far from the plain model. Here the
labels compete with each other only. The objective is

    sum of -w log p(label | query, label words) + tau/2 |b / s|^2

where b are the vectors that are added to each sublayer's output and w is the weight of a demonstration, 1 by
default. The solvers' ``parameters`` are b / s. The unit s has one value per sublayer, chosen so that every
sublayer moves the label scores equally: one over the root of the Fisher information at the start of the fit,
where all labels count as equally probable, averaged over the values of the sublayer. tau follows from
``prior_std``: the standard deviation, under the prior, of the label scores around their mean for the query,
averaged over labels and demonstrations. It is in nats, so it means the same on every model. The prior is
wide. A fit of few examples stays close to the plain model because it starts there and stops early; a narrow
prior costs accuracy (docs/ablations.md).

Labels are scored by their first tokens, or by their words where first tokens are shared. Small fits are
solved by `i2cl.core.gauss_newton`, large ones by `i2cl.core.adamw`; `i2cl.core.plan` chooses. One more vector
then makes the model generate a label unprompted: see `i2cl.core.label_mass`.

A multi-label task has the logistic loss of each label instead (`i2cl.core.multi_label`), and no such vector.
"""

import warnings
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from i2cl.core.adamw import fit_adamw
from i2cl.core.context import require_two_classes
from i2cl.core.gauss_newton import fit_gauss_newton
from i2cl.core.injection import DEFAULT_THRESHOLD, Injection, LabelHead, Report
from i2cl.core.label_mass import raise_label_mass
from i2cl.core.multi_label import MultiLabelObjective, require_multi_label
from i2cl.core.objective import Objective, Solution
from i2cl.core.plan import FREE_MEMORY_SHARE, FitPlan, Solver, check_fit_size, plan_fit
from i2cl.core.recipe import ExtractConfig, Sublayers
from i2cl.core.weights import ClassWeight, apply_class_weight
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import Scoring
from i2cl.models.memory import MemoryWarning, free_memory
from i2cl.models.scoring import LabelScorer, require_decoder_and_task
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Examples, Task


class AnchoredConfig(Settings):
    """Options of anchored calibration.

    Attributes:
        sublayers: which sublayers get a vector: both of every layer, one of them, or each block's output.
        prior_std: standard deviation of the label scores under the prior, in nats, at most 10,000; 0 yields
            the plain model.
        steps: maximum number of Gauss-Newton steps. 0 yields the plain model. AdamW has its own
            number of steps and ignores ``tolerance``, ``trust`` and ``settled``.
        tolerance: relative gain of the objective by an undamped step below which the solver stops.
        trust: share of the predicted gain that a step must achieve; otherwise it is damped. With 0 any gain
            is accepted.
        settled: loss in nats below which a demonstration is not differentiated again from the third step on;
            its last derivatives are reused. With 0, all are differentiated in each step.
        say_label: add one more vector to the last sublayer that makes the model generate a label unprompted
            without changing which label is the most probable (`i2cl.core.label_mass`).
        solver: ``"gauss_newton"``, ``"adamw"``, or ``"auto"``: Gauss-Newton up to
            `i2cl.core.plan.MAX_KERNEL_PAIRS` pairs of an example and a wrong label
            (`MAX_WORD_KERNEL_PAIRS` for word-level scoring) if they fit into memory. An injection stores the
            solver that was used in its settings, as ``solved_by``.
        class_weight: ``"balanced"``, weights of the classes by label word, or None for equal weights of all
            demonstrations (`i2cl.core.weights.apply_class_weight`).
        memory: memory limit of the fit in gigabytes, beyond the model; default: a quarter of the free memory.
            Not stored.
    """

    sublayers: Sublayers = "both"
    prior_std: Annotated[float, Field(ge=0, le=1e4)] = 30.0
    steps: int = Field(4, ge=0)
    tolerance: float = Field(0.02, ge=0)
    trust: float = Field(0.25, ge=0, lt=1)
    settled: float = Field(0.1, ge=0)
    say_label: bool = True
    solver: Solver = "auto"
    class_weight: ClassWeight = None
    memory: float | None = Field(None, gt=0, allow_inf_nan=False, exclude=True)


def anchor(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    config: AnchoredConfig | None = None,
    *,
    seed: int = 0,
    scoring: Scoring = "auto",
    progress: StepProgress | None = None,
) -> Injection:
    """Fit an injection around the plain model. Deterministic on one CPU.

    Args:
        decoder: the frozen model.
        task: gives template and label words.
        demonstrations: labelled examples.
        config: see `AnchoredConfig`.
        seed: seed of the draw of the demonstrations, which the injection stores; it also shuffles AdamW's
            batches.
        scoring: ``"first_token"``, ``"words"``, or ``"auto"``: word-level if labels share first tokens.
        progress: called after each Gauss-Newton step, or as in `i2cl.models.training.train`, with the steps
            done, the maximum number of steps and the mean loss in nats.

    Raises:
        I2CLError: without demonstrations of two classes, with too many demonstrations, if the fit does not
            fit into memory, for ``scoring="sequence"``, on a decoder whose blocks do not simply add their
            sublayers' outputs, or on scores that are not finite.
    """
    config = AnchoredConfig.or_default(config)
    objective = _make_objective(decoder, task, demonstrations, config, scoring)
    plan = plan_fit(objective.size, fit_memory(config.memory), config.solver, config.steps)
    if plan.warning:
        warnings.warn(plan.warning, MemoryWarning, stacklevel=2)
    solution = _solve(objective, plan, config, seed, progress)
    parameters = solution.parameters
    is_plain = not parameters.any()
    if is_plain and config.steps and config.prior_std:
        message = "the fit did not lower the loss of the examples and yields the plain model: lower prior_std"
        warnings.warn(message, UserWarning, stacklevel=2)
    vectors = objective.vectors(parameters)
    word_weights = None if is_plain else objective.word_weights(parameters)
    settings = config.model_dump(mode="json", exclude_none=True)
    settings |= {"method": "anchored", "solved_by": plan.solver, "tau": solution.tau}
    if config.say_label and objective.has_last_vector and not is_plain and not task.multi_label:
        labels = objective.labels(parameters)
        label_mass = raise_label_mass(decoder, objective.queries, labels, objective.edit(parameters))
        vectors[-1, -1] += label_mass.vector / decoder.sublayer_scale
        settings["label_mass"] = [label_mass.before, label_mass.after]
    head = LabelHead(objective.scorer.scoring, word_weights)
    if isinstance(objective, MultiLabelObjective):
        thresholds = (DEFAULT_THRESHOLD,) * len(task.labels)
        head = replace(head, bias=tuple(objective.bias.tolist()), thresholds=thresholds)
    return Injection(
        context=vectors,
        coefficients=torch.ones(*vectors.shape[:2], 2),
        task=task.without_data(),
        base=decoder.base,
        head=head,
        report=Report(settings, solution.history),
        seed=seed,
        extraction=ExtractConfig(sublayers=config.sublayers),
        demonstrations=len(demonstrations),
    )


def _make_objective(
    decoder: Decoder, task: Task, demonstrations: Examples, config: AnchoredConfig, scoring: Scoring
) -> Objective:
    """Check the arguments, and return the loss of the fit."""
    require_decoder_and_task(decoder, task)
    if task.multi_label:
        require_multi_label(task, demonstrations)
    else:
        require_two_classes("anchored calibration", task, demonstrations)
    check_fit_size(len(demonstrations), len({label for example in demonstrations for label in example.ids}))
    decoder.require_identity()
    if config.class_weight is not None:
        task.require_single_label("class_weight")
        demonstrations = apply_class_weight(demonstrations, task.labels, config.class_weight)
    objective_class = MultiLabelObjective if task.multi_label else Objective
    return objective_class(
        LabelScorer.for_fit(decoder, task, scoring), tuple(demonstrations), config.sublayers
    )


def _solve(
    objective: Objective,
    plan: FitPlan,
    config: AnchoredConfig,
    seed: int,
    progress: StepProgress | None,
) -> Solution:
    with objective.scorer.decoder.frozen():
        if plan.solver == "adamw":
            return fit_adamw(objective, config.prior_std if config.steps else 0.0, seed, progress)
        return fit_gauss_newton(
            objective,
            config.prior_std,
            config.steps,
            tolerance=config.tolerance,
            trust=config.trust,
            settled=config.settled,
            progress=progress,
        )


def fit_memory(limit: float | None) -> float:
    """Return the memory limit of a fit in bytes; ``limit`` is in gigabytes, None for the default."""
    return limit * 1e9 if limit is not None else FREE_MEMORY_SHARE * free_memory()
