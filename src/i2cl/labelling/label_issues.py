"""Find labelled rows whose label is probably wrong (confident learning).

A row is suspicious if a fit that has not seen it is confident of another label, compared with how confident
such fits are of that label on average. Source: Northcutt et al. 2021, https://arxiv.org/abs/1911.00068.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from i2cl import encoders
from i2cl.errors import I2CLError
from i2cl.injections.temperature import likely_temperature, log_softmax
from i2cl.methods import Predictor, make_methods
from i2cl.methods.cross_validation import cross_validate
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import require_decoder_and_task
from i2cl.tasks import Example, Examples, Task
from i2cl.tasks.task import group_by_label, sample_per_class

FOLDS = 5
MAX_SHOTS = 20  # rows per class that a refit sees by default, as in `i2cl fit`
MIN_SIMILARITY = 0.9  # cosine of the character n-gram counts of near-duplicates
NGRAMS = (3, 5)  # characters

Probabilities = Float[np.ndarray, "rows labels"]
Labels = Int[np.ndarray, " rows"]


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
    decoder: Decoder,
    task: Task,
    rows: Examples,
    *,
    log_probs: Float[Tensor, "rows labels"] | None = None,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[LabelIssue]:
    """List the rows whose label is probably wrong, worst first. No row is changed.

    Refits leave out one fold each and score it. A refit is anchored calibration on up to `MAX_SHOTS` rows per
    label, combined with a sentence encoder if one is installed. A row is listed if its refit is confident of
    another label (`find_label_issues`), or if a row with nearly the same text has another label and its own
    is the less probable of the two.

    Args:
        decoder: the model.
        task: label words and template.
        rows: labelled examples, two texts or more of at least two labels. A label with a single text is not
            questioned.
        log_probs: log-probabilities of the labels by fits that have not seen the row, if known. Default: from
            a cross-validation.
        folds: maximum number of folds.
        seed: seed of the folds and of the refits.
        progress: called with 1 after each refit.

    Raises:
        I2CLError: with fewer than two labels that have two texts, on an empty text, or for a multi-label
            task.
    """
    require_decoder_and_task(decoder, task)
    task.require_single_label("a review of labels")
    if log_probs is None:
        log_probs = out_of_fold_log_probs(decoder, task, rows, folds, seed, progress)
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
    progress: Callable[[float], None] | None = None,
) -> Float[Tensor, "rows labels"]:
    """Return each row's calibrated label log-probabilities by a fit that has not seen it; see `review`.

    A row whose label has no other text gets probability 1 for it: no refit could know the label.
    """
    groups = group_by_label(rows, len(task.labels))
    reviewed = [label for label, group in enumerate(groups) if len({row.text for row in group}) > 1]
    if len(reviewed) < 2:
        raise I2CLError("fewer than two labels have two texts or more: label more texts")
    reviewed_task = replace(task, labels=tuple(task.labels[label] for label in reviewed), train=(), test=())
    relabelled = [replace(row, label=reviewed.index(row.label)) for row in rows if row.label in reviewed]
    groups = group_by_label(relabelled, len(reviewed))
    examples = sample_per_class(groups, [min(MAX_SHOTS, len(group)) for group in groups], Random(seed))
    encoder = encoders.local_encoder()
    name, options = ("anchored+sentence_embeddings", {"encoder": encoder}) if encoder else ("anchored", {})
    (method,) = make_methods([name], options)

    def refit(training_rows: tuple[Example, ...]) -> Predictor:
        predictor = method.fit(decoder, reviewed_task, training_rows, seed)
        if progress is not None:
            progress(1)
        return predictor

    predictor = cross_validate(reviewed_task, examples, refit, folds, seed, rows=relabelled)
    scored = [at for at, row in enumerate(rows) if row.label in reviewed and row.text in predictor.fold_of]
    scores = predictor.log_probs([rows[at].text for at in scored])
    labels = np.array([reviewed.index(rows[at].label) for at in scored])
    temperature = likely_temperature(scores.numpy(), labels, *method.temperature_prior)
    log_probs = torch.full((len(rows), len(task.labels)), -torch.inf)
    log_probs[range(len(rows)), [row.label for row in rows]] = 0.0
    log_probs[np.ix_(scored, reviewed)] = (scores / temperature).log_softmax(-1)
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
