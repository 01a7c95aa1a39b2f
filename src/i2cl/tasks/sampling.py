"""Seeded, class-balanced choices of rows, drawn from the generator given and never from global state."""

from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar


class Labelled(Protocol):
    """Anything with a class id."""

    @property
    def label(self) -> int:
        """Class id, counted from 0."""


Item = TypeVar("Item", bound=Labelled)


def seeded(seed: int | str) -> Random:
    """A generator of its own for this seed, the same in every process."""
    return Random(seed)


def group_by_label(rows: Sequence[Item], classes: int) -> list[list[Item]]:
    """Rows of each class id 0..classes-1, in their order."""
    groups: list[list[Item]] = [[] for _ in range(classes)]
    for row in rows:
        groups[row.label].append(row)
    return groups


def even_quotas(sizes: Sequence[int], total: int, rng: Random) -> list[int]:
    """Rows to take from groups of these sizes: `total` in all (or every row), as equal as the sizes allow.
    What does not divide evenly goes to randomly chosen groups, one row each.
    """
    quotas = [0] * len(sizes)
    left = min(total, sum(sizes))
    while left:
        open_groups = [index for index, size in enumerate(sizes) if quotas[index] < size]
        share = left // len(open_groups)
        if share == 0:
            for index in rng.sample(open_groups, left):
                quotas[index] += 1
            break
        for index in open_groups:
            taken = min(share, sizes[index] - quotas[index])
            quotas[index] += taken
            left -= taken
    return quotas


def sample_per_class(
    groups: Sequence[Sequence[Item]], quotas: Sequence[int], rng: Random
) -> tuple[Item, ...]:
    """`quotas[c]` different rows of every class c, in shuffled order."""
    chosen = [row for group, quota in zip(groups, quotas, strict=True) for row in rng.sample(group, quota)]
    rng.shuffle(chosen)
    return tuple(chosen)
