"""Held-out evaluation of one fit against baselines, and the verdict on it.

`plan_evaluation` decides which labelled rows a fit is evaluated on; `evaluate_fit` scores it there. The
statistics are in `i2cl.experiments.evidence.verdicts`.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from i2cl.core.experts import EmbeddingsExpert, StatesExpert, TextExpert, TfidfExpert
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, failure_reason
from i2cl.experiments.confidence import confidence, highest
from i2cl.experiments.evaluation import (
    Fitted,
    SharedScores,
    fit_method,
    fit_wrappers,
    innermost,
    macro_f1,
    measure,
)
from i2cl.experiments.evidence.selective import require_target, selection
from i2cl.experiments.evidence.verdicts import Comparison, Counts, Verdict, verdict, wilson
from i2cl.experiments.records import Run, Scores
from i2cl.injections.ensemble import (
    EXPERT_PRIORS,
    WEIGHT_FOLDS,
    EnsembleConfig,
    WeightPrior,
    cross_fitted,
    likely_weights,
)
from i2cl.methods import Cost, Injector, Method, Predictor, make_methods
from i2cl.methods.anchored import Anchored
from i2cl.methods.classifiers import CharTfidf, ExpertPredictor, SentenceEmbeddings
from i2cl.methods.cross_validation import (
    FOLDS,
    CrossValidatedPredictor,
    cross_validate,
    cross_validation_error,
    fold_rows,
    single_text_labels,
)
from i2cl.methods.ensemble import Ensemble, HiddenStates, StatesPredictor, llm_prior, text_methods
from i2cl.methods.injecting import injection_predictor
from i2cl.methods.postprocessing import LabelPrior
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import Scoring
from i2cl.tasks import Example, Examples, Task

# baselines on the text alone, with the name of their expert
TEXT_METHODS = {SentenceEmbeddings.name: EmbeddingsExpert.name, CharTfidf.name: TfidfExpert.name}
# baselines that need no fit: a fit has to beat each of them
FREE = ("majority_class", "zero_shot", "zero_shot+batch_calibration")
BASELINES = (*FREE, "few_shot", "char_tfidf")
FREE_WITHOUT_LLM = ("majority_class",)
ROWS = 160  # rows that a fit is evaluated on by default
MAX_CROSS_VALIDATED_ROWS = 512  # further rows would narrow the intervals little
Threshold = Literal["0.5", "f1"]  # of the labels of a multi-label task: 0.5, or chosen by F1
Split = Literal["train", "test", "demonstrations"]
T = TypeVar("T")


def free_baselines(*, uses_llm: bool) -> tuple[str, ...]:
    """Return the baselines that need no fit, for a fit with or without the LLM."""
    return FREE if uses_llm else FREE_WITHOUT_LLM


def cheaper_methods(*, uses_llm: bool) -> Collection[str]:
    """Return the methods that are preferred to a fit of the same accuracy."""
    return TEXT_METHODS if uses_llm else (CharTfidf.name,)


class FitObserver:
    """Receives the progress of a fit (`i2cl.experiments.fitting.fit_task`). Override what is of interest."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Called after each step of the fit, with its mean loss in nats."""

    def stage(self, what: str, texts: int) -> None:
        """Called before texts are processed: unlabelled ones scored, or the demonstrations embedded."""

    def fitted(self, injection: Injection, seconds: float) -> None:
        """Called with the fit before it is evaluated."""

    def refit_step(self, done: int, total: int, _loss: float) -> None:
        """Called after each step of a refit, in a cross-validation."""

    def evaluating(self, method: str) -> None:
        """Called with the name of each method before it is scored."""

    def embedded(self, texts: float) -> None:
        """Called as texts are embedded to fit a baseline or, in a cross-validation, an expert."""

    def scored(self, rows: float) -> None:
        """Called as rows are scored, and as the texts of a `stage` finish."""


@dataclass(frozen=True)
class FitRequest:
    """Options of a fit and its evaluation; see `i2cl.experiments.fitting.fit_task`.

    Attributes:
        method: fits the task.
        ensemble: which text experts are fitted beside the LLM; default: all that are available.
        seed: of the fit.
        scoring: how labels are scored; the baselines of an evaluation choose for themselves.
        unlabelled: texts to measure a label prior on; none for no label prior.
        shares: share of each label among these texts; None: all equal.
        target: target accuracy of a confidence threshold.
        threshold: how the thresholds of a multi-label task are chosen, see
            `i2cl.experiments.evidence.multi_label.evaluate_multi_label`.
        command: the command line that repeats the fit, for the card.
        keep_examples: store the demonstrations with the injection.
    """

    method: Injector
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    seed: int = 0
    scoring: Scoring = "auto"
    unlabelled: Sequence[str] = ()
    shares: Sequence[float] | None = None
    target: float | None = None
    threshold: Threshold | None = None
    command: str = ""
    keep_examples: bool = False


@dataclass(frozen=True)
class Score:
    """Accuracy of one method with its 95 % interval (`wilson`), macro-F1, and cost per task.

    Macro-F1 is the mean over the labels that at least one row has.
    """

    accuracy: float
    low: float
    high: float
    macro_f1: float
    fit_seconds: float
    milliseconds_per_query: float
    cached_bytes: int


@dataclass(frozen=True)
class FitEvaluation(Verdict):
    """Evaluation of a fit and of baselines on held-out rows. `Injection.evaluation` holds it as JSON.

    Attributes:
        rows: number of rows.
        split: where the rows come from; ``"demonstrations"`` means cross-validation, where a refit without a
            row predicts it.
        methods: scores by method.
        not_run: why other methods could not run, by method.
        support: number of rows of each label.
        recall: share of each label's rows that the fit answers correctly; None without rows of that label.
        confusion: number of rows by true label (outer list) and predicted label, in the task's label order.
        confidence: log-loss, Brier score, calibration error and area under the risk-coverage curve of the
            fit (`i2cl.experiments.confidence.Confidence`). The temperature, or the weights of an ensemble,
            are chosen for each row by the others (`i2cl.injections.ensemble.cross_fitted`).
        llm_gain: what the LLM adds to the text experts of an ensemble: the difference of their accuracies,
            ``low`` and ``high`` of its 95 % interval; empty for the LLM alone, and without the LLM.
        selection: the confidence threshold for a target accuracy
            (`i2cl.experiments.evidence.selective.selection`); empty if none was requested.
        not_evaluated: see `EvaluationPlan`.
    """

    rows: int
    split: Split
    methods: dict[str, Score]
    not_run: dict[str, str]
    support: dict[str, int]
    recall: dict[str, float | None]
    confusion: list[list[int]]
    confidence: dict[str, float]
    llm_gain: dict[str, float]
    selection: dict[str, Any]
    not_evaluated: list[str]


@dataclass(frozen=True)
class EvaluationPlan:
    """The labelled rows that a fit is evaluated on, and what it is compared with.

    Attributes:
        split: see `FitEvaluation`.
        rows: the rows; none if the fit is not evaluated.
        folds: number of refits of a cross-validation, else 0.
        missing: labels without a row, which make a verdict impossible.
        not_evaluated: labels without a row, because they have a single text, which every fit needs. The
            verdict is on the other labels.
        reason: why the fit is not evaluated; empty if it is, or if no evaluation was requested.
        compare: methods to compare the fit with, besides `BASELINES` and text experts.
    """

    split: Split = "train"
    rows: tuple[Example, ...] = ()
    folds: int = 0
    missing: tuple[str, ...] = ()
    not_evaluated: tuple[str, ...] = ()
    reason: str = ""
    compare: tuple[Method, ...] = ()

    def require_target(self, target: float) -> None:
        """Raise I2CLError if these rows cannot support a confidence threshold for a target accuracy."""
        absent = (*self.missing, *self.not_evaluated)
        if self.folds or absent:
            what = f"no held-out row is labelled {absent[0]!r}" if absent else "there are too few"
            raise I2CLError(
                f"a target accuracy needs held-out rows of every label, but {what}: raise --evaluate, give "
                "rows with --test FILE, or fit with fewer --shots"
            )
        require_target(target, len(self.rows))


def plan_evaluation(
    task: Task, demonstrations: Examples, limit: int = ROWS, folds: int = FOLDS, seed: int = 0
) -> EvaluationPlan:
    """Choose the rows to evaluate a fit on.

    Test rows if the task has any; else training rows that are not demonstrations, if they cover every label;
    else cross-validation over all of these rows. Labels with a single text are not evaluated: that text is a
    demonstration of every fit. If cross-validation is not possible, the held-out rows are used if they have
    at least two labels and half of all.

    Args:
        task: with its rows.
        demonstrations: the rows of the fit.
        limit: maximum number of held-out rows, see `sample_rows`; 0 for no evaluation. Rows with the text
            of a demonstration are not held out.
        folds: number of folds of a cross-validation; 0 for none.
        seed: of the folds.

    Raises:
        I2CLError: on a negative limit.
    """
    if limit < 0:
        raise I2CLError(f"evaluate is {limit}: give a number of rows, or 0 for no evaluation")
    if limit == 0:
        return EvaluationPlan()
    shown = {example.text: example for example in reversed(demonstrations)}
    held_out = sample_rows([row for row in task.test or task.train if row.text not in shown], limit)
    missing = _labels_without(task, held_out)
    present = len(task.labels) - len(missing)
    if held_out and (task.test or not missing):
        return EvaluationPlan("test" if task.test else "train", held_out, missing=missing)
    single = {task.labels[label] for label in single_text_labels(demonstrations)}
    if present > 1 and single.issuperset(missing):
        return EvaluationPlan("train", held_out, not_evaluated=missing)
    if not folds:
        reason = "no labelled rows remain to score: fit with fewer --shots"
    elif not (reason := cross_validation_error(task, demonstrations, folds, seed)):
        parts = fold_rows(task, demonstrations, folds, seed)
        in_folds = {demonstrations[row].text for part in parts for row in part}
        scored = [row for row in reversed(shown.values()) if row.text in in_folds]
        rows = sample_rows([*scored, *held_out], MAX_CROSS_VALIDATED_ROWS, seed)
        not_evaluated = _labels_without(task, rows)
        return EvaluationPlan("demonstrations", rows, len(parts), not_evaluated=not_evaluated)
    if not held_out or (folds and present < max(2, len(task.labels) / 2)):
        return EvaluationPlan(reason=reason)
    return EvaluationPlan("train", held_out, missing=missing)


def _labels_without(task: Task, rows: Examples) -> tuple[str, ...]:
    """Return the labels that none of the rows has."""
    present = {label for row in rows for label in row.ids}
    return tuple(word for label, word in enumerate(task.labels) if label not in present)


def sample_rows(rows: Examples, limit: int, seed: int = 0) -> tuple[Example, ...]:
    """Draw up to ``limit`` rows with the same label frequencies, in their order.

    Every label with rows keeps at least one: with more labels than ``limit``, there are more rows. Rows of a
    multi-label task are drawn at random, besides one of each label.
    """
    if len(rows) <= limit:
        return tuple(rows)
    if rows[0].labels is not None:
        order = Random(f"evaluation {seed}").sample(range(len(rows)), len(rows))
        first = {label: index for index in reversed(order) for label in rows[index].ids}
        kept = list(dict.fromkeys([*first.values(), *order]))[: max(limit, len(set(first.values())))]
        return tuple(rows[index] for index in sorted(kept))
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.label, []).append(index)
    rng, share = Random(f"evaluation {seed}"), limit / len(rows)
    exact = {label: max(1.0, share * len(indices)) for label, indices in groups.items()}
    quotas = {label: int(size) for label, size in exact.items()}
    rest = sorted(groups, key=lambda label: quotas[label] - exact[label])  # largest remainder first
    for label in rest[: max(0, limit - sum(quotas.values()))]:
        quotas[label] += exact[label] > quotas[label]
    chosen = [index for label in sorted(groups) for index in rng.sample(groups[label], quotas[label])]
    return tuple(rows[index] for index in sorted(chosen))


def evaluate_fit(
    injection: Injection,
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    plan: EvaluationPlan,
    request: FitRequest,
    *,
    seconds: float,
    refit: Callable[[Examples], Injection],
    observer: FitObserver | None = None,
) -> Injection:
    """Return the injection with its `FitEvaluation`, and with weights that are fitted on the plan's rows.

    The weights are those of the ensemble's members; for the LLM alone, the temperature. Every method gets the
    same demonstrations and seed, or in a cross-validation the same folds. Baselines that run the LLM are left
    out if the fit does not use it. A baseline that fails, such as few-shot with demonstrations that exceed
    the context, is listed in `FitEvaluation.not_run`.

    Args:
        injection: the fit.
        decoder: its model.
        task: with its rows.
        demonstrations: the rows of the fit.
        plan: see `plan_evaluation`; it must have rows.
        request: options of the fit.
        seconds: duration of the fit.
        refit: fits to some of the demonstrations; used in a cross-validation only.
        observer: receives progress.

    Raises:
        I2CLError: without rows, with too few for the target, or on an empty text.
    """
    if not plan.rows:
        raise I2CLError("the evaluation plan has no rows: give at least one labelled row")
    if request.target is not None:
        plan.require_target(request.target)
    method, shared = request.method, SharedScores()
    observer = observer or FitObserver()
    fitter = _Fitter(decoder, task, tuple(demonstrations), plan, injection.seed)
    methods = text_methods(request.ensemble, observer.embedded)
    fits = fitter.baselines(request, methods.values())
    if not plan.folds:
        text_experts = injection.head.text_experts
        fits |= {methods[expert.name]: partial(fitter.use_expert, expert) for expert in text_experts}
    refit = cache(refit)
    if (states := injection.head.states) is not None:
        methods[states.name] = HiddenStates(method)
        fits[methods[states.name]] = partial(fitter.use_states, states, injection, refit)
    experts = [expert.name for expert in injection.head.experts]
    members = [methods[name].full_name for name in experts]
    priors = [EXPERT_PRIORS[name] for name in experts]
    if injection.head.uses_llm:
        evaluated = method if injection.label_bias is None else LabelPrior(method)
        fits[evaluated] = partial(fitter.use_injection, injection, refit, seconds)
        members, priors = [evaluated.full_name, *members], [llm_prior(method), *priors]

    def run(fit: Callable[[Method], Fitted], other: Method) -> Run:
        return measure(decoder, task, fit(other), plan.rows, observer.scored, shared)

    calls = {other.full_name: partial(run, fit, other) for other, fit in fits.items()}
    runs, not_run = run_all(calls, {"zero_shot", *members}, observer)
    evaluated_members = [runs[name] for name in members]
    return _with_evaluation(injection, runs, not_run, evaluated_members, priors, plan, request)


@dataclass(frozen=True)
class _Fitter:
    """Fits methods to the demonstrations: once, or in the cross-validation of a plan once per fold."""

    decoder: Decoder
    task: Task
    demonstrations: tuple[Example, ...]
    plan: EvaluationPlan
    seed: int

    def baselines(
        self, request: FitRequest, text_baselines: Iterable[Method]
    ) -> dict[Method, Callable[[Method], Fitted]]:
        """Return how each baseline is fitted; ``text_baselines`` with the example weights of the fit."""
        weighted = request.method.weighted(self.task, self.demonstrations)

        @cache
        def fit_innermost(inner: Method) -> Fitted:
            return fit_method(self.decoder, self.task, inner, self.demonstrations, self.seed)

        def fit_once(other: Method) -> Fitted:
            return fit_wrappers(self.decoder, other, fit_innermost(innermost(other)), self.task)

        def fit_text(other: Method) -> Fitted:
            if self.plan.folds:
                return self.fit_per_fold(other, weighted)
            return fit_method(self.decoder, self.task, other, weighted, self.seed)

        fit_other = partial(self.fit_per_fold, shown=self.demonstrations) if self.plan.folds else fit_once
        uses_llm = request.ensemble.uses_llm
        free = make_methods(free_baselines(uses_llm=uses_llm))
        fits: dict[Method, Callable[[Method], Fitted]] = dict.fromkeys(free, fit_once)
        few_shot = make_methods(["few_shot"] if uses_llm else [])
        fits |= dict.fromkeys((*few_shot, *self.plan.compare), fit_other)
        return fits | dict.fromkeys(text_baselines, fit_text)

    def use_injection(
        self,
        injection: Injection,
        refit: Callable[[Examples], Injection],
        seconds: float,
        method: Method,
    ) -> Fitted:
        """Return the fit that is evaluated, or its refits."""
        predictor = injection_predictor(injection, self.decoder, self.task)
        if self.plan.folds:
            predictor = self._refits(
                self.demonstrations,
                lambda rest: injection_predictor(refit(rest), self.decoder, self.task),
                predictor.cost,
            )
        return Fitted(method, predictor, self.demonstrations, self.seed, seconds)

    def use_states(
        self,
        expert: StatesExpert,
        injection: Injection,
        refit: Callable[[Examples], Injection],
        method: Method,
    ) -> Fitted:
        """Return the expert on hidden states of the fit that is evaluated, or of its refits."""
        predictor: Predictor = StatesPredictor(injection, self.decoder)
        if self.plan.folds:
            predictor = self._refits(
                self.demonstrations, lambda rest: StatesPredictor(refit(rest), self.decoder), predictor.cost
            )
        return Fitted(method, predictor, self.demonstrations, self.seed, expert.fit_seconds)

    def use_expert(self, expert: TextExpert, method: Method) -> Fitted:
        """Return a text expert of the fit that is evaluated."""
        predictor = ExpertPredictor(expert, str(self.decoder.device))
        return Fitted(method, predictor, self.demonstrations, self.seed, expert.fit_seconds)

    def fit_per_fold(self, method: Method, shown: Examples) -> Fitted:
        """Fit a method once per fold."""
        started = time.perf_counter()
        predictor = self._refits(shown, partial(method.fit, self.decoder, self.task, seed=self.seed))
        seconds = (time.perf_counter() - started) / len(predictor.refits)
        return Fitted(method, predictor, tuple(shown), self.seed, seconds)

    def _refits(
        self, shown: Examples, refit: Callable[[tuple[Example, ...]], Predictor], cost: Cost | None = None
    ) -> CrossValidatedPredictor:
        folds = self.plan.folds
        return cross_validate(self.task, shown, refit, folds, self.seed, cost=cost, rows=self.plan.rows)


def refitting(method: Injector, injection: Injection) -> Callable[..., Injection]:
    """Return ``method.fit_injection`` with the solver and the scoring that made ``injection``.

    With fewer demonstrations, the automatic choice could differ, and a cross-validation would measure a
    different kind of fit.
    """
    same_solver = method.with_solver_of(injection) if isinstance(method, Anchored) else method
    return partial(same_solver.fit_injection, scoring=injection.scoring)


def typical_temperature(method: Method, task: Task, demonstrations: Examples) -> float | None:
    """Return the temperature for a fit that is not evaluated; None with one example of some class.

    A fit to two or more examples per class is overconfident (docs/guide/confidence.md).
    """
    counts = Counter(label for example in demonstrations for label in example.ids)
    enough = all(counts[label] >= 2 for label in range(len(task.labels)))
    return method.temperature_prior[0] if enough else None


def run_all(
    runs: Mapping[str, Callable[[], T]], required: Collection[str], observer: FitObserver
) -> tuple[dict[str, T], dict[str, str]]:
    """Run each method. Errors of the required methods are raised, those of others are returned."""
    results: dict[str, T] = {}
    not_run: dict[str, str] = {}
    for name, run in runs.items():
        observer.evaluating(name)
        try:
            results[name] = run()
        except (I2CLError, RuntimeError) as error:
            if name in required or (reason := failure_reason(error)) is None:
                raise
            not_run[name] = reason
    return results, not_run


def _with_evaluation(
    injection: Injection,
    runs: dict[str, Run],
    not_run: dict[str, str],
    members: Sequence[Run],
    priors: Sequence[WeightPrior],
    plan: EvaluationPlan,
    request: FitRequest,
) -> Injection:
    """Fit the weights of the members, the LLM first if it is one of them, and evaluate their pool."""
    uses_llm = injection.head.uses_llm
    gold = np.array(members[0].gold)
    log_probs = np.stack([one.scores.array for one in members if one.scores is not None])
    # with rows of some labels only, fitted weights would be overconfident
    pooled = cross_fitted(log_probs, gold, priors, folds=0 if plan.missing else WEIGHT_FOLDS)
    run = members[0]
    if len(members) > 1:
        run = _pooled_run(members, pooled)
        runs = runs | {Ensemble.name: run}
    predictions = np.array(run.predictions)
    correct = gold == predictions
    rivals = {name: _correct(one) for name, one in runs.items() if one is not run}
    counts = {name: _discordant(correct, rival) for name, rival in rivals.items()}
    names = [one.method for one in members]
    advise = partial(advice, names, uses_llm=uses_llm)
    comparison = verdict(
        counts,
        run.n,
        free_baselines(uses_llm=uses_llm),
        missing=plan.missing,
        cheaper=cheaper_methods(uses_llm=uses_llm),
        parts=names,
        advise=advise,
    )
    confusion = np.zeros((len(run.labels), len(run.labels)), dtype=int)
    np.add.at(confusion, (gold, predictions), 1)
    support = confusion.sum(1).tolist()
    llm_gain: dict[str, float] = {}
    texts = len(injection.head.text_experts)
    if uses_llm and texts and not plan.missing:
        without = cross_fitted(log_probs[-texts:], gold, priors[-texts:], WEIGHT_FOLDS).argmax(1) == gold
        compared = Comparison.of_counts(_discordant(correct, without), run.n)
        llm_gain = {"difference": compared.difference, "low": compared.low, "high": compared.high}
        right, experts = int(without.sum()), [expert.name for expert in injection.head.text_experts]
        score = (right / run.n, *wilson(right, run.n))
        advised = advise_without_llm(comparison.advice, compared, experts, "accuracy", score)
        comparison = replace(comparison, advice=advised)
    evaluation = FitEvaluation(
        **asdict(comparison),
        rows=run.n,
        split=plan.split,
        methods={name: _score(one) for name, one in runs.items()},
        not_run=not_run,
        support=dict(zip(run.labels, support, strict=True)),
        recall={
            word: confusion[label, label].item() / support[label] if support[label] else None
            for label, word in enumerate(run.labels)
        },
        confusion=confusion.tolist(),
        confidence=asdict(confidence(pooled, gold, predictions)),
        llm_gain=llm_gain,
        selection={} if request.target is None else selection(highest(pooled), correct, request.target),
        not_evaluated=list(plan.not_evaluated),
    )
    if not plan.missing:
        injection = with_weights(injection, log_probs, gold, priors)
    injection = injection.with_report(evaluation=asdict(evaluation))
    # the model card publishes only accuracies of this fit on every label
    if plan.folds or plan.missing or plan.not_evaluated:
        return injection
    measured = {"accuracy": run.accuracy, "macro_f1": run.macro_f1, "n": run.n}
    return injection.with_report(metrics=measured)


def with_weights(
    injection: Injection,
    log_probs: Float[np.ndarray, "members rows labels"],
    gold: Int[np.ndarray, " rows"],
    priors: Sequence[WeightPrior],
) -> Injection:
    """Fit the weights to all rows: the temperature of the LLM alone, and those of the ensemble."""
    if not injection.head.uses_llm:
        return injection.with_head(expert_weights=(0.0, *likely_weights(log_probs, gold, priors)))
    (alone,) = likely_weights(log_probs[:1], gold, priors[:1])
    injection = injection.with_head(temperature=1 / alone)
    if not injection.head.experts:
        return injection
    return injection.with_head(expert_weights=likely_weights(log_probs, gold, priors))


def _pooled_run(members: Sequence[Run], pooled: Float[np.ndarray, "rows labels"]) -> Run:
    """Return the run of an ensemble, given its log-probabilities.

    It takes the time of all members, except that hidden states come from the LLM's pass.
    """
    gold, predictions = np.array(members[0].gold), pooled.argmax(1)
    changes: dict[str, Any] = {
        "method": Ensemble.name,
        "accuracy": float((predictions == gold).mean()),
        "macro_f1": macro_f1(gold, predictions, pooled.shape[1]),
        "predictions": tuple(predictions.tolist()),
        "scores": Scores.of(pooled),
        "fit_seconds": sum(one.fit_seconds for one in members),
        "predict_seconds": sum(one.predict_seconds for one in members if one.method != StatesExpert.name),
        "cost": sum((one.cost for one in members[1:]), members[0].cost),
    }
    return members[0].model_copy(update=changes)


def advice(members: Collection[str], rival: str, *, uses_llm: bool = True) -> str:
    """Return what to do if a rival is more accurate than the fit.

    Args:
        members: names of the methods that the fit combines.
        rival: name of the rival.
        uses_llm: whether the LLM is a member.
    """
    if rival in TEXT_METHODS:
        return _advise_text_method(rival, is_member=rival in members, uses_llm=uses_llm)
    more_rows = "give more rows, which make the weights more reliable"
    if rival == StatesExpert.name:
        return more_rows
    if rival in members:
        return f"use {rival} alone (--experts llm), or {more_rows}"
    if rival == "majority_class":
        return "use more rows (--shots)" + (" or a label prior (--unlabelled, --prior)" if uses_llm else "")
    if rival == "few_shot":
        return "use few_shot if its longer prompts are affordable"
    return f"use {rival}, which needs no fit, or fit more rows" if rival in FREE else f"use {rival} instead"


def _advise_text_method(rival: str, *, is_member: bool, uses_llm: bool) -> str:
    option = f"--experts {TEXT_METHODS[rival]}"
    if uses_llm:
        combine = "" if is_member else "; or leave out --experts, to combine it with the LLM"
        return f"{rival} alone is the cheaper choice, since it needs no LLM ({option}){combine}"
    if rival == CharTfidf.name:
        return f"{rival} alone is the cheaper choice, since it needs no sentence encoder ({option})"
    return f"use {rival} alone ({option})" if is_member else "add embeddings to --experts"


def advise_without_llm(
    advice: str, llm_gain: Comparison, experts: Sequence[str], metric: str, score: tuple[float, float, float]
) -> str:
    """Add to an advice how to fit without the LLM, if the LLM adds nothing significant.

    Args:
        advice: the advice so far; unchanged if it recommends other experts.
        llm_gain: the fit compared with its text experts alone.
        experts: names of the text experts.
        metric: name of the metric that is compared.
        score: metric of the text experts alone, with its 95 % interval.
    """
    if llm_gain.low > 0 or "--experts" in advice:
        return advice
    value, low, high = score
    scores = f"{metric} {value:.3f}, 95 % interval {low:.3f} to {high:.3f}"
    without_llm = f"--experts {','.join(experts)} saves a task without the LLM ({scores})"
    return "; ".join(filter(None, [advice, without_llm]))


def _discordant(ours: Bool[np.ndarray, " rows"], other: Bool[np.ndarray, " rows"]) -> Counts:
    return int((ours & ~other).sum()), int((other & ~ours).sum())


def _correct(run: Run) -> Bool[np.ndarray, " rows"]:
    return np.equal(run.gold, run.predictions)


def _score(run: Run) -> Score:
    low, high = wilson(int(_correct(run).sum()), run.n)
    milliseconds = 1000 * run.predict_seconds / run.n
    macro = run.macro_f1 * (len(run.labels) / len(set(run.gold)))  # the F1 of a label without rows is 0
    return Score(run.accuracy, low, high, macro, run.fit_seconds, milliseconds, run.cost.cached_bytes)
