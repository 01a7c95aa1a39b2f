"""Label words: which one a cell of a label column names, and which ones a file has."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from i2cl.errors import I2CLError
from i2cl.tasks.text import fold, normalize_word

MOST_DIGITS = 9  # of a class id
SHORTEST = 4  # letters from which two words that differ in one of them may be the same
RARE = 5  # how many times as frequent the other one is, where a word that differs in a letter is a slip
BOOLEANS = {"false": 0, "true": 1}  # class ids of booleans, as in numpy and pandas
_CODE = re.compile(r"(?P<prefix>[A-Za-z]*)[ _-]?\d+")


class LabelLookup:
    """Finds the class id of a label cell: exact words first, then ignoring case, then numbers.

    An underscore in a cell may stand for a space, as in the names of intents. Words are compared in Unicode
    NFC.

    Args:
        labels: label words in the order of their ids, or a dict from each code that a file may have to its
            label word; several codes may have the same word.
        first: number of the first class in files that have numbers: 0 or 1.
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
        # Two words that differ only in case cannot be told apart without it.
        self._folded = {
            word.casefold(): index for word, index in self._exact.items() if counts[word.casefold()] == 1
        }
        self._numbers = {as_id(code): index for code, index in self.codes.items()}
        if not codes:
            self._numbers = {first + index: index for index in ids.values()}

    @classmethod
    def of(cls, labels: Sequence[str] | Mapping[str, str], cells: Iterable[object]) -> "LabelLookup":
        """Create the lookup for a file with these label cells.

        Numbers count from 1 if they run from 1 to the number of words; false and true are 0 and 1. Raises
        I2CLError if labels is a dict and the cells hold its words, not its codes.
        """
        cells = list(cells)
        words = {str(cell_word(cell)).casefold() for cell in cells}
        if isinstance(labels, Mapping):
            lookup = cls(labels)
            codes = {code.casefold() for code in map(normalize_word, labels)}
            if words.isdisjoint(codes) and not words.isdisjoint(map(str.casefold, lookup.labels)):
                pairs = ",".join(f"{code}={word}" for code, word in labels.items())
                cure = f"write NAME=CODE, such as --labels {pairs}, or in Python a dict from code to name"
                raise I2CLError(f"no row has the label {next(iter(labels))!r}: {cure}")
            return lookup
        if words and len(labels) == 2 and words <= BOOLEANS.keys() - set(map(str.casefold, labels)):
            return cls({code: labels[place] for code, place in BOOLEANS.items()})
        ids = {as_id(cell) for cell in cells}
        counted = None not in ids and 0 not in ids and {1, len(labels)} <= ids
        return cls(labels, first=1 if counted else 0)

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
        if str(number) in self._exact:  # 1.0 is the label word "1" where there is one
            return self._exact[str(number)]
        return None if number is None else self._numbers.get(number)

    def allowed(self) -> str:
        """Return what may stand in a label column, for error messages."""
        if self.codes:
            return ", ".join(f"{code} ({self.labels[place]})" for code, place in self.codes.items())
        last = self.first + len(self.labels) - 1
        return f"{', '.join(self.labels)} (or the ids {self.first} to {last})"


def cell_word(cell: object) -> str | None:
    """Return a label cell as a word in Unicode NFC; None for a cell that is no word, id or boolean."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int | float):
        number = as_id(cell)
        return None if number is None else str(number)
    return normalize_word(cell.strip()) if isinstance(cell, str) else None


def as_id(cell: object) -> int | None:
    """Return the class id that a cell is, or None. 1.0 is 1: pandas writes ids beside missing values so."""
    word = str(cell).strip().removesuffix(".0")
    whole = word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS
    return int(word) if whole and not isinstance(cell, bool) else None


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
    found = [_CODE.fullmatch(word) for word in words]
    prefixes = {one["prefix"] for one in found if one}
    if all(found) and (len(prefixes) == 1 or max(map(len, prefixes)) == 1):
        return "codes"
    return ""


def ordered(words: Iterable[str]) -> tuple[str, ...]:
    """Sort distinct label words: numbers by value, others alphabetically."""
    distinct = set(words)
    ids = {word: as_id(word) for word in distinct}
    if None in ids.values():
        return tuple(sorted(distinct))
    return tuple(sorted(distinct, key=lambda word: (ids[word] or 0, word)))


def slips(counts: dict[str, int]) -> list[tuple[str, str]]:
    """Find label words that may be misspellings of another label, which has more rows.

    They differ in case or plural, or one is rare (`RARE`) and differs by a letter.

    Returns:
        Pairs of a suspicious word and the word that may have been meant.
    """
    pairs = []
    words = sorted(counts, key=lambda word: (counts[word], word))
    for place, word in enumerate(words):
        for other in reversed(words[place + 1 :]):
            rare = counts[other] >= RARE * counts[word]
            if _same_but_written(word, other) or (rare and _a_letter_apart(word, other)):
                pairs.append((word, other))
                break
    return pairs


def _same_but_written(one: str, other: str) -> bool:
    short, long = sorted(map(fold, (one, other)), key=len)
    return long in {short, f"{short}s", f"{short}es"} or (short[-1:] == "y" and long == f"{short[:-1]}ies")


def _a_letter_apart(one: str, other: str) -> bool:
    """Return whether one insertion, deletion, substitution or swap of neighbours makes them equal."""
    a, b = one.casefold(), other.casefold()
    if min(len(a), len(b)) < SHORTEST or as_id(a) is not None:
        return False
    pairs = enumerate(zip(a, b, strict=False))
    first = next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))  # that differs
    a, b = a[first:], b[first:]
    swapped = a[:2] == b[:2][::-1] and a[2:] == b[2:]
    return swapped or a[1:] == b[1:] or a == b[1:] or a[1:] == b
