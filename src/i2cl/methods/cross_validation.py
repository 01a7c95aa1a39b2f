"""K-fold cross-validation, for measurements without further labelled rows."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, LabelScores, Predictor
from i2cl.models.scoring import Progress, stack_rows
from i2cl.tasks import Example, Task
from i2cl.tasks.labels import name_labels

FOLDS = 3  # default number of folds


def require_folds(folds: int) -> None:
    """Raise I2CLError for fewer than two folds."""
    if folds < 2:
        raise I2CLError(f"folds={folds}: give 2 or more, since each fold is scored by a fit to the others")


def single_text_labels(demonstrations: Sequence[Example]) -> set[int]:
    """Return the labels with a single text; a fit without that text would not know the label."""
    pairs = {(label, example.text) for example in demonstrations for label in example.ids}
    counts = Counter(label for label, _ in pairs)
    return {label for label, count in counts.items() if count == 1}


def fold_rows(
    task: Task, demonstrations: Sequence[Example], folds: int = FOLDS, seed: int = 0
) -> list[list[int]]:
    """Split the demonstrations into folds; each refit leaves out one.

    The only text of a label is in no fold, so every refit has it. Other labels are spread over the folds as
    evenly as their texts allow, and equal texts stay in the same fold. There are at most ``folds`` folds, and
    no more than the median label has rows: with more, a fold would hold only some of the labels, and its
    refit would have fewer training rows of exactly these.

    Args:
        task: gives the label words.
        demonstrations: labelled examples, at least two texts for at least two labels.
        folds: maximum number of folds.
        seed: shuffles the texts before they are assigned.

    Returns:
        The row numbers of each fold, in ascending order.

    Raises:
        I2CLError: for fewer than two folds, if the folds have fewer than two labels, or if a refit would not
            see all labels.
    """
    require_folds(folds)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, example in enumerate(demonstrations):
        rows_of[example.text].append(row)
    single = single_text_labels(demonstrations)
    all_labels = [label for example in demonstrations for label in example.ids]
    frequencies = np.bincount(all_labels, minlength=len(task.labels))

    def labels_of(rows: Sequence[int]) -> list[int]:
        """Return the labels of some rows, rarest first."""
        labels = {label for row in rows for label in demonstrations[row].ids}
        return sorted(labels, key=lambda label: frequencies[label])

    groups = [rows for rows in rows_of.values() if single.isdisjoint(labels_of(rows))]
    in_folds = {label for rows in groups for label in labels_of(rows)}
    if len(in_folds) < 2:
        missing = (word for label, word in enumerate(task.labels) if label not in in_folds)
        raise _missing_labels_error(missing)
    median_rows = int(np.median(frequencies[sorted(in_folds)]))
    rows_by_fold: list[list[int]] = [[] for _ in range(min(folds, len(groups), max(2, median_rows)))]
    counts = np.zeros((len(rows_by_fold), len(task.labels)), dtype=int)  # rows of each label by fold
    shuffled = [groups[index] for index in np.random.default_rng(seed).permutation(len(groups))]

    def rarest_frequency(rows: Sequence[int]) -> int:
        """Frequency of the rarest label; rows without labels, of a multi-label task, come last."""
        return int(min(frequencies[labels_of(rows)], default=len(demonstrations)))

    for rows in sorted(shuffled, key=rarest_frequency):
        labels = labels_of(rows)
        fold = min(
            range(len(rows_by_fold)), key=lambda fold: (*counts[fold, labels], len(rows_by_fold[fold]))
        )
        rows_by_fold[fold] += rows
        for row in rows:
            counts[fold, list(demonstrations[row].ids)] += 1
    in_one_fold = (counts == frequencies).any(0)
    if in_one_fold.any():
        raise _missing_labels_error(compress(task.labels, in_one_fold))
    return [sorted(rows) for rows in rows_by_fold if rows]


def _missing_labels_error(labels: Iterable[str]) -> I2CLError:
    return I2CLError(
        f"a refit would not know the label {name_labels(list(labels))}: give two texts per label"
    )


def cross_validation_error(
    task: Task, demonstrations: Sequence[Example], folds: int = FOLDS, seed: int = 0
) -> str:
    """Return why `fold_rows` raises an error for these demonstrations, or "" if it does not."""
    try:
        fold_rows(task, demonstrations, folds, seed)
    except I2CLError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class CrossValidatedPredictor:
    """Scores each text by a refit that has not seen it.

    Attributes:
        refits: one predictor per fold, fitted to the other folds.
        fold_of: fold of each text. The only text of a label has none: every refit has seen it.
        cost: cost of the fit to all demonstrations.
    """

    refits: Sequence[Predictor]
    fold_of: Mapping[str, int]
    cost: Cost

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Score texts in `fold_of`. Raises KeyError for others."""
        if not texts:
            return self.refits[0].log_probs([])
        rows_of: dict[int, list[int]] = defaultdict(list)
        for row, text in enumerate(texts):
            rows_of[self.fold_of[text]].append(row)
        return stack_rows(
            (rows, self.refits[fold].log_probs([texts[row] for row in rows], progress))
            for fold, rows in sorted(rows_of.items())
        )


def cross_validate(
    task: Task,
    demonstrations: Sequence[Example],
    refit: Callable[[tuple[Example, ...]], Predictor],
    folds: int = FOLDS,
    seed: int = 0,
    *,
    cost: Cost | None = None,
    rows: Sequence[Example] = (),
) -> CrossValidatedPredictor:
    """Refit once per fold to the demonstrations that are not in it.

    Args:
        task: gives the label words.
        demonstrations: labelled examples.
        refit: fits to some of the demonstrations.
        folds: maximum number of folds, see `fold_rows`.
        seed: see `fold_rows`.
        cost: cost of the fit to all demonstrations. Default: the cost of the first refit.
        rows: further rows to score, unseen by all refits; they are assigned to the folds in turn.

    Raises:
        I2CLError: as `fold_rows` and ``refit``.
    """
    rows_by_fold = fold_rows(task, demonstrations, folds, seed)
    count = len(rows_by_fold)
    fold_of = {demonstrations[row].text: fold for fold, rows in enumerate(rows_by_fold) for row in rows}
    training_sets = [
        tuple(example for example in demonstrations if fold_of.get(example.text) != fold)
        for fold in range(count)
    ]
    demonstration_texts = {example.text for example in demonstrations}
    further_texts = dict.fromkeys(row.text for row in rows if row.text not in demonstration_texts)
    fold_of |= {text: number % count for number, text in enumerate(further_texts)}
    refits = [refit(examples) for examples in training_sets]
    return CrossValidatedPredictor(refits, fold_of, refits[0].cost if cost is None else cost)
