"""Statistics of labelled rows and likely mistakes in them, computed before fitting."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from i2cl.tasks.labels import kind_of_codes, likely_typos
from i2cl.tasks.task import Task

N_LONGEST = 20  # texts with the most characters; one of them almost certainly has the most tokens


@dataclass(frozen=True)
class Survey:
    """Statistics of a task's training rows.

    Attributes:
        rows: number of rows.
        distinct: number of distinct texts.
        labels: number of rows of each label.
        typos: labels that may be misspelled, each with the label that was probably meant.
        contradictions: texts with several labels, and these labels.
        longest: the texts with the most characters.
        codes: kind of labels that mean nothing to a model, such as "numbers"; "" for words.
    """

    rows: int
    distinct: int
    labels: dict[str, int]
    typos: tuple[tuple[str, str], ...]
    contradictions: tuple[tuple[str, tuple[str, ...]], ...]
    longest: tuple[str, ...]
    codes: str

    @classmethod
    def from_task(cls, task: Task) -> "Survey":
        """Compute the statistics of a task's training rows."""
        counts = Counter(row.label for row in task.train)
        labels = {word: counts[index] for index, word in enumerate(task.labels)}
        ids_by_text: dict[str, set[int]] = defaultdict(set)
        for row in task.train:
            ids_by_text[row.text].add(row.label)
        return cls(
            rows=len(task.train),
            distinct=len(ids_by_text),
            labels=labels,
            typos=tuple(likely_typos(labels)),
            contradictions=tuple(
                (text, tuple(task.labels[index] for index in sorted(ids)))
                for text, ids in ids_by_text.items()
                if len(ids) > 1
            ),
            longest=tuple(nlargest(N_LONGEST, ids_by_text, key=len)),
            codes=kind_of_codes(task.labels),
        )

    def record(self) -> dict[str, Any]:
        """Return counts and likely mistakes as JSON-serializable values."""
        return {
            "rows": self.rows,
            "distinct": self.distinct,
            "labels": self.labels,
            "slips": dict(self.typos),
            "contradictions": {text: list(words) for text, words in self.contradictions},
        }
