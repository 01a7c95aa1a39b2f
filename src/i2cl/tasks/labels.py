"""Label words: Unicode normalization, and which class a label cell of a file names."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from i2cl.errors import I2CLError

BOOLEANS = ("false", "true")  # in the order of their class ids
_MAX_ID_DIGITS = 9
_MAX_NAMED = 5  # label words in a message
# Control and format characters (zero-width space, byte order mark, word joiner) and all kinds of space.
_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})


def is_blank(text: str) -> bool:
    """Return whether a text has no visible characters: it is empty, or only spaces, U+200B and the like."""
    return all(
        character.isspace() or unicodedata.category(character) in _INVISIBLE_CATEGORIES for character in text
    )


def normalize_word(word: str) -> str:
    """Return a label word or task name in Unicode NFC: macOS and some exports write 'é' as 'e' + accent."""
    return unicodedata.normalize("NFC", word)


def name_labels(words: Sequence[str]) -> str:
    """Return up to five label words for a sentence: "'a', 'b' or 'c'"."""
    names = [repr(word) for word in words[:_MAX_NAMED]]
    if len(words) > _MAX_NAMED:
        names.append(f"{len(words) - _MAX_NAMED} more")
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class LabelLookup:
    """Maps label cells to class ids: by exact word, else ignoring case, else by number.

    Words are compared in Unicode NFC. Underscores in a cell also match spaces, as in names of intents.
    Numbers are class ids, unless label words are numbers. They count from 1 if those in the file run from 1
    to the number of words, else from 0. If the cells are booleans, false is 0 and true is 1.

    Args:
        labels: label words in the order of their ids, or a dict from each code in the file to its label word;
            several codes may have the same word.
        cells: label cells of the file, which decide how numbers and booleans are read.

    Attributes:
        labels: label words in the order of their ids.
        allowed: the values that a label cell may have, for error messages.

    Raises:
        I2CLError: if ``labels`` is a dict and the cells contain its words instead of its codes.
    """

    def __init__(self, labels: Sequence[str] | Mapping[Any, str], cells: Iterable[object] = ()) -> None:
        cells = list(cells)
        words = {str(cell_word(cell)).casefold() for cell in cells}
        codes = {}
        if isinstance(labels, Mapping):
            codes = {normalize_word(str(code)): normalize_word(word) for code, word in labels.items()}
        self.labels = tuple(dict.fromkeys(codes.values()) if codes else map(normalize_word, labels))
        known = set(map(str.casefold, self.labels))
        if codes and words.isdisjoint(map(str.casefold, codes)) and not words.isdisjoint(known):
            pairs = ",".join(f"{code}={word}" for code, word in codes.items())
            raise I2CLError(
                f"no row has the label {next(iter(codes))!r}: write NAME=CODE, such as --labels {pairs}, or "
                "in Python a dict from code to name"
            )
        if words and not codes and len(self.labels) == 2 and words <= set(BOOLEANS) - known:
            codes = dict(zip(BOOLEANS, self.labels, strict=True))
        ids = {as_id(cell) for cell in cells}
        first = 1 if None not in ids and 0 not in ids and {1, len(self.labels)} <= ids else 0
        self._ids = {word: index for index, word in enumerate(self.labels)}
        self._ids |= {code: self._ids[word] for code, word in codes.items()}
        counts = Counter(map(str.casefold, self._ids))
        # words that differ only in case need an exact match
        folded = {word.casefold(): index for word, index in self._ids.items()}
        self._folded = {word: index for word, index in folded.items() if counts[word] == 1}
        self._numbers = {as_integer(word): index for word, index in self._ids.items()}
        self.allowed = ", ".join(f"{code} ({word})" for code, word in codes.items()) or ", ".join(self.labels)
        if not codes and self._numbers.keys() == {None}:
            self._numbers = dict(enumerate(range(len(self.labels)), start=first))
            last = first + len(self.labels) - 1
            id_range = f"ids {first} to {last}" if last > first else f"id {first}"
            self.allowed += f" (or the {id_range})"

    def find(self, label: object) -> int | None:
        """Return the class id that a cell names, or None."""
        word = str(label).strip() if isinstance(label, float) else cell_word(label)
        if word is None:
            return None
        folded, number = word.casefold(), as_integer(word)
        tables = (self._ids, word), (self._folded, folded), (self._folded, folded.replace("_", " "))
        index = next((table[key] for table, key in tables if key in table), None)
        return self._numbers.get(number) if index is None and number is not None else index


def cell_word(cell: object) -> str | None:
    """Return a label cell as a word in Unicode NFC, or None if it is not a word, an id or a boolean."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int | float):
        number = as_integer(cell)
        return None if number is None else str(number)
    return normalize_word(cell.strip()) if isinstance(cell, str) else None


def as_id(cell: object) -> int | None:
    """Return a cell as a class id, or None if it is not one: an integer from 0, see `as_integer`."""
    number = as_integer(cell)
    return None if number is None or number < 0 else number


def as_integer(cell: object) -> int | None:
    """Return a cell as an integer, or None if it is not one.

    1.0 is accepted as 1: pandas writes integers as floats in columns with missing values.
    """
    word = str(cell).strip().removesuffix(".0")
    digits = word.removeprefix("-")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_ID_DIGITS
    return int(word) if is_number and not isinstance(cell, bool) else None


def sort_labels(words: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct label words, sorted: by value if all are numbers, else alphabetically."""
    distinct = set(words)
    if any(as_integer(word) is None for word in distinct):
        return tuple(sorted(distinct))
    return tuple(sorted(distinct, key=lambda word: (int(word.removesuffix(".0")), word)))


def require_confidence(threshold: Any) -> None:
    """Raise I2CLError unless a confidence threshold is above 0 and at most 1, or None."""
    if threshold is not None and not (isinstance(threshold, Real) and 0 < float(threshold) <= 1):
        raise I2CLError(f"min_confidence {threshold!r} is not a probability: give a number above 0, up to 1")


def predicted_labels(
    probabilities: Sequence[float],
    thresholds: Sequence[float] | None = None,
    min_confidence: float | None = None,
) -> tuple[int, ...]:
    """Return the indices of the labels that a text gets.

    Args:
        probabilities: probability of each label.
        thresholds: minimum probability of each label of a multi-label task, which may get any number of
            labels. None: the most probable label.
        min_confidence: replaces the thresholds. Without thresholds, the most probable label needs at least
            this probability.
    """
    if thresholds is None:
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return (best,) if min_confidence is None or probabilities[best] >= min_confidence else ()
    minimum = thresholds if min_confidence is None else [min_confidence] * len(thresholds)
    pairs = enumerate(zip(probabilities, minimum, strict=True))
    return tuple(index for index, (probability, threshold) in pairs if probability >= threshold)
