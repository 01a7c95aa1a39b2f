"""Label words: which class a label cell names, and likely mistakes in the labels of a file."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from i2cl.errors import I2CLError
from i2cl.tasks.text import fold, normalize_word

MAX_ID_DIGITS = 9
MIN_TYPO_LENGTH = 4  # characters; shorter words that differ in one character are usually different words
TYPO_FREQUENCY_RATIO = 5  # a word is a possible typo of one that is at least this many times as frequent
BOOLEANS = {"false": 0, "true": 1}  # class ids of booleans, as in numpy and pandas
_CODE = re.compile(r"(?P<prefix>[A-Za-z]*)[ _-]?\d+")


class LabelLookup:
    """Maps label cells to class ids: by exact word, else ignoring case, else by number.

    Underscores in a cell also match spaces, as in names of intents. Words are compared in Unicode NFC.

    Args:
        labels: label words in the order of their ids, or a dict from each code in the file to its label word;
            several codes may have the same word.
        first: number of the first class in files with numeric labels: 0 or 1.
    """

    def __init__(self, labels: Sequence[str] | Mapping[str, str], first: int = 0) -> None:
        codes = labels if isinstance(labels, Mapping) else {}
        words = labels.values() if isinstance(labels, Mapping) else labels
        self.labels = tuple(map(normalize_word, dict.fromkeys(words) if codes else words))
        self.first = first
        self.codes = {code: self.labels.index(normalize_word(word)) for code, word in codes.items()}
        ids = {word: index for index, word in enumerate(self.labels)}
        self._exact = ids | {normalize_word(code): index for code, index in self.codes.items()}
        counts = Counter(word.casefold() for word in self._exact)
        # words that differ only in case need an exact match
        self._folded = {
            word.casefold(): index for word, index in self._exact.items() if counts[word.casefold()] == 1
        }
        self._numbers = {as_id(code): index for code, index in self.codes.items()}
        if not codes:
            self._numbers = {first + index: index for index in ids.values()}

    @classmethod
    def from_cells(cls, labels: Sequence[str] | Mapping[str, str], cells: Iterable[object]) -> "LabelLookup":
        """Create the lookup for a file with these label cells.

        Numbers count from 1 if they run from 1 to the number of words; false and true are 0 and 1.

        Raises:
            I2CLError: if labels is a dict and the cells contain its words instead of its codes.
        """
        cells = list(cells)
        words = {str(cell_word(cell)).casefold() for cell in cells}
        if isinstance(labels, Mapping):
            lookup = cls(labels)
            codes = {code.casefold() for code in map(normalize_word, labels)}
            if words.isdisjoint(codes) and not words.isdisjoint(map(str.casefold, lookup.labels)):
                pairs = ",".join(f"{code}={word}" for code, word in labels.items())
                raise I2CLError(
                    f"no row has the label {next(iter(labels))!r}: write NAME=CODE, such as --labels "
                    f"{pairs}, or in Python a dict from code to name"
                )
            return lookup
        if words and len(labels) == 2 and words <= BOOLEANS.keys() - set(map(str.casefold, labels)):
            return cls({code: labels[index] for code, index in BOOLEANS.items()})
        ids = {as_id(cell) for cell in cells}
        from_one = None not in ids and 0 not in ids and {1, len(labels)} <= ids
        return cls(labels, first=1 if from_one else 0)

    def find(self, label: object) -> int | None:
        """Return the class id that a cell names, or None."""
        word = str(label).strip() if isinstance(label, float) else cell_word(label)
        if word is None:
            return None
        folded = word.casefold()
        keys = (self._exact, word), (self._folded, folded), (self._folded, folded.replace("_", " "))
        for table, key in keys:
            if key in table:
                return table[key]
        number = as_id(word)
        if str(number) in self._exact:  # 1.0 means the label word "1" if there is one
            return self._exact[str(number)]
        return None if number is None else self._numbers.get(number)

    def allowed(self) -> str:
        """Return the values that a label cell may have, for error messages."""
        if self.codes:
            return ", ".join(f"{code} ({self.labels[index]})" for code, index in self.codes.items())
        last = self.first + len(self.labels) - 1
        return f"{', '.join(self.labels)} (or the ids {self.first} to {last})"


def cell_word(cell: object) -> str | None:
    """Return a label cell as a word in Unicode NFC, or None if it is not a word, an id or a boolean."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int | float):
        number = as_id(cell)
        return None if number is None else str(number)
    return normalize_word(cell.strip()) if isinstance(cell, str) else None


def as_id(cell: object) -> int | None:
    """Return a cell as a class id, or None if it is not one.

    1.0 is accepted as 1: pandas writes integers as floats in columns with missing values.
    """
    word = str(cell).strip().removesuffix(".0")
    is_number = word.isascii() and word.isdecimal() and len(word) <= MAX_ID_DIGITS
    return int(word) if is_number and not isinstance(cell, bool) else None


def kind_of_codes(labels: Iterable[str]) -> str:
    """Return "numbers", "booleans", "letters" or "codes" (A1, LABEL_0) if labels mean nothing to a model.

    Returns "" if at least one label is a word.
    """
    words = list(labels)
    if {word.casefold() for word in words} <= BOOLEANS.keys():
        return "booleans"
    if all(as_id(word.removeprefix("-")) is not None for word in words):
        return "numbers"
    if all(len(word) == 1 and word.isascii() and word.isalnum() for word in words):
        return "letters"
    matches = [_CODE.fullmatch(word) for word in words]
    prefixes = {match["prefix"] for match in matches if match}
    if all(matches) and (len(prefixes) == 1 or max(map(len, prefixes)) == 1):
        return "codes"
    return ""


def sort_labels(words: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct label words, sorted: by value if all are numbers, else alphabetically."""
    distinct = set(words)
    ids = {word: as_id(word) for word in distinct}
    if None in ids.values():
        return tuple(sorted(distinct))
    return tuple(sorted(distinct, key=lambda word: (ids[word] or 0, word)))


def likely_typos(counts: dict[str, int]) -> list[tuple[str, str]]:
    """Find label words that may be misspellings of a more frequent label.

    Words match if they differ only in case or plural, or if one is rare (`TYPO_FREQUENCY_RATIO`) and differs
    by one character.

    Args:
        counts: number of rows of each label word.

    Returns:
        Pairs of a suspicious word and the word that was probably meant.
    """
    pairs = []
    words = sorted(counts, key=lambda word: (counts[word], word))
    for position, word in enumerate(words):
        for other in reversed(words[position + 1 :]):
            is_rare = counts[other] >= TYPO_FREQUENCY_RATIO * counts[word]
            if _same_but_case_or_plural(word, other) or (is_rare and _is_one_edit_apart(word, other)):
                pairs.append((word, other))
                break
    return pairs


def _same_but_case_or_plural(first: str, second: str) -> bool:
    short, long = sorted(map(fold, (first, second)), key=len)
    return long in {short, f"{short}s", f"{short}es"} or (short[-1:] == "y" and long == f"{short[:-1]}ies")


def _is_one_edit_apart(first: str, second: str) -> bool:
    """Return whether one insertion, deletion, substitution or swap of neighbours makes the words equal."""
    a, b = first.casefold(), second.casefold()
    if min(len(a), len(b)) < MIN_TYPO_LENGTH or as_id(a) is not None:
        return False
    pairs = enumerate(zip(a, b, strict=False))
    start = next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))  # first difference
    a, b = a[start:], b[start:]
    swapped = a[:2] == b[:2][::-1] and a[2:] == b[2:]
    return swapped or a[1:] == b[1:] or a == b[1:] or a[1:] == b
