"""Read labelled rows (for `fit` and `eval`) and unlabelled texts (for `predict`).

Errors name the file and all unusable rows. `i2cl.tasks.formats` reads the file formats.
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

from i2cl.errors import LONE_SURROGATE, I2CLError
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.formats import ROW_SUFFIXES, STDIN, RowFormat, is_row_file, rows_or_errors
from i2cl.tasks.labels import LabelLookup, as_id, cell_word, sort_labels
from i2cl.tasks.row import Columns, Row, preview
from i2cl.tasks.task import Example
from i2cl.tasks.text import fold, is_blank

T = TypeVar("T")
U = TypeVar("U")

# Text and label columns seem to be swapped if a file has at least MIN_SWAPPED_ROWS rows, its texts repeat (at
# most 2 distinct texts, or MIN_SWAPPED_REPEATS rows per text on average), and its labels hardly repeat.
MIN_SWAPPED_ROWS = 4
MIN_SWAPPED_REPEATS = 3
MIN_SWAPPED_LABELS = 0.8  # distinct labels per row
_MAX_NAMED_ROWS = 20  # per reason, in one error message
_MAX_REASONS = 6
_SKIP_HINT = "or skip such rows (--skip-bad-rows)"


class LabelWarning(UserWarning):
    """Two label words look like two spellings of one class."""


class Query(NamedTuple):
    """A text to classify.

    Attributes:
        text: the text; empty if the row is unusable.
        kept: values of the columns to repeat in the output.
        error: why the row is unusable; None if it is usable.
    """

    text: str
    kept: tuple[object, ...] = ()
    error: RowError | None = None


class BadRows:
    """Collects the unusable rows of a file, grouped by reason. Memory does not grow with their number.

    Attributes:
        count: number of unusable rows.
    """

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = "stdin" if source == STDIN else source
        self._first: RowError | None = None
        self._rows_by_reason: dict[str, list[str]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, *errors: RowError) -> None:
        """Add the errors of unusable rows."""
        for error in errors:
            self.count += 1
            self._first = self._first or error
            if error.why in self._rows_by_reason or len(self._rows_by_reason) < _MAX_REASONS:
                self._counts[error.why] += 1
                rows = self._rows_by_reason.setdefault(error.why, [])
                if len(rows) < _MAX_NAMED_ROWS:
                    rows.append(error.place.removeprefix(f"{self._source} "))

    def summary(self) -> str:
        """Return each reason once, with the rows that it applies to."""
        parts = []
        for why, rows in self._rows_by_reason.items():
            unit = rows[0].split()[0]  # row, line or item
            numbers = [row.removeprefix(f"{unit} ") for row in rows]
            if unnamed := self._counts[why] - len(rows):
                numbers.append(f"{unnamed} more")
            listed = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
            parts.append(f"{unit}{'s' * (len(numbers) > 1)} {listed}: {why}")
        if others := self.count - self._counts.total():
            parts.append(f"and {others} more rows")
        return "; ".join(parts)

    def error(self, total: int, *, skip: bool) -> RowError:
        """Return the error to raise for a file with ``total`` rows.

        ``skip``: bad rows were to be skipped, but no row is left without them.
        """
        message = str(self._first)
        if self.count > 1:
            message = f"{self._source}: {self.count} of {total} rows cannot be used: {self.summary()}"
        if skip:
            return RowError(f"{message}; no row is left without them")
        return RowError(message if self.count == total else f"{message}; {_SKIP_HINT}")


def read_labelled(
    path: Path,
    labels: Sequence[str] | Mapping[str, str] | LabelLookup | None = None,
    text_column: str = "text",
    label_column: str = "label",
    *,
    skip: bool = False,
) -> tuple[tuple[Example, ...], LabelLookup]:
    """Read the labelled examples of a file.

    A label cell is a label word (exact, else ignoring case) or a class id counted from 0 or from 1. A cell
    that could be either is read as a word.

    Args:
        path: the file.
        labels: label words in the order of their ids, a dict from each code in the file to its label word,
            or the lookup of another file of the same task. Default: the distinct labels of the file, sorted.
        text_column: name of the text column or key.
        label_column: name of the label column or key.
        skip: skip unusable rows, with a `ReadAsWarning` that names them.

    Returns:
        The examples, and the lookup that their labels were read with.

    Raises:
        I2CLError: if the file cannot be read, or has unusable rows; the message names all of them.
    """
    if not is_row_file(path):
        known = ", ".join(ROW_SUFFIXES)
        raise I2CLError(f"{path}: cannot read files ending in {path.suffix!r}: use one of {known}")
    rows = list(rows_or_errors(str(path), Columns(text_column, label_column)))
    bad = BadRows(str(path))
    good = _apply_to_rows(rows, partial(_check, require_word=labels is None), bad)
    if bad.count and (not good or (labels is None and not skip)):  # label words are derived from all rows
        raise bad.error(len(rows), skip=skip)
    _require_not_swapped(path, good, text_column, label_column, labels)
    if labels is None:
        lookup = LabelLookup(_derive_labels(path, good))
    elif isinstance(labels, LabelLookup):
        lookup = labels
    else:
        lookup = LabelLookup.from_cells(labels, (row.values[1] for row in good))
    examples = _apply_to_rows(good, lambda row: Example(_text(row), _label(row, lookup)), bad)
    if bad.count and not (skip and examples):
        raise bad.error(len(rows), skip=skip)
    if bad.count:
        message = f"{path}: {bad.count} of {len(rows)} rows are skipped: {bad.summary()}"
        warnings.warn(message, ReadAsWarning, stacklevel=2)
    return tuple(examples), lookup


def unusable_rows(
    path: Path,
    labels: Sequence[str] | LabelLookup | None = None,
    text_column: str = "text",
    label_column: str = "label",
) -> tuple[list[str], LabelLookup | None]:
    """Return the error message of every unusable row of a labelled file, and the lookup of its labels.

    The lookup is None if ``labels`` is None. If an error prevents reading the rest of the file, it comes
    last.
    """
    rows: list[Row | RowError] = []
    try:
        rows += rows_or_errors(str(path), Columns(text_column, label_column))
    except RowError as error:
        rows.append(error)
    if labels is None or isinstance(labels, LabelLookup):
        lookup = labels
    else:
        lookup = LabelLookup.from_cells(labels, (row.values[1] for row in rows if isinstance(row, Row)))
    messages = []
    for row in rows:
        try:
            checked = _check(row, require_word=lookup is None)
            if lookup is not None:
                _label(checked, lookup)
        except RowError as error:
            messages.append(str(error))
    return messages, lookup


def read_queries(
    source: str,
    kind: RowFormat | None = None,
    column: str = "text",
    kept: tuple[str, ...] = (),
    *,
    skip: bool = False,
) -> Iterator[Query]:
    """Yield the texts of a file, one at a time.

    Args:
        source: path of the file; ``-`` for stdin.
        kind: format of the file. Default: by its suffix.
        column: name of the text column or key.
        kept: columns to pass through unchanged.
        skip: yield unusable rows too, with an empty text and their error.

    Raises:
        I2CLError: if the file cannot be read.
        RowError: on the first unusable row, unless ``skip`` is set.
    """
    with closing(rows_or_errors(source, Columns(column, kept=kept), kind)) as rows:  # closes the file
        for row in rows:
            try:
                if isinstance(row, RowError):
                    raise row
                query = Query(_text(row), _kept_values(row, kept))
            except RowError as error:
                if not skip:
                    raise RowError(f"{error.why}; {_SKIP_HINT}", error.place) from None
                query = Query("", _kept_values_or_none(row, kept), error)
            yield query


def check_queries(
    source: str,
    kind: RowFormat | None = None,
    column: str = "text",
    kept: tuple[str, ...] = (),
    *,
    skip: bool = False,
) -> BadRows:
    """Read a whole file like `read_queries`, and return its unusable rows.

    Raises:
        I2CLError: if the file cannot be read.
        RowError: if there are unusable rows (with ``skip``: if there are no others); the message names all.
    """
    bad, count = BadRows(source), 0
    for query in read_queries(source, kind, column, kept, skip=True):
        count += 1
        if query.error is not None:
            bad.add(query.error)
    if bad.count and (not skip or bad.count == count):
        raise bad.error(count, skip=skip)
    return bad


def _apply_to_rows(rows: Sequence[T], function: Callable[[T], U], bad: BadRows) -> list[U]:
    """Return the results of a function for the rows, and add the errors it raises to ``bad``."""
    results = []
    for row in rows:
        try:
            results.append(function(row))
        except RowError as error:
            bad.add(error)
    return results


def _check(row: Row | RowError, *, require_word: bool) -> Row:
    """Return the row, or raise RowError if it is unusable. ``require_word``: its label must be a word."""
    if isinstance(row, RowError):
        raise row
    _text(row)
    if require_word:
        _word(row)
    return row


def _text(row: Row) -> str:
    text = row.values[0]
    if text is None or (isinstance(text, str) and is_blank(text)):
        raise RowError("the text is empty: fill it in or delete the row", row.place)
    if not isinstance(text, str):
        raise RowError(f"the text is {preview(text)}, not a string: put it in quotes", row.place)
    if LONE_SURROGATE.search(text):
        raise RowError("the text contains a lone surrogate: correct or delete the row", row.place)
    return text


def _kept_values(row: Row, names: tuple[str, ...]) -> tuple[object, ...]:
    values = row.values[1:]
    for name, value in zip(names, values, strict=True):
        if LONE_SURROGATE.search(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):
            raise RowError(
                f"column {name!r} contains a lone surrogate: correct it, or leave it out of --keep",
                row.place,
            )
    return values


def _kept_values_or_none(row: Row | RowError, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return the kept columns of an unusable row, or None for each if they cannot be used either."""
    try:
        if isinstance(row, Row):
            return _kept_values(row, names)
    except RowError:
        pass
    return (None,) * len(names)


def _label(row: Row, lookup: LabelLookup) -> int:
    if (index := lookup.find(row.values[1])) is None:
        raise RowError(
            f"label {preview(row.values[1])} is not one of {lookup.allowed()}: correct it", row.place
        )
    return index


def _require_not_swapped(
    path: Path, rows: Sequence[Row], text_column: str, label_column: str, labels: object
) -> None:
    """Raise RowError if the text column seems to contain the labels, and the label column the texts."""
    texts = {str(row.values[0]).strip() for row in rows}
    row_labels = {str(row.values[1]).strip() for row in rows}
    texts_repeat = len(texts) <= max(2, len(rows) // MIN_SWAPPED_REPEATS)
    labels_are_distinct = len(row_labels) >= MIN_SWAPPED_LABELS * len(rows)
    if labels is None and len(rows) >= MIN_SWAPPED_ROWS and texts_repeat and labels_are_distinct:
        some_texts = ", ".join(preview(text) for text in sorted(texts)[:4]) + ", ..." * (len(texts) > 4)
        options = f"--text-column {shlex.quote(label_column)} --label-column {shlex.quote(text_column)}"
        raise RowError(
            f"{path}: {len(row_labels)} labels and {len(texts)} texts ({some_texts}) in {len(rows)} rows: "
            f"are the columns swapped? Pass text_column={label_column!r}, label_column={text_column!r} "
            f"({options})"
        )


def _derive_labels(path: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the label words of a file, sorted.

    Numbers from 1, such as stars, are accepted as words. Ids from 0 are rejected, because they carry no
    meaning.
    """
    words = set(map(_word, rows))
    if any(as_id(word) == 0 for word in words) and all(as_id(word) is not None for word in words):
        ids = ", ".join(sort_labels(words)[:8])
        raise RowError(
            f"{path}: the labels are numbers ({ids}): pass the label words (--labels), one for each in this "
            "order"
        )
    if len(words) == 1:
        raise RowError(
            f"{path}: every label is {words.pop()!r}: add rows of another class or pass the label words "
            "(--labels)"
        )
    _warn_of_case(path, words)
    return sort_labels(words)


def _warn_of_case(path: Path, words: set[str]) -> None:
    groups: dict[str, list[str]] = {}
    for word in sorted(words):
        groups.setdefault(fold(word), []).append(word)
    if similar := [" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1]:
        message = (
            f"{path}: labels {'; '.join(similar)} differ only in case, but count as separate classes: use "
            "one spelling if they are one class"
        )
        warnings.warn(message, LabelWarning, stacklevel=4)


def _word(row: Row) -> str:
    label = row.values[1]
    word = cell_word(label)
    if word is None or is_blank(word):
        raise RowError(
            f"label {preview(label)} is not a word: write a label word there, or pass the label words for "
            "class ids",
            row.place,
        )
    return word
