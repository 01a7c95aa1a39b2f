"""Score all labels of a query in one row: the label sequences form a trie after the query.

Prefixes that labels share run once. An attention mask separates the branches, and every token has the
position that it would have if its label were alone, so the scores equal those of separate rows.
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
    """The proper prefixes of all labels, each stored once as a node.

    Attributes:
        tokens: last token of each node.
        parents: parent of each node, always an earlier one; -1 for the query.
        edges: pairs of a node (or -1) and a token that continues it in some label.
        steps: edges of each label, whose log-probabilities sum to the label's.
    """

    tokens: Ids
    parents: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, ...], ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, labels: tuple[Ids, ...]) -> "Trie":
        """Build the trie of label sequences."""
        node_of: dict[Ids, int] = {(): -1}
        edges: dict[tuple[int, int], int] = {}
        steps = []
        for ids in labels:
            for end in range(1, len(ids)):
                node_of.setdefault(ids[:end], len(node_of) - 1)
            path = [(node_of[ids[:end]], token) for end, token in enumerate(ids)]
            steps.append(tuple(edges.setdefault(edge, len(edges)) for edge in path))
        prefixes = [ids for ids in node_of if ids]
        parents = tuple(node_of[ids[:-1]] for ids in prefixes)
        return cls(tuple(ids[-1] for ids in prefixes), parents, tuple(edges), tuple(steps))

    @cached_property
    def visible(self) -> Bool[Tensor, "nodes nodes"]:
        """Attention mask of the nodes: each sees itself and its ancestors."""
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
    """Index tensors that turn logits after a query and the nodes into label scores."""

    positions: Int[Tensor, " edges"]  # position whose logits score each edge
    tokens: Int[Tensor, " edges"]  # token of each edge
    labels: Int[Tensor, " steps"]  # label of each step
    edges: Int[Tensor, " steps"]  # edge of each step

    def to(self, device: torch.device) -> "TrieIndices":
        """Copy to a device."""
        return TrieIndices(*(indices.to(device) for indices in self))

    def scores(self, logits: Float[Tensor, "positions vocab"], count: int) -> Float[Tensor, " labels"]:
        """Compute the log-probability of each of ``count`` labels."""
        logits = logits.float()
        log_probs = logits[self.positions, self.tokens] - logits.logsumexp(-1)[self.positions]
        return log_probs.new_zeros(count).index_add(0, self.labels, log_probs[self.edges])


def forked_batch(queries: Sequence[Ids], tries: Sequence[Trie], device: torch.device) -> Batch:
    """Make a batch of queries followed by the nodes of their labels; ``last`` is the end of each query."""
    batch = make_batch([query + trie.tokens for query, trie in zip(queries, tries, strict=True)], device)
    lines, width = batch.input_ids.shape
    visible = torch.ones(width, width, dtype=torch.bool).tril().repeat(lines, 1, 1)
    position_ids = torch.arange(width).repeat(lines, 1)
    for row, (query, trie) in enumerate(zip(queries, tries, strict=True)):
        branches = slice(len(query), len(query) + len(trie.tokens))
        visible[row, branches, branches] = trie.visible
        position_ids[row, branches] = len(query) - 1 + trie.visible.sum(1)  # by depth
    ends = torch.tensor([len(query) - 1 for query in queries], device=device)
    return replace(batch, last=ends, position_ids=position_ids.to(device), visible=visible.to(device))


def edge_scores(
    logits: Float[Tensor, "batch positions vocab"], tries: Sequence[Trie]
) -> list[Float[Tensor, " labels"]]:
    """Compute each row's label scores from logits at the query's end and at every node."""
    # Rows of one task share a trie, whose indices are copied to the device once per batch.
    indices = {trie: trie.indices.to(logits.device) for trie in dict.fromkeys(tries)}
    # Row by row: each has the logits of a whole vocabulary for every node.
    return [indices[trie].scores(row, len(trie.steps)) for row, trie in zip(logits, tries, strict=True)]
