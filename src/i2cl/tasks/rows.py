"""Read labelled rows (for `fit` and `eval`) and unlabelled texts (for `predict`).

Errors name the file and the rows. File formats are read by `i2cl.tasks.formats`.
"""

import json
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from i2cl.errors import HALF_PAIR, I2CLError
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.formats import ROW_SUFFIXES, STDIN, RowFormat, is_row_file, rows_or_errors
from i2cl.tasks.labels import LabelLookup, as_id, cell_word, ordered
from i2cl.tasks.row import Columns, Row, shown
from i2cl.tasks.task import Example
from i2cl.tasks.text import fold, is_blank

T = TypeVar("T")
U = TypeVar("U")

MIN_SWAPPED_ROWS = 4
SWAPPED_REPEATS = 3  # each text stands in so many rows on average, or there are two texts at most
SWAPPED_SHARE = 0.8  # of the rows have a label of their own
_MAX_NAMED_ROWS = 20  # per reason, in one error message
_MAX_REASONS = 6
_SKIP = "or skip such rows (--skip-bad-rows)"


class LabelWarning(UserWarning):
    """Two label words look like one class that is written in two ways."""


class Query(NamedTuple):
    """A text to classify, the columns to repeat beside its answer, and why the row is unusable, if it is."""

    text: str
    kept: tuple[object, ...] = ()
    error: RowError | None = None


class BadRows:
    """Unusable rows of a file, grouped by reason. Memory does not grow with their number."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = "stdin" if source == STDIN else source
        self._first: RowError | None = None
        self._rows: dict[str, list[str]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, *errors: RowError) -> None:
        """Count more rows."""
        for error in errors:
            self.count += 1
            self._first = self._first or error
            if error.why in self._rows or len(self._rows) < _MAX_REASONS:
                self._counts[error.why] += 1
                rows = self._rows.setdefault(error.why, [])
                if len(rows) < _MAX_NAMED_ROWS:
                    rows.append(error.place.removeprefix(f"{self._source} "))

    def summary(self) -> str:
        """Return each reason once, with the rows that it applies to."""
        parts = []
        for why, rows in self._rows.items():
            kind = rows[0].split()[0]
            named = [row.removeprefix(f"{kind} ") for row in rows]
            more = self._counts[why] - len(rows)
            named += [f"{more} more"] if more else []
            which = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
            parts.append(f"{kind}{'s' * (len(named) > 1)} {which}: {why}")
        if others := self.count - self._counts.total():
            parts.append(f"and {others} more rows")
        return "; ".join(parts)

    def error(self, rows: int, *, skip: bool) -> RowError:
        """Return the error for a file with so many rows. ``skip``: no row is left without the bad ones."""
        line = str(self._first)
        if self.count > 1:
            line = f"{self._source}: {self.count} of {rows} rows cannot be used: {self.summary()}"
        if skip:
            return RowError(f"{line}; no row is left without them")
        return RowError(line if self.count == rows else f"{line}; {_SKIP}")


def read_labelled(
    path: Path,
    labels: Sequence[str] | Mapping[str, str] | LabelLookup | None = None,
    text_column: str = "text",
    label_column: str = "label",
    *,
    skip: bool = False,
) -> tuple[tuple[Example, ...], LabelLookup]:
    """Read the labelled examples of a file.

    A label cell is a label word (exact, else ignoring case) or a class id, counted from 0 or from 1; a cell
    that could be either counts as the word.

    Args:
        path: the file.
        labels: label words in the order of their ids, a dict from each code in the file to its label word,
            or the lookup of another file of the same task. Default: the distinct labels of the file, sorted.
        text_column: name of the column or key that holds the text.
        label_column: name of the column or key that holds the label.
        skip: leave out unusable rows, with a `ReadAsWarning` that names them.

    Returns:
        The examples, and how their labels were read.

    Raises:
        I2CLError: if the file cannot be read, or naming all rows that cannot be used.
    """
    if not is_row_file(path):
        known = ", ".join(ROW_SUFFIXES)
        raise I2CLError(f"{path}: cannot read files ending in {path.suffix!r}: use one of {known}")
    rows = list(rows_or_errors(str(path), Columns(text_column, label_column)))
    bad = BadRows(str(path))
    good = _usable_rows(rows, partial(_usable, worded=labels is None), bad)
    if bad.count and (not good or (labels is None and not skip)):  # label words come from all rows
        raise bad.error(len(rows), skip=skip)
    _require_not_swapped(path, good, text_column, label_column, labels)
    if labels is None:
        lookup = LabelLookup(_derive_labels(path, good))
    elif isinstance(labels, LabelLookup):
        lookup = labels
    else:
        lookup = LabelLookup.of(labels, (row.values[1] for row in good))
    examples = _usable_rows(good, lambda row: Example(_text(row), _label(row, lookup)), bad)
    if bad.count and not (skip and examples):
        raise bad.error(len(rows), skip=skip)
    if bad.count:
        line = f"{path}: {bad.count} of {len(rows)} rows are left out: {bad.summary()}"
        warnings.warn(line, ReadAsWarning, stacklevel=2)
    return tuple(examples), lookup


def refused_rows(
    path: Path,
    labels: Sequence[str] | LabelLookup | None = None,
    text_column: str = "text",
    label_column: str = "label",
) -> tuple[list[str], LabelLookup | None]:
    """Return the error of every unusable row of a labelled file, and how given labels are read there.

    The file has columns ``text`` and ``label``. An error that keeps the rest from being read comes last.
    """
    rows: list[Row | RowError] = []
    try:
        rows += rows_or_errors(str(path), Columns(text_column, label_column))
    except RowError as error:
        rows.append(error)
    if labels is None or isinstance(labels, LabelLookup):
        lookup = labels
    else:
        lookup = LabelLookup.of(labels, (row.values[1] for row in rows if isinstance(row, Row)))
    refused = []
    for row in rows:
        try:
            usable = _usable(row, worded=lookup is None)
            if lookup is not None:
                _label(usable, lookup)
        except RowError as error:
            refused.append(str(error))
    return refused, lookup


def read_queries(
    source: str,
    kind: RowFormat | None = None,
    column: str = "text",
    kept: tuple[str, ...] = (),
    *,
    skip: bool = False,
) -> Iterator[Query]:
    """Read the texts of a file, or of stdin for ``-``, one at a time.

    Args:
        source: the file.
        kind: its format. Default: by its ending.
        column: name of the column or key that holds the text.
        kept: columns to pass on as they are.
        skip: yield unusable rows too, with an empty text and their error.

    Raises:
        I2CLError: if the file cannot be read.
        RowError: on the first row that cannot be used, unless they are skipped.
    """
    with closing(rows_or_errors(source, Columns(column, kept=kept), kind)) as rows:  # or it stays half read
        for row in rows:
            try:
                if isinstance(row, RowError):
                    raise row
                query = Query(_text(row), _kept(row, kept))
            except RowError as error:
                if not skip:
                    raise RowError(f"{error.why}; {_SKIP}", error.place) from None
                query = Query("", _kept_or_empty(row, kept), error)
            yield query


def check_queries(
    source: str,
    kind: RowFormat | None = None,
    column: str = "text",
    kept: tuple[str, ...] = (),
    *,
    skip: bool = False,
) -> BadRows:
    """Read a whole file as `read_queries` would, and return its unusable rows.

    Raises:
        I2CLError: if the file cannot be read.
        RowError: naming all unusable rows; if they are skipped, only where no row is left without them.
    """
    bad, count = BadRows(source), 0
    for query in read_queries(source, kind, column, kept, skip=True):
        count += 1
        if query.error is not None:
            bad.add(query.error)
    if bad.count and (not skip or bad.count == count):
        raise bad.error(count, skip=skip)
    return bad


def _usable_rows(rows: Sequence[T], use: Callable[[T], U], bad: BadRows) -> list[U]:
    """Apply ``use`` to the rows; errors are added to ``bad``."""
    results = []
    for row in rows:
        try:
            results.append(use(row))
        except RowError as error:
            bad.add(error)
    return results


def _usable(row: Row | RowError, *, worded: bool) -> Row:
    """Return the row if its text can be used and, if ``worded``, its label is a word."""
    if isinstance(row, RowError):
        raise row
    _text(row)
    if worded:
        _word(row)
    return row


def _text(row: Row) -> str:
    text = row.values[0]
    if text is None or (isinstance(text, str) and is_blank(text)):
        raise RowError("the text is empty: fill it in or delete the row", row.place)
    if not isinstance(text, str):
        raise RowError(f"the text is {shown(text)}, not a string: put it in quotes", row.place)
    if HALF_PAIR.search(text):
        raise RowError("the text holds half a surrogate pair: repair the escape or delete the row", row.place)
    return text


def _kept(row: Row, names: tuple[str, ...]) -> tuple[object, ...]:
    values = row.values[1:]
    for name, value in zip(names, values, strict=True):
        if HALF_PAIR.search(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):
            cure = "repair it, or do not keep it"
            raise RowError(f"column {name!r} holds half a surrogate pair: {cure}", row.place)
    return values


def _kept_or_empty(row: Row | RowError, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return the kept columns of an unusable row, or None for each if these are unusable too."""
    try:
        if isinstance(row, Row):
            return _kept(row, names)
    except RowError:
        pass
    return (None,) * len(names)


def _label(row: Row, lookup: LabelLookup) -> int:
    if (index := lookup.find(row.values[1])) is None:
        problem = f"label {shown(row.values[1])} is not one of {lookup.allowed()}"
        raise RowError(f"{problem}: correct it", row.place)
    return index


def _require_not_swapped(
    path: Path, rows: Sequence[Row], text_column: str, label_column: str, labels: object
) -> None:
    """Raise RowError if the text column seems to hold the labels, and the label column the texts.

    Then almost every row has a label of its own, and there are only a few different texts.
    """
    texts = {str(row.values[0]).strip() for row in rows}
    found = {str(row.values[1]).strip() for row in rows}
    few = len(texts) <= max(2, len(rows) // SWAPPED_REPEATS)
    if labels is None and len(rows) >= MIN_SWAPPED_ROWS and few and len(found) >= SWAPPED_SHARE * len(rows):
        some = ", ".join(shown(text) for text in sorted(texts)[:4]) + ", ..." * (len(texts) > 4)
        what = f"{len(found)} labels and {len(texts)} texts ({some}) in {len(rows)} rows"
        cure = f"text_column={label_column!r}, label_column={text_column!r}"
        options = f"--text-column {shlex.quote(label_column)} --label-column {shlex.quote(text_column)}"
        raise RowError(f"{path}: {what}: are the columns swapped? Pass {cure} ({options})")


def _derive_labels(path: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the label words of a file, sorted.

    Numbers from 1, such as stars, are taken as words. Ids from 0 are refused, because they mean nothing.
    """
    words = set(map(_word, rows))
    if any(as_id(word) == 0 for word in words) and all(as_id(word) is not None for word in words):
        some = ", ".join(ordered(words)[:8])
        cure = "pass the label words (--labels), one for each in this order"
        raise RowError(f"{path}: the labels are numbers ({some}): {cure}")
    if len(words) == 1:
        cure = "add rows of another class or pass the label words (--labels)"
        raise RowError(f"{path}: every label is {words.pop()!r}: {cure}")
    _warn_of_case(path, words)
    return ordered(words)


def _warn_of_case(path: Path, words: set[str]) -> None:
    alike: dict[str, list[str]] = {}
    for word in sorted(words):
        alike.setdefault(fold(word), []).append(word)
    if pairs := [" and ".join(map(repr, group)) for group in alike.values() if len(group) > 1]:
        line = f"{path}: labels {'; '.join(pairs)} differ in case alone, and each is a class of its own"
        warnings.warn(f"{line}: write them alike if they are one class", LabelWarning, stacklevel=4)


def _word(row: Row) -> str:
    label = row.values[1]
    word = cell_word(label)
    if word is None or is_blank(word):
        cure = "write a label word there, or pass the label words for class ids"
        raise RowError(f"label {shown(label)} is not a word: {cure}", row.place)
    return word
