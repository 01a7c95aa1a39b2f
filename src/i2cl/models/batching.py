"""From token ids to length-sorted batches.

Padded batches are padded on the right and run without a mask, but for forks: under causal attention a
token never sees what stands to its right, so padding cannot change a result, whatever the
tokenizer's own padding side says. Packed batches hold all queries in one row, kept apart by their
position ids (https://huggingface.co/docs/transformers/en/attention_interface).

Some models turn the positions of a whole batch by its longest row (longrope). There rows on two sides of
such a limit never share a batch, and keys cached below it are not used beyond it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Token ids of some queries: a right-padded row for each, or all of them packed into one row."""

    input_ids: Int[Tensor, "lines tokens"]  #: what stands right of a row's end is padding
    first: Int[Tensor, " batch"]  #: index of each query's first token in its row: 0, unless packed
    last: Int[Tensor, " batch"]  #: index of each query's last token, whose next token is predicted
    rows: tuple[int, ...]  #: place of each query in the caller's list
    #: of a packed batch, which start again with every query, or of one whose rows fork; None otherwise
    position_ids: Int[Tensor, "lines tokens"] | None = None
    #: which others of its row each token sees, where rows fork (`i2cl.models.trie`); None: all before it
    visible: Bool[Tensor, "lines tokens tokens"] | None = None

    @property
    def packed(self) -> bool:
        """Whether one row holds all queries."""
        return self.position_ids is not None and self.visible is None


def make_batch(ids: Sequence[Ids], device: torch.device, rows: Sequence[int] | None = None) -> Batch:
    """One right-padded batch of all given rows, in the given order."""
    width = max(map(len, ids))
    padded = torch.tensor([row + (0,) * (width - len(row)) for row in ids], device=device)
    last = torch.tensor([len(row) - 1 for row in ids], device=device)
    return Batch(padded, torch.zeros_like(last), last, tuple(rows if rows is not None else range(len(ids))))


def pack_batch(ids: Sequence[Ids], device: torch.device) -> Batch:
    """All given rows one behind the other in a single row, without padding; never behind a prefix."""
    ends = list(accumulate(map(len, ids)))
    return Batch(
        input_ids=torch.tensor([[token for row in ids for token in row]], device=device),
        first=torch.tensor([end - len(row) for end, row in zip(ends, ids, strict=True)], device=device),
        last=torch.tensor(ends, device=device) - 1,
        rows=tuple(range(len(ids))),
        position_ids=torch.tensor([[place for row in ids for place in range(len(row))]], device=device),
    )


def behind(batch: Batch, front: Ids) -> Batch:
    """The same padded rows, each with the tokens ``front`` before it."""
    shared = torch.tensor([front], device=batch.input_ids.device).expand(len(batch.input_ids), -1)
    return replace(
        batch,
        input_ids=torch.cat([shared, batch.input_ids], dim=1),
        first=batch.first + len(front),
        last=batch.last + len(front),
    )


def gather(
    positions: Int[Tensor, "batch positions"], packed: bool, hidden: Tensor
) -> Float[Tensor, "batch positions d"]:
    """The hidden states (lines x tokens x d) that the LM head is to see."""
    index = positions.to(hidden.device)
    wide = index[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden[0, index] if packed else hidden.gather(1, wide)


def rope_limits(config: Any) -> tuple[int, ...]:
    """Row lengths beyond which a model turns every position by other angles (longrope), rising."""
    ropes = [one for one in _ropes(config) if one.get("rope_type") == "longrope"]
    return tuple(sorted({int(one["original_max_position_embeddings"]) for one in ropes}))


def context_length(config: Any, otherwise: int) -> int | None:
    """Tokens that a model takes at most, or None; ``otherwise`` is what its tokenizer says.
    In rows shorter than the context transformers forgets how longer ones, run by others, changed the angles
    of a dynamic NTK; so there it is one token less.
    """
    for field in ("max_position_embeddings", "max_seq_len"):
        length = getattr(config, field, None)
        if isinstance(length, int) and length > 0:
            dynamic = any("dynamic" in str(one.get("rope_type")) for one in _ropes(config))
            return length - 1 if dynamic else length
    return otherwise if otherwise < 10**9 else None


def _ropes(config: Any) -> list[dict[str, Any]]:
    """What a config says of its rotary embedding, or of that of each kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [ropes] if "rope_type" in ropes else [one for one in ropes.values() if isinstance(one, dict)]


def by_side(lengths: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """Places of the rows between two limits each, which may share a batch; those of the shortest first."""
    sides = defaultdict(list)
    for place, length in enumerate(lengths):
        sides[bisect_left(limits, length)].append(place)
    return [sides[side] for side in sorted(sides)]


def packing_pays(lengths: Sequence[int], d_model: int) -> bool:
    """Whether a packed batch needs fewer multiplications than a padded one.
    A token costs about 24 d^2 in a block's matrices, and 4 d for every key in its row: packing saves padding,
    but runs the attention over all queries at once.
    """
    packed, padded = (1, sum(lengths)), (len(lengths), max(lengths))
    first, second = (lines * width * (6 * d_model + width) for lines, width in (packed, padded))
    return first < second


def longest_first(ids: Sequence[Ids]) -> list[int]:
    """Places of all rows by falling length, so that what does not fit into memory fails at once.
    Equal texts stand together, which makes batches independent of the order the texts came in.
    """
    return sorted(range(len(ids)), key=lambda row: (-len(ids[row]), ids[row]))


def budget_chunks(ids: Sequence[Ids], token_budget: int) -> list[list[int]]:
    """Places of all rows, longest first, in parts of at most ``token_budget`` padded tokens, or one row."""
    order, chunks = longest_first(ids), []
    while order:
        size = max(1, token_budget // len(ids[order[0]]))
        chunks.append(order[:size])
        del order[:size]
    return chunks


# A pass over few tokens costs as much as a full batch divided by this: the weights have to be read.
PASSES_A_BATCH = 8


def batch_sizes(lengths: Sequence[int], most: Sequence[int], price: float) -> list[int]:
    """How many of some rows, longest first, run together, so that padding and passes cost the least.
    A batch is padded to its first row, which says how many it may have at ``most``, at least one. A pass has
    a price in tokens.
    """
    count = len(lengths)
    best, size = [0.0] * (count + 1), [1] * count
    shorter = [count] * count  # the next row of fewer tokens, where alone a cut can save padding
    for row in range(count - 1, -1, -1):
        if row + 1 < count:
            shorter[row] = row + 1 if lengths[row + 1] < lengths[row] else shorter[row + 1]
        end, after = min(count, row + most[row]), shorter[row]
        best[row] = lengths[row] * (end - row) + price + best[end]
        size[row] = end - row
        while after < end:
            cost = lengths[row] * (after - row) + price + best[after]
            if cost < best[row]:
                best[row], size[row] = cost, after - row
            after = shorter[after]
    sizes, row = [], 0
    while row < count:
        sizes.append(size[row])
        row += size[row]
    return sizes


def shared_front(rows: Sequence[Ids]) -> Ids:
    """The tokens that all rows start with, short of the shortest row's last, which is left to run."""
    length = min(map(len, rows)) - 1
    columns = zip(*(row[:length] for row in rows), strict=True)
    return tuple(tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, columns))


# Tokens of keys and values that a batch may hold, cached ones included; a larger token budget raises it.
# Every row gets a copy of the cached ones, which beyond a few thousand costs a CPU more than a larger batch
# saves: docs/performance.md.
KEPT_BUDGET = 16384
CPU_KEPT_BUDGET = 4096
