"""Build length-sorted batches of token ids.

Batches are padded on the right and, except for forked rows, run without a mask: under causal attention a
token never sees the tokens to its right, so padding cannot change a result, whatever the tokenizer's padding
side. Packed batches hold all queries in one row, separated by their position ids
(https://huggingface.co/docs/transformers/en/attention_interface).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Token ids of queries: one right-padded row for each, or all packed into one row."""

    input_ids: Int[Tensor, "lines tokens"]  #: padded on the right
    first: Int[Tensor, " batch"]  #: index of each query's first token in its row: 0, unless packed
    last: Int[Tensor, " batch"]  #: index of each query's last token, whose next token is predicted
    rows: tuple[int, ...]  #: index of each query in the caller's list
    #: position ids of packed or forked rows; None otherwise
    position_ids: Int[Tensor, "lines tokens"] | None = None
    #: attention mask of forked rows (`i2cl.models.trie`); None: causal
    visible: Bool[Tensor, "lines tokens tokens"] | None = None

    @property
    def packed(self) -> bool:
        """Whether one row holds all queries."""
        return self.position_ids is not None and self.visible is None


def make_batch(ids: Sequence[Ids], device: torch.device, rows: Sequence[int] | None = None) -> Batch:
    """Make a right-padded batch of rows, in the given order."""
    width = max(map(len, ids))
    padded = torch.tensor([row + (0,) * (width - len(row)) for row in ids], device=device)
    last = torch.tensor([len(row) - 1 for row in ids], device=device)
    return Batch(padded, torch.zeros_like(last), last, tuple(rows if rows is not None else range(len(ids))))


def pack_batch(ids: Sequence[Ids], device: torch.device) -> Batch:
    """Pack rows into a single one without padding. Not for use with a prefix."""
    ends = list(accumulate(map(len, ids)))
    return Batch(
        input_ids=torch.tensor([[token for row in ids for token in row]], device=device),
        first=torch.tensor([end - len(row) for end, row in zip(ends, ids, strict=True)], device=device),
        last=torch.tensor(ends, device=device) - 1,
        rows=tuple(range(len(ids))),
        position_ids=torch.tensor([[position for row in ids for position in range(len(row))]], device=device),
    )


def gather(
    positions: Int[Tensor, "batch positions"], packed: bool, hidden: Tensor
) -> Float[Tensor, "batch positions d"]:
    """Select the hidden states (lines x tokens x d) for the LM head."""
    index = positions.to(hidden.device)
    if packed:
        return hidden[0, index]
    return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))


def context_length(config: Any, tokenizer_length: int) -> int | None:
    """Return a model's context length in tokens, or None if it has no limit.

    Without a length in the model's config, the tokenizer's ``model_max_length`` is used. Within the context,
    the rotary angles of a row do not depend on the other rows of its batch. A model with longrope chooses the
    angles of a batch by its longest row, so its context ends at ``original_max_position_embeddings``, where
    they change. With dynamic NTK it is one token less than the context: transformers resets the angles that a
    longer row changed only for rows shorter than the context.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    kinds = [str(rope.get("rope_type")) for rope in ropes]
    limits = [
        int(rope["original_max_position_embeddings"])
        for rope, kind in zip(ropes, kinds, strict=True)
        if kind == "longrope"
    ]
    lengths = [getattr(config, field, None) for field in ("max_position_embeddings", "max_seq_len")]
    length = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    if length is not None:
        limits.append(length - any("dynamic" in kind for kind in kinds))
    elif tokenizer_length < 10**9:  # transformers sets 1e30 for none
        limits.append(tokenizer_length)
    return min(limits, default=None)


def packing_pays(lengths: Sequence[int], d_model: int) -> bool:
    """Return whether a packed batch needs fewer multiplications than a padded one.

    A token costs about 24 d^2 in a block's matrices, and 4 d for every key in its row. Packing saves padding,
    but runs the attention over all queries at once.
    """

    def cost(lines: int, width: int) -> int:
        return lines * width * (6 * d_model + width)

    return cost(1, sum(lengths)) < cost(len(lengths), max(lengths))


def longest_first(ids: Sequence[Ids]) -> list[int]:
    """Return the indices of rows by descending length, so that an out-of-memory error comes first.

    Rows of equal length are sorted by content, so batches do not depend on the order of the texts.
    """
    return sorted(range(len(ids)), key=lambda row: (-len(ids[row]), ids[row]))


def budget_chunks(ids: Sequence[Ids], token_budget: int) -> list[list[int]]:
    """Split rows, longest first, into parts of up to ``token_budget`` padded tokens, at least one row."""
    order, chunks = longest_first(ids), []
    while order:
        size = max(1, token_budget // len(ids[order[0]]))
        chunks.append(order[:size])
        del order[:size]
    return chunks


# A pass over few tokens costs at least 1/8 of a full batch, since it reads all weights.
MIN_PASS_COST = 1 / 8


def batch_sizes(lengths: Sequence[int], max_rows: Sequence[int], pass_cost: float) -> list[int]:
    """Split rows into batches with the least padding and number of passes, by dynamic programming.

    Args:
        lengths: of the rows, longest first.
        max_rows: maximum number of rows of a batch that starts with each row, at least 1.
        pass_cost: cost of a pass, in tokens.

    Returns:
        The number of rows of each batch.
    """
    count = len(lengths)
    # The lowest cost of all rows from a row on, and the size of the first batch that achieves it.
    min_cost, first_size = [0.0] * (count + 1), [1] * count
    next_shorter = [count] * count  # only a cut before a shorter row saves padding
    for row in range(count - 1, -1, -1):
        if row + 1 < count:
            next_shorter[row] = row + 1 if lengths[row + 1] < lengths[row] else next_shorter[row + 1]
        max_end, end = min(count, row + max_rows[row]), next_shorter[row]
        min_cost[row] = lengths[row] * (max_end - row) + pass_cost + min_cost[max_end]
        first_size[row] = max_end - row
        while end < max_end:
            cost = lengths[row] * (end - row) + pass_cost + min_cost[end]
            if cost < min_cost[row]:
                min_cost[row], first_size[row] = cost, end - row
            end = next_shorter[end]
    sizes, row = [], 0
    while row < count:
        sizes.append(first_size[row])
        row += first_size[row]
    return sizes


def common_prefix(rows: Sequence[Ids]) -> Ids:
    """Return the tokens that all rows start with, excluding the last token of the shortest row."""
    length = min(map(len, rows)) - 1
    columns = zip(*(row[:length] for row in rows), strict=True)
    return tuple(tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
