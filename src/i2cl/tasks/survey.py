"""Statistics of labelled rows and likely mistakes in them, computed before fitting."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from heapq import nlargest
from typing import Any

from i2cl.tasks.labels import BOOLEANS, as_id
from i2cl.tasks.task import Task

N_LONGEST = 20  # texts with the most characters; one of them almost certainly has the most tokens
TYPO_FREQUENCY_RATIO = 5  # a word is a possible typo of one that is at least this many times as frequent
MIN_TYPO_SIMILARITY = 0.85  # ratio of `difflib.SequenceMatcher`: one wrong letter in seven
SEPARATORS = (";", "|", ",")  # in cells with several labels
_CODE = re.compile(r"(?P<prefix>[A-Za-z]*)[ _-]?\d+")


@dataclass(frozen=True)
class Survey:
    """Statistics of a task's training rows.

    Attributes:
        rows: number of rows.
        distinct: number of distinct texts.
        labels: number of rows of each label.
        typos: labels that may be misspelled, each with the label that was probably meant.
        contradictions: texts whose rows have different labels, and these labels.
        longest: the texts with the most characters.
        codes: kind of labels that mean nothing to a model, see `kind_of_codes`; "" for words.
        separator: separator of multi-label cells that was probably not given; "" if there is none.
        unlabelled: rows without any label, in a multi-label task.
    """

    rows: int
    distinct: int
    labels: dict[str, int]
    typos: dict[str, str]
    contradictions: dict[str, list[str]]
    longest: tuple[str, ...]
    codes: str
    separator: str = ""
    unlabelled: int = 0

    @classmethod
    def from_task(cls, task: Task) -> "Survey":
        """Compute the statistics of a task's training rows."""
        counts = Counter(label for row in task.train for label in row.ids)
        labels = {word: counts[index] for index, word in enumerate(task.labels)}
        ids_by_text: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for row in task.train:
            ids_by_text[row.text].add(row.ids)
        return cls(
            rows=len(task.train),
            distinct=len(ids_by_text),
            labels=labels,
            typos=likely_typos(labels),
            contradictions={
                text: [task.labels[index] for index in sorted({index for ids in sets for index in ids})]
                for text, sets in ids_by_text.items()
                if len(sets) > 1
            },
            longest=tuple(nlargest(N_LONGEST, ids_by_text, key=len)),
            codes=kind_of_codes(task.labels),
            separator="" if task.multi_label else likely_separator(task.labels),
            unlabelled=sum(not row.ids for row in task.train),
        )

    def record(self) -> dict[str, Any]:
        """Return counts and likely mistakes as JSON-serializable values."""
        names = ("rows", "distinct", "labels", "unlabelled", "separator", "codes", "typos", "contradictions")
        return {name: getattr(self, name) for name in names}


def likely_typos(counts: dict[str, int]) -> dict[str, str]:
    """Find label words that may be misspellings of a more frequent label.

    Words match if they differ only in case, or if one is rare (`TYPO_FREQUENCY_RATIO`) and they are similar
    (`MIN_TYPO_SIMILARITY`).

    Args:
        counts: number of rows of each label word.

    Returns:
        For each suspicious word, the word that was probably meant.
    """
    pairs = {}
    words = sorted(counts, key=lambda word: (counts[word], word))
    for position, word in enumerate(words):
        for other in reversed(words[position + 1 :]):
            similarity = SequenceMatcher(None, word.casefold(), other.casefold()).ratio()
            rare = counts[other] >= TYPO_FREQUENCY_RATIO * counts[word] and as_id(word) is None
            if similarity == 1 or (rare and similarity >= MIN_TYPO_SIMILARITY):
                pairs[word] = other
                break
    return pairs


def likely_separator(labels: Iterable[str]) -> str:
    """Return the separator if some labels look like several others, such as "billing;refund", or ""."""
    words = set(labels)
    for separator in SEPARATORS:
        joined = [word for word in words if separator in word]
        parts = {part.strip() for word in joined for part in word.split(separator)}
        if joined and parts & words:
            return separator
    return ""


def kind_of_codes(labels: Iterable[str]) -> str:
    """Return the kind of labels that mean nothing to a model, or "" if at least one label is a word.

    The kinds are "numbers", "booleans", "letters", "abbreviations" (F, PE) and "codes" (A1, LABEL_0).
    """
    words = list(labels)
    if {word.casefold() for word in words} <= set(BOOLEANS):
        return "booleans"
    if all(as_id(word.removeprefix("-")) is not None for word in words):
        return "numbers"
    if all(len(word) == 1 and word.isascii() and word.isalnum() for word in words):
        return "letters"
    short = all(len(word) <= 2 and word.isascii() and word.isupper() for word in words)
    if short and min(map(len, words)) == 1:
        return "abbreviations"
    matches = [_CODE.fullmatch(word) for word in words]
    prefixes = {match["prefix"] for match in matches if match}
    if all(matches) and (len(prefixes) == 1 or max(map(len, prefixes)) == 1):
        return "codes"
    return ""
