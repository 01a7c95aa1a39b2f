"""Find labelled rows whose label is probably wrong (confident learning).

A row is suspicious if a fit that has not seen it is confident of another label, compared with how confident
such fits are of that label on average. Source: Northcutt et al. 2021, https://arxiv.org/abs/1911.00068.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from i2cl import encoders
from i2cl.core.context import require_labels
from i2cl.core.experts import EmbeddingsExpert, TfidfExpert, fit_regression, pool, regression_scores
from i2cl.core.injection import Injection
from i2cl.encoders import EmbeddingsConfig
from i2cl.errors import I2CLError
from i2cl.injections.ensemble import EnsembleConfig
from i2cl.injections.temperature import likely_temperature, log_softmax
from i2cl.methods import Cost, Predictor, make_methods
from i2cl.methods.base import LabelScores
from i2cl.methods.cross_validation import cross_validate
from i2cl.models.decoder import Decoder
from i2cl.models.loading import usable_device
from i2cl.models.scoring import Progress, require_decoder_and_task
from i2cl.tasks import Example, Examples, Task
from i2cl.tasks.task import group_by_label, sample_per_class

FOLDS = 5
MAX_SHOTS = 20  # rows per class that a refit sees by default, as in `i2cl fit`
MIN_SIMILARITY = 0.9  # cosine of the character n-gram counts of near-duplicates
NGRAMS = (3, 5)  # characters
POOL_TEMPERATURE_PRIOR = (1.0, 1.0)  # the weights of a pool are inverse temperatures already

Probabilities = Float[np.ndarray, "rows labels"]
Labels = Int[np.ndarray, " rows"]
Vector = Float[np.ndarray, " d"]


@dataclass(frozen=True)
class LabelIssue:
    """A labelled row whose label is probably wrong.

    Attributes:
        row: index into the rows given to `review`.
        text: the row's text.
        label: the row's label word.
        suggested: the label word that is probably right.
        probability: probability of ``label`` according to a fit that has not seen the row.
        near_duplicates: indices of rows with nearly the same text and another label.
    """

    row: int
    text: str
    label: str
    suggested: str
    probability: float
    near_duplicates: tuple[int, ...] = ()


def review(
    decoder: Decoder | None,
    task: Task | Injection,
    rows: Examples,
    *,
    log_probs: Float[Tensor, "rows labels"] | None = None,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Progress | None = None,
    scored: Progress | None = None,
    device: str | None = None,
) -> list[LabelIssue]:
    """List the rows whose label is probably wrong, worst first. No row is changed.

    Refits leave out one fold each and score it. A refit is anchored calibration on up to `MAX_SHOTS` rows per
    label, combined with a sentence encoder if one is installed; for an `Injection` that was fitted without
    the LLM, it consists of the same text experts on all rows. A row is listed if its refit is confident of
    another label (`find_label_issues`), or if a row with nearly the same text has another label and its own
    is the less probable of the two.

    Args:
        decoder: the model. Not used, and may be None, for an injection that was fitted without the LLM.
        task: label words and template, or a fitted task.
        rows: labelled examples, two texts or more of at least two labels. A label with a single text is not
            questioned.
        log_probs: log-probabilities of the labels by fits that have not seen the row, if known. Default: from
            a cross-validation.
        folds: maximum number of folds.
        seed: seed of the folds and of the refits.
        progress: called with 1 after each refit; without the LLM, as texts are embedded.
        scored: with the LLM, called as the refits score the rows.
        device: device of the sentence encoder if ``decoder`` is None. Default: an accelerator if there is
            one.

    Raises:
        I2CLError: with fewer than two labels that have two texts, on an empty text, or for a multi-label
            task.
    """
    injection, task = (task, task.task) if isinstance(task, Injection) else (None, task)
    text_experts = injection if injection is not None and not injection.head.uses_llm else None
    if text_experts is None or decoder is not None:
        require_decoder_and_task(decoder, task)
    task.require_single_label("a review of labels")
    require_labels(task, rows)
    if log_probs is None and text_experts is not None:
        place = str(usable_device(device) if decoder is None else decoder.device)
        log_probs = text_expert_log_probs(text_experts, rows, folds, seed, place, progress)
    elif log_probs is None:
        assert decoder is not None  # noqa: S101 - checked above
        log_probs = out_of_fold_log_probs(decoder, task, rows, folds, seed, progress, scored)
    labels = np.array([row.label for row in rows])
    probabilities = np.exp(log_softmax(log_probs.numpy()))
    margins = label_margins(probabilities, labels)
    twins = near_duplicates(rows)
    listed = {row for row, others in twins.items() if margins[row] <= min(margins[list(others)])}
    listed.update(np.flatnonzero(find_label_issues(probabilities, labels)).tolist())
    return [
        _issue(task, rows, probabilities, row, twins.get(row, ()))
        for row in sorted(listed, key=lambda row: (margins[row], row))
    ]


def out_of_fold_log_probs(
    decoder: Decoder,
    task: Task,
    rows: Examples,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Progress | None = None,
    scored: Progress | None = None,
) -> Float[Tensor, "rows labels"]:
    """Return each row's calibrated label log-probabilities by a fit that has not seen it; see `review`.

    A row whose label has no other text gets probability 1 for it: no refit could know the label.
    """

    def make_refits(task: Task, rows: Examples) -> _Refits:
        groups = group_by_label(rows, len(task.labels))
        examples = sample_per_class(groups, [min(MAX_SHOTS, len(group)) for group in groups], Random(seed))
        encoder = encoders.local_encoder()
        options = {"encoder": encoder} if encoder else {}
        (method,) = make_methods(["anchored+sentence_embeddings" if encoder else "anchored"], options)

        def refit(training_rows: Examples) -> Predictor:
            predictor = method.fit(decoder, task, training_rows, seed)
            if progress is not None:
                progress(1)
            return predictor

        return _Refits(refit, examples, method.temperature_prior)

    return _cross_validated_log_probs(task, rows, make_refits, folds, seed, scored)


def text_expert_log_probs(
    injection: Injection,
    rows: Examples,
    folds: int = FOLDS,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Float[Tensor, "rows labels"]:
    """Return the same as `out_of_fold_log_probs`, by refits of an injection's text experts to all rows.

    Every text is embedded once. ``progress`` is called as texts are embedded. Raises I2CLError if the encoder
    of the injection is missing, or a text is empty.
    """
    head, config, vectors = injection.head, EnsembleConfig.of(injection), dict[str, Vector]()
    if head.embeddings is not None:
        head.embeddings.require_encoder(device)
        texts = list(dict.fromkeys(row.text for row in rows))
        encoder = encoders.frozen_encoder(head.embeddings.encoder, device)
        vectors = dict(zip(texts, encoders.embed(encoder, texts, progress), strict=True))

    def make_refits(task: Task, rows: Examples) -> _Refits:
        def refit(training_rows: Examples) -> Predictor:
            def scores(texts: Sequence[str]) -> Tensor:
                members = [
                    fit_and_score(
                        task,
                        training_rows,
                        texts,
                        vectors if name == EmbeddingsExpert.name else None,
                        config.embeddings_c,
                    )
                    for name in head.members
                ]
                return pool(torch.stack(members, 1), head.expert_weights[1:]).log_softmax(-1).float()

            return _TextPredictor(scores)

        return _Refits(refit, rows, POOL_TEMPERATURE_PRIOR)

    return _cross_validated_log_probs(injection.task, rows, make_refits, folds, seed)


def fit_and_score(
    task: Task,
    rows: Examples,
    texts: Sequence[str],
    vectors: Mapping[str, Vector] | None,
    c: float = EmbeddingsConfig().embeddings_c,
) -> Float[Tensor, "texts labels"]:
    """Fit a text expert to rows, and return the label log-probabilities of texts.

    Args:
        task: gives the labels.
        rows: labelled examples.
        texts: texts to score.
        vectors: embeddings by text, with which a fit takes milliseconds; None for character n-grams.
        c: scikit-learn's ``C`` of the classifier on embeddings.
    """
    if vectors is None:
        return TfidfExpert.fit(task, rows).scores(texts).log_softmax(-1)
    known = np.stack([vectors[row.text] for row in rows])
    weights = fit_regression(known, task, rows, c)
    queries = torch.tensor(np.array([vectors[text] for text in texts]))
    return regression_scores(weights, queries.view(len(texts), known.shape[1])).log_softmax(-1)


class _Refits(NamedTuple):
    """How the fits of a cross-validation are made."""

    refit: Callable[[tuple[Example, ...]], Predictor]
    examples: Examples  # rows that are divided into folds; all others are scored only
    temperature_prior: tuple[float, float]


@dataclass(frozen=True)
class _TextPredictor:
    """Scores texts by a function."""

    scores: Callable[[Sequence[str]], Float[Tensor, "texts labels"]]
    cost: Cost = field(default_factory=Cost)

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:  # noqa: ARG002
        return self.scores(texts)


def _cross_validated_log_probs(
    task: Task,
    rows: Examples,
    make_refits: Callable[[Task, Examples], _Refits],
    folds: int,
    seed: int,
    scored: Progress | None = None,
) -> Float[Tensor, "rows labels"]:
    """Cross-validate a method on the labels with two texts or more; see `out_of_fold_log_probs`.

    ``make_refits`` receives a task of these labels and the rows that have one of them.
    """
    groups = group_by_label(rows, len(task.labels))
    reviewed = [label for label, group in enumerate(groups) if len({row.text for row in group}) > 1]
    if len(reviewed) < 2:
        raise I2CLError("fewer than two labels have two texts or more: label more texts")
    reviewed_task = replace(task, labels=tuple(task.labels[label] for label in reviewed), train=(), test=())
    relabelled = [replace(row, label=reviewed.index(row.label)) for row in rows if row.label in reviewed]
    refits = make_refits(reviewed_task, relabelled)
    predictor = cross_validate(reviewed_task, refits.examples, refits.refit, folds, seed, rows=relabelled)
    known = [at for at, row in enumerate(rows) if row.label in reviewed and row.text in predictor.fold_of]
    scores = predictor.log_probs([rows[at].text for at in known], scored)
    labels = np.array([reviewed.index(rows[at].label) for at in known])
    temperature = likely_temperature(scores.numpy(), labels, *refits.temperature_prior)
    log_probs = torch.full((len(rows), len(task.labels)), -torch.inf)
    log_probs[range(len(rows)), [row.label for row in rows]] = 0.0
    log_probs[np.ix_(known, reviewed)] = (scores / temperature).log_softmax(-1)
    return log_probs


def find_label_issues(probabilities: Probabilities, labels: Labels) -> Bool[np.ndarray, " rows"]:
    """Return which rows have another label than the one that their out-of-fold probabilities favour.

    A label is a candidate for a row if its probability reaches the mean probability that rows with that label
    have for it. The most probable candidate is favoured; rows without a candidate are not suspicious.
    """
    given_label = probabilities[np.arange(len(labels)), labels]
    thresholds = np.full(probabilities.shape[1], np.inf)  # labels without a row are never candidates
    for label in np.unique(labels):
        thresholds[label] = given_label[labels == label].mean()
    candidates = np.where(probabilities >= thresholds, probabilities, 0)
    return np.asarray(candidates.any(1) & (candidates.argmax(1) != labels))


def label_margins(probabilities: Probabilities, labels: Labels) -> Float[np.ndarray, " rows"]:
    """Return the probability of each row's label minus the largest probability of another one."""
    rows = np.arange(len(labels))
    others = probabilities.copy()
    others[rows, labels] = -np.inf
    return np.asarray(probabilities[rows, labels] - others.max(1))


def near_duplicates(rows: Examples) -> dict[int, tuple[int, ...]]:
    """Return the rows that have nearly the same text as rows with another label, each with those rows.

    Texts are compared without case and punctuation.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.neighbors import NearestNeighbors

    words = [" ".join(re.findall(r"\w+", row.text)) or row.text for row in rows]
    vectors = CountVectorizer(analyzer="char_wb", ngram_range=NGRAMS).fit_transform(words)
    neighbours = NearestNeighbors(metric="cosine", radius=1 - MIN_SIMILARITY).fit(vectors)
    labels = np.array([row.label for row in rows])
    duplicates: dict[int, tuple[int, ...]] = {}
    for row, others in enumerate(neighbours.radius_neighbors(return_distance=False)):
        if different := tuple(sorted(others[labels[others] != labels[row]].tolist())):
            duplicates[row] = different
    return duplicates


def _issue(
    task: Task, rows: Examples, probabilities: Probabilities, row: int, others: tuple[int, ...]
) -> LabelIssue:
    label = rows[row].label
    rivals = probabilities[row].copy()
    rivals[label] = -np.inf
    suggested = int(rivals.argmax())
    text, probability = rows[row].text, float(probabilities[row, label])
    return LabelIssue(row, text, task.labels[label], task.labels[suggested], probability, others)
