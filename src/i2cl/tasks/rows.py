"""Read labelled rows (for `fit` and `eval`) and unlabelled texts (for `predict`).

Errors name the file and all unusable rows. `i2cl.tasks.formats` reads the file formats.
"""

import json
import shlex
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from i2cl.errors import LONE_SURROGATE, I2CLError
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.formats import (
    ROW_SUFFIXES,
    STDIN,
    Columns,
    Row,
    RowFormat,
    is_row_file,
    preview,
    rows_or_errors,
)
from i2cl.tasks.labels import BOOLEANS, LabelLookup, as_id, cell_word, is_blank, sort_labels
from i2cl.tasks.task import Example

_MAX_ERRORS = 1000  # bad rows whose errors are kept
_MAX_NAMED_ROWS = 20  # per reason, in one error message
_MAX_REASONS = 6
_SKIP_HINT = "or skip such rows (--skip-bad-rows)"


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
    """Collects the unusable rows of a file.

    Attributes:
        count: number of unusable rows.
        errors: the errors of the first of them.
    """

    def __init__(self, source: str) -> None:
        self.count = 0
        self.errors: list[RowError] = []
        self._reasons: Counter[str] = Counter()  # of all rows, where one of the kept errors has the reason
        self._source = "stdin" if source == STDIN else source

    def add(self, *errors: RowError) -> None:
        """Add the errors of unusable rows."""
        for error in errors:
            self.count += 1
            if len(self.errors) < _MAX_ERRORS:
                self.errors.append(error)
            elif error.why not in self._reasons:
                continue
            self._reasons[error.why] += 1

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add a RowError raised in the block, and continue after the block."""
        try:
            yield
        except RowError as error:
            self.add(error)

    def summary(self) -> str:
        """Return each reason once, with the rows that it applies to: "rows 3 and 5: the text is empty"."""
        rows_by_reason: dict[str, list[str]] = {}
        for error in self.errors:
            row = error.place.removeprefix(f"{self._source} ")
            rows_by_reason.setdefault(error.why, []).append(row)
        parts, listed = [], 0
        for why, rows in list(rows_by_reason.items())[:_MAX_REASONS]:
            unit = rows[0].split()[0]  # row, line or item
            numbers = [row.removeprefix(f"{unit} ") for row in rows[:_MAX_NAMED_ROWS]]
            if (others := self._reasons[why] - len(numbers)) > 0:
                numbers.append(f"{others:,} more")
            names = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
            parts.append(f"{unit}{'s' * (len(numbers) > 1)} {names}: {why}")
            listed += self._reasons[why]
        if self.count > listed:
            parts.append(f"and {self.count - listed:,} more rows")
        return "; ".join(parts)

    def raise_unless_skipped(self, total: int, *, skip: bool) -> None:
        """Raise RowError if there are bad rows; with ``skip``, only if all ``total`` rows are bad."""
        if not self.count or (skip and self.count < total):
            return
        message = str(self.errors[0])
        if 1 < self.count == total and len(self._reasons) == 1:
            message = f"{self._source}: none of the {total:,} rows can be used: {self.errors[0].why}"
        elif self.count > 1:
            message = f"{self._source}: {self.count:,} of {total:,} rows cannot be used: {self.summary()}"
        if skip:
            message += "; no row is left without them"
        elif self.count < total:
            message += f"; {_SKIP_HINT}"
        raise RowError(message, rows=tuple(map(str, self.errors)))


def read_labelled(
    path: Path,
    labels: Sequence[str] | Mapping[Any, str] | LabelLookup | None = None,
    text_column: str = "text",
    label_column: str = "label",
    *,
    label_separator: str | None = None,
    label_columns: Sequence[str] = (),
    multi_label: bool | None = None,
    known: Sequence[str] = (),
    skip: bool = False,
) -> tuple[tuple[Example, ...], LabelLookup]:
    """Read the labelled examples of a file.

    A label cell is a label word (exact, else ignoring case) or, if no label word is a number, a class id
    counted from 0 or from 1.

    In a file of a multi-label task, a row has any number of labels: in a JSON list, in one cell with a
    separator, or in one column of zeros and ones per label.

    Args:
        path: the file.
        labels: label words in the order of their ids, a dict from each code in the file to its label word,
            or the lookup of another file of the same task. Default: the distinct labels of the file, sorted.
        text_column: name of the text column or key.
        label_column: name of the label column or key.
        label_separator: what separates the labels in a cell of a multi-label task; an empty cell has none.
        label_columns: columns of a multi-label task whose names are the labels and whose cells are 0 or 1.
        multi_label: whether rows have any number of labels. Default: if there is a separator, if there are
            label columns, or if the first label is a JSON list.
        known: without ``labels``, label words that come before the file's others.
        skip: skip unusable rows, with a `ReadAsWarning` that names them.

    Returns:
        The examples, and the lookup that their labels were read with.

    Raises:
        I2CLError: if the file cannot be read, or has unusable rows; the message names all of them.
    """
    if not is_row_file(path):
        suffixes = ", ".join(ROW_SUFFIXES)
        raise I2CLError(f"{path}: cannot read files ending in {path.suffix!r}: use one of {suffixes}")
    bad = BadRows(str(path))
    rows: list[Row] = []
    total = 0
    cells = _LabelCells(label_separator, tuple(label_columns), multi_label)
    if label_columns:
        columns = Columns(text_column, None, cells.columns, kept_option="--label-columns")
        labels = LabelLookup(label_columns) if labels is None else labels
    else:
        columns = Columns(text_column, label_column)
    for row in rows_or_errors(str(path), columns):
        total += 1
        with bad.collect():
            rows.append(_checked(row, cells, are_words=labels is None))
    if labels is None or not rows:  # label words are derived from all rows
        bad.raise_unless_skipped(total, skip=skip)
    if labels is None:
        if not cells.multi_label:
            _require_not_swapped(path, rows, text_column, label_column)
        labels = LabelLookup(_derive_labels(path, rows, known))
    elif not isinstance(labels, LabelLookup):
        labels = LabelLookup(labels, (cell for row in rows for cell in row.values[1:]))
    examples = []
    for row in rows:
        with bad.collect():
            ids = [_class_id(row, cell, labels) for cell in row.values[1:]]
            text = _text(row)
            examples.append(Example.multi_label(text, ids) if cells.multi_label else Example(text, ids[0]))
    bad.raise_unless_skipped(total, skip=skip)
    if bad.count:
        message = f"{path}: {bad.count:,} of {total:,} rows are skipped: {bad.summary()}"
        warnings.warn(message, ReadAsWarning, stacklevel=2)
    return tuple(examples), labels


def require_learnable(path: Path, examples: Sequence[Example], labels: Sequence[str]) -> None:
    """Check the training rows of a multi-label task.

    Raises:
        I2CLError: if a label is in every row or in none.
    """
    counts = Counter(label for example in examples for label in example.ids)
    for label, word in enumerate(labels):
        if counts[label] in {0, len(examples)}:
            share, rows = ("every", "without it") if counts[label] else ("no", "with it")
            raise I2CLError(
                f"{path}: {share} row has the label {word!r}, so it cannot be learned: add rows {rows}, or "
                "leave the label out"
            )


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
            values: tuple[object, ...] = (None,) * len(kept)
            try:
                if isinstance(row, RowError):
                    raise row
                values = _kept_values(row, kept)
                query = Query(_text(row), values)
            except RowError as error:
                if not skip:
                    raise RowError(f"{error.why}; {_SKIP_HINT}", error.place) from None
                query = Query("", values, error)
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
    bad.raise_unless_skipped(count, skip=skip)
    return bad


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


@dataclass
class _LabelCells:
    """Finds the labels of a row of values: a text, and one label or any number of them.

    Attributes:
        separator: between the labels in a cell.
        columns: columns whose cells are 0 or 1, instead of a column of labels.
        multi_label: whether a row has any number of labels; None until the first row is read.
    """

    separator: str | None
    columns: tuple[str, ...]
    multi_label: bool | None

    def of(self, row: Row) -> list[object]:
        """Return the labels of a row. Raises RowError if they are in another format."""
        if self.columns:
            self.multi_label = True
            return [
                name
                for name, cell in zip(self.columns, row.values[1:], strict=True)
                if _flag(row, name, cell)
            ]
        (cell,) = row.values[1:]
        if self.multi_label is None:
            self.multi_label = self.separator is not None or isinstance(cell, list)
        if not self.multi_label or isinstance(cell, list):
            return cell if self.multi_label and isinstance(cell, list) else [cell]
        if self.separator is None:
            raise RowError(
                f"label {preview(cell)} is not a list, but other rows have lists: write a list in every row, "
                "[] for no label",
                row.place,
            )
        if isinstance(cell, str):
            return [part.strip() for part in cell.split(self.separator) if not is_blank(part)]
        return [] if cell is None else [cell]


def _flag(row: Row, name: str, cell: object) -> bool:
    """Return whether the cell of a label column is 1 or true."""
    word = str(cell_word(cell)).casefold()
    flag = BOOLEANS.index(word) if word in BOOLEANS else as_id(word)
    if flag not in {0, 1}:
        raise RowError(f"label column {name!r} has {preview(cell)}: write 0 or 1", row.place)
    return flag == 1


def _checked(row: Row | RowError, cells: _LabelCells, *, are_words: bool) -> Row:
    """Return a row as its text and labels. Raises RowError if it cannot be used."""
    if isinstance(row, RowError):
        raise row
    _text(row)
    labels = cells.of(row)
    if are_words:
        for label in labels:
            _label_word(row, label)
    return Row(row.place, (row.values[0], *labels))


def _label_word(row: Row, label: object) -> str:
    _require_label(row, label)
    word = cell_word(label)
    if word is None:
        raise RowError(
            f"label {preview(label)} is not a word: write a label word there, or pass the label words for "
            "class ids",
            row.place,
        )
    if word.casefold() == "nan":
        raise RowError(
            "the label is nan, which is a missing value in pandas: fill it in or delete the row (for a class "
            "of that name, pass --labels)",
            row.place,
        )
    return word


def _require_label(row: Row, label: object) -> None:
    """Raise RowError if a label is missing."""
    if label is None or (isinstance(label, str) and is_blank(label)):
        raise RowError("the label is empty: fill it in or delete the row", row.place)


def _class_id(row: Row, label: object, lookup: LabelLookup) -> int:
    if (index := lookup.find(label)) is None:
        _require_label(row, label)
        raise RowError(f"label {preview(label)} is not one of {lookup.allowed}: correct it", row.place)
    return index


def _require_not_swapped(path: Path, rows: Sequence[Row], text_column: str, label_column: str) -> None:
    """Raise RowError if there are at least twice as many distinct labels as distinct texts."""
    texts = {str(row.values[0]).strip() for row in rows}
    labels = {str(row.values[1]).strip() for row in rows}
    if len(rows) >= 4 and len(labels) >= 2 * len(texts):
        some_texts = ", ".join(preview(text) for text in sorted(texts)[:4]) + ", ..." * (len(texts) > 4)
        options = f"--text-column {shlex.quote(label_column)} --label-column {shlex.quote(text_column)}"
        raise RowError(
            f"{path}: {len(labels)} labels and {len(texts)} texts ({some_texts}) in {len(rows)} rows: are "
            f"the columns swapped? Pass text_column={label_column!r}, label_column={text_column!r} "
            f"({options})"
        )


def _derive_labels(path: Path, rows: Sequence[Row], known: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the known label words and the others of a file, sorted."""
    words = {_label_word(row, cell) for row in rows for cell in row.values[1:]}
    if known:
        lookup = LabelLookup(known)
        return (*known, *sort_labels(word for word in words if lookup.find(word) is None))
    if not words:
        raise RowError(f"{path}: no row has a label: add some")
    if len(words) == 1:
        raise RowError(
            f"{path}: every label is {words.pop()!r}: add rows of another class or pass the label words "
            "(--labels)"
        )
    return sort_labels(words)
