"""Held-out evaluation of a fit of a multi-label task: F1 and average precision, thresholds, and the verdict.

The counterpart of `i2cl.experiments.evidence.fit_evaluation` for texts with any number of labels. Metrics are
scikit-learn's. Two methods are compared by the difference of their micro-F1 on the same rows: its interval
comes from a paired bootstrap, its p-value from approximate randomization (Yeh 2000,
https://aclanthology.org/C00-2137), which swaps the answers of the two methods row by row.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from i2cl.core.experts import TextExpert
from i2cl.core.injection import DEFAULT_THRESHOLD, Injection
from i2cl.core.multi_label import frequency_bias, indicators
from i2cl.experiments.evidence.fit_evaluation import (
    EvaluationPlan,
    FitObserver,
    FitRequest,
    Threshold,
    advice,
    advise_without_llm,
    cheaper_methods,
    run_all,
    with_weights,
)
from i2cl.experiments.evidence.verdicts import LEVEL, Comparison, Verdict, verdict
from i2cl.injections.ensemble import (
    EXPERT_PRIORS,
    EnsembleConfig,
    WeightPrior,
    cross_fitted,
    fit_expert,
    pool_log_probs,
)
from i2cl.methods import Cost, Predictor
from i2cl.methods.base import LabelScores
from i2cl.methods.classifiers import ExpertPredictor
from i2cl.methods.cross_validation import cross_validate
from i2cl.methods.ensemble import Ensemble, llm_prior, text_methods
from i2cl.methods.injecting import NO_COST, injection_predictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer, Progress
from i2cl.tasks import Examples, Task

FREQUENCY = "label_frequency"  # predicts the frequency of each label in the training rows
ZERO_SHOT = "zero_shot"  # the plain model, with thresholds from the demonstrations
FREE = (FREQUENCY, ZERO_SHOT)  # baselines that need no fit
N_BASELINES = 4  # these two, and the text experts
MIN_POSITIVES = 5  # rows with a label, below which its threshold is that of all labels together
RESAMPLES = 2000
PUBLISHED = ("micro_f1", "macro_f1", "mean_average_precision", "exact_match")  # by the model card

Probabilities = Float[np.ndarray, "rows labels"]
Indicators = Bool[np.ndarray, "rows labels"]


class Score(NamedTuple):
    """Metrics of one method, with the 95 % interval of its micro-F1, and its cost per task.

    The mean average precision is over the labels that at least one row has.
    """

    micro_f1: float
    low: float
    high: float
    macro_f1: float
    mean_average_precision: float
    exact_match: float
    fit_seconds: float
    milliseconds_per_query: float
    cached_bytes: int


@dataclass(frozen=True)
class MultiLabelEvaluation(Verdict):
    """Evaluation of a fit and of baselines on held-out rows. `Injection.evaluation` holds it as JSON.

    The verdict compares micro-F1. If thresholds were chosen on these rows (``threshold`` is "f1"), every
    method's answers for one half of the rows use thresholds from the other half.

    Attributes:
        rows: number of rows.
        split: see `i2cl.experiments.evidence.fit_evaluation.FitEvaluation`.
        methods: scores by method.
        not_run: why other methods could not run, by method.
        support: number of rows with each label.
        labels: F1, precision and recall of the fit by label; None for a label without a row.
        llm_gain: what the LLM adds to the text experts of an ensemble: the difference of their micro-F1,
            ``low`` and ``high`` of its 95 % interval; empty for the LLM alone, and without the LLM.
        labels_per_row: mean number of labels of a row.
        threshold: how thresholds were chosen.
        log_loss: mean logistic loss per label of the fit, in nats. The weights of an ensemble, or the
            temperature, are chosen for each row by the others (`i2cl.injections.ensemble.cross_fitted`).
        not_evaluated: see `i2cl.experiments.evidence.fit_evaluation.EvaluationPlan`.
    """

    rows: int
    split: str
    methods: dict[str, dict[str, float]]
    not_run: dict[str, str]
    support: dict[str, int]
    labels: dict[str, dict[str, float] | None]
    llm_gain: dict[str, float]
    labels_per_row: float
    threshold: Threshold
    log_loss: float
    not_evaluated: list[str]


class Run(NamedTuple):
    """Probabilities of one method on the rows, and its cost."""

    probabilities: Probabilities
    fit_seconds: float
    milliseconds_per_query: float
    cached_bytes: int


@dataclass(frozen=True)
class _Baseline:
    """A fitted baseline, as a `i2cl.methods.base.Predictor`."""

    probabilities: Callable[[Sequence[str]], Probabilities]  # of each label of each text
    cost: Cost = NO_COST

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return the log-probability of each label."""
        scores = torch.from_numpy(self.probabilities(texts)).log()
        if progress is not None:
            progress(len(texts))
        return scores


def evaluate_multi_label(
    injection: Injection,
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    plan: EvaluationPlan,
    request: FitRequest,
    *,
    seconds: float,
    refit: Callable[[Examples], Injection],
    observer: FitObserver,
) -> Injection:
    """Return the injection with its evaluation, weights and thresholds, all from the same rows.

    The weights are those of the ensemble's members; for the LLM alone, the temperature. The baseline
    zero_shot is left out if the fit does not use the LLM.

    Args:
        injection: the fit.
        decoder: its model.
        task: with its rows.
        demonstrations: the rows of the fit.
        plan: see `i2cl.experiments.evidence.fit_evaluation.plan_evaluation`; it must have rows.
        request: options of the fit, of which ``threshold`` says how thresholds are chosen: ``"0.5"``, or
            ``"f1"`` for the highest F1 of each label, which is the default: where labels are rare, calibrated
            probabilities seldom reach 0.5.
        seconds: duration of the fit.
        refit: fits to some of the demonstrations.
        observer: receives progress.

    Raises:
        I2CLError: on an empty text.
    """
    texts, name = [row.text for row in plan.rows], request.method.full_name

    def refitted(some: Examples) -> Predictor:
        return injection_predictor(refit(some) if plan.folds else injection, decoder, task)

    def run(fit: Callable[[Examples], Predictor], known_seconds: float | None) -> Run:
        started = time.perf_counter()
        predictor: Predictor
        if plan.folds:
            rows = tuple(demonstrations)
            predictor = cross_validate(task, rows, fit, plan.folds, injection.seed, rows=plan.rows)
        else:
            predictor = fit(demonstrations)
        fitted = time.perf_counter()
        probabilities = predictor.log_probs(texts, observer.scored).double().exp().numpy()
        milliseconds = 1000 * (time.perf_counter() - fitted) / len(texts)
        fit_seconds = (fitted - started) / max(1, plan.folds) if known_seconds is None else known_seconds
        return Run(probabilities, fit_seconds, milliseconds, predictor.cost.cached_bytes)

    texts_by_expert, experts = text_methods(request.ensemble), [one.name for one in injection.head.experts]
    fitted_experts = () if plan.folds else injection.head.text_experts
    fits = baselines(decoder, task, plan, request.ensemble, fitted_experts, observer.embedded)
    known_seconds = {texts_by_expert[one.name].full_name: one.fit_seconds for one in fitted_experts}
    members = [texts_by_expert[expert].full_name for expert in experts]
    priors = [EXPERT_PRIORS[expert] for expert in experts]
    if injection.head.uses_llm:
        fits[name], known_seconds[name] = refitted, seconds
        members, priors = [name, *members], [llm_prior(request.method), *priors]
    runs, not_run = run_all(
        {method: partial(run, fit, known_seconds.get(method)) for method, fit in fits.items()},
        {ZERO_SHOT, *members},
        observer,
    )
    gold = indicators(plan.rows, len(task.labels))
    return _with_evaluation(injection, runs, not_run, members, priors, gold, plan, request)


def _with_evaluation(
    injection: Injection,
    runs: dict[str, Run],
    not_run: dict[str, str],
    members: Sequence[str],
    priors: Sequence[WeightPrior],
    gold: Indicators,
    plan: EvaluationPlan,
    request: FitRequest,
) -> Injection:
    """Fit the weights of the members, the LLM first if it is one of them, and evaluate their pool."""
    uses_llm = injection.head.uses_llm
    threshold, labels = request.threshold or "f1", injection.task.labels
    pairs = pair_log_probs([runs[name].probabilities for name in members])
    name, pooled = members[0], cross_fitted_probabilities(pairs, gold, priors)
    if len(members) > 1:
        name = Ensemble.name
        runs = runs | {name: _pooled_run([runs[member] for member in members], pooled)}
    probabilities = {method: run.probabilities for method, run in runs.items()} | {name: pooled}
    answers = {method: decide(values, gold, threshold) for method, values in probabilities.items()}
    counts = {method: label_counts(answer, gold) for method, answer in answers.items()}
    rivals = {method: compare(counts[name], rival) for method, rival in counts.items() if method != name}
    advise, free = partial(advice, members, uses_llm=uses_llm), FREE if uses_llm else FREE[:1]
    comparison = verdict(
        rivals, len(gold), free, cheaper=cheaper_methods(uses_llm=uses_llm), parts=members, advise=advise
    )
    llm_gain: dict[str, float] = {}
    if uses_llm and len(members) > 1:
        without = decide(cross_fitted_probabilities(pairs[1:], gold, priors[1:]), gold, threshold)
        without_counts = label_counts(without, gold)
        gain = compare(counts[name], without_counts)
        llm_gain = {"difference": gain.difference, "low": gain.low, "high": gain.high}
        score = (float(_micro_f1(without_counts.sum(0))), *_interval(_bootstrap(without_counts)[0]))
        experts = injection.head.members[1:]
        advised = advise_without_llm(comparison.advice, gain, experts, "micro-F1", score)
        comparison = replace(comparison, advice=advised)
    evaluation = MultiLabelEvaluation(
        **asdict(comparison),
        rows=len(gold),
        split=plan.split,
        methods={method: score_answers(answers[method], gold, run)._asdict() for method, run in runs.items()},
        not_run=not_run,
        support=dict(zip(labels, gold.sum(0).tolist(), strict=True)),
        labels=_per_label(answers[name], gold, labels),
        llm_gain=llm_gain,
        labels_per_row=float(gold.sum(1).mean()),
        threshold=threshold,
        log_loss=float(-np.log(np.where(gold, pooled, 1 - pooled) + 1e-12).mean()),
        not_evaluated=list(plan.not_evaluated),
    )
    injection = with_weights(injection, pairs, gold.ravel().astype(int), priors)
    if threshold == "f1":
        injection = _with_thresholds(injection, pairs, gold)
    injection = injection.with_report(evaluation=asdict(evaluation))
    if plan.folds or plan.not_evaluated:  # the model card publishes only metrics of this fit on every label
        return injection
    scores = evaluation.methods[name]
    metrics = {metric: scores[metric] for metric in PUBLISHED}
    return injection.with_report(metrics=metrics | {"n": len(gold)})


def _with_thresholds(
    injection: Injection, pairs: Float[np.ndarray, "members pairs 2"], gold: Indicators
) -> Injection:
    """Choose thresholds by F1 for the ensemble, and for the LLM alone if it is used."""

    def choose(weights: Sequence[float]) -> tuple[float, ...]:
        log_probs = pool_log_probs(pairs[: len(weights)], weights)
        return choose_thresholds(np.exp(log_probs[:, 1]).reshape(gold.shape), gold)

    weights = injection.head.expert_weights
    if not injection.head.uses_llm:
        return injection.with_head(thresholds=choose(weights[1:]))
    alone = choose([1 / injection.temperature])
    if not weights:
        return injection.with_head(thresholds=alone)
    return injection.with_head(thresholds=choose(weights), llm_thresholds=alone)


def pair_log_probs(probabilities: Sequence[Probabilities]) -> Float[np.ndarray, "members pairs 2"]:
    """Return the log-probabilities of both answers, no and yes, for each pair of a row and a label.

    Args:
        probabilities: of each member.
    """
    bounded = np.clip(np.stack(probabilities).reshape(len(probabilities), -1), 1e-12, 1 - 1e-12)
    return np.asarray(np.log(np.stack([1 - bounded, bounded], -1)))


def cross_fitted_probabilities(
    pairs: Float[np.ndarray, "members pairs 2"], gold: Indicators, priors: Sequence[WeightPrior]
) -> Probabilities:
    """Return the pool's probabilities, at weights that other rows chose."""
    rows = np.repeat(np.arange(len(gold)), gold.shape[1])
    log_probs = cross_fitted(pairs, gold.ravel().astype(int), priors, groups=rows)
    return np.asarray(np.exp(log_probs[:, 1]).reshape(gold.shape))


def _pooled_run(members: Sequence[Run], pooled: Probabilities) -> Run:
    """Return the run of an ensemble, which takes the time and storage of all members."""
    return Run(
        pooled,
        sum(member.fit_seconds for member in members),
        sum(member.milliseconds_per_query for member in members),
        sum(member.cached_bytes for member in members),
    )


def choose_thresholds(probabilities: Probabilities, gold: Indicators) -> tuple[float, ...]:
    """Return the threshold of each label with the highest F1 on labelled rows.

    A label with fewer than `MIN_POSITIVES` rows gets the threshold with the highest micro-F1 of all labels.
    """
    common = _best_threshold(probabilities.ravel(), gold.ravel())
    return tuple(
        _best_threshold(probabilities[:, label], gold[:, label])
        if gold[:, label].sum() >= MIN_POSITIVES
        else common
        for label in range(gold.shape[1])
    )


def _best_threshold(
    probabilities: Float[np.ndarray, " answers"], gold: Bool[np.ndarray, " answers"]
) -> float:
    """Return the threshold with the highest F1: midway between two probabilities, inside (0, 1)."""
    if not gold.any():
        return DEFAULT_THRESHOLD
    order = np.argsort(-probabilities, kind="stable")
    ranked, right = probabilities[order], np.cumsum(gold[order])
    scores = 2 * right / (np.arange(1, len(ranked) + 1) + gold.sum())
    scores[:-1][ranked[:-1] == ranked[1:]] = -1  # equal probabilities cannot be separated
    best = int(scores.argmax())
    below = ranked[best + 1] if best + 1 < len(ranked) else 0.0
    return float(np.clip((ranked[best] + below) / 2, 1e-6, 1 - 1e-6))


def decide(probabilities: Probabilities, gold: Indicators, threshold: Threshold) -> Indicators:
    """Return which labels each row gets; with "f1", by thresholds chosen on the other half of the rows.

    The halves are random. A single row gets the default thresholds.
    """
    from sklearn.model_selection import KFold

    if threshold == "0.5" or len(gold) < 2:
        return np.asarray(probabilities >= DEFAULT_THRESHOLD)
    answers = np.zeros_like(gold)
    for others, part in KFold(2, shuffle=True, random_state=0).split(gold):
        thresholds = choose_thresholds(probabilities[others], gold[others])
        answers[part] = probabilities[part] >= np.array(thresholds)
    return answers


def baselines(
    decoder: Decoder,
    task: Task,
    plan: EvaluationPlan,
    config: EnsembleConfig,
    fitted_experts: Sequence[TextExpert] = (),
    progress: Progress | None = None,
) -> dict[str, Callable[[Examples], Predictor]]:
    """Return how each baseline is fitted to demonstrations. All text experts are among them.

    Without cross-validation, the label frequencies are those of all training rows that are not in the plan.
    ``fitted_experts`` are not fitted again. ``progress`` is called as a fit embeds texts.
    """
    labels, device = len(task.labels), str(decoder.device)
    scored = {row.text for row in plan.rows}
    training = () if plan.folds else [row for row in task.train if row.text not in scored]

    def frequency(shown: Examples) -> Predictor:
        means = indicators(training or shown, labels).mean(0)
        return _Baseline(lambda texts: np.tile(means, (len(texts), 1)))

    def zero_shot(shown: Examples) -> Predictor:
        scorer = LabelScorer(decoder, task)
        scores = scorer.scores([row.text for row in shown])
        bias = frequency_bias(scores, torch.from_numpy(indicators(shown, labels)).float())
        return _Baseline(lambda texts: (scorer.scores(texts) + bias).double().sigmoid().numpy())

    def text_expert(name: str, shown: Examples) -> Predictor:
        fitted = (expert for expert in fitted_experts if expert.name == name)
        expert = next(fitted, None) or fit_expert(name, config, task, shown, device, progress)
        cost = ExpertPredictor(expert, device).cost
        return _Baseline(lambda texts: expert.scores(texts, device).double().sigmoid().numpy(), cost)

    fits: dict[str, Callable[[Examples], Predictor]] = {FREQUENCY: frequency}
    if config.uses_llm:
        fits[ZERO_SHOT] = zero_shot
    for name, method in text_methods(config).items():
        fits[method.full_name] = partial(text_expert, name)
    return fits


def label_counts(answers: Indicators, gold: Indicators) -> Int[np.ndarray, "rows 2"]:
    """Return twice the number of correct labels of each row, and that of its predicted and true labels."""
    return np.stack([2 * (answers & gold).sum(1), answers.sum(1) + gold.sum(1)], 1)


def _micro_f1(sums: Float[np.ndarray, "*samples 2"]) -> Float[np.ndarray, "*samples"]:
    return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1))


def _bootstrap(*methods: Int[np.ndarray, "rows 2"]) -> list[Float[np.ndarray, " samples"]]:
    """Return the micro-F1 of each method on the same resampled rows."""
    n = len(methods[0])
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    return [_micro_f1(weights @ counts) for counts in methods]


def _interval(samples: Float[np.ndarray, " samples"]) -> tuple[float, float]:
    low, high = np.quantile(samples, [LEVEL / 2, 1 - LEVEL / 2]).tolist()
    return low, high


def compare(fit: Int[np.ndarray, "rows 2"], rival: Int[np.ndarray, "rows 2"]) -> Comparison:
    """Compare the micro-F1 of two methods on the same rows, given their counts."""
    n = len(fit)
    difference = float(_micro_f1(fit.sum(0)) - _micro_f1(rival.sum(0)))
    samples = np.subtract(*_bootstrap(fit, rival))
    swapped = np.random.default_rng(1).integers(0, 2, (RESAMPLES, n))
    moved = swapped @ (rival - fit)
    shuffled = _micro_f1(fit.sum(0) + moved) - _micro_f1(rival.sum(0) - moved)
    p = (1 + int((np.abs(shuffled) >= abs(difference) - 1e-12).sum())) / (1 + RESAMPLES)
    return Comparison(difference, *_interval(samples), p, float(n * samples.var() + difference**2))


def score_answers(answers: Indicators, gold: Indicators, run: Run) -> Score:
    """Compute the metrics of a method's answers."""
    from sklearn.metrics import average_precision_score, f1_score

    counts = label_counts(answers, gold)
    present = np.flatnonzero(gold.any(0))
    precisions = [average_precision_score(gold[:, label], run.probabilities[:, label]) for label in present]
    low, high = _interval(_bootstrap(counts)[0])
    return Score(
        float(_micro_f1(counts.sum(0))),
        low,
        high,
        float(f1_score(gold, answers, average=None, zero_division=0)[present].mean())
        if len(present)
        else 0.0,
        float(np.mean(precisions)) if precisions else 0.0,
        float((answers == gold).all(1).mean()),
        *run[1:],
    )


def _per_label(
    answers: Indicators, gold: Indicators, labels: Sequence[str]
) -> dict[str, dict[str, float] | None]:
    from sklearn.metrics import precision_recall_fscore_support

    precision, recall, f1, support = precision_recall_fscore_support(gold, answers, zero_division=0)
    return {
        word: {"f1": float(f1[at]), "precision": float(precision[at]), "recall": float(recall[at])}
        if support[at]
        else None
        for at, word in enumerate(labels)
    }
