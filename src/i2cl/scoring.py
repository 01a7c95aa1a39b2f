"""Log-probabilities of label words after a prompt."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.batching import Batch, Ids, make_batch
from i2cl.decoder import Decoder
from i2cl.edits import Edit
from i2cl.errors import I2CLError
from i2cl.prefix import Prefix
from i2cl.tasks import Template

Scoring = Literal["auto", "first_token", "full"]
"""Score a label by its first token, by its whole token sequence, or let the labels decide."""

Progress = Callable[[float], None]
"""Called with the number of queries just finished; whole sequences count label by label."""


class ScoringWarning(UserWarning):
    """Labels share their first token, so whole label sequences are scored."""


@dataclass(frozen=True)
class LabelTokens:
    """The tokens of each label word as they follow a prompt.

    Attributes:
        ids: token ids per label.
        full: whether whole sequences are scored instead of first tokens.
    """

    ids: tuple[Ids, ...]
    full: bool

    @property
    def first(self) -> Ids:
        """First token of each label."""
        return tuple(ids[0] for ids in self.ids)

    def target(self, label: int) -> Ids:
        """What calibration learns to predict: the first token, or all of them."""
        return self.ids[label] if self.full else self.ids[label][:1]

    @property
    def room(self) -> int:
        """Context tokens that scoring needs behind the query."""
        return max(map(len, self.ids)) - 1 if self.full else 0


def label_tokens(
    decoder: Decoder, template: Template, labels: Sequence[str], scoring: Scoring = "auto"
) -> LabelTokens:
    """Find the tokens of each label by encoding it in the context of a prompt.

    Raises:
        I2CLError: if the prompt's last token and a label merge into one token, or two labels are the
            same under the chosen scoring.
    """
    probe = template.query("text")
    prompt = decoder.encoder([probe])[0]
    whole = decoder.encoder([probe + template.continuation(label) for label in labels])
    for label, ids in zip(labels, whole, strict=True):
        if ids[: len(prompt)] != prompt or len(ids) == len(prompt):
            raise I2CLError(
                f"this tokenizer merges label {label!r} with the end of the prompt: "
                "put a space or a newline before {label} in the template"
            )
    found = tuple(ids[len(prompt) :] for ids in whole)
    if len(set(found)) < len(found):
        raise I2CLError("two labels have the same tokens: give labels that differ")
    shared = len({ids[0] for ids in found}) < len(found)
    if shared and scoring == "first_token":
        raise I2CLError("labels share their first token: use scoring='full', or other label words")
    if shared and scoring == "auto":
        message = "labels share their first token; scoring whole label sequences instead"
        warnings.warn(message, ScoringWarning, stacklevel=2)
    return LabelTokens(found, full=scoring == "full" or shared)


def encode_queries(
    decoder: Decoder, build: Callable[[str], str], texts: Sequence[str], labels: LabelTokens
) -> list[Ids]:
    """Encode ``build(text)`` for each text, leaving room for the label.

    Raises:
        I2CLError: on a text that is empty or no Unicode, or if the prompt without it exceeds the context.
    """
    for row, text in enumerate(texts):
        if not text.strip():
            raise I2CLError(f"text {row + 1} is empty: remove it or give it content")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise I2CLError(f"text {row + 1} holds half a surrogate pair, which is no character: remove it")
    limit = None if decoder.max_length is None else decoder.max_length - labels.room
    return decoder.encoder.fitted(build, texts, limit)


def score(
    decoder: Decoder,
    queries: Sequence[Ids],
    labels: LabelTokens,
    *,
    edit: Edit | None = None,
    prefix: Prefix | None = None,
    progress: Progress | None = None,
) -> Float[Tensor, "queries labels"]:
    """Log-probability of each label after each query, over the whole vocabulary, in float32 on the CPU.

    Args:
        decoder: the model.
        queries: token ids of each query, without the prefix.
        labels: what to score.
        edit: applied to every layer while the queries run.
        prefix: demonstrations run once beforehand.
        progress: called as queries finish.
    """
    scores = torch.empty(len(queries), len(labels.ids))
    with decoder.frozen(), torch.no_grad():
        run = _full if labels.full else _first
        for index, values in run(decoder, queries, labels, edit, prefix):
            scores[index] = values
            if progress is not None:
                progress(values.numel() / len(labels.ids))
    return scores


def next_token_log_probabilities(
    decoder: Decoder, queries: Sequence[Ids], *, edit: Edit | None = None, prefix: Prefix | None = None
) -> Float[Tensor, "queries vocab"]:
    """Log-probability of every token after each query, in float32 on the CPU."""
    found: dict[int, Tensor] = {}
    with decoder.frozen(), torch.no_grad():
        for batch in decoder.batches(queries, reserve=len(prefix.ids) if prefix else 0):
            logits = decoder.forward(batch, edit=edit, prefix=prefix)[:, 0]
            found |= dict(zip(batch.rows, logits.float().log_softmax(-1).cpu(), strict=True))
    return torch.stack([found[row] for row in range(len(queries))])


Chunk = tuple[tuple[Tensor, ...], Tensor]


def _first(
    decoder: Decoder, queries: Sequence[Ids], labels: LabelTokens, edit: Edit | None, prefix: Prefix | None
) -> Iterator[Chunk]:
    for batch in decoder.batches(queries, reserve=len(prefix.ids) if prefix else 0):
        logits = decoder.forward(batch, edit=edit, prefix=prefix)[:, 0]
        wanted = torch.tensor(labels.first, device=logits.device)
        yield (torch.tensor(batch.rows),), logits.float().log_softmax(-1)[:, wanted].cpu()


def _full(
    decoder: Decoder, queries: Sequence[Ids], labels: LabelTokens, edit: Edit | None, prefix: Prefix | None
) -> Iterator[Chunk]:
    pairs = [(row, label) for row in range(len(queries)) for label in range(len(labels.ids))]
    whole = [queries[row] + labels.ids[label] for row, label in pairs]
    for group in decoder.batches(whole, reserve=len(prefix.ids) if prefix else 0):
        rows, columns = zip(*[pairs[place] for place in group.rows], strict=True)
        targets = [labels.ids[label] for label in columns]
        batch = labelled_batch([queries[row] for row in rows], targets, decoder.device)
        values = sequence_log_probabilities(decoder, batch, targets, edit, prefix)
        yield (torch.tensor(rows), torch.tensor(columns)), values.cpu()


def labelled_batch(queries: Sequence[Ids], targets: Sequence[Ids], device: torch.device) -> Batch:
    """Queries followed by all but the last token of their targets; ``last`` stays at the query's end."""
    ids = [query + target[:-1] for query, target in zip(queries, targets, strict=True)]
    last = torch.tensor([len(query) - 1 for query in queries], device=device)
    return replace(make_batch(ids, device), last=last)


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
    padded = padded.to(logits.device)
    chosen = logits.float().log_softmax(-1).gather(-1, padded.clamp(min=0)[..., None])[..., 0]
    return chosen.where(padded >= 0, 0.0).sum(-1)
