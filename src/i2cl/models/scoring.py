"""Log-probabilities of label words after a prompt."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from i2cl.errors import LONE_SURROGATE, I2CLError
from i2cl.models.batching import CPU_KEPT_BUDGET, PASSES_A_BATCH, Batch, Ids, make_batch, pack_batch
from i2cl.models.decoder import CPU_BUDGET, Decoder
from i2cl.models.edits import Edit
from i2cl.models.encoding import LabelTokens, Scoring, label_tokens
from i2cl.models.precision import dtype_name
from i2cl.models.prefix import Prefix
from i2cl.models.trie import Trie, edge_scores, forked_batch
from i2cl.tasks import Task
from i2cl.tasks.text import is_blank

T = TypeVar("T")

# Called with the number of queries just finished, or the share of one whose labels run one by one.
Progress = Callable[[float], None]

MAX_NAMED_TEXTS = 5  # in one error message
LONGEST_FORK = 4096  # tokens of a row that forks: its mask has their square


class NotFiniteError(I2CLError):
    """Label scores that are no numbers, of which the largest would be an accident."""


def require_finite(scores: Float[Tensor, "*queries labels"], decoder: Decoder) -> None:
    """Refuse scores of which one is not a number, unlike -inf. Raises NotFiniteError naming the precision."""
    if scores.isnan().any():
        raise NotFiniteError(
            f"label scores are not numbers, since something overflows in {dtype_name(decoder.model.dtype)}. "
            "Load the model in another precision (--dtype float32), or fit again closer to the plain model"
        )


class TextError(I2CLError):
    """Raised for texts that cannot be classified.

    Attributes:
        problems: what is wrong with each of them, by its index (from 0). The others can be classified.
    """

    def __init__(self, problems: Mapping[int, str], count: int) -> None:
        self.problems = dict(problems)
        named = [
            f"text {index + 1} {problem}" for index, problem in islice(problems.items(), MAX_NAMED_TEXTS)
        ]
        if len(problems) > MAX_NAMED_TEXTS:
            named.append(f"and {len(problems) - MAX_NAMED_TEXTS} more")
        several = f"{len(problems)} of {count} texts cannot be classified: " if len(problems) > 1 else ""
        super().__init__(several + "; ".join(named))


def require_texts(texts: Sequence[str]) -> None:
    """Check that texts can be classified. Raises TextError naming all that are blank or not valid Unicode."""
    if isinstance(texts, str):
        raise I2CLError("texts is one string: give a list of texts")
    problems: dict[int, str] = {}
    given: Sequence[object] = texts
    for index, text in enumerate(given):
        if not isinstance(text, str):
            problems[index] = f"is {text!r:.60} and no string: remove it, or make it one"
        elif is_blank(text):
            problems[index] = "is empty: remove it or give it content"
        elif LONE_SURROGATE.search(text):
            problems[index] = "contains a lone surrogate, which is no character: remove it"
    if problems:
        raise TextError(problems, len(texts))


@dataclass(frozen=True)
class Questions:
    """A task asked of a decoder: its label tokens, encoded queries, targets and scores.

    Every method asks here, so all of them encode a text and read an answer in one way.

    Attributes:
        decoder: the model.
        task: gives template and label words.
        scoring: by first tokens, by whole label sequences, by words, or as the labels demand.
        weights: of the words' tokens, where a fit found them.
    """

    decoder: Decoder
    task: Task
    scoring: Scoring = "auto"
    weights: Float[Tensor, "read labels"] | None = field(default=None, compare=False)

    @cached_property
    def labels(self) -> LabelTokens:
        """Tokens of the label words as they follow a query. Raises I2CLError: see `label_tokens`."""
        task = self.task
        tokens = label_tokens(self.decoder.encoder, task.template, task.labels, self.scoring)
        return tokens if self.weights is None else tokens.weighted(self.weights)

    def queries(
        self, texts: Sequence[str], build: Callable[[str], str] | None = None, *, cut: bool = True
    ) -> list[Ids]:
        """Token ids of ``build(text)`` for each text, with room for a label behind.
        By default that is the template's query. Where the whole exceeds the context, the text's end is cut,
        with a warning; or refused, without ``cut``. Raises I2CLError on a text that is empty or no Unicode,
        or what exceeds the context all the same.
        """
        require_texts(texts)
        limit = None if self.decoder.max_length is None else self.decoder.max_length - self.labels.room
        ask, line = build or self.task.template.query, self.labels.line
        return self.decoder.encoder.fitted(lambda text: ask(text) + line, texts, limit, cut=cut)

    def prompt(self, text: str) -> str:
        """What stands before a label: the template's query, and a line's end where that belongs to it."""
        return self.task.template.query(text) + self.labels.line

    def scores(
        self, texts: Sequence[str], *, edit: Edit | None = None, progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word after each text's query. Raises I2CLError: as `queries`, and
        where a score is not a number.
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
    """Log-probability of each label after each query, over the whole vocabulary, in float32 on the CPU.
    Queries are without the prefix, whose demonstrations ran beforehand. Labels are the same for all queries,
    or each query's own; whole sequences are scored for all if one says so. Queries with fewer labels than
    others have -inf behind theirs. The edit works at every layer; progress is told as queries finish.
    """
    each = [labels] * max(1, len(queries)) if isinstance(labels, LabelTokens) else labels
    most = max((len(one.ids) for one in each), default=0)
    scores = torch.full((len(queries), most), -torch.inf)
    with decoder.frozen(), torch.no_grad():
        work = _Work(decoder, queries, each[: len(queries)], edit, prefix)
        for way, chosen in _ways(work).items():
            for places, values, finished in way(work, chosen):
                scores[places] = values.cpu()
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
    wide = (scores.double() / temperature).log_softmax(-1)
    best, rounded = wide.argmax(-1, keepdim=True), wide.float()
    # Rounding must not make another label tie with the most probable one.
    tied = rounded.argmax(-1, keepdim=True) != best
    top = rounded.gather(-1, best)
    return rounded.scatter(-1, best, torch.where(tied, top.nextafter(torch.full_like(top, torch.inf)), top))


def next_token_log_probabilities(
    decoder: Decoder, queries: Sequence[Ids], *, edit: Edit | None = None, prefix: Prefix | None = None
) -> Float[Tensor, "queries vocab"]:
    """Log-probability of every token after each query, in float32 on the CPU."""
    with decoder.frozen(), torch.no_grad():
        return in_order((batch.rows, rows.cpu()) for batch, rows in _read(decoder, queries, edit, prefix))


def in_order(parts: Iterable[tuple[Sequence[int], Tensor]]) -> Tensor:
    """One tensor of rows that come in parts, each part with the places of its rows."""
    row_of = {place: row for places, rows in parts for place, row in zip(places, rows, strict=True)}
    return torch.stack([row_of[place] for place in range(len(row_of))])


def in_parts(
    work: Callable[[Sequence[str]], T], texts: Sequence[str], size: int, progress: Progress | None
) -> Iterator[T]:
    """What ``work`` makes of so many texts at a time."""
    for start in range(0, len(texts), size):
        some = texts[start : start + size]
        yield work(some)
        if progress is not None:
            progress(len(some))


# Row and column indices of some scores; their values; how many queries they complete.
Part = tuple[tuple[Tensor, Tensor], Tensor, float]


def _cells(rows: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Row and column indices of the first ``counts`` labels of each row."""
    columns = torch.cat([torch.arange(count) for count in counts])
    return torch.tensor(rows).repeat_interleave(torch.tensor(counts)), columns


@dataclass(frozen=True, eq=False)
class _Work:
    """What `score` is asked: queries, each with its labels, under an edit and behind a prefix."""

    decoder: Decoder
    queries: Sequence[Ids]
    labels: Sequence[LabelTokens]
    edit: Edit | None
    prefix: Prefix | None


def _first(work: _Work, _chosen: Sequence[int]) -> Iterator[Part]:
    for batch, values in _read(work.decoder, work.queries, work.edit, work.prefix):
        each = [work.labels[row] for row in batch.rows]
        places = _cells(batch.rows, [len(labels.ids) for labels in each])
        if all(labels is each[0] for labels in each):
            yield places, each[0].scores(values).flatten(), len(batch.rows)
        else:
            parts = [labels.scores(row) for labels, row in zip(each, values, strict=True)]
            yield places, torch.cat(parts), len(batch.rows)


def _read(
    decoder: Decoder, queries: Sequence[Ids], edit: Edit | None, prefix: Prefix | None
) -> Iterator[tuple[Batch, Float[Tensor, "batch vocab"]]]:
    """Log-probability of every token behind each query."""

    def run(batch: Batch) -> Tensor:
        return decoder.forward(batch, edit=edit, prefix=prefix)[:, 0].float().log_softmax(-1)

    yield from decoder.run_batches(queries, run, reserve=prefix.length if prefix else 0)


# Reads the labels of some queries, whose places come last.
Way = Callable[[_Work, Sequence[int]], Iterator[Part]]


def _ways(work: _Work) -> dict[Way, list[int]]:
    """Places of the queries by how their labels are read.
    All labels of several tokens stand behind their query at once, where the model lets a row fork. A mask of
    one's own knows no window, some models have no place for more tokens than their context has, and a mask
    grows with the square of a row.
    """
    if not any(labels.full for labels in work.labels):
        return {_first: list(range(len(work.queries)))}
    everywhere = work.prefix is None and (work.edit is None or work.edit.everywhere)
    limit = min(work.decoder.window or LONGEST_FORK, work.decoder.max_length or LONGEST_FORK, LONGEST_FORK)
    forks, others = list[int](), list[int]()
    for row, (query, labels) in enumerate(zip(work.queries, work.labels, strict=True)):
        fits = everywhere and len(query) + len(Trie.of(labels.ids).tokens) <= limit
        (forks if fits and work.decoder.can_fork else others).append(row)
    shared = everywhere and _shares(work, others)
    return {_forked: forks, (_shared if shared else _whole): others}


def _forked(work: _Work, chosen: Sequence[int]) -> Iterator[Part]:
    """Whole label sequences, each query run once with all of its labels behind it."""
    tries = [Trie.of(work.labels[row].ids) for row in chosen]

    def run(batch: Batch) -> list[Tensor]:
        some = [tries[place] for place in batch.rows]
        rows = tuple(chosen[place] for place in batch.rows)
        forked = forked_batch([work.queries[row] for row in rows], some, work.decoder.device)
        at = _from_last(forked, 1 + max(len(trie.tokens) for trie in some))
        return edge_scores(work.decoder.forward(replace(forked, rows=rows), at=at, edit=work.edit), some)

    whole = [work.queries[row] + trie.tokens for row, trie in zip(chosen, tries, strict=True)]
    for batch, each in work.decoder.run_batches(whole, run):
        places = _cells([chosen[place] for place in batch.rows], [len(values) for values in each])
        yield places, torch.cat(each), len(batch.rows)


def _shares(work: _Work, chosen: Sequence[int]) -> bool:
    """Whether each query is to run once, with its labels behind the keys that it leaves.
    They follow in a pass for every length of query, so that has to save a fair part of a batch each. Beyond a
    limit of longrope a label turns the keys of its query.
    """
    if not work.decoder.can_split or work.decoder.rope_limits:
        return False
    lengths = [len(work.queries[row]) for row in chosen]
    saved = sum(n * (len(work.labels[row].ids) - 1) for n, row in zip(lengths, chosen, strict=True))
    return PASSES_A_BATCH * saved > work.decoder.current_budget * len(set(lengths))


class _Branch(NamedTuple):
    """A label behind a query: the query's place in its batch, and both their places in the caller's lists."""

    line: int
    row: int
    column: int
    ids: Ids


def _shared(work: _Work, chosen: Sequence[int]) -> Iterator[Part]:
    """Whole label sequences, each query run once, and its labels behind the keys that it leaves."""

    def run(batch: Batch) -> tuple[list[_Branch], Tensor]:
        batch = replace(batch, rows=tuple(chosen[place] for place in batch.rows))
        caches: list[Cache] = []
        read = work.decoder.forward(batch, edit=work.edit, caches=caches)[:, 0].float().log_softmax(-1)
        branches = [
            _Branch(line, row, column, ids)
            for line, row in enumerate(batch.rows)
            for column, ids in enumerate(work.labels[row].ids)
        ]
        values = read[[branch.line for branch in branches], [branch.ids[0] for branch in branches]]
        by_length = defaultdict(list)  # behind queries of one length no key is padding
        for place, branch in enumerate(branches):
            if len(branch.ids) > 1:
                by_length[len(work.queries[branch.row])].append(place)
        for length, places in by_length.items():
            lengths = [len(branches[place].ids) for place in places]
            for group in _groups(work.decoder, places, lengths, length):
                some = [branches[place] for place in group]
                behind = Prefix.of_rows(caches[0], [branch.line for branch in some], length)
                targets = [branch.ids[1:] for branch in some]
                rests = make_batch([branch.ids[:-1] for branch in some], work.decoder.device)
                rests = replace(rests, last=rests.first, rows=tuple(branch.row for branch in some))
                values[group] += sequence_log_probabilities(work.decoder, rests, targets, work.edit, behind)
        return branches, values

    for batch, (branches, values) in work.decoder.run_batches([work.queries[row] for row in chosen], run):
        rows, columns = ([getattr(one, name) for one in branches] for name in ("row", "column"))
        yield (torch.tensor(rows), torch.tensor(columns)), values, len(batch.rows)


def _groups(
    decoder: Decoder, places: Sequence[int], lengths: Sequence[int], cached: int
) -> Iterator[Sequence[int]]:
    """Places of labels of these lengths, behind so many cached tokens each, that run together.
    Shorter labels go with longer ones as long as their padding costs less than a pass of their own. A CPU may
    hold the keys of more tokens than it runs: copying a few costs less than a pass of few rows. What exceeds
    the memory halves the batch of queries, and the token budget with it.
    """
    room = decoder.current_budget * (CPU_KEPT_BUDGET // CPU_BUDGET if decoder.device.type == "cpu" else 1)
    by_length = defaultdict(list)
    for place, length in zip(places, lengths, strict=True):
        by_length[length].append(place)
    groups: list[tuple[int, list[int]]] = []  # the longest label's length, and places
    padding = 0
    for length in sorted(by_length, reverse=True):
        padding += len(by_length[length]) * (groups[-1][0] - length) if groups else 0
        if not groups or PASSES_A_BATCH * padding > decoder.current_budget:
            groups.append((length, []))
            padding = 0
        groups[-1][1].extend(by_length[length])
    for longest, group in groups:
        size = max(1, room // (cached + longest))
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _whole(work: _Work, chosen: Sequence[int]) -> Iterator[Part]:
    """Whole label sequences, each query run with each of its labels."""
    pairs = [(row, label) for row in chosen for label in range(len(work.labels[row].ids))]
    whole = [work.queries[row] + work.labels[row].ids[label][:-1] for row, label in pairs]  # what will run
    reserve = work.prefix.length if work.prefix else 0

    def run(group: Batch) -> Tensor:
        some = [pairs[place] for place in group.rows]
        targets = [work.labels[row].ids[column] for row, column in some]
        batch = labelled_batch([work.queries[row] for row, _ in some], targets, work.decoder.device)
        batch = replace(batch, rows=tuple(row for row, _ in some))
        return sequence_log_probabilities(work.decoder, batch, targets, work.edit, work.prefix)

    for group, values in work.decoder.run_batches(whole, run, reserve=reserve):
        rows, columns = zip(*(pairs[place] for place in group.rows), strict=True)
        finished = sum(1 / len(work.labels[row].ids) for row in rows)
        yield (torch.tensor(rows), torch.tensor(columns)), values, finished


def labelled_batch(
    queries: Sequence[Ids], targets: Sequence[Ids], device: torch.device, *, packed: bool = False
) -> Batch:
    """Queries followed by all but the last token of their targets; ``last`` stays at the query's end."""
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
    """Log-probability of each row's target tokens after its query, in nats. Gradients flow if on."""
    length = max(map(len, targets))
    logits = decoder.forward(batch, at=_from_last(batch, length), edit=edit, prefix=prefix)
    padded = torch.tensor([ids + (-1,) * (length - len(ids)) for ids in targets], device=logits.device)
    wide = logits.float()
    chosen = wide.gather(-1, padded.clamp(min=0)[..., None])[..., 0] - wide.logsumexp(-1)
    return chosen.where(padded >= 0, 0.0).sum(-1)


def _from_last(batch: Batch, count: int) -> Int[Tensor, "batch positions"]:
    """Where each query ends, and the places behind; shorter rows read padding there."""
    steps = torch.arange(count, device=batch.last.device)
    return (batch.last[:, None] + steps).clamp(max=batch.input_ids.shape[1] - 1)
