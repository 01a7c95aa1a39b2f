"""From strings to length-sorted batches of token ids.

Padded batches are padded on the right and run without an attention mask: under causal attention a
token never sees what stands to its right, so padding cannot change a result, whatever the
tokenizer's own padding side says. Packed batches hold all queries in one row, kept apart by their
position ids (https://huggingface.co/docs/transformers/en/attention_interface).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from i2cl.errors import I2CLError

Ids = tuple[int, ...]


class TruncationWarning(UserWarning):
    """Texts were cut to fit the model's context; the message counts them."""


@dataclass(frozen=True)
class Batch:
    """Token ids of some queries: a right-padded row for each, or all of them packed into one row.

    Attributes:
        input_ids: token ids; what stands right of a row's end is padding.
        first: index of each query's first token in its row: 0, unless packed.
        last: index of each query's last token in its row, whose next token is predicted.
        rows: place of each query in the caller's list.
        position_ids: of a packed batch, which start again with every query; None otherwise.
    """

    input_ids: Int[Tensor, "lines tokens"]
    first: Int[Tensor, " batch"]
    last: Int[Tensor, " batch"]
    rows: tuple[int, ...]
    position_ids: Int[Tensor, "1 tokens"] | None = None

    @property
    def packed(self) -> bool:
        """Whether one row holds all queries."""
        return self.position_ids is not None


def make_batch(ids: Sequence[Ids], device: torch.device, rows: Sequence[int] | None = None) -> Batch:
    """One right-padded batch of all given rows, in the given order."""
    width = max(map(len, ids))
    padded = torch.tensor([row + (0,) * (width - len(row)) for row in ids], device=device)
    last = torch.tensor([len(row) - 1 for row in ids], device=device)
    return Batch(padded, torch.zeros_like(last), last, tuple(rows if rows is not None else range(len(ids))))


def pack_batch(ids: Sequence[Ids], device: torch.device) -> Batch:
    """All given rows one behind the other in a single row, without padding."""
    ends = list(accumulate(map(len, ids)))
    return Batch(
        input_ids=torch.tensor([[token for row in ids for token in row]], device=device),
        first=torch.tensor([end - len(row) for end, row in zip(ends, ids, strict=True)], device=device),
        last=torch.tensor(ends, device=device) - 1,
        rows=tuple(range(len(ids))),
        position_ids=torch.tensor([[place for row in ids for place in range(len(row))]], device=device),
    )


def packing_pays(lengths: Sequence[int], d_model: int) -> bool:
    """Whether a packed batch needs fewer multiplications than a padded one.

    A token costs about 24 d^2 in a block's matrices, and 4 d for every key in its row: packing saves
    padding, but runs the attention over all queries at once.
    """

    def cost(lines: int, width: int) -> int:
        return lines * width * (6 * d_model + width)

    return cost(1, sum(lengths)) < cost(len(lengths), max(lengths))


def longest_first(ids: Sequence[Ids]) -> list[int]:
    """Places of all rows by falling length, so that what does not fit into memory fails at once.

    Equal texts stand together, which makes batches independent of the order the texts came in.
    """
    return sorted(range(len(ids)), key=lambda row: (-len(ids[row]), ids[row]))


def budget_chunks(ids: Sequence[Ids], token_budget: int) -> list[list[int]]:
    """Places of all rows, longest first, in parts of at most ``token_budget`` padded tokens, or one row."""
    order = longest_first(ids)
    chunks = []
    start = 0
    while start < len(order):
        size = max(1, token_budget // len(ids[order[start]]))
        chunks.append(order[start : start + size])
        start += size
    return chunks


def shared_front(rows: Sequence[Ids]) -> Ids:
    """The tokens that all rows start with, short of the shortest row's last, which is left to run."""
    length = min(map(len, rows)) - 1
    columns = zip(*(row[:length] for row in rows), strict=True)
    return tuple(tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, columns))


@dataclass(frozen=True)
class Encoder:
    """Encodes strings with the special tokens that the tokenizer puts in front (such as BOS).

    Special tokens that it would put behind (such as EOS) are left out, since the last token must
    be the one that predicts the next.
    """

    tokenizer: PreTrainedTokenizerBase
    front: Ids

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Encoder":
        """Find out what the tokenizer puts in front, by encoding a probe with and without it."""
        bare = tuple(tokenizer("a", add_special_tokens=False)["input_ids"])
        full = tuple(tokenizer("a")["input_ids"])
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return cls(tokenizer, full[:start])
        return cls(tokenizer, ())

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text, special tokens in front included."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [self.front + tuple(ids) for ids in encoded]

    def fitted(self, build: Callable[[str], str], texts: Sequence[str], limit: int | None) -> list[Ids]:
        """Token ids of ``build(text)``, the text cut at its end where the whole exceeds ``limit`` tokens.

        Template and label positions are never cut. Warns once with the number of texts cut.

        Raises:
            I2CLError: if not even an empty text leaves room.
        """
        return self.fitted_each([build] * len(texts), texts, limit)

    def fitted_each(
        self, builds: Sequence[Callable[[str], str]], texts: Sequence[str], limit: int | None
    ) -> list[Ids]:
        """Like `fitted`, with a prompt format for each text."""
        ids = self([build(text) for build, text in zip(builds, texts, strict=True)])
        if limit is None:
            return ids
        cut = [row for row, row_ids in enumerate(ids) if len(row_ids) > limit]
        for row in cut:
            ids[row] = self._cut(builds[row], texts[row], limit)
        if cut:
            message = f"{len(cut)} of {len(texts)} texts were cut to fit {limit} tokens of context"
            warnings.warn(message, TruncationWarning, stacklevel=3)
        return ids

    def _cut(self, build: Callable[[str], str], text: str, limit: int) -> Ids:
        def encode(characters: int) -> Ids:
            return self([build(text[:characters])])[0]

        best = encode(0)
        if len(best) > limit:
            raise I2CLError(
                f"the prompt without its text needs {len(best)} tokens, but only {limit} fit into the "
                "context: use fewer or shorter demonstrations, or a model with a longer context"
            )
        fits, over = 0, 4 * limit
        while over < len(text) and len(encode(over)) <= limit:
            fits, over = over, 2 * over
        over = min(over, len(text))
        while over - fits > 1:
            middle = (fits + over) // 2
            if len(encode(middle)) <= limit:
                fits = middle
            else:
                over = middle
        return encode(fits)
