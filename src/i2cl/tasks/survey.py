"""What somebody should know of labelled rows before anything is fitted to them."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from i2cl.tasks.labels import as_id, slips
from i2cl.tasks.task import Task

LONGEST = 20  # texts with the most characters, among which that with the most tokens is looked for


@dataclass(frozen=True)
class Survey:
    """Training rows, counted: labels that may be ``slips``, texts of several labels, longest texts."""

    rows: int
    distinct: int
    labels: dict[str, int]
    slips: tuple[tuple[str, str], ...]
    contradictions: tuple[tuple[str, tuple[str, ...]], ...]
    longest: tuple[str, ...]
    numbered: bool

    @classmethod
    def of(cls, task: Task) -> "Survey":
        """That of a task's training rows."""
        counts = Counter(row.label for row in task.train)
        labels = {word: counts[place] for place, word in enumerate(task.labels)}
        texts: dict[str, set[int]] = defaultdict(set)
        for row in task.train:
            texts[row.text].add(row.label)
        several = [(text, tuple(task.labels[one] for one in sorted(ids))) for text, ids in texts.items()]
        return cls(
            rows=len(task.train),
            distinct=len(texts),
            labels=labels,
            slips=tuple(slips(labels)),
            contradictions=tuple((text, words) for text, words in several if len(words) > 1),
            longest=tuple(nlargest(LONGEST, texts, key=len)),
            numbered=all(as_id(word) is not None for word in task.labels),
        )

    def record(self) -> dict[str, Any]:
        """Counts and what looks wrong, for JSON."""
        counts = {"rows": self.rows, "distinct": self.distinct, "labels": self.labels}
        contradictions = {text: list(words) for text, words in self.contradictions}
        return {**counts, "slips": dict(self.slips), "contradictions": contradictions}
