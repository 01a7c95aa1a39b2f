"""Label words: which one a cell of a label column names, and which ones a file has."""

from collections import Counter
from collections.abc import Iterable, Sequence

MOST_DIGITS = 9  # of a class id
SHORTEST = 4  # letters from which two words that differ in one of them may be the same
RARE = 5  # how many times as frequent the other one is, where a word that differs in a letter is a slip


class LabelLookup:
    """Class ids by label word or by number: exact words first, then in another case, then numbers.
    An underscore in a cell may stand for a space, as in the names of intents. ``first`` is what the first
    class is called where a file has numbers: 0 or 1.
    """

    def __init__(self, labels: Sequence[str], first: int = 0) -> None:
        self.labels = tuple(labels)
        self.first = first
        self._exact = {word: index for index, word in enumerate(self.labels)}
        folded = [word.casefold() for word in self.labels]
        counts = Counter(folded)
        # Two words that differ only in case cannot be told apart without it.
        self._folded = {word: index for index, word in enumerate(folded) if counts[word] == 1}

    @classmethod
    def of(cls, labels: Sequence[str], cells: Iterable[object]) -> "LabelLookup":
        """One that counts from 1 where a file's cells are numbers that do, from 1 to the number of words."""
        ids = {as_id(cell) for cell in cells}
        counted = None not in ids and 0 not in ids and {1, len(labels)} <= ids
        return cls(labels, first=1 if counted else 0)

    def find(self, label: object) -> int | None:
        """The class id that `label` names, or None."""
        if isinstance(label, bool) or not isinstance(label, int | float | str):
            return None
        word = str(label).strip()
        folded = word.casefold()
        keys = (self._exact, word), (self._folded, folded), (self._folded, folded.replace("_", " "))
        for table, key in keys:
            if key in table:
                return table[key]
        number = as_id(word)
        if str(number) in self._exact:  # 1.0 is the label word "1" where there is one
            return self._exact[str(number)]
        place = -1 if number is None else number - self.first
        return place if 0 <= place < len(self.labels) else None

    def allowed(self) -> str:
        """What may stand in a label column, for error messages."""
        last = self.first + len(self.labels) - 1
        return f"{', '.join(self.labels)} (or the ids {self.first} to {last})"


def as_id(cell: object) -> int | None:
    """The number that a cell is, unless it is another thing. 1.0 is 1: so pandas writes ids beside gaps."""
    word = str(cell).strip().removesuffix(".0")
    whole = word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS
    return int(word) if whole and not isinstance(cell, bool) else None


def ordered(words: Iterable[str]) -> tuple[str, ...]:
    """Distinct label words in the order of their ids: of the alphabet, or that of numbers."""
    distinct = set(words)
    ids = {word: as_id(word) for word in distinct}
    if None in ids.values():
        return tuple(sorted(distinct))
    return tuple(sorted(distinct, key=lambda word: (ids[word] or 0, word)))


def slips(counts: dict[str, int]) -> list[tuple[str, str]]:
    """Label words that look like another one written otherwise, each with that one, which has more rows.
    They differ in case or plural, or a rare one (`RARE`) differs by a letter.
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
    short, long = sorted((" ".join(word.casefold().split()) for word in (one, other)), key=len)
    return long in {short, f"{short}s", f"{short}es"} or (short[-1:] == "y" and long == f"{short[:-1]}ies")


def _a_letter_apart(one: str, other: str) -> bool:
    """One letter more, less, another or in the place of its neighbour."""
    a, b = one.casefold(), other.casefold()
    if min(len(a), len(b)) < SHORTEST or as_id(a) is not None:
        return False
    pairs = enumerate(zip(a, b, strict=False))
    first = next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))  # that differs
    a, b = a[first:], b[first:]
    swapped = a[:2] == b[:2][::-1] and a[2:] == b[2:]
    return swapped or a[1:] == b[1:] or a == b[1:] or a[1:] == b
