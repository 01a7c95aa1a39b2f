"""Log-probabilities of label words after a prompt."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from i2cl.errors import LONE_SURROGATE, I2CLError, require_type
from i2cl.models.batching import Batch, Ids, make_batch, pack_batch
from i2cl.models.decoder import DECODER_HINT, Decoder
from i2cl.models.edits import Edit
from i2cl.models.label_tokens import (
    LabelTokens,
    Scoring,
    SharedFirstTokenError,
    find_label_tokens,
    require_scoring,
)
from i2cl.models.precision import dtype_name
from i2cl.models.prefix import Prefix
from i2cl.models.trie import Trie, edge_scores, forked_batch
from i2cl.tasks import Task
from i2cl.tasks.labels import is_blank

T = TypeVar("T")

# Progress callback: receives the number of queries completed since the last call, fractional where the labels
# of a query run separately.
Progress = Callable[[float], None]

MAX_NAMED_TEXTS = 5  # in one error message
MAX_FORK_LENGTH = 4096  # tokens of a forked row, whose attention mask grows with their square


class NotFiniteError(I2CLError):
    """Raised when label scores contain NaN."""


def require_finite(scores: Float[Tensor, "*queries labels"], decoder: Decoder) -> None:
    """Raise NotFiniteError if a score is NaN. A score of -inf is valid."""
    if scores.isnan().any():
        dtype = dtype_name(decoder.model.dtype)
        raise NotFiniteError(
            f"label scores are NaN: the model overflows in {dtype}; reload it with --dtype float32, or fit "
            "again with a lower prior_std"
        )


class TextError(I2CLError):
    """Raised for texts that cannot be classified.

    Attributes:
        problems: what is wrong with each of these texts, by index (from 0). The others can be classified.
    """

    def __init__(self, problems: Mapping[int, str], count: int, hint: str) -> None:
        self.problems = dict(problems)
        named = [
            f"text {index + 1} {problem}" for index, problem in islice(problems.items(), MAX_NAMED_TEXTS)
        ]
        if len(problems) > MAX_NAMED_TEXTS:
            named.append(f"and {len(problems) - MAX_NAMED_TEXTS} more")
        summary = f"{len(problems)} of {count} texts cannot be classified: " if len(problems) > 1 else ""
        super().__init__(summary + "; ".join(named), hint)


def require_texts(texts: Sequence[str]) -> None:
    """Check that texts can be classified. Raises TextError naming all that are blank or not valid Unicode."""
    if isinstance(texts, str):
        raise I2CLError("texts is one string", "give a list of texts")
    problems: dict[int, str] = {}
    given: Sequence[object] = texts
    for index, text in enumerate(given):
        if not isinstance(text, str):
            problems[index] = f"is {text!r:.60}, not a string"
        elif is_blank(text):
            problems[index] = "is empty"
        elif LONE_SURROGATE.search(text):
            problems[index] = "contains a lone surrogate, which is not a character"
    if problems:
        raise TextError(problems, len(texts), "correct or remove " + ("them" if len(problems) > 1 else "it"))


def require_decoder_and_task(decoder: Decoder | None, task: Task) -> None:
    """Raise I2CLError if an argument has another type, such as the name of a model or of a task."""
    require_type("decoder", decoder, Decoder, DECODER_HINT)
    require_type("task", task, Task, "load one with load_task, or construct a Task")


@dataclass(frozen=True)
class LabelScorer:
    """A task on a decoder: encodes its texts as queries and computes label scores.

    All methods use this class, so they encode a text and read an answer in the same way.

    Attributes:
        decoder: the model.
        task: gives template and label words.
        scoring: first-token, full-sequence or word-level scoring, or ``"auto"``: depends on the labels.
        word_weights: fitted weights, if any.

    Raises:
        I2CLError: if ``decoder`` is not a `Decoder`, ``task`` not a `Task`, or ``scoring`` unknown.
    """

    decoder: Decoder
    task: Task
    scoring: Scoring = "auto"
    word_weights: Float[Tensor, "tokens labels"] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        require_decoder_and_task(self.decoder, self.task)
        require_scoring(self.scoring)

    @classmethod
    def for_fit(cls, decoder: Decoder, task: Task, scoring: Scoring = "auto") -> "LabelScorer":
        """Return the scorer for fits whose loss compares labels with each other only.

        ``"auto"`` chooses word-level scoring if labels share first tokens, and in a multi-label task. Raises
        I2CLError for ``scoring="sequence"``, which would cost a pass per example and label in each step.
        """
        if scoring == "sequence":
            raise I2CLError(
                "scoring='sequence' is for methods without a fit, such as few_shot: leave it out, or use "
                "scoring='words'"
            )
        if scoring == "auto" and task.multi_label:
            return cls(decoder, task, "words")
        if scoring == "auto":
            try:
                find_label_tokens(decoder.encoder, task.template, task.labels, "first_token")
            except SharedFirstTokenError:
                return cls(decoder, task, "words")
        return cls(decoder, task, scoring)

    @cached_property
    def labels(self) -> LabelTokens:
        """Tokens of the label words as they follow a query. Raises I2CLError: see `find_label_tokens`."""
        task = self.task
        tokens = find_label_tokens(
            self.decoder.encoder, task.template, task.labels, self.scoring, multi_label=task.multi_label
        )
        return tokens if self.word_weights is None else tokens.with_word_weights(self.word_weights)

    def queries(
        self, texts: Sequence[str], build: Callable[[str], str] | None = None, *, cut: bool = True
    ) -> list[Ids]:
        """Encode texts as queries, leaving room for a label.

        Args:
            texts: what to classify.
            build: makes the prompt of a text; default: the template's query.
            cut: truncate texts that exceed the context, with a warning, instead of raising an error.

        Raises:
            I2CLError: on a text that is empty or not valid Unicode, or if the prompt exceeds the context even
                with an empty text.
        """
        require_texts(texts)
        limit = (
            None
            if self.decoder.max_length is None
            else self.decoder.max_length - self.labels.tokens_after_query
        )
        make_prompt, suffix = build or self.task.template.query, self.labels.query_suffix
        return self.decoder.encoder.encode(lambda text: make_prompt(text) + suffix, texts, limit, cut=cut)

    def prompt(self, text: str) -> str:
        """Return the prompt that a label follows: the template's query and `LabelTokens.query_suffix`."""
        return self.task.template.query(text) + self.labels.query_suffix

    def scores(
        self, texts: Sequence[str], *, edit: Edit | None = None, progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Compute the score of each label after each text's query.

        Raises I2CLError as `queries`, and NotFiniteError if a score is NaN.
        """
        values = score(self.decoder, self.queries(texts), self.labels, edit=edit, progress=progress)
        require_finite(values, self.decoder)
        return values


def score(
    decoder: Decoder,
    queries: Sequence[Ids],
    labels: LabelTokens | Sequence[LabelTokens],
    *,
    edit: Edit | None = None,
    prefix: Prefix | None = None,
    progress: Progress | None = None,
) -> Float[Tensor, "queries labels"]:
    """Compute the log-probability of each label after each query, over the whole vocabulary.

    Args:
        decoder: the model.
        queries: token ids, without the prefix.
        labels: the labels of all queries, or one per query. If one of them uses full-sequence scoring, all
            do.
        edit: what changes the model's layers, if anything.
        prefix: cached keys and values of tokens that precede every query.
        progress: called as queries finish.

    Returns:
        Scores in float32 on the CPU. Rows of queries with fewer labels than others are padded with -inf.
    """
    query_labels = [labels] * max(1, len(queries)) if isinstance(labels, LabelTokens) else labels
    columns = max((len(tokens.sequences) for tokens in query_labels), default=0)
    scores = torch.full((len(queries), columns), -torch.inf)
    request = _Request(decoder, queries, query_labels[: len(queries)], edit, prefix)
    with decoder.frozen(), torch.no_grad():
        for cells, values, finished in request.parts():
            scores[cells] = values.cpu()
            if progress is not None:
                progress(finished)
    return scores


def add_label_bias(
    scores: Float[Tensor, "*queries labels"], bias: Float[Tensor, "... labels"]
) -> Float[Tensor, "*queries labels"]:
    """Add a bias per label, in nats, to log-probabilities among the labels, and normalize again."""
    return (scores.log_softmax(-1) + bias).log_softmax(-1)


def label_log_probs(
    scores: Float[Tensor, "*queries labels"],
    bias: Float[Tensor, "... labels"] | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "*queries labels"]:
    """Turn label scores into log-probabilities among the labels, in float32.

    Args:
        scores: log-probabilities or logits of the labels, up to a constant per query.
        bias: nats that are added to each label's log-probability.
        temperature: divides the biased log-probabilities. The most probable label stays the same.
    """
    scores = scores.log_softmax(-1) if bias is None else add_label_bias(scores, bias)
    if temperature == 1:
        return scores.float()
    exact = (scores.double() / temperature).log_softmax(-1)
    best, rounded = exact.argmax(-1, keepdim=True), exact.float()
    # Rounding must not make another label tie with the most probable one.
    tied = rounded.argmax(-1, keepdim=True) != best
    top = rounded.gather(-1, best)
    return rounded.scatter(-1, best, torch.where(tied, top.nextafter(torch.full_like(top, torch.inf)), top))


def next_token_log_probabilities(
    decoder: Decoder, queries: Sequence[Ids], *, edit: Edit | None = None, prefix: Prefix | None = None
) -> Float[Tensor, "queries vocab"]:
    """Compute the log-probability of every token after each query, in float32 on the CPU."""
    request = _Request(decoder, queries, (), edit, prefix)
    with decoder.frozen(), torch.no_grad():
        return stack_rows((batch.rows, rows.cpu()) for batch, rows in request.next_token_log_probs())


def stack_rows(parts: Iterable[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Stack rows in the order of their indices, from parts of (indices, rows)."""
    row_of = {index: row for indices, rows in parts for index, row in zip(indices, rows, strict=True)}
    return torch.stack([row_of[index] for index in range(len(row_of))])


def map_batches(
    function: Callable[[Sequence[str]], T], texts: Sequence[str], size: int, progress: Progress | None
) -> Iterator[T]:
    """Yield the results of a function on batches of ``size`` texts."""
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        yield function(batch)
        if progress is not None:
            progress(len(batch))


# Row and column indices of some scores, the scores, and the number of queries that they complete.
Part = tuple[tuple[Tensor, Tensor], Tensor, float]


@dataclass(frozen=True, eq=False)
class _Request:
    """Arguments of `score`, and the three ways to compute it."""

    decoder: Decoder
    queries: Sequence[Ids]
    labels: Sequence[LabelTokens]
    edit: Edit | None
    prefix: Prefix | None

    def parts(self) -> Iterator[Part]:
        """Yield all scores.

        The full label sequences of a query share one row, as branches of a trie, where model and edit allow
        it. That excludes models that build masks or positions themselves, rows beyond the sliding window or
        the context length, edits that depend on a token's position, and pruned prefixes.
        """
        if not any(labels.full_sequences for labels in self.labels):
            yield from self._single_tokens()
            return
        decoder, forks, others = self.decoder, list[int](), list[int]()
        is_pruned = self.prefix is not None and self.prefix.is_pruned
        may_fork = not is_pruned and (self.edit is None or self.edit.everywhere) and decoder.can_fork
        lengths = [length - self._reserve for length in (decoder.window, decoder.max_length) if length]
        limit = min([*lengths, MAX_FORK_LENGTH])
        for row, (query, labels) in enumerate(zip(self.queries, self.labels, strict=True)):
            fits = may_fork and len(query) + len(Trie.of(labels.sequences).tokens) <= limit
            (forks if fits else others).append(row)
        yield from self._forked(forks)
        yield from self._one_row_per_label(others)

    def next_token_log_probs(self) -> Iterator[tuple[Batch, Float[Tensor, "batch vocab"]]]:
        """Yield the log-probability of every token after each query, batch by batch."""

        def run(batch: Batch) -> Tensor:
            logits = self.decoder.forward(batch, edit=self.edit, prefix=self.prefix)
            return logits[:, 0].float().log_softmax(-1)

        yield from self.decoder.run_batches(self.queries, run, reserve=self._reserve)

    def _single_tokens(self) -> Iterator[Part]:
        """Score labels by their first tokens or words: one row per query."""
        for batch, values in self.next_token_log_probs():
            row_labels = [self.labels[row] for row in batch.rows]
            cells = _cells(batch.rows, [len(labels.sequences) for labels in row_labels])
            if all(labels is row_labels[0] for labels in row_labels):
                yield cells, row_labels[0].scores(values).flatten(), len(batch.rows)
            else:
                parts = [labels.scores(row) for labels, row in zip(row_labels, values, strict=True)]
                yield cells, torch.cat(parts), len(batch.rows)

    def _forked(self, chosen: Sequence[int]) -> Iterator[Part]:
        """Score full sequences: one row per query, followed by all of its labels."""
        tries = [Trie.of(self.labels[row].sequences) for row in chosen]

        def run(batch: Batch) -> list[Tensor]:
            row_tries = [tries[index] for index in batch.rows]
            rows = tuple(chosen[index] for index in batch.rows)
            forked = forked_batch([self.queries[row] for row in rows], row_tries, self.decoder.device)
            at = _from_last(forked, 1 + max(len(trie.tokens) for trie in row_tries))
            forked = replace(forked, rows=rows)
            logits = self.decoder.forward(forked, at=at, edit=self.edit, prefix=self.prefix)
            return edge_scores(logits, row_tries)

        ids = [self.queries[row] + trie.tokens for row, trie in zip(chosen, tries, strict=True)]
        for batch, parts in self.decoder.run_batches(ids, run, reserve=self._reserve):
            cells = _cells([chosen[index] for index in batch.rows], [len(values) for values in parts])
            yield cells, torch.cat(parts), len(batch.rows)

    def _one_row_per_label(self, chosen: Sequence[int]) -> Iterator[Part]:
        """Score full sequences: one row for each query and label."""
        pairs = [(row, label) for row in chosen for label in range(len(self.labels[row].sequences))]
        ids = [self.queries[row] + self.labels[row].sequences[label][:-1] for row, label in pairs]

        def run(group: Batch) -> Tensor:
            group_pairs = [pairs[index] for index in group.rows]
            targets = [self.labels[row].sequences[label] for row, label in group_pairs]
            queries = [self.queries[row] for row, _ in group_pairs]
            batch = labelled_batch(queries, targets, self.decoder.device)
            batch = replace(batch, rows=tuple(row for row, _ in group_pairs))
            return sequence_log_probabilities(self.decoder, batch, targets, self.edit, self.prefix)

        for group, values in self.decoder.run_batches(ids, run, reserve=self._reserve):
            rows, columns = zip(*(pairs[index] for index in group.rows), strict=True)
            finished = sum(1 / len(self.labels[row].sequences) for row in rows)
            yield (torch.tensor(rows), torch.tensor(columns)), values, finished

    @property
    def _reserve(self) -> int:
        """Number of cached tokens that precede every query."""
        return self.prefix.length if self.prefix else 0


def _cells(rows: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return row and column indices of the first ``counts`` labels of each row."""
    columns = torch.cat([torch.arange(count) for count in counts])
    return torch.tensor(rows).repeat_interleave(torch.tensor(counts)), columns


def labelled_batch(
    queries: Sequence[Ids], targets: Sequence[Ids], device: torch.device, *, packed: bool = False
) -> Batch:
    """Make a batch of queries, each followed by its target without the last token.

    ``last`` of the batch is the end of each query.
    """
    ids = [query + target[:-1] for query, target in zip(queries, targets, strict=True)]
    batch = pack_batch(ids, device) if packed else make_batch(ids, device)
    ends = torch.tensor([len(query) - 1 for query in queries], device=device)
    return replace(batch, last=batch.first + ends)


def sequence_log_probabilities(
    decoder: Decoder,
    batch: Batch,
    targets: Sequence[Ids],
    edit: Edit | None = None,
    prefix: Prefix | None = None,
) -> Float[Tensor, " batch"]:
    """Compute the log-probability of each row's target tokens after its query, in nats.

    Gradients flow if the caller enables them.
    """
    length = max(map(len, targets))
    logits = decoder.forward(batch, at=_from_last(batch, length), edit=edit, prefix=prefix)
    padded = torch.tensor([ids + (-1,) * (length - len(ids)) for ids in targets], device=logits.device)
    logits = logits.float()
    log_probs = logits.gather(-1, padded.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)
    return log_probs.where(padded >= 0, 0.0).sum(-1)


def _from_last(batch: Batch, count: int) -> Int[Tensor, "batch positions"]:
    """Return the last position of each query and the next ``count - 1``; short rows end in padding."""
    steps = torch.arange(count, device=batch.last.device)
    return (batch.last[:, None] + steps).clamp(max=batch.input_ids.shape[1] - 1)
