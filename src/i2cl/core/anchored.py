"""Anchored calibration: as many numbers as I2CL keeps, fitted around the plain model instead of far from it.

Beyond the paper. "Noisy Self-calibration" minimises cross-entropy over the whole vocabulary, which mostly
says "some label word", from coefficients whose steps may lead anywhere. Here the labels compete among
themselves, and the plain model is the prior's mean: the maximum a posteriori of

    sum of -log p(label | query, label words) + tau/2 |(theta - theta_0) / s|^2

in theta, a vector added to each writer's output (or I2CL's lambda and beta). The scale s is one number a
site, at which every site moves the label scores as far as any other: one over the root of the Fisher
information where the fit starts and all labels are equally probable, averaged over the numbers of the site.
The context vector's root mean square there, the alternative, leaves a fit to the few early sites where little
moves much; which ones is the model's own affair. tau follows from the reach: how far the prior lets the label
scores of a query move apart, as a standard deviation in nats, which means the same on every model. It is
wide: what keeps a fit of few examples near the plain model is that it goes no further than their labels ask.
A narrow one leaves accuracy behind (docs/results.md).

A step linearises the label scores in theta (one forward pass over the demonstrations, and a backward pass
for each label but the first). What is left is kernel logistic regression in the space of the N x C scores,
where the kernel J s^2 J' has few rows however wide the model is; it is solved to its optimum, with a proximal
term that grows where the step does not pay (Gauss-Newton and Levenberg-Marquardt for a loss that is not
squared). One step is regression with the model's tangent kernel (https://arxiv.org/abs/2210.05643).

The last vector makes the model say a label by itself: see `i2cl.core.label_mass`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, pad

from i2cl.core.context import ContextVector, require_demonstrations
from i2cl.core.edits import LinearEdit, RowsEdit
from i2cl.core.injection import Injection
from i2cl.core.label_mass import raise_label_mass
from i2cl.core.recipe import CalibrationConfig
from i2cl.core.tangent import Tangent, optimum
from i2cl.errors import I2CLError
from i2cl.models.batching import Batch
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.scoring import Questions, labelled_batch, score, sequence_log_probabilities
from i2cl.models.training import Backward, StepProgress
from i2cl.tasks import Example, Task

MOST_SCORES = 4096
"""Demonstrations times labels: the kernel has so many rows, and is solved as a whole."""

PriorScale = Literal["balanced", "fisher", "context", "equal"]

STRONGEST = 1e6
"""Proximal factor beyond which no step pays."""


class AnchoredConfig(BaseModel):
    """How far from the plain model, and in which numbers.

    Attributes:
        free: a vector at each writer (2 x layers x d numbers), or I2CL's lambda and beta (4 x layers).
        reach: standard deviation of the label scores under the prior, in nats, at most 10,000; 0 is the plain
            model.
        steps: linearisations at most.
        tolerance: relative gain of the objective by an undamped step below which it ends.
        anchored_layers: all, or a third of them.
        prior_lambda: the prior's mean, where the fit starts too, is the context vector times this; at 0 the
            plain model.
        prior_scale: ``"balanced"``, at which all sites move the label scores alike, or ``"fisher"``, all
            numbers; of vectors, ``"context"``, the context vector's at each site, or ``"equal"``, its root
            mean square over all of them, where scalars have 1.
        trust: share of the gain that its linearisation promises which a step has to bring; one that brings
            less is damped. At 0 any gain will do, and one that is small ends the fit.
        say_label: end with one more vector at the last writer that makes the model say a label by itself, and
            leaves the answer among the labels as it is (`i2cl.core.label_mass`). Only where labels are told
            apart by their first tokens: of whole sequences every token would need a vector of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    free: Literal["vectors", "scalars"] = "vectors"
    reach: Annotated[float, Field(ge=0, le=1e4)] = 30.0
    steps: int = Field(4, ge=0)
    tolerance: float = Field(0.02, ge=0)
    anchored_layers: Literal["all", "early", "middle", "late"] = "all"
    prior_lambda: float = Field(0.0, allow_inf_nan=False)
    prior_scale: PriorScale = "balanced"
    trust: float = Field(0.25, ge=0, lt=1)
    say_label: bool = True

    @property
    def told_by_slopes(self) -> bool:
        """Whether the scale takes the label scores' derivatives, and nothing of the context vector."""
        return self.prior_scale in ("balanced", "fisher")


def anchor(
    decoder: Decoder,
    task: Task,
    demonstrations: Sequence[Example],
    context: ContextVector,
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
        context: of these demonstrations or others; sets the scale, and is what lambda multiplies.
        config: see `AnchoredConfig`.
        seed: of the demonstrations, to be told with the injection.
        scoring: a label's first token, or its whole sequence; see `i2cl.models.encoding`.
        progress: called after each step with steps done, steps at most and the mean loss in nats.

    Raises:
        I2CLError: without demonstrations or with too many, on a context vector of another model, or scores
            that are not finite.
    """
    config = config or AnchoredConfig()
    require_demonstrations(task, demonstrations)
    require_few(task, demonstrations)
    context.require_base(decoder)
    fit = _Fit(Questions(decoder, task, scoring), tuple(demonstrations), context, config)
    with decoder.frozen():
        u, history = fit.solved(progress)
    vectors, coefficients = fit.linear(fit.theta(u)[None])
    tau = fit.tau if math.isfinite(fit.tau) else None
    found: dict[str, object] = {"tau": tau}
    if config.say_label and fit.ends_free and u.any():
        raised = raise_label_mass(decoder, fit.queries, fit.questions.labels.first, fit.edit(u))
        vectors[0, -1, -1] += raised.vector / decoder.writer_scale
        found["label_mass"] = [raised.before, raised.after]
    settings = config.model_dump(mode="json") | {"method": "anchored"} | found
    return Injection(
        context=replace(context, values=vectors[0]),
        coefficients=coefficients[0],
        task=task.without_data(),
        base=decoder.base,
        scoring=scoring,
        seed=seed,
        settings=settings,
        history=history,
    )


def require_few(task: Task, demonstrations: Sequence[Example]) -> None:
    """Refuse more demonstrations times labels than `MOST_SCORES`.

    Raises:
        I2CLError: naming both.
    """
    scores = len(demonstrations) * len(task.labels)
    if scores > MOST_SCORES:
        raise I2CLError(
            f"{len(demonstrations)} demonstrations times {len(task.labels)} labels are {scores} scores, and "
            f"anchored calibration takes at most {MOST_SCORES}: give fewer (--shots), or take method i2cl"
        )


@dataclass(eq=False)
class _Fit:
    """One fit; ``tau`` is the strength of the prior that its reach comes to."""

    questions: Questions
    demonstrations: tuple[Example, ...]
    context: ContextVector
    config: AnchoredConfig
    tau: float = math.nan

    def __post_init__(self) -> None:
        decoder, texts = self.questions.decoder, [example.text for example in self.demonstrations]
        self.queries = self.questions.queries(texts)
        gold = torch.tensor([example.label for example in self.demonstrations])
        self.target = one_hot(gold, len(self.questions.labels.ids)).double()
        values = self.context.values
        layers = CalibrationConfig(layers=self.config.anchored_layers)
        active = layers.active(decoder.layers, self.context.config.writers)[..., None]
        if self.config.free == "vectors":
            size = values.square().mean(-1, keepdim=True).sqrt()
            if self.config.prior_scale == "equal":
                size = size.square().mean().sqrt().expand_as(size)
            elif self.config.told_by_slopes:  # the first tangent's
                size = torch.ones_like(size)
            self.start = self.config.prior_lambda * values * active
            self.scale = (size * active).expand_as(values)
        else:
            self.start = torch.tensor([self.config.prior_lambda, 1.0]).repeat(*values.shape[:2], 1)
            self.scale = active.float().expand_as(self.start)
        self.unit = self.scale

    @property
    def ends_free(self) -> bool:
        """Whether the last writer has a vector of its own: only the final norm and the LM head follow."""
        vectors = self.context.config.site == "writers" and self.config.free == "vectors"
        return vectors and not self.questions.labels.full and bool(self.scale[-1, -1].any())

    def linear(
        self, theta: Float[Tensor, "rows layers sites size"]
    ) -> tuple[Float[Tensor, "rows layers sites d"], Float[Tensor, "rows layers sites 2"]]:
        """Vectors and (lambda, beta) such that an injection of them is theta's."""
        if self.config.free == "vectors":
            return theta, torch.ones(*theta.shape[:-1], 2, device=theta.device)
        values = self.context.values.to(theta.device)
        return values.expand(len(theta), *values.shape), theta

    def solved(self, progress: StepProgress | None) -> tuple[Float[Tensor, " parameters"], tuple[float, ...]]:
        """U, and the mean loss at the start and after each step."""
        u = torch.zeros(self.start.numel())
        point = self.first()
        loss = self.loss(point.scores)
        history = [loss]
        self.tau = point.tau(self.config.reach)
        most = self.config.steps if 0 < self.tau < math.inf else 0
        objective, factor = loss * len(self.target), 1.0
        for step in range(most):
            found = self.stepped(point, u, objective, max(1.0, factor / 8))
            if found is None:
                break
            moved, scores, value, factor = found
            gain, u, objective = (objective - value) / objective, moved, value
            history.append(self.loss(scores))
            if progress is not None:
                progress(step + 1, most, history[-1])
            settled = gain < self.config.tolerance and factor == 1  # a damped step gains little by itself
            if settled or step == most - 1:
                break
            point = self.point(u)
        return u, tuple(history)

    def first(self) -> Tangent:
        """The tangent at the start, which tells the scale where its slopes do."""
        self.scale = self.unit
        point = self.point(torch.zeros(self.start.numel()))
        if not self.config.told_by_slopes:
            return point
        even = point.even(self.unit.shape[-1] if self.config.prior_scale == "balanced" else 1)
        self.scale = self.unit * even.view_as(self.unit)
        return Tangent(point.scores, point.jacobian * even)

    def stepped(
        self, point: Tangent, u: Float[Tensor, " parameters"], objective: float, factor: float
    ) -> tuple[Float[Tensor, " parameters"], Float[Tensor, "n labels"], float, float] | None:
        """The next u, its scores, its objective and the factor that this took; None where no step pays."""
        along = (point.jacobian @ u).double().view_as(point.scores)
        while factor <= STRONGEST:
            held = self.tau * factor
            pull = 1 / factor  # of the prior, whose mean is the plain model, against the step's length
            weights = optimum(point.scores.double() - pull * along, point.kernel, self.target, held)
            moved = (1 - pull) * u + point.jacobian.T @ weights.float()
            scores = self.scores(moved)
            value = self.objective(scores, moved)
            straight = point.scores + (point.jacobian @ (moved - u)).view_as(point.scores)
            promised = max(0.0, objective - self.objective(straight, moved))  # rounding may say less
            if value < objective - self.config.trust * promised:  # which no value that is not finite is
                return moved, scores, value, factor
            factor *= 8
        return None

    def objective(self, scores: Float[Tensor, "n labels"], u: Float[Tensor, " parameters"]) -> float:
        """What is minimised, at u, where these are the label scores."""
        loss = cross_entropy(scores.double(), self.target, reduction="sum").item()
        return loss + self.tau / 2 * u.double().square().sum().item()

    def loss(self, scores: Float[Tensor, "n labels"]) -> float:
        """Mean cross-entropy among the labels, in nats."""
        return cross_entropy(scores.double(), self.target).item()

    def theta(self, u: Float[Tensor, " parameters"]) -> Float[Tensor, "layers sites size"]:
        """The parameters at a place in units of their scale."""
        return self.start + self.scale * u.view_as(self.start)

    def scores(self, u: Float[Tensor, " parameters"]) -> Float[Tensor, "n labels"]:
        """Label scores at u."""
        questions = self.questions
        return score(questions.decoder, self.queries, questions.labels, edit=self.edit(u))

    def edit(self, u: Float[Tensor, " parameters"]) -> LinearEdit:
        """The injection of u."""
        vectors, pairs = self.linear(self.theta(u)[None])
        return LinearEdit(vectors[0], pairs[0], self.context.config.site)

    def point(self, u: Float[Tensor, " parameters"]) -> Tangent:
        """Label scores at u and their derivatives: of whole sequences row by row, else label by label."""
        labels = self.questions.labels.ids
        rows = [(row, slice(None)) for row in range(len(self.queries))]
        ids = list(self.queries)
        if self.questions.labels.full:
            rows = [(row, slice(at, at + 1)) for row in range(len(self.queries)) for at in range(len(labels))]
            ids = [self.queries[row] + labels[at.start][:-1] for row, at in rows]
        scores = torch.empty(len(self.queries), len(labels))
        jacobian = torch.empty(len(self.queries), len(labels), u.numel())
        run = partial(self._slopes, self.theta(u), rows)
        for batch, (values, slopes) in self.questions.decoder.run_batches(ids, run):
            for place, value, slope in zip(batch.rows, values, slopes, strict=True):
                row, at = rows[place]
                scores[row, at], jacobian[row, at] = value, slope
        if not (scores.isfinite().all() and jacobian.isfinite().all()):
            raise I2CLError("label scores or their derivatives are not finite: load the model in float32")
        return Tangent(scores, jacobian.flatten(0, 1))

    def _slopes(
        self, theta: Float[Tensor, "layers sites size"], rows: Sequence[tuple[int, slice]], batch: Batch
    ) -> tuple[Float[Tensor, "batch columns"], Float[Tensor, "batch columns parameters"]]:
        """Every row has a theta of its own, so one backward pass tells the derivatives of all rows."""
        decoder, labels = self.questions.decoder, self.questions.labels
        leaf = torch.nn.Parameter(theta.to(decoder.device).repeat(len(batch.rows), 1, 1, 1))
        backward = Backward([leaf], decoder.model.dtype)
        with torch.enable_grad():
            vectors, pairs = self.linear(leaf)
            own = torch.zeros(len(rows), dtype=torch.long, device=decoder.device)
            own[list(batch.rows)] = torch.arange(len(batch.rows), device=decoder.device)
            amount, keep = pairs.unbind(-1)
            edit = RowsEdit(amount[..., None] * vectors, keep, own, self.context.config.site)
            if labels.full:
                asked = [self.queries[rows[place][0]] for place in batch.rows]
                targets = [labels.ids[rows[place][1].start] for place in batch.rows]
                whole = replace(labelled_batch(asked, targets, decoder.device), rows=batch.rows)
                values = sequence_log_probabilities(decoder, whole, targets, edit)[:, None]
            else:
                values = decoder.forward(batch, edit=edit)[:, 0].float()[:, list(labels.first)]
            # Softmax sees differences alone: of several labels the first needs no pass of its own.
            wanted = values[:, 1:] - values[:, :1] if values.shape[1] > 1 else values
            found = []
            for column in wanted.unbind(-1):
                decoder.pause()
                found += backward.gradients(column.sum())
        slopes = torch.stack([(self.scale * one.cpu()).flatten(1) for one in found if one is not None], dim=1)
        return values.detach().cpu(), pad(slopes, (0, 0, values.shape[1] - len(found), 0))
