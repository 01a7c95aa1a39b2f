"""Held-out evaluation of a fit of a multi-label task: F1 and average precision, thresholds, and the verdict.

The counterpart of `i2cl.experiments.evidence.fit_evaluation` for texts with any number of labels. Metrics are
scikit-learn's. Two methods are compared by the difference of their micro-F1 on the same rows: its interval
comes from a paired bootstrap, its p-value from approximate randomization (Yeh 2000,
https://aclanthology.org/C00-2137), which swaps the answers of the two methods row by row.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from i2cl import encoders
from i2cl.core.injection import DEFAULT_THRESHOLD, Injection
from i2cl.core.multi_label import frequency_bias, indicators
from i2cl.encoders import EmbeddingsConfig
from i2cl.experiments.evidence.fit_evaluation import (
    EvaluationPlan,
    FitObserver,
    FitRequest,
    Threshold,
    run_all,
)
from i2cl.experiments.evidence.verdicts import LEVEL, Comparison, Verdict, verdict
from i2cl.injections.temperature import likely_temperature
from i2cl.methods import Cost, Predictor
from i2cl.methods.base import LabelScores
from i2cl.methods.classifiers import TfidfConfig
from i2cl.methods.cross_validation import cross_validate
from i2cl.methods.injecting import NO_COST, injection_predictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer, Progress
from i2cl.tasks import Examples, Task

FREQUENCY = "label_frequency"  # predicts the frequency of each label in the training rows
ZERO_SHOT = "zero_shot"  # the plain model, with thresholds from the demonstrations
FREE = (FREQUENCY, ZERO_SHOT)  # baselines that need no fit
N_BASELINES = 3  # these two, and logistic regression on embeddings or TF-IDF
EMBEDDINGS, TFIDF = "sentence_embeddings", "tfidf"  # with one logistic regression per label
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
        labels_per_row: mean number of labels of a row.
        threshold: how thresholds were chosen.
        log_loss: mean logistic loss per label of the fit at its temperature, which these rows chose, in nats.
        not_evaluated: see `i2cl.experiments.evidence.fit_evaluation.EvaluationPlan`.
    """

    rows: int
    split: str
    methods: dict[str, dict[str, float]]
    not_run: dict[str, str]
    support: dict[str, int]
    labels: dict[str, dict[str, float] | None]
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
    """Return the injection with its evaluation, temperature and thresholds, all from the same rows.

    Args:
        injection: the fit.
        decoder: its model.
        task: with its rows.
        demonstrations: the rows of the fit.
        plan: see `i2cl.experiments.evidence.fit_evaluation.plan_evaluation`; it must have rows.
        request: options of the fit, of which ``threshold`` says how thresholds are chosen: ``"0.5"``, or
            ``"f1"`` for the highest F1 of each label.
        seconds: duration of the fit.
        refit: fits to some of the demonstrations.
        observer: receives progress.

    Raises:
        I2CLError: on an empty text.
    """
    texts, name = [row.text for row in plan.rows], request.method.full_name

    def refitted(some: Examples) -> Predictor:
        return injection_predictor(refit(some) if plan.folds else injection, decoder, task)

    def run(fit: Callable[[Examples], Predictor]) -> Run:
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
        fit_seconds = seconds if fit is refitted else (fitted - started) / max(1, plan.folds)
        return Run(probabilities, fit_seconds, milliseconds, predictor.cost.cached_bytes)

    fits = baselines(decoder, task, plan) | {name: refitted}
    runs, not_run = run_all(
        {one: partial(run, fit) for one, fit in fits.items()}, {name, ZERO_SHOT}, observer
    )
    gold = indicators(plan.rows, len(task.labels))
    return _with_evaluation(injection, runs, not_run, gold, plan, request)


def _with_evaluation(
    injection: Injection,
    runs: Mapping[str, Run],
    not_run: dict[str, str],
    gold: Indicators,
    plan: EvaluationPlan,
    request: FitRequest,
) -> Injection:
    """Choose temperature and thresholds, and evaluate the answers that they give."""
    name, threshold, labels = request.method.full_name, request.threshold, injection.task.labels
    own = runs[name].probabilities
    temperature = choose_temperature(own, gold, request.method.temperature_prior)
    tempered = at_temperature(own, temperature)
    probabilities = {one: run.probabilities for one, run in runs.items()} | {name: tempered}
    answers = {one: decide(values, gold, threshold) for one, values in probabilities.items()}
    evaluation = MultiLabelEvaluation(
        **asdict(_verdict(answers, gold, name)),
        rows=len(gold),
        split=plan.split,
        methods={one: score_answers(answers[one], gold, run)._asdict() for one, run in runs.items()},
        not_run=not_run,
        support=dict(zip(labels, gold.sum(0).tolist(), strict=True)),
        labels=_per_label(answers[name], gold, labels),
        labels_per_row=float(gold.sum(1).mean()),
        threshold=threshold,
        log_loss=float(-np.log(np.where(gold, tempered, 1 - tempered) + 1e-12).mean()),
        not_evaluated=list(plan.not_evaluated),
    )
    thresholds = choose_thresholds(tempered, gold) if threshold == "f1" else injection.head.thresholds
    injection = injection.with_head(temperature=temperature, thresholds=thresholds)
    injection = injection.with_report(evaluation=asdict(evaluation))
    if plan.folds or plan.not_evaluated:  # the model card publishes only metrics of this fit on every label
        return injection
    score = evaluation.methods[name]
    metrics = {one: score[one] for one in PUBLISHED}
    return injection.with_report(metrics=metrics | {"n": len(gold)})


def choose_temperature(probabilities: Probabilities, gold: Indicators, prior: tuple[float, float]) -> float:
    """Return the maximum a posteriori temperature, where each pair of a row and a label is one answer."""
    pairs = np.stack([1 - probabilities, probabilities], -1).reshape(-1, 2)
    with np.errstate(divide="ignore"):
        return likely_temperature(np.log(pairs), gold.astype(int).ravel(), *prior)


def at_temperature(probabilities: Probabilities, temperature: float) -> Probabilities:
    """Divide log-odds by a temperature."""
    bounded = np.clip(probabilities, 1e-12, 1 - 1e-12)
    return np.asarray(1 / (1 + ((1 - bounded) / bounded) ** (1 / temperature)))


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
    decoder: Decoder, task: Task, plan: EvaluationPlan
) -> dict[str, Callable[[Examples], Predictor]]:
    """Return how each baseline is fitted to demonstrations.

    Without cross-validation, the label frequencies are those of all training rows that are not in the plan.
    """
    labels, scored = len(task.labels), {row.text for row in plan.rows}
    training = () if plan.folds else [row for row in task.train if row.text not in scored]

    def frequency(shown: Examples) -> Predictor:
        means = indicators(training or shown, labels).mean(0)
        return _Baseline(lambda texts: np.tile(means, (len(texts), 1)))

    def zero_shot(shown: Examples) -> Predictor:
        scorer = LabelScorer(decoder, task)
        scores = scorer.scores([row.text for row in shown])
        bias = frequency_bias(scores, torch.from_numpy(indicators(shown, labels)).float())
        return _Baseline(lambda texts: (scorer.scores(texts) + bias).double().sigmoid().numpy())

    encoder = encoders.local_encoder()
    fit = partial(_embeddings, encoder, str(decoder.device)) if encoder else _tfidf
    return {
        FREQUENCY: frequency,
        ZERO_SHOT: zero_shot,
        EMBEDDINGS if encoder else TFIDF: partial(fit, labels),
    }


def _one_vs_rest(c: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    return OneVsRestClassifier(LogisticRegression(C=c, class_weight="balanced", max_iter=10_000))


def _embeddings(encoder: str, device: str, labels: int, shown: Examples) -> Predictor:
    model, config = encoders.frozen_encoder(encoder, device), EmbeddingsConfig()
    vectors = encoders.embed(model, [row.text for row in shown])
    head = _one_vs_rest(config.embeddings_c).fit(vectors, indicators(shown, labels))
    stored = labels * (vectors.shape[1] + 1)
    return _Baseline(
        lambda texts: np.asarray(head.predict_proba(encoders.embed(model, texts))),
        Cost(stored, stored, 8 * stored),
    )


def _tfidf(labels: int, shown: Examples) -> Predictor:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline

    config = TfidfConfig()
    ngrams = (1, config.tfidf_words)
    vectorizer = TfidfVectorizer(ngram_range=ngrams, sublinear_tf=True, token_pattern=r"\w+")  # noqa: S106
    model = make_pipeline(vectorizer, _one_vs_rest(config.tfidf_c))
    model.fit([row.text for row in shown], indicators(shown, labels))
    trained = labels * (len(vectorizer.idf_) + 1)
    stored = trained + len(vectorizer.idf_)
    return _Baseline(lambda texts: np.asarray(model.predict_proba(texts)), Cost(trained, stored, 8 * stored))


def _verdict(answers: Mapping[str, Indicators], gold: Indicators, fit: str) -> Verdict:
    counts = {name: label_counts(one, gold) for name, one in answers.items()}
    rivals = {name: compare(counts[fit], one) for name, one in counts.items() if name != fit}
    return verdict(rivals, len(gold), FREE)


def label_counts(answers: Indicators, gold: Indicators) -> Int[np.ndarray, "rows 2"]:
    """Return twice the number of correct labels of each row, and that of its predicted and true labels."""
    return np.stack([2 * (answers & gold).sum(1), answers.sum(1) + gold.sum(1)], 1)


def _micro_f1(sums: Float[np.ndarray, "*samples 2"]) -> Float[np.ndarray, "*samples"]:
    return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1))


def _bootstrap(*methods: Int[np.ndarray, "rows 2"]) -> list[Float[np.ndarray, " samples"]]:
    """Return the micro-F1 of each method on the same resampled rows."""
    n = len(methods[0])
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    return [_micro_f1(weights @ one) for one in methods]


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
