"""The one reader of rows: what `fit` and `eval` take of labelled rows, and `predict` of texts, with errors
that name the row. How files are written is `i2cl.tasks.formats`.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from i2cl.errors import HALF_PAIR, I2CLError
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.formats import ROW_SUFFIXES, Columns, Row, RowFormat, rows_or_errors, shown
from i2cl.tasks.labels import LabelLookup, as_id, ordered
from i2cl.tasks.task import Example

T = TypeVar("T")
U = TypeVar("U")

_MOST_PLACES = 20
_MOST_REASONS = 6


class Query(NamedTuple):
    """A text to be classified."""

    text: str
    kept: tuple[object, ...] = ()


def read_labelled(
    path: Path,
    labels: Sequence[str] | LabelLookup | None = None,
    text_column: str = "text",
    label_column: str = "label",
    *,
    skip: bool = False,
) -> tuple[tuple[Example, ...], LabelLookup]:
    """The examples of one file, and what its labels mean.
    A label is a label word (exact, else ignoring case) or a class id, counted from 0 or from 1; a cell that
    is both counts as the word. Without ``labels`` the words are the file's distinct labels, sorted. Labels
    are words by id, or what those of another file of the same task mean. With ``skip``, rows that cannot be
    used are left out with a `ReadAsWarning` that names them. Raises I2CLError naming the file and all rows
    that cannot be used, or what else keeps it from being read.
    """
    if path.suffix.lower() not in ROW_SUFFIXES:
        known = ", ".join(ROW_SUFFIXES)
        raise I2CLError(f"{path}: cannot read files ending in {path.suffix!r}: use one of {known}")
    rows = list(rows_or_errors(str(path), Columns(text_column, label_column)))
    good, bad = _parted(rows, partial(_usable, worded=labels is None))
    if bad and (not good or (labels is None and not skip)):  # what the others are called has to wait
        raise _refusal(path, bad, len(rows), skip=skip)
    if labels is None:
        lookup = LabelLookup(_derived(path, good))
    elif isinstance(labels, LabelLookup):
        lookup = labels
    else:
        lookup = LabelLookup.of(labels, (row.values[1] for row in good))
    examples, others = _parted(good, lambda row: Example(_text(row), _label(row, lookup)))
    bad += others
    if bad and not (skip and examples):
        raise _refusal(path, bad, len(rows), skip=skip)
    if bad:
        line = f"{path}: {len(bad)} of {len(rows)} rows are left out: {_listed(path, bad)}"
        warnings.warn(line, ReadAsWarning, stacklevel=2)
    return tuple(examples), lookup


def refused_rows(
    path: Path,
    labels: Sequence[str] | LabelLookup | None = None,
    text_column: str = "text",
    label_column: str = "label",
) -> tuple[list[str], LabelLookup | None]:
    """Return one message for each row of a file that cannot be used, and the meaning of the labels.

    If `read_labelled` cannot read the file to its end, the last message says why.
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

    def use(row: Row | RowError) -> None:
        usable = _usable(row, worded=lookup is None)
        if lookup is not None:
            _label(usable, lookup)

    return [str(error) for error in _parted(rows, use)[1]], lookup


def _parted(rows: Sequence[T], use: Callable[[T], U]) -> tuple[list[U], list[RowError]]:
    """What came of the rows, and the errors of the others."""
    good, bad = [], []
    for row in rows:
        try:
            good.append(use(row))
        except RowError as error:
            bad.append(error)
    return good, bad


def _usable(row: Row | RowError, *, worded: bool) -> Row:
    """The row, if its text can be used and, where words are wanted, its label too."""
    if isinstance(row, RowError):
        raise row
    _text(row)
    if worded:
        _word(row)
    return row


def _refusal(path: Path, bad: Sequence[RowError], rows: int, *, skip: bool) -> RowError:
    line = str(bad[0])
    if len(bad) > 1:
        line = f"{path}: {len(bad)} of {rows} rows cannot be used: {_listed(path, bad)}"
    if skip:
        return RowError(f"{line}; no row is left without them")
    return RowError(line if len(bad) == rows else f"{line}; or leave such rows out (--skip-bad-rows)")


def _listed(path: Path, bad: Sequence[RowError]) -> str:
    """What is wrong with rows, each thing once, with the rows that have it."""
    places: dict[str, list[str]] = {}
    for error in bad:
        places.setdefault(error.why, []).append(error.place.removeprefix(f"{path} "))
    parts = []
    for why, where in islice(places.items(), _MOST_REASONS):
        kind = where[0].split()[0]
        named = [place.removeprefix(f"{kind} ") for place in where[:_MOST_PLACES]]
        named += [f"{len(where) - _MOST_PLACES} more"] if len(where) > _MOST_PLACES else []
        which = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
        parts.append(f"{kind}{'s' * (len(where) > 1)} {which}: {why}")
    if len(places) > _MOST_REASONS:
        parts.append(f"and {len(places) - _MOST_REASONS} other things")
    return "; ".join(parts)


def read_queries(
    source: str, kind: RowFormat | None = None, column: str = "text", kept: tuple[str, ...] = ()
) -> Iterator[Query]:
    """Texts of a file, or of stdin for ``-``, one at a time, with what is kept of each.
    Raises I2CLError as `rows_or_errors` does, and RowError on the first row that cannot be used.
    """
    with closing(rows_or_errors(source, Columns(column, kept=kept), kind)) as rows:  # or it stays half read
        for row in rows:
            if isinstance(row, RowError):
                raise row
            yield Query(_text(row), _kept(row, kept))


def _text(row: Row) -> str:
    text = row.values[0]
    if not isinstance(text, str):
        raise RowError(f"the text is {shown(text)}, not a string: put it in quotes", row.place)
    if not text.strip():
        raise RowError("the text is empty: fill it in or delete the row", row.place)
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


def _label(row: Row, lookup: LabelLookup) -> int:
    if (index := lookup.find(row.values[1])) is None:
        problem = f"label {shown(row.values[1])} is not one of {lookup.allowed()}"
        raise RowError(f"{problem}: correct it", row.place)
    return index


def _derived(path: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    """The label words of a file: also numbers from 1, as of stars, but not ids from 0, which say nothing."""
    words = set(map(_word, rows))
    if any(as_id(word) == 0 for word in words) and all(as_id(word) is not None for word in words):
        some = ", ".join(ordered(words)[:8])
        cure = "pass the label words (--labels), one per id"
        raise RowError(f"{path}: the labels are class ids ({some}): {cure}")
    if len(words) == 1:
        cure = "add rows of another class or pass the label words (--labels)"
        raise RowError(f"{path}: every label is {words.pop()!r}: {cure}")
    return ordered(words)


def _word(row: Row) -> str:
    label = row.values[1]
    if isinstance(label, int | float) and (number := as_id(label)) is not None:
        return str(number)
    if not isinstance(label, str) or not label.strip():
        cure = "write a label word there, or pass the label words for class ids"
        raise RowError(f"label {shown(label)} is not a word: {cure}", row.place)
    return label.strip()
