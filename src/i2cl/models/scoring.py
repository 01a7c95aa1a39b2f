"""Log-probabilities of label words after a prompt."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from i2cl.errors import I2CLError
from i2cl.models.batching import Batch, Ids, make_batch, pack_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.encoding import LabelTokens, Scoring, label_tokens
from i2cl.models.precision import dtype_name
from i2cl.models.prefix import Prefix
from i2cl.models.trie import Trie, edge_scores, fork_places, forked_batch
from i2cl.tasks import Example, Task

# Called with the number of queries just finished, or the share of one whose labels run one by one.
Progress = Callable[[float], None]


class NotFiniteError(I2CLError):
    """Label scores that are no numbers, of which the largest would be an accident."""


def require_finite(scores: Float[Tensor, "*queries labels"], decoder: Decoder) -> None:
    """Refuse scores of which one is not a number, unlike -inf. Raises NotFiniteError naming the precision."""
    if scores.isnan().any():
        dtype = dtype_name(decoder.model.dtype)
        raise NotFiniteError(
            f"label scores are not numbers, since something overflows in {dtype}. "
            "Load the model in another precision (--dtype float32), or fit again closer to the plain model"
        )


def require_texts(texts: Sequence[str]) -> None:
    """Refuse texts that are no strings, empty or no Unicode. Raises I2CLError naming the first one."""
    if isinstance(texts, str):
        raise I2CLError("texts is one string: give a list of texts")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise I2CLError(f"text {row + 1} is {text!r:.60} and no string: remove it, or make it one")
        if not text.strip():
            raise I2CLError(f"text {row + 1} is empty: remove it or give it content")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise I2CLError(f"text {row + 1} holds half a surrogate pair, which is no character: remove it")


@dataclass(frozen=True)
class Questions:
    """A task asked of a decoder: its label tokens, encoded queries, targets and scores.

    Every method asks here, so all of them encode a text and read an answer in one way.

    Attributes:
        decoder: the model.
        task: gives template and label words.
        scoring: by first tokens, by whole label sequences, or as the labels demand.
    """

    decoder: Decoder
    task: Task
    scoring: Scoring = "auto"

    @cached_property
    def labels(self) -> LabelTokens:
        """Tokens of the label words as they follow a query. Raises I2CLError: see `label_tokens`."""
        return label_tokens(self.decoder.encoder, self.task.template, self.task.labels, self.scoring)

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

    def targets(self, examples: Sequence[Example]) -> list[Ids]:
        """What is to follow each example's query: its label's first token, or all of them."""
        return [self.labels.target(example.label) for example in examples]

    def scores(
        self, texts: Sequence[str], *, edit: Edit | None = None, progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word after each text's query. Raises I2CLError: as `queries`, and
        where a score is not a number.
        """
        found = score(self.decoder, self.queries(texts), self.labels, edit=edit, progress=progress)
        require_finite(found, self.decoder)
        return found


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
    most = max((len(own.ids) for own in each), default=0)
    scores = torch.full((len(queries), most), -torch.inf)
    with decoder.frozen(), torch.no_grad():
        for way, chosen in _ways(decoder, queries, each[: len(queries)], edit, prefix).items():
            asked = [queries[row] for row in chosen], [each[row] for row in chosen]
            for rows, columns, values, finished in way(decoder, *asked, edit, prefix):
                scores[torch.tensor(chosen)[rows], columns] = values
                if progress is not None:
                    progress(finished)
    return scores


def biased(
    scores: Float[Tensor, "*queries labels"], bias: Float[Tensor, " labels"]
) -> Float[Tensor, "*queries labels"]:
    """Log-probabilities among the labels, with a number for each label added, normalised again; in nats."""
    return (scores.log_softmax(-1) + bias).log_softmax(-1)


def among(
    scores: Float[Tensor, "*queries labels"], bias: Float[Tensor, " labels"] | None, temperature: float
) -> Float[Tensor, "*queries labels"]:
    """What an injection makes of label scores: `biased` by its label prior, then divided by its temperature.
    With neither they stay as they are; else they are among the labels. A division is in float64, where scores
    that differ stay different, so the answers stay too.
    """
    if bias is not None:
        scores = biased(scores, bias)
    return scores if temperature == 1 else (scores.double() / temperature).log_softmax(-1)


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


Part = tuple[Tensor, Tensor, Tensor, float]  # rows, columns, values of scores; how many queries they complete


def _first(
    decoder: Decoder,
    queries: Sequence[Ids],
    labels: Sequence[LabelTokens],
    edit: Edit | None,
    prefix: Prefix | None,
) -> Iterator[Part]:
    for batch, values in _read(decoder, queries, edit, prefix):
        wanted = [(row, token) for row, place in enumerate(batch.rows) for token in labels[place].first]
        columns = [column for place in batch.rows for column in range(len(labels[place].ids))]
        rows, tokens = torch.tensor(wanted, device=values.device).unbind(-1)
        places = torch.tensor(batch.rows)[rows.cpu()]
        yield places, torch.tensor(columns), values[rows, tokens].cpu(), len(batch.rows)


def _read(
    decoder: Decoder, queries: Sequence[Ids], edit: Edit | None, prefix: Prefix | None
) -> Iterator[tuple[Batch, Float[Tensor, "batch vocab"]]]:
    """Log-probability of every token behind each query."""

    def run(batch: Batch) -> Tensor:
        return decoder.forward(batch, edit=edit, prefix=prefix)[:, 0].float().log_softmax(-1)

    yield from decoder.run_batches(queries, run, reserve=prefix.length if prefix else 0)


Way = Callable[[Decoder, Sequence[Ids], Sequence[LabelTokens], Edit | None, Prefix | None], Iterator[Part]]


def _ways(
    decoder: Decoder,
    queries: Sequence[Ids],
    labels: Sequence[LabelTokens],
    edit: Edit | None,
    prefix: Prefix | None,
) -> dict[Way, list[int]]:
    """Places of the queries by how their labels are read.

    All labels of several tokens stand behind their query at once, where the model lets a row fork. A mask of
    one's own knows no window, and some models have no place for more tokens than their context has.
    """
    if not any(own.full for own in labels):
        return {_first: list(range(len(queries)))}
    forks = prefix is None and (edit is None or edit.everywhere) and decoder.can_fork
    limit = min(decoder.window or math.inf, decoder.max_length or math.inf)
    found: dict[Way, list[int]] = {_forked: [], _whole: []}
    for row, (query, own) in enumerate(zip(queries, labels, strict=True)):
        fits = forks and len(query) + len(Trie.of(own.ids).tokens) <= limit
        found[_forked if fits else _whole].append(row)
    return found


def _forked(
    decoder: Decoder,
    queries: Sequence[Ids],
    labels: Sequence[LabelTokens],
    edit: Edit | None,
    _prefix: Prefix | None,
) -> Iterator[Part]:
    """Whole label sequences, each query run once for all of its labels."""
    tries = [Trie.of(own.ids) for own in labels]

    def run(batch: Batch) -> list[Tensor]:
        own = [tries[row] for row in batch.rows]
        forked = forked_batch([queries[row] for row in batch.rows], own, decoder.device)
        logits = decoder.forward(replace(forked, rows=batch.rows), at=fork_places(forked, own), edit=edit)
        return edge_scores(logits, own)

    whole = [query + trie.tokens for query, trie in zip(queries, tries, strict=True)]
    for batch, each in decoder.run_batches(whole, run):
        rows = [row for row, values in zip(batch.rows, each, strict=True) for _ in values]
        columns = [column for values in each for column in range(len(values))]
        yield torch.tensor(rows), torch.tensor(columns), torch.cat(each).cpu(), len(batch.rows)


def _whole(
    decoder: Decoder,
    queries: Sequence[Ids],
    labels: Sequence[LabelTokens],
    edit: Edit | None,
    prefix: Prefix | None,
) -> Iterator[Part]:
    """Whole label sequences, each query run with each of its labels."""
    pairs = [(row, label) for row in range(len(queries)) for label in range(len(labels[row].ids))]
    whole = [queries[row] + labels[row].ids[label][:-1] for row, label in pairs]  # what will run

    def run(group: Batch) -> Tensor:
        rows, columns = zip(*[pairs[place] for place in group.rows], strict=True)
        targets = [labels[row].ids[column] for row, column in zip(rows, columns, strict=True)]
        batch = labelled_batch([queries[row] for row in rows], targets, decoder.device)
        return sequence_log_probabilities(decoder, replace(batch, rows=rows), targets, edit, prefix)

    for group, values in decoder.run_batches(whole, run, reserve=prefix.length if prefix else 0):
        rows, columns = torch.tensor([pairs[place] for place in group.rows]).unbind(-1)
        yield rows, columns, values.cpu(), sum(1 / len(labels[row].ids) for row in rows.tolist())


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
    device = batch.last.device
    padded = torch.tensor([ids + (-1,) * (length - len(ids)) for ids in targets], device=device)
    steps = torch.arange(length, device=device)
    at = (batch.last[:, None] + steps).clamp(max=batch.input_ids.shape[1] - 1)
    logits = decoder.forward(batch, at=at, edit=edit, prefix=prefix)
    padded, wide = padded.to(logits.device), logits.float()
    chosen = wide.gather(-1, padded.clamp(min=0)[..., None])[..., 0] - wide.logsumexp(-1)
    return chosen.where(padded >= 0, 0.0).sum(-1)


def label_log_probabilities(
    decoder: Decoder,
    batch: Batch,
    labels: Sequence[Ids],
    gold: Sequence[int],
    edit: Edit | None = None,
    prefix: Prefix | None = None,
) -> Float[Tensor, " batch"]:
    """Log-probability of each row's right label among its own labels, in nats. Gradients flow if on.
    A row is a query, ``labels`` are the first tokens of its labels, of which rows may have more or fewer,
    ``gold`` is the right one's place.
    """
    logits = decoder.forward(batch, edit=edit, prefix=prefix)[:, 0].float()
    return right_among([row[list(own)] for row, own in zip(logits, labels, strict=True)], gold)


def right_among(scores: Sequence[Tensor], gold: Sequence[int]) -> Float[Tensor, " queries"]:
    """Log-probability of each query's right label, from the scores of its own labels, up to a constant."""
    padded = pad_sequence(list(scores), batch_first=True, padding_value=-torch.inf)
    right = torch.tensor(gold, device=padded.device)
    return padded.log_softmax(-1).gather(-1, right[:, None])[:, 0]
