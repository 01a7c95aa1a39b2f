"""Anchored calibration: a vector for every writer, fitted around the plain model instead of far from it.

Beyond the paper. "Noisy Self-calibration" minimises cross-entropy over the whole vocabulary, which mostly
says "some label word", from coefficients whose steps may lead anywhere. Here the labels compete among
themselves, and the fit starts at the plain model and is drawn to it: four damped steps on

    sum of -log p(label | query, label words) + tau/2 |theta / s|^2

in theta, a vector added to each writer's output. The scale s is one number a site, at which every site moves
the label scores as far as any other: one over the root of the Fisher information where the fit starts and all
labels are equally probable, averaged over the numbers of the site. tau follows from the reach: how far the
prior lets the label scores of a query move apart, as a standard deviation in nats, which means the same on
every model. It is wide: what keeps a fit of few examples near the plain model is that it starts there and
stops early. A narrow one leaves accuracy behind (docs/results.md).

A step linearises the label scores in theta (one forward pass over the demonstrations, and a backward pass for
each column of `i2cl.core.tangent.Tangent`). What is left is kernel logistic regression, where the kernel
J s^2 J' has as few rows as all demonstrations have columns, however wide the model is. It is solved to its
optimum, with a proximal term that grows where the step does not pay (Gauss-Newton and
Levenberg-Marquardt for a loss that is not squared). One step is regression with the model's tangent kernel
(https://arxiv.org/abs/2210.05643).

The last vector makes the model say a label by itself: see `i2cl.core.label_mass`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from i2cl.core.context import ContextVector, ExtractConfig, Writers, require_demonstrations
from i2cl.core.edits import LinearEdit, RowsEdit
from i2cl.core.injection import Injection
from i2cl.core.label_mass import raise_label_mass
from i2cl.core.tangent import Tangent, balanced, columns, directions, optimum, summed_loss
from i2cl.errors import I2CLError
from i2cl.models.batching import Batch
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.scoring import Questions, labelled_batch, score, sequence_log_probabilities
from i2cl.models.training import Backward, StepProgress
from i2cl.tasks import Example, Task

MOST_COLUMNS = 1024
"""Rows of the kernel, as long as each demonstration keeps `FEWEST` columns; then those."""

FEWEST = 2
"""Columns of a demonstration: the label that competes most, and all others together."""

MOST_SEQUENCES = 4096
"""Whole label sequences, of all demonstrations: each has a row in the kernel, whoever asks for them."""

MOST_DEMONSTRATIONS = 4096
"""The kernel has `FEWEST` rows for each, and is solved as a whole."""

STRONGEST = 1e6
"""Proximal factor beyond which no step pays."""


class AnchoredConfig(BaseModel):
    """How far from the plain model, and in which numbers.

    Attributes:
        writers: which sites get a vector: both writers of every layer, one of them, or each block's output.
        reach: standard deviation of the label scores under the prior, in nats, at most 10,000; 0 is the plain
            model.
        steps: linearisations at most.
        tolerance: relative gain of the objective by an undamped step below which it ends.
        trust: share of the gain that its linearisation promises which a step has to bring; one that brings
            less is damped. At 0 any gain will do, and one that is small ends the fit.
        say_label: end with one more vector at the last writer that makes the model say a label by itself, and
            leaves the answer among the labels as it is (`i2cl.core.label_mass`). Only where labels are told
            apart by single tokens: of whole sequences every token would need a vector of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    writers: Writers = "both"
    reach: Annotated[float, Field(ge=0, le=1e4)] = 30.0
    steps: int = Field(4, ge=0)
    tolerance: float = Field(0.02, ge=0)
    trust: float = Field(0.25, ge=0, lt=1)
    say_label: bool = True


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
    """Fit an injection around the plain model. Nothing is random.

    Args:
        decoder: the frozen model.
        task: gives template and label words.
        demonstrations: labelled examples.
        config: see `AnchoredConfig`.
        seed: of the demonstrations, to be told with the injection.
        scoring: a label's first token, its whole sequence, or one token of its own; see
            `i2cl.models.encoding`. Where labels share first tokens, ``"auto"`` takes whole sequences up to
            `MOST_COLUMNS` of them, and single tokens beyond: a fit reads every sequence once a step.
        progress: called after each step with steps done, steps at most and the mean loss in nats.

    Raises:
        I2CLError: without demonstrations or with too many, on a decoder whose blocks add something else than
            their writers put out, or on scores that are not finite.
    """
    config = config or AnchoredConfig()
    require_demonstrations(task, demonstrations)
    require_few(demonstrations)
    decoder.require_identity()
    questions = Questions(decoder, task, scoring)
    if scoring == "auto" and questions.labels.full and len(demonstrations) * len(task.labels) > MOST_COLUMNS:
        scoring = "keyword"
        questions = Questions(decoder, task, scoring)
    if questions.labels.full and len(demonstrations) * len(task.labels) > MOST_SEQUENCES:
        raise I2CLError(
            f"{len(demonstrations)} examples times {len(task.labels)} labels are more whole sequences than "
            f"the {MOST_SEQUENCES} that anchored calibration takes: leave out scoring='full'"
        )
    problem = Problem(questions, tuple(demonstrations), config.writers)
    with decoder.frozen():
        u, tau, history = solved(problem, config, progress)
    vectors = problem.theta(u)
    settings = config.model_dump(mode="json") | {"method": "anchored", "tau": tau}
    if config.say_label and problem.ends_free and u.any():
        raised = raise_label_mass(decoder, problem.queries, questions.labels.first, problem.edit(u))
        vectors[-1, -1] += raised.vector / decoder.writer_scale
        settings["label_mass"] = [raised.before, raised.after]
    extraction = ExtractConfig(writers=config.writers)
    return Injection(
        context=ContextVector(vectors, extraction, len(demonstrations), decoder.base),
        coefficients=torch.ones(*vectors.shape[:2], 2),
        task=task.without_data(),
        base=decoder.base,
        scoring=scoring,
        seed=seed,
        settings=settings,
        history=history,
    )


def require_few(demonstrations: Sequence[Example]) -> None:
    """Refuse more demonstrations than `MOST_DEMONSTRATIONS`.

    Raises:
        I2CLError: with both numbers.
    """
    if len(demonstrations) > MOST_DEMONSTRATIONS:
        raise I2CLError(
            f"{len(demonstrations)} examples are more than the {MOST_DEMONSTRATIONS} that anchored "
            "calibration takes: give fewer of each class (--shots)"
        )


def columns_kept(demonstrations: int, labels: int) -> int:
    """How many columns each demonstration keeps: one for every label but its own where they are few."""
    return min(labels - 1, max(FEWEST, MOST_COLUMNS // max(1, demonstrations)))


@dataclass(eq=False)
class Problem:
    """Label scores of the demonstrations as a function of u, theta in units of the scale.

    Attributes:
        questions: the task asked of the model.
        demonstrations: labelled examples.
        writers: which sites have a vector.
        scale: units of theta at each site; `first` sets it.
    """

    questions: Questions
    demonstrations: tuple[Example, ...]
    writers: Writers

    def __post_init__(self) -> None:
        decoder = self.questions.decoder
        self.queries = self.questions.queries([example.text for example in self.demonstrations])
        self.gold = torch.tensor([example.label for example in self.demonstrations])
        self.site = ExtractConfig(writers=self.writers).site
        active = torch.ones(decoder.layers, 1 if self.site == "hidden" else 2, 1)
        if self.writers in ("mha", "mlp"):
            active[:, 1 if self.writers == "mha" else 0] = 0
        self.scale = active.expand(-1, -1, decoder.d_model)

    @property
    def ends_free(self) -> bool:
        """Whether the last writer has a vector, with only the final norm and the LM head behind it."""
        single = not self.questions.labels.full
        return single and self.site == "writers" and bool(self.scale[-1, -1].any())

    @property
    def columns(self) -> int:
        """Of each demonstration; of whole sequences one for every label but its own."""
        labels = len(self.questions.labels.ids)
        return labels - 1 if self.questions.labels.full else columns_kept(len(self.queries), labels)

    def theta(self, u: Float[Tensor, " parameters"]) -> Float[Tensor, "layers sites d"]:
        """The vectors at a place in units of their scale."""
        return self.scale * u.view_as(self.scale)

    def edit(self, u: Float[Tensor, " parameters"]) -> LinearEdit:
        """The injection of u."""
        vectors = self.theta(u)
        return LinearEdit(vectors, torch.ones(*vectors.shape[:2], 2), self.site)

    def scores(self, u: Float[Tensor, " parameters"]) -> Float[Tensor, "n labels"]:
        """Label scores at u."""
        questions = self.questions
        return score(questions.decoder, self.queries, questions.labels, edit=self.edit(u))

    def first(self) -> tuple[Tangent, float]:
        """The tangent at the plain model, once it has set the scale; and the variance it gives label scores.

        Where not all labels have a column, the variance over labels is that of the gold label around the
        mean of all, over the demonstrations: the same for classes equally frequent.
        """
        nothing = torch.zeros(self.scale.numel())
        point = self.point(nothing)
        if point.whole:
            spread = point.spread()
        else:
            labels = len(self.questions.labels.ids)
            own = one_hot(self.gold, labels).float() - 1 / labels
            _, slopes = self._derivatives(nothing, lambda _, rows: own[rows][:, None])
            spread = slopes[:, 0].square().mean(0)
        even = balanced(spread, self.scale.shape[-1])
        self.scale = self.scale * even.view_as(self.scale)
        point = replace(point, jacobian=point.jacobian.mul_(even))
        return point, float((spread * even.square()).sum())

    def point(self, u: Float[Tensor, " parameters"]) -> Tangent:
        """Label scores at u, and how the columns of each demonstration change there.

        Raises:
            I2CLError: on scores or derivatives that are not finite.
        """
        kept = self.columns
        if self.questions.labels.full:
            scores, slopes = self._sequence_derivatives(u)
        else:
            scores, slopes = self._derivatives(
                u, lambda values, rows: directions(values, self.gold[rows], kept)
            )
        if not (scores.isfinite().all() and slopes.isfinite().all()):
            raise I2CLError("label scores or their derivatives are not finite: load the model in float32")
        values = columns(scores, self.gold, kept)
        return Tangent(scores, values, slopes.flatten(0, 1), whole=kept == scores.shape[1] - 1)

    def _derivatives(
        self,
        u: Float[Tensor, " parameters"],
        of: Callable[[Float[Tensor, "batch labels"], Sequence[int]], Float[Tensor, "batch columns labels"]],
    ) -> tuple[Float[Tensor, "n labels"], Float[Tensor, "n columns parameters"]]:
        """Scores, and the derivative of each of some sums of them: one backward pass for all rows each."""
        decoder, first = self.questions.decoder, list(self.questions.labels.first)

        def run(batch: Batch) -> tuple[Tensor, Tensor]:
            rows = list(batch.rows)
            leaf, edit = self._rows_edit(u, rows, len(self.queries))
            backward = Backward([leaf], decoder.model.dtype)
            with torch.enable_grad():
                values = decoder.forward(batch, edit=edit)[:, 0].float()[:, first]
                weights = of(values.detach().cpu(), rows).to(values)
                found = []
                for column in range(weights.shape[1]):
                    decoder.pause()
                    found += backward.gradients((values * weights[:, column]).sum())
            return values.detach().cpu(), torch.stack([self._in_units(one) for one in found], dim=1)

        return self._gathered(decoder.run_batches(self.queries, run), len(self.queries))

    def _sequence_derivatives(
        self, u: Float[Tensor, " parameters"]
    ) -> tuple[Float[Tensor, "n labels"], Float[Tensor, "n columns parameters"]]:
        """Scores of whole sequences and their derivatives, less the gold label's; its own row is left out."""
        decoder, labels = self.questions.decoder, self.questions.labels.ids
        pairs = [(row, label) for row in range(len(self.queries)) for label in range(len(labels))]
        ids = [self.queries[row] + labels[label][:-1] for row, label in pairs]

        def run(batch: Batch) -> tuple[Tensor, Tensor]:
            leaf, edit = self._rows_edit(u, list(batch.rows), len(pairs))
            backward = Backward([leaf], decoder.model.dtype)
            with torch.enable_grad():
                own = [pairs[place] for place in batch.rows]
                targets = [labels[label] for _, label in own]
                asked = [self.queries[row] for row, _ in own]
                whole = replace(labelled_batch(asked, targets, decoder.device), rows=batch.rows)
                values = sequence_log_probabilities(decoder, whole, targets, edit)
                decoder.pause()
                (found,) = backward.gradients(values.sum())
            return values.detach().cpu()[:, None], self._in_units(found)[:, None]

        flat, slopes = self._gathered(decoder.run_batches(ids, run), len(ids))
        scores = flat.view(len(self.queries), len(labels))
        order = directions(scores, self.gold, len(labels) - 1)  # of all labels: one of them less the gold one
        return scores, torch.einsum("nkc,ncp->nkp", order, slopes.view(*scores.shape, -1))

    def _rows_edit(
        self, u: Float[Tensor, " parameters"], rows: Sequence[int], count: int
    ) -> tuple[torch.nn.Parameter, RowsEdit]:
        """Vectors of its own for every row, so that one backward pass tells the derivatives of all rows."""
        device = self.questions.decoder.device
        leaf = torch.nn.Parameter(self.theta(u).to(device).repeat(len(rows), 1, 1, 1))
        place = torch.zeros(count, dtype=torch.long, device=device)
        place[list(rows)] = torch.arange(len(rows), device=device)
        return leaf, RowsEdit(leaf, torch.ones(leaf.shape[:-1], device=device), place, self.site)

    def _in_units(self, found: Tensor | None) -> Float[Tensor, "batch parameters"]:
        if found is None:
            raise I2CLError("the label scores do not depend on the writers: is this the right model?")
        return (self.scale * found.cpu()).flatten(1)

    def _gathered(
        self, parts: Iterator[tuple[Batch, tuple[Tensor, Tensor]]], count: int
    ) -> tuple[Tensor, Tensor]:
        """Values and derivatives of all batches, each written once into its place among so many rows."""
        values = slopes = torch.empty(0)
        for batch, (some, more) in parts:
            if not len(values):
                values, slopes = torch.empty(count, *some.shape[1:]), torch.empty(count, *more.shape[1:])
            values[list(batch.rows)], slopes[list(batch.rows)] = some, more
        return values, slopes


@dataclass(frozen=True, eq=False)
class Step:
    """A step that pays.

    Attributes:
        u: where it ends.
        objective: summed loss there, with the prior.
        factor: how much stronger than the prior the proximal term had to be.
        loss: mean cross-entropy among the labels, in nats.
    """

    u: Float[Tensor, " parameters"]
    objective: float
    factor: float
    loss: float


def solved(
    problem: Problem, config: AnchoredConfig, progress: StepProgress | None = None
) -> tuple[Float[Tensor, " parameters"], float | None, tuple[float, ...]]:
    """Where the fit ends, in units of the scale; tau; and the mean loss at the start and after each step.

    tau is None where the reach is 0 or no site moves the scores.
    """
    point, variance = problem.first()
    loss = cross_entropy(point.scores.double(), problem.gold).item()
    tau = variance / config.reach**2 if config.reach > 0 else math.inf
    at = Step(torch.zeros(problem.scale.numel()), loss * len(problem.gold), 1.0, loss)
    history = [loss]
    most = config.steps if 0 < tau < math.inf else 0
    for step in range(most):
        found = stepped(problem, point, at, tau, config.trust)
        if found is None:
            break
        gain = (at.objective - found.objective) / at.objective
        at = found
        history.append(at.loss)
        if progress is not None:
            progress(step + 1, most, at.loss)
        settled = gain < config.tolerance and at.factor == 1  # a damped step gains little by itself
        if settled or step == most - 1:
            break
        point = problem.point(at.u)
    return at.u, tau if math.isfinite(tau) else None, tuple(history)


def stepped(problem: Problem, point: Tangent, at: Step, tau: float, trust: float) -> Step | None:
    """The next step, damped until it brings its share of what it promises; None where none does."""
    factor, u = max(1.0, at.factor / 8), at.u
    along = (point.jacobian @ u).double().view_as(point.values)
    while factor <= STRONGEST:
        pull = 1 / factor  # of the prior, whose mean is the plain model, against the step's length
        weights = optimum(point.values - pull * along, point.kernel, tau * factor)
        moved = (1 - pull) * u + point.jacobian.T @ weights.float()
        prior = tau / 2 * moved.double().square().sum().item()
        straight = point.values + (point.jacobian @ (moved - u)).double().view_as(point.values)
        promised = max(0.0, at.objective - summed_loss(straight) - prior)  # rounding may say less
        loss = cross_entropy(problem.scores(moved).double(), problem.gold).item()
        objective = loss * len(problem.gold) + prior
        if objective < at.objective - trust * promised:  # which no value that is not finite is
            return Step(moved, objective, factor, loss)
        factor *= 8
    return None
