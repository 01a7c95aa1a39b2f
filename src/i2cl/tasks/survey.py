"""Summary of labelled rows and of likely mistakes in them, before anything is fitted."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from i2cl.tasks.labels import kind_of_codes, slips
from i2cl.tasks.task import Task

LONGEST = 20  # texts with the most characters: one of them has the most tokens


@dataclass(frozen=True)
class Survey:
    """Summary of a task's training rows.

    Attributes:
        rows: number of rows.
        distinct: number of distinct texts.
        labels: number of rows of each label.
        slips: labels that may be misspelled, each with the label that may have been meant.
        contradictions: texts that have several labels, with these.
        longest: the texts with the most characters.
        codes: what the labels are if they say nothing to a model, such as "numbers"; else "".
    """

    rows: int
    distinct: int
    labels: dict[str, int]
    slips: tuple[tuple[str, str], ...]
    contradictions: tuple[tuple[str, tuple[str, ...]], ...]
    longest: tuple[str, ...]
    codes: str

    @classmethod
    def of(cls, task: Task) -> "Survey":
        """Summarize the training rows of a task."""
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
            codes=kind_of_codes(task.labels),
        )

    def record(self) -> dict[str, Any]:
        """Return counts and likely mistakes, for JSON."""
        counts = {"rows": self.rows, "distinct": self.distinct, "labels": self.labels}
        contradictions = {text: list(words) for text, words in self.contradictions}
        return {**counts, "slips": dict(self.slips), "contradictions": contradictions}
