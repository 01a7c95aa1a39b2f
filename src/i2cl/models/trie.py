"""Labels of several tokens as a trie, all of whose branches run behind a query in one row.

The beginnings that labels share run once. A mask keeps the branches apart, and every token has the position
that it has where its label stands alone. So one pass gives the scores of all labels, and none is
approximated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float
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

    def scores(self, edges: Float[Tensor, " edges"]) -> Float[Tensor, " labels"]:
        """Log-probability of each label, from those of the edges."""
        pairs = [(label, edge) for label, path in enumerate(self.steps) for edge in path]
        rows, taken = torch.tensor(pairs, device=edges.device).unbind(-1)
        return edges.new_zeros(len(self.steps)).index_add(0, rows, edges[taken])


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
    values = []
    for row, trie in zip(logits, tries, strict=True):
        wide = row.float()  # a row at a time: each has a vocabulary for every beginning
        whole = wide.logsumexp(-1)
        nodes, tokens = torch.tensor(trie.edges, device=wide.device).unbind(-1)
        values.append(trie.scores(wide[nodes + 1, tokens] - whole[nodes + 1]))
    return values
