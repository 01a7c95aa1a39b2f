"""Choose demonstrations from a labelled file, as many as can be fitted in a few minutes."""

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from random import Random
from statistics import median_low
from typing import Literal

from i2cl import encoders
from i2cl.core.anchored import fit_memory
from i2cl.core.experts import EmbeddingsExpert
from i2cl.core.plan import (
    BACKWARD,
    MAX_EXAMPLES,
    TRAINING_FORWARD,
    FitPlan,
    FitSize,
    check_fit_size,
    plan_fit,
)
from i2cl.core.recipe import ACTIVE_SUBLAYERS
from i2cl.encoders import EmbeddingsConfig
from i2cl.errors import I2CLError
from i2cl.injections.ensemble import EnsembleConfig
from i2cl.methods import Method, make_methods
from i2cl.methods.anchored import Anchored
from i2cl.methods.i2cl import I2CL
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer, next_token_log_probabilities
from i2cl.models.trie import Trie
from i2cl.tasks import Example, Examples, Task
from i2cl.tasks.task import group_by_label, sample_multi_label, sample_per_class

MAX_SHOTS = 20  # demonstrations per class by default
PATIENCE_S = 300.0  # default time budget of a fit
KEEP_BACK = 5  # one row in five is held out by default, if there are no test rows
MIN_ROWS_TO_KEEP_BACK = 10  # classes with fewer rows keep all of them as demonstrations
TIMED_TOKENS = 256  # in the batch that measures the model's speed
TIMED_TEXTS = 16  # that measure the sentence encoder's speed
MIN_SHOTS = 5  # demonstrations per class that are drawn however long the fit takes: the paper's number
Shots = int | Literal["all"] | None  # per class; every row; or by default
CHOICES = (MAX_SHOTS, 15, 10, 8, 6, MIN_SHOTS, 4, 3, 2, 1)
"""Candidate numbers of shots. There are few, so small differences in speed rarely change the choice."""


class FewRowsWarning(UserWarning):
    """A class has fewer rows than the requested number of demonstrations."""


@dataclass(frozen=True)
class Draw:
    """Demonstrations drawn from a task's training rows.

    Attributes:
        demonstrations: the rows to fit.
        shots: maximum number per class.
        rows: number of training rows.
        keep_back: one row in this many was held out, 0 for none; see `up_to`.
        seconds: estimated time of the fit; None before the model is known.
        more: a larger number of shots that the user may prefer, with its number of rows and seconds.
        speed: of the model, which the times are estimated with; None before the model is known.
    """

    demonstrations: tuple[Example, ...]
    shots: int
    rows: int
    keep_back: int = 0
    seconds: float | None = None
    more: tuple[int, int, float] | None = None
    speed: "_Speed | None" = field(default=None, repr=False, compare=False)

    def timed(
        self, decoder: Decoder, task: Task, method: Method, ensemble: EnsembleConfig | None = None
    ) -> "Draw":
        """Return the same draw with an estimate of the time that the fit takes.

        ``ensemble``: the text experts, whose sentence encoder is timed; None for the LLM alone.
        """
        speed = _Speed.of(decoder, task, method, ensemble)
        return replace(self, seconds=speed.estimate(self.demonstrations), speed=speed)

    def evaluation_seconds(self, rows: Examples, folds: int = 0) -> float:
        """Estimate the seconds that the evaluation takes after the fit; 0 before the model is known.

        It scores the rows with the fit, zero_shot, few_shot (except in a multi-label task) and the sentence
        encoder. The other methods take no time in comparison.

        Args:
            rows: the rows to score.
            folds: number of refits of a cross-validation, each to all demonstrations but one fold.
        """
        if self.speed is None or self.seconds is None or not rows:
            return 0.0
        speed, shown = self.speed, self.demonstrations
        refits = folds * speed.encoding(shown) + max(0, folds - 1) * self.seconds
        seconds = speed.scoring(rows) + speed.encoding(rows) + refits
        if rows[0].labels is not None:
            return seconds + speed.scoring(rows)
        return seconds + speed.zero_shot(rows) + speed.few_shot(rows, shown, max(1, folds))


def up_to(task: Task, shots: int, seed: int, keep_back: int = 0) -> tuple[Example, ...]:
    """Draw up to ``shots`` rows of each class; the same rows as `Task.sample` if every class has enough.

    With ``keep_back`` n > 0, one row in n is held out from every class with at least
    `MIN_ROWS_TO_KEEP_BACK` rows. Raises I2CLError if a class has no rows.
    """
    task.sample(1, seed)  # raises for a class without rows
    if task.multi_label:
        rows = _not_held_out(task, keep_back, seed) if keep_back else task.train
        return sample_multi_label(rows, len(task.labels), shots, Random(seed))
    groups = group_by_label(task.train, len(task.labels))
    available = [
        n - ceil(n / keep_back) if keep_back and n >= MIN_ROWS_TO_KEEP_BACK else n for n in map(len, groups)
    ]
    return sample_per_class(groups, [min(shots, max(1, n)) for n in available], Random(seed))


def _not_held_out(task: Task, keep_back: int, seed: int) -> Examples:
    """Hold out one row in ``keep_back`` of each label of a multi-label task with enough rows."""
    totals = [len(group) for group in group_by_label(task.train, len(task.labels))]
    spare = [ceil(n / keep_back) if n >= MIN_ROWS_TO_KEEP_BACK else 0 for n in totals]
    rest, limit = [], ceil(len(task.train) / keep_back)
    for row in Random(f"held out {seed}").sample(list(task.train), len(task.train)):
        if limit and all(spare[label] for label in row.ids):
            limit -= 1
            for label in row.ids:
                spare[label] -= 1
        else:
            rest.append(row)
    return rest


def draw(
    task: Task,
    method: Method | None,
    shots: Shots,
    seed: int,
    *,
    from_file: bool,
    keep_back: int | None,
    scored: bool,
) -> Draw | None:
    """Draw the demonstrations, or return None if their number depends on the speed of the model.

    For None, call `draw_within_budget` with the loaded model.

    Args:
        task: with its training rows.
        method: how the LLM is fitted; None for a fit without the LLM.
        shots: rows per class, or ``"all"`` for every row. Default: the task's own number; if ``from_file``,
            as many as the time budget allows, or every row without the LLM.
        seed: seed of the draw.
        from_file: whether the rows come from a user's file, where a class may have fewer than ``shots`` rows.
        keep_back: see `up_to`. Default: `KEEP_BACK` if ``shots`` is None and ``scored``, else 0.
        scored: whether the fit will be evaluated and the task has no test rows.

    Raises:
        I2CLError: if there are too few or too many rows.
    """
    anchored, all_rows = isinstance(method, Anchored), shots == "all"
    default = _largest(task.train) if from_file and method is None else task.shots
    count = _largest(task.train) if shots == "all" else shots or default
    if from_file and anchored and (all_rows or shots is None):
        _check_size(up_to(task, count if all_rows else 1, seed, keep_back or 0))
        return None
    if keep_back and not from_file:
        raise I2CLError(f"--keep-back needs rows from a file, not the built-in task {task.name!r}: omit it")
    if keep_back is None:
        keep_back = KEEP_BACK if scored and shots is None else 0
    allow_small_classes = from_file or all_rows
    demonstrations = up_to(task, count, seed, keep_back) if allow_small_classes else task.sample(count, seed)
    if anchored:
        _check_size(demonstrations)
    return Draw(demonstrations, count, len(task.train), keep_back if from_file else 0)


def warn_of_small_classes(task: Task, shots: int) -> None:
    """Emit a `FewRowsWarning` if classes have fewer rows than the requested number of demonstrations."""
    groups = group_by_label(task.train, len(task.labels))
    small = [
        f"{word} ({len(rows)})" for word, rows in zip(task.labels, groups, strict=True) if len(rows) < shots
    ]
    if small:
        shown = ", ".join(small[:5]) + (f" and {len(small) - 5} more" if len(small) > 5 else "")
        message = f"these classes have fewer than {shots} rows, all of which are used: {shown}"
        warnings.warn(message, FewRowsWarning, stacklevel=3)


def draw_within_budget(
    decoder: Decoder,
    task: Task,
    method: Method,
    seed: int,
    *,
    keep_back: int | None,
    scored: bool,
    shots: Literal["all"] | None = None,
    ensemble: EnsembleConfig | None = None,
) -> Draw:
    """Draw as many demonstrations as anchored calibration can fit in `PATIENCE_S` seconds.

    These are `MIN_SHOTS` to `MAX_SHOTS` per class; fewer only where more would exceed its limits. With
    ``"all"`` shots, every row is drawn, and none held out unless ``keep_back`` says so.
    """
    speed, largest = _Speed.of(decoder, task, method, ensemble), _largest(task.train)
    if shots == "all":
        rows = up_to(task, largest, seed, keep_back or 0)
        return Draw(rows, largest, len(task.train), keep_back or 0, speed.estimate(rows), speed=speed)
    if keep_back is None:
        keep_back = KEEP_BACK if scored else 0

    def is_affordable(shots: int) -> bool:
        rows = up_to(task, shots, seed, keep_back)
        return len(rows) <= MAX_EXAMPLES and (shots <= MIN_SHOTS or speed.seconds(rows) <= PATIENCE_S)

    count = next(choice for choice in CHOICES if choice == 1 or is_affordable(choice))
    demonstrations = up_to(task, count, seed, keep_back)
    count = min(count, _largest(demonstrations))
    more = None
    for larger in (largest, MAX_SHOTS):
        larger_draw = up_to(task, larger, seed)
        if larger <= 2 * MAX_SHOTS and len(demonstrations) < len(larger_draw) <= MAX_EXAMPLES:
            if (seconds := speed.seconds(larger_draw)) < inf:
                more = larger, len(larger_draw), seconds
            break
    seconds = speed.estimate(demonstrations)
    return Draw(demonstrations, count, len(task.train), keep_back, seconds, more, speed)


def review_seconds(decoder: Decoder, task: Task, rows: Examples, folds: int) -> float:
    """Estimate the seconds of `i2cl.labelling.review`. Raises I2CLError if its fits would be too large."""
    (method,) = make_methods(["anchored"])
    speed = _Speed.of(decoder, replace(task, train=tuple(rows)), method)
    groups = group_by_label(rows, len(task.labels))
    shown = sample_per_class(groups, [min(MAX_SHOTS, len(group)) for group in groups], Random(0))
    return (folds - 1) * speed.estimate(shown) + speed.scoring(rows)


def _largest(rows: Examples) -> int:
    """Number of rows of the largest class; rows of a multi-label task without any label are one more."""
    return max(Counter(label for row in rows for label in row.ids or (None,)).values())


def _check_size(shown: Examples) -> None:
    """Raise I2CLError if there are more demonstrations or labels than anchored calibration takes."""
    check_fit_size(len(shown), len({label for row in shown for label in row.ids}))


@dataclass(frozen=True)
class _Speed:
    """Speed of a model and a sentence encoder on a task's texts.

    A pass over a batch takes a fixed time, and some for each token.
    """

    scorer: LabelScorer
    method: Method
    seconds_per_token: float
    seconds_per_batch: float
    encoder_seconds: float = 0.0  # per text; 0 without a sentence encoder

    @classmethod
    def of(
        cls, decoder: Decoder, task: Task, method: Method, ensemble: EnsembleConfig | None = None
    ) -> "_Speed":
        """Time a batch of `TIMED_TOKENS` tokens in texts of median length, and a text of few tokens."""
        anchored = isinstance(method, Anchored)
        scorer = LabelScorer.for_fit(decoder, task) if anchored else LabelScorer(decoder, task, "sequence")
        usual = median_low(len(row.text) for row in task.train)
        rows = sorted(task.train, key=lambda row: abs(len(row.text) - usual))[:TIMED_TOKENS]
        queries = scorer.queries([row.text for row in rows])
        count = next((n for n in range(1, len(queries)) if sum(map(len, queries[:n])) >= TIMED_TOKENS), None)
        queries = queries[:count]
        short = [queries[0][:1]]
        next_token_log_probabilities(decoder, short)  # the first pass allocates memory
        seconds_per_batch = _seconds(decoder, short)
        # With the fixed time of a batch, which overlaps with computing: larger batches gain nothing more.
        per_token = _seconds(decoder, queries) / sum(map(len, queries))
        texts = [row.text for row in rows[:TIMED_TEXTS]]
        return cls(scorer, method, per_token, seconds_per_batch, _encoder_seconds(texts, decoder, ensemble))

    def seconds(self, shown: Examples) -> float:
        """Estimate the seconds of a fit; infinite if it does not fit into memory."""
        try:
            return self.estimate(shown)
        except I2CLError:
            return inf

    def estimate(self, shown: Examples) -> float:
        """Estimate the seconds of a fit.

        Counts forward and backward passes; `benchmarks/estimates.py` compares with real fits. A fit may need
        fewer steps, and other work on the machine slows it down. Raises I2CLError as `plan_fit`.
        """
        plan = self._plan(shown)
        tokens = self._tokens(shown)
        decoder = self.scorer.decoder
        by_tokens = ceil(tokens / decoder.training_budget)
        batches = max(by_tokens, ceil(len(shown) / plan.batch_size) if plan.batch_size else 1)
        seconds = plan.passes * (tokens * self.seconds_per_token + batches * self.seconds_per_batch)
        return seconds + self.encoding(shown)

    def scoring(self, rows: Examples) -> float:
        """Estimate the seconds of an inference pass over rows, with a single pass for all labels."""
        return self._inference(self._tokens(rows))

    def encoding(self, rows: Examples) -> float:
        """Estimate the seconds that the sentence encoder takes, if any."""
        return len(rows) * self.encoder_seconds

    def zero_shot(self, rows: Examples) -> float:
        """Estimate the seconds of prompting. It scores full labels if they share first tokens."""
        return self._inference(self._prompt_tokens(rows))

    def few_shot(self, rows: Examples, shown: Examples, folds: int = 1) -> float:
        """Estimate the seconds of prompting with cached demonstrations.

        Attending to the cache takes as long as the rest of the model once it has as many tokens as the model
        is wide.

        Args:
            rows: the rows to score.
            shown: the demonstrations.
            folds: number of times that demonstrations are cached: all but one fold of them, if there are any.
        """
        decoder = self.scorer.decoder
        tokens = self._tokens(shown) + sum(len(self._sequences[row.label]) for row in shown)
        cached = min(tokens * (folds - 1 or 1) / folds, decoder.max_length or inf)
        return folds * self._inference(cached) + self._inference(self._prompt_tokens(rows)) * (
            1 + cached / decoder.d_model
        )

    def _inference(self, tokens: float) -> float:
        batches = ceil(tokens / self.scorer.decoder.training_budget)
        return tokens * self.seconds_per_token + batches * self.seconds_per_batch

    def _tokens(self, rows: Examples) -> int:
        return sum(map(len, self.scorer.queries([row.text for row in rows])))

    def _prompt_tokens(self, rows: Examples) -> int:
        """Count the tokens of a prompt for each row, with the labels if they share first tokens."""
        tokens, sequences = self._tokens(rows), self._sequences
        if len({ids[:1] for ids in sequences}) == len(sequences):
            return tokens
        if self.scorer.decoder.can_fork:  # one row for all labels
            return tokens + len(rows) * len(Trie.of(sequences).tokens)
        return tokens * len(sequences) + len(rows) * sum(len(ids) - 1 for ids in sequences)

    @property
    def _sequences(self) -> tuple[Ids, ...]:
        return self.scorer.labels.sequences

    def _plan(self, shown: Examples) -> FitPlan:
        decoder, method = self.scorer.decoder, self.method
        if isinstance(method, Anchored):
            labels, config = self.scorer.labels, method.anchoring
            vectors = decoder.layers * len(ACTIVE_SUBLAYERS[config.sublayers])
            words = len(labels.tokens) * len(labels.sequences) if labels.word_tokens else 0
            count = len(labels.sequences) + (labels.reference is not None)
            size = FitSize(len(shown), count, vectors * decoder.d_model + words, words > 0)
            return plan_fit(size, fit_memory(config.memory), config.solver, config.steps)
        steps = max(1, getattr(method, "rounds", 1))
        passes, batch_size = 1 + steps * (TRAINING_FORWARD + BACKWARD), None
        if isinstance(method, I2CL) and method.calibration.optimizer == "adamw":
            batch_size = method.calibration.batch_size
        return FitPlan("adamw", passes, batch_size)


def _encoder_seconds(texts: Sequence[str], decoder: Decoder, ensemble: EnsembleConfig | None) -> float:
    """Time the sentence encoder of an ensemble: seconds per text, or 0 without one."""
    if ensemble is None or EmbeddingsExpert.name not in ensemble.members():
        return 0.0
    config = ensemble.embeddings or EmbeddingsConfig()
    encoder = encoders.frozen_encoder(config.encoder, str(decoder.device))  # stays in memory for the fit
    encoders.embed(encoder, texts[:1])  # the first pass allocates memory
    started = time.perf_counter()
    encoders.embed(encoder, texts)
    return (time.perf_counter() - started) / len(texts)


def _seconds(decoder: Decoder, queries: Sequence[Ids]) -> float:
    started = time.perf_counter()
    next_token_log_probabilities(decoder, queries)
    return time.perf_counter() - started
