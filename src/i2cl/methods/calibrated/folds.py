"""K-fold cross-validation, for measurements without further labelled rows."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.injection import LABEL_PRIOR, Injection
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Predictor
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, in_order
from i2cl.tasks import Example, Task

FOLDS = 3  # default number of folds
Refit = Callable[[tuple[Example, ...]], Predictor]  # fits a predictor to some of the demonstrations


def require_folds(folds: int) -> None:
    """Raise I2CLError for fewer than two folds."""
    if folds < 2:
        raise I2CLError(f"folds={folds}: give 2 or more, since each fold is scored by a fit to the others")


def fold_rows(
    task: Task, demonstrations: Sequence[Example], folds: int = FOLDS, seed: int = 0
) -> list[list[int]]:
    """Split the demonstrations into folds; each refit leaves out one.

    Every label is spread over the folds as evenly as its texts allow, and equal texts stay in the same fold.
    There are at most ``folds`` folds, and at most as many as the median label has texts. Otherwise a refit
    would have fewer texts of exactly those labels that it is scored on.

    Args:
        task: gives the label words.
        demonstrations: labelled examples, at least two texts per label.
        folds: maximum number of folds.
        seed: of the order in which texts are assigned.

    Raises:
        I2CLError: for fewer than two folds, or if a refit would not see all labels.
    """
    require_folds(folds)
    copies: dict[str, list[int]] = defaultdict(list)
    for row, example in enumerate(demonstrations):
        copies[example.text].append(row)
    groups = list(copies.values())
    frequent = np.bincount([example.label for example in demonstrations], minlength=len(task.labels))
    usual = max(2, int(np.median(frequent)))
    parts: list[list[int]] = [[] for _ in range(min(folds, len(groups), usual))]
    held = np.zeros((len(parts), len(task.labels)), dtype=int)
    order = [groups[at] for at in np.random.default_rng(seed).permutation(len(groups))]
    for rows in sorted(order, key=lambda rows: min(frequent[demonstrations[row].label] for row in rows)):
        labels = sorted({demonstrations[row].label for row in rows}, key=lambda label: frequent[label])
        fold = min(range(len(parts)), key=lambda at: (*held[at, labels], len(parts[at])))
        parts[fold] += rows
        for row in rows:
            held[fold, demonstrations[row].label] += 1
    lacking = [name for name, lost in zip(task.labels, (held == frequent).any(0), strict=True) if lost]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        names = ", ".join(map(repr, lacking[:3]))
        raise I2CLError(f"a refit would not know the label {names}{more}: give two texts per label")
    return [sorted(rows) for rows in parts if rows]


def unmeasurable(task: Task, demonstrations: Sequence[Example], folds: int = FOLDS, seed: int = 0) -> str:
    """Return why `fold_rows` raises an error for these demonstrations, or "" if it does not."""
    try:
        fold_rows(task, demonstrations, folds, seed)
    except I2CLError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class FoldPredictor:
    """Scores each text by a refit without it."""

    refits: Sequence[Predictor]  # one per fold
    fold_of: Mapping[str, int]  # by text
    cost: Cost  # of the fit to all demonstrations

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Compute label scores of the texts that `folded` was given. Raises KeyError for others."""
        if not texts:
            return self.refits[0].log_probs([])
        rows: dict[int, list[int]] = defaultdict(list)
        for at, text in enumerate(texts):
            rows[self.fold_of[text]].append(at)
        each = ((rows[fold], self.refits[fold]) for fold in sorted(rows))
        return in_order((rows, refit.log_probs([texts[at] for at in rows], progress)) for rows, refit in each)


def folded(
    task: Task,
    demonstrations: Sequence[Example],
    refit: Refit,
    folds: int = FOLDS,
    seed: int = 0,
    cost: Cost | None = None,
    rows: Sequence[Example] = (),
) -> FoldPredictor:
    """Cross-validate: refit once per fold to the demonstrations of the other folds; see `fold_rows`.

    ``rows`` are further rows to score. No refit has seen them, so they are assigned to the folds in turn.
    """
    parts = fold_rows(task, demonstrations, folds, seed)
    fold_of = {demonstrations[row].text: fold for fold, rows in enumerate(parts) for row in rows}
    others = [[one for one in demonstrations if fold_of[one.text] != fold] for fold in range(len(parts))]
    further = dict.fromkeys(row.text for row in rows if row.text not in fold_of)
    fold_of |= {text: place % len(parts) for place, text in enumerate(further)}
    refits = [refit(tuple(rest)) for rest in others]
    return FoldPredictor(refits, fold_of, refits[0].cost if cost is None else cost)


@dataclass(frozen=True)
class InjectedPredictor:
    """Predicts with an injection, its label bias and its sentence encoder, at a temperature of 1."""

    injection: Injection
    below: Predictor  # without the biases
    decoder: Decoder
    cost: Cost

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Compute log-probabilities among the labels."""
        scores = self.below.log_probs(texts, progress)
        head = replace(self.injection.head, temperature=1.0)
        return head.log_probs(scores, head.encoder_bias(texts, self.decoder.device))


def injected(injection: Injection, decoder: Decoder, task: Task) -> Predictor:
    """Return a predictor for an injection, at a temperature of 1."""
    scorer = replace(injection.scorer(decoder), task=task)
    cost = kept(injection)
    below = PromptPredictor(scorer, edit=injection.edit(), injection=injection, cost=cost)
    plain = (injection.label_bias, injection.encoder_bias) == (None, None)
    return below if plain else InjectedPredictor(injection, below, decoder, cost)


def kept(injection: Injection) -> Cost:
    """Return the storage cost of an injection without its coefficients."""
    bias = None if injection.label_bias is None else torch.tensor(injection.label_bias)
    encoder = None if injection.encoder_bias is None else injection.encoder_bias.weights
    texts = injection.settings.get(LABEL_PRIOR, {}).get("texts", 0)
    return Cost.of(injection.context.values, injection.word_weights, bias, encoder, unlabelled=texts)
