"""Anchored calibration: a vector for every writer, fitted around the plain model instead of far from it.

Beyond the paper. "Noisy Self-calibration" minimises cross-entropy over the whole vocabulary, which mostly
says "some label word", from coefficients whose steps may lead anywhere. Here the labels compete among
themselves, and the fit starts at the plain model and is drawn to it: four damped steps on

    sum of -w log p(label | query, label words) + tau/2 |theta / s|^2

in theta, a vector added to each writer's output, where w is the weight of a demonstration, 1 by default. The
scale s is one number a site, at which every site moves the label scores as far as any other: one over the
root of the Fisher information where the fit starts and all labels are equally probable, averaged over the
numbers of the site. tau follows from the reach: how far the
prior lets the label scores of a query move apart, as a standard deviation in nats, which means the same on
every model. It is wide: what keeps a fit of few examples near the plain model is that it starts there and
stops early. A narrow one leaves accuracy behind (docs/results.md).

A step linearises the label scores in theta: one forward pass over the demonstrations, and a backward pass for
each column of `i2cl.core.tangent.Tangent`. From the third step on only demonstrations that are not settled
are differentiated anew; the others keep the derivatives that they have. What is left is kernel logistic
regression, where the kernel J s^2 J' has as few rows as all demonstrations have columns, however wide the
model is. It is solved to its optimum, with a proximal term that grows where the step does not pay
(Gauss-Newton and Levenberg-Marquardt for a loss that is not squared). One step is regression with the model's
tangent kernel (https://arxiv.org/abs/2210.05643).

Where demonstrations times labels are too many for a kernel, `i2cl.core.descent` minimises the same objective,
and, where labels are scored by their words, how much each word counts with it.

The last vector makes the model say a label by itself: see `i2cl.core.label_mass`.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from i2cl.core.context import ContextVector, ExtractConfig, Writers, require_demonstrations
from i2cl.core.descent import descended
from i2cl.core.injection import Injection
from i2cl.core.label_mass import raise_label_mass
from i2cl.core.problem import MOST_WHOLE, Problem, Solver
from i2cl.core.tangent import Tangent, optimum, summed_loss
from i2cl.core.weights import ClassWeight, apply_class_weight, mean_cross_entropy
from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring, ScoringWarning, SharedFirstTokenError
from i2cl.models.scoring import Questions
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Example, Task

MOST_DEMONSTRATIONS = 16_384  # one pass over more would take hours
MOST_LABELS = 4096
DAMPING = 8.0  # proximal factor of every step but the first, in units of the prior, and of one tried again
STRONGEST = 1e6  # proximal factor beyond which no step pays
COMPETING = 0.01  # probability from which on a label of several tokens is differentiated anew

MANY = (
    "{} labels share first tokens, and whole ones would take hours: each is scored by its words, in any "
    "order. With five or more examples each sentence_embeddings may answer better (i2cl eval)"
)
WORDS = "{} labels share first tokens, and a descent takes no whole ones: each is scored by its words"
FEW = "{} labels are scored by their words, in any order: whole ones take more memory (--memory)"
NO_STEP = "no step lowers the loss of the demonstrations, so this is the plain model: lower the reach"


class AnchoredConfig(Settings):
    """How far from the plain model, and in which vectors.

    Attributes:
        writers: which sites get a vector: both writers of every layer, one of them, or each block's output.
        reach: standard deviation of the label scores under the prior, in nats, at most 10,000; 0 is the plain
            model.
        steps: linearisations at most. A descent has passes of its own: of this and the next three it takes
            only whether there are any steps.
        tolerance: relative gain of the objective by an undamped step below which it ends.
        trust: share of the gain that its linearisation promises which a step has to bring; one that brings
            less is damped. At 0 any gain will do, and one that is small ends the fit.
        settled: loss in nats below which a demonstration keeps its derivatives from the third step on; at 0
            all are differentiated anew at each step. Labels of several tokens are, from the second step on,
            where they have a probability of `COMPETING`.
        say_label: end with one more vector at the last writer that makes the model say a label by itself, and
            leaves the answer among the labels as it is (`i2cl.core.label_mass`). Only where labels are told
            apart by first tokens: of whole sequences every token would need a vector of its own.
        solver: ``"kernel"``, ``"descent"`` (`i2cl.core.descent`), or ``"auto"``: a kernel of up to
            `MOST_COLUMNS`, which are demonstrations times labels but one, if it goes into the memory. Whole
            label sequences have a kernel alone. What solved a fit stands in its settings as ``solved_by``.
        class_weight: ``"balanced"``, weights of the classes by label word, or None for equal weights of all
            demonstrations (`i2cl.core.weights.apply_class_weight`).
        memory: gigabytes beyond the model that derivatives may take; default: a quarter of what is free.
            What they do not fit into is descended, which takes few. Not stored.
    """

    writers: Writers = "both"
    reach: Annotated[float, Field(ge=0, le=1e4)] = 30.0
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
    demonstrations: Sequence[Example],
    config: AnchoredConfig | None = None,
    *,
    seed: int = 0,
    scoring: Scoring = "auto",
    progress: StepProgress | None = None,
) -> Injection:
    """Fit an injection around the plain model. Repeatable bit for bit on one CPU.

    Args:
        decoder: the frozen model.
        task: gives template and label words.
        demonstrations: labelled examples.
        config: see `AnchoredConfig`.
        seed: of the demonstrations, to be told with the injection; and of the order of a descent.
        scoring: by a label's first token, its whole sequence, or its words; see `i2cl.models.encoding`. Where
            labels share first tokens, ``"auto"`` takes whole sequences up to `MOST_WHOLE` of them, as far
            as the memory holds their derivatives, and words beyond.
        progress: called after each step, of a descent as in `i2cl.models.training.train`, with steps done,
            steps at most and the mean loss in nats.

    Raises:
        I2CLError: without demonstrations, with too many, on whole sequences that are too many or exceed the
            memory, on a decoder whose blocks add something else than their writers put out, or on scores that
            are not finite.
    """
    config = config or AnchoredConfig()
    require_demonstrations(task, demonstrations)
    require_few(demonstrations)
    decoder.require_identity()
    demonstrations = apply_class_weight(demonstrations, task.labels, config.class_weight)
    problem, small = _problem(decoder, task, demonstrations, config, scoring)
    questions = problem.questions
    with decoder.frozen():
        if small:
            u, tau, history = solved(problem, config, progress)
        else:
            reach = config.reach if config.steps else 0.0
            u, weights, tau, history = descended(problem, reach, seed, progress)
            questions = replace(questions, weights=weights)
    if not u.any() and config.steps and config.reach:
        warnings.warn(NO_STEP, UserWarning, stacklevel=2)
    vectors = problem.theta(u)
    solved_by = "kernel" if small else "descent"
    settings = config.model_dump(mode="json", exclude_none=True)
    settings |= {"method": "anchored", "solved_by": solved_by, "tau": tau}
    if config.say_label and problem.ends_free and u.any():
        raised = raise_label_mass(decoder, problem.queries, questions.labels, problem.edit(u))
        vectors[-1, -1] += raised.vector / decoder.writer_scale
        settings["label_mass"] = [raised.before, raised.after]
    extraction = ExtractConfig(writers=config.writers)
    return Injection(
        context=ContextVector(vectors, extraction, len(demonstrations), decoder.base),
        coefficients=torch.ones(*vectors.shape[:2], 2),
        task=task.without_data(),
        base=decoder.base,
        scoring=questions.scoring,
        word_weights=questions.weights,
        seed=seed,
        settings=settings,
        history=history,
    )


def _problem(
    decoder: Decoder, task: Task, demonstrations: Sequence[Example], config: AnchoredConfig, scoring: Scoring
) -> tuple[Problem, bool]:
    """What is to be solved, and whether in a kernel."""
    rows = len(demonstrations) * (len(task.labels) - 1)
    by_words = config.solver == "descent" or (rows > MOST_WHOLE and config.solver == "auto")
    if scoring == "auto" and by_words and not _first_tokens_differ(decoder, task):
        why = MANY if rows > MOST_WHOLE else WORDS
        warnings.warn(why.format(len(task.labels)), ScoringWarning, stacklevel=3)
        scoring = "words"
    problem = Problem(Questions(decoder, task, scoring), tuple(demonstrations), config.writers)
    small = problem.fits(config.memory, config.solver)
    if not small and problem.questions.labels.full:  # whole sequences that the memory does not hold
        warnings.warn(FEW.format(len(task.labels)), ScoringWarning, stacklevel=3)
        problem = replace(problem, questions=Questions(decoder, task, "words"))
    return problem, small


def _first_tokens_differ(decoder: Decoder, task: Task) -> bool:
    try:
        return not Questions(decoder, task, "first_token").labels.full
    except SharedFirstTokenError:
        return False


def require_few(demonstrations: Sequence[Example]) -> None:
    """Refuse more than `MOST_DEMONSTRATIONS` or `MOST_LABELS` (I2CLError with both numbers)."""
    count, labels = len(demonstrations), len({example.label for example in demonstrations})
    if labels > MOST_LABELS:
        most = f"{labels} labels are more than the {MOST_LABELS} that anchored calibration takes"
        raise I2CLError(f"{most}: sentence_embeddings takes them (i2cl eval)")
    if count > MOST_DEMONSTRATIONS:
        most = f"{count} examples are more than the {MOST_DEMONSTRATIONS} that anchored calibration takes"
        raise I2CLError(f"{most}: give fewer of each class (--shots)")


class Step(NamedTuple):
    """A step that pays."""

    u: Float[Tensor, " parameters"]  # where it ends
    scores: Float[Tensor, "n labels"]  # of the labels there
    objective: float  # summed loss there, with the prior
    factor: float  # how much stronger than the prior the proximal term had to be
    loss: float  # mean cross-entropy among the labels, in nats


def solved(
    problem: Problem, config: AnchoredConfig, progress: StepProgress | None = None
) -> tuple[Float[Tensor, " parameters"], float | None, tuple[float, ...]]:
    """Where the fit ends, in units of the scale; tau, or None where the reach is 0 or no site moves the
    scores; and the mean loss at the start and after each step.
    """
    point, scores, variance = problem.first()
    loss = mean_cross_entropy(scores, problem.gold, problem.weights)
    tau = variance / config.reach**2 if config.reach > 0 else math.inf
    at = Step(torch.zeros(problem.scale.numel()), scores, loss * problem.total_weight, 1.0, loss)
    history = [loss]
    most = config.steps if 0 < tau < math.inf else 0
    for step in range(most):
        factor, strongest = 1.0, STRONGEST
        if step:
            losses = cross_entropy(at.scores, problem.gold, reduction="none")
            anew = (losses >= (config.settled if step > 1 else 0.0)).nonzero()[:, 0].tolist()
            competing = at.scores.softmax(-1) >= COMPETING if config.settled else None
            point = problem.moved(point, at.u, at.scores, anew, competing)
            factor, strongest = DAMPING, STRONGEST if anew else DAMPING
        after = stepped(problem, point, at, tau, config.trust, factor, strongest)
        if after is None:
            break
        gain = (at.objective - after.objective) / at.objective
        at = after
        history.append(at.loss)
        if progress is not None:
            progress(step + 1, most, at.loss)
        if gain * at.factor < config.tolerance:  # a damped step gains so much less
            break
    return at.u, tau if math.isfinite(tau) else None, tuple(history)


def stepped(
    problem: Problem,
    point: Tangent,
    at: Step,
    tau: float,
    trust: float,
    factor: float = 1.0,
    strongest: float = STRONGEST,
) -> Step | None:
    """The next step, damped until it brings its share of what it promises; None where none does."""
    u = at.u
    along = (point.jacobian @ u).double().view_as(point.values)
    while factor <= strongest:
        pull = 1 / factor  # of the prior, whose mean is the plain model, against the step's length
        weights = optimum(point.values - pull * along, point.kernel, tau * factor, point.weights)
        moved = (1 - pull) * u + point.jacobian.T @ weights.float()
        prior = tau / 2 * moved.double().square().sum().item()
        straight = point.values + (point.jacobian @ (moved - u)).double().view_as(point.values)
        # rounding may make it negative
        promised = max(0.0, at.objective - summed_loss(straight, point.weights) - prior)
        scores = problem.scores(moved)
        loss = mean_cross_entropy(scores, problem.gold, problem.weights)
        objective = loss * problem.total_weight + prior
        if objective < at.objective - trust * promised:  # which no value that is not finite is
            return Step(moved, scores, objective, factor, loss)
        factor *= DAMPING
    return None
