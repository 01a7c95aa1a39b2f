"""Labels of several tokens as a trie, all of whose branches run behind a query in one row.

The beginnings that labels share run once. A mask keeps the branches apart, and every token has the position
that it has where its label stands alone. So one pass gives the scores of all labels, and none is
approximated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from i2cl.models.batching import Batch, Ids, make_batch


@dataclass(frozen=True, eq=False)
class Trie:
    """The beginnings of labels, each once; a beginning is all of a label but some last tokens."""

    tokens: Ids  # the last token of each beginning
    parents: tuple[int, ...]  # the beginning before it, always an earlier one; -1: the query alone
    # a beginning or -1, and a token that some label has behind it; each once
    edges: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, ...], ...]  # of each label its edges, whose log-probabilities add up to its own

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, labels: tuple[Ids, ...]) -> "Trie":
        """The trie of these label sequences."""
        places: dict[Ids, int] = {(): -1}
        edges: dict[tuple[int, int], int] = {}
        steps = []
        for ids in labels:
            for end in range(1, len(ids)):
                places.setdefault(ids[:end], len(places) - 1)
            path = [(places[ids[:end]], token) for end, token in enumerate(ids)]
            steps.append(tuple(edges.setdefault(edge, len(edges)) for edge in path))
        beginnings = [ids for ids in places if ids]
        parents = tuple(places[ids[:-1]] for ids in beginnings)
        return cls(tuple(ids[-1] for ids in beginnings), parents, tuple(edges), tuple(steps))

    @cached_property
    def visible(self) -> Bool[Tensor, "nodes nodes"]:
        """What each beginning sees: itself, and those before it."""
        mask = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    @cached_property
    def indices(self) -> "TrieIndices":
        """The trie as index tensors on the CPU."""
        pairs = [(label, edge) for label, path in enumerate(self.steps) for edge in path]
        nodes, tokens = torch.tensor(self.edges).unbind(-1)
        labels, edges = torch.tensor(pairs).unbind(-1)
        return TrieIndices(nodes + 1, tokens, labels, edges)


class TrieIndices(NamedTuple):
    """Index tensors that turn logits after a query and its beginnings into label scores."""

    positions: Int[Tensor, " edges"]  # of each edge, the position whose logits have its token
    tokens: Int[Tensor, " edges"]  # of each edge
    labels: Int[Tensor, " steps"]  # of each step of a label's path
    edges: Int[Tensor, " steps"]  # of each step

    def to(self, device: torch.device) -> "TrieIndices":
        """Copy to a device."""
        return TrieIndices(*(one.to(device) for one in self))

    def scores(self, logits: Float[Tensor, "positions vocab"], count: int) -> Float[Tensor, " labels"]:
        """Log-probability of each of ``count`` labels."""
        wide = logits.float()
        edges = wide[self.positions, self.tokens] - wide.logsumexp(-1)[self.positions]
        return edges.new_zeros(count).index_add(0, self.labels, edges[self.edges])


def forked_batch(queries: Sequence[Ids], tries: Sequence[Trie], device: torch.device) -> Batch:
    """Each query with all branches of its labels behind it; ``last`` stays at the query's end."""
    batch = make_batch([query + trie.tokens for query, trie in zip(queries, tries, strict=True)], device)
    lines, width = batch.input_ids.shape
    visible = torch.ones(width, width, dtype=torch.bool).tril().repeat(lines, 1, 1)
    places = torch.arange(width).repeat(lines, 1)
    for row, (query, trie) in enumerate(zip(queries, tries, strict=True)):
        branches = slice(len(query), len(query) + len(trie.tokens))
        visible[row, branches, branches] = trie.visible
        places[row, branches] = len(query) - 1 + trie.visible.sum(1)  # behind as many beginnings as it sees
    ends = torch.tensor([len(query) - 1 for query in queries], device=device)
    return replace(batch, last=ends, position_ids=places.to(device), visible=visible.to(device))


def edge_scores(
    logits: Float[Tensor, "batch positions vocab"], tries: Sequence[Trie]
) -> list[Float[Tensor, " labels"]]:
    """Log-probability of each row's labels, from logits at its query's end and at every beginning."""
    # Rows of one task share a trie, whose indices are copied to the device once a batch.
    indices = {trie: trie.indices.to(logits.device) for trie in dict.fromkeys(tries)}
    # A row at a time: each has a vocabulary for every beginning.
    return [indices[trie].scores(row, len(trie.steps)) for row, trie in zip(logits, tries, strict=True)]
