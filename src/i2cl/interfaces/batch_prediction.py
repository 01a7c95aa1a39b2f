"""Classify files of any length in chunks, resuming after a kill.

Rows of the output file OUT are collected in ``.OUT.part``; ``.OUT.part.json`` contains the settings that they
depend on. The same run resumes after the last complete chunk. At the end, OUT is created by a rename. In TSV
and JSON Lines every row is one line. CSV cells may contain line breaks, and Parquet has no lines: their rows
are collected as JSON Lines and converted at the end.
"""

import csv
import errno
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from i2cl.errors import I2CLError, require_packages
from i2cl.storage.atomic import sync_to_disk, write_errors
from i2cl.storage.journal import Journal, exclusive_lock
from i2cl.tasks.files import COMPRESSION_SUFFIXES, RowError
from i2cl.tasks.formats import STDIN
from i2cl.tasks.labels import predicted_labels
from i2cl.tasks.rows import Query
from i2cl.tasks.task import LABEL_SEPARATOR

if TYPE_CHECKING:
    from i2cl.core.injection import Injection

OutputFormat = Literal["tsv", "csv", "jsonl", "parquet"]

# Formats by file suffix; any other suffix means tab-separated.
SUFFIXES: dict[str, OutputFormat] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
UNSUPPORTED_SUFFIXES = {".xlsx", ".xls", ".json", *COMPRESSION_SUFFIXES}

ROW_NUMBER_COLUMN = "row"
ROW_GROUP_SIZE = 50_000  # rows of a Parquet file in memory at a time
FORMULA_PREFIXES = ("=", "+", "-", "@")  # first characters that make a cell a formula in a spreadsheet

_BREAKS_TO_SPACES = str.maketrans("\t\r\n", "   ")

# Converts the collected rows (first path) to the output file (second path), and returns a note for the user.
Finish = Callable[[Path, Path], str]


def read_chunks(
    queries: Iterable[Query], size: int, start: int = 0, *, numbered: bool = False
) -> Iterator[list[Query]]:
    """Yield rows in chunks of ``size``, without the first ``start`` rows, which are still read and checked.

    ``numbered`` puts the row number (from 1, without the header) before the kept columns.
    """
    if numbered:
        queries = (row._replace(kept=(number, *row.kept)) for number, row in enumerate(queries, start=1))
    remaining = islice(queries, start, None)
    while chunk := list(islice(remaining, size)):
        yield chunk


def digest(injection: "Injection") -> str:
    """Return the SHA-256 of everything that an injection's predictions depend on."""
    settings: list[object] = [injection.task.to_dict(), asdict(injection.base), injection.positions]
    settings += [injection.scoring, injection.extraction.hook_point, injection.seed, injection.label_bias]
    tensors = [injection.context, injection.coefficients]
    # Optional parts are appended only if present, so that digests of other injections do not change.
    if injection.ensemble is not None:
        settings.append(injection.ensemble)
        tensors += [tensor for expert in injection.head.experts for tensor in expert.tensors().values()]
    elif injection.temperature != 1:
        settings.append(injection.temperature)
    if injection.head.thresholds is not None:
        settings.append(injection.head.thresholds)
    if injection.word_weights is not None:
        tensors.append(injection.word_weights)
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for tensor in tensors:
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


@dataclass
class Output:
    """An output that predictions are written to."""

    append: Callable[[str], None]
    header: str
    path: Path | None  # None for stdout
    kept: int = 0  # rows of an earlier run
    resumes: bool = False  # whether rows survive the end of this process
    note: str = ""  # for the user, about the finished file

    def __post_init__(self) -> None:
        self.rows = self.kept  # all rows written

    def write(self, lines: str, rows: int) -> None:
        """Write the lines of ``rows`` rows, with the header before the first. Raises I2CLError on failure."""
        with _write_errors(self.path):
            self.append(lines if self.rows else self.header + lines)
        self.rows += rows


@contextmanager
def open_output(
    path: Path | None,
    header: str,
    settings: Mapping[str, Any],
    *,
    chunk: int,
    resumes: bool = True,
    restart: bool = False,
    finish: Finish | None = None,
) -> Iterator[Output]:
    """Open stdout, or a file that is only created or replaced if the block ends without an error.

    Special files such as /dev/null and pipes are written to directly; symbolic links are followed. After an
    error, rows are kept for the next run, unless it was a `RowError`: then the input has to be corrected,
    which invalidates the rows.

    Args:
        path: the file; None for stdout.
        header: text before the first row.
        settings: JSON-serializable settings that the rows depend on.
        chunk: rows per `Output.write`. Kept rows are a multiple of it, so that chunks stay the same.
        resumes: whether the input can be read again from the start.
        restart: discard rows of an earlier run.
        finish: converts the collected rows to the final file, see `Table.finish`. Default: rename it.

    Raises:
        I2CLError: if the file cannot be written, another process is writing it, or an earlier run with other
            settings has left rows.
    """
    print_text = partial(print, end="", flush=True)
    if path is None:
        yield Output(partial(print_text, file=sys.stdout), header, path)
    elif path.exists() and not path.is_file():
        with _write_errors(path):
            handle = path.open("w", encoding="utf-8")
        try:
            yield Output(partial(print_text, file=handle), header, path)
        finally:
            with _write_errors(path):  # closing flushes, which fails again on a full disk
                handle.close()
    else:
        path = Path(os.path.realpath(path))
        with ExitStack() as stack:
            with _write_errors(path):
                busy = f"another process is writing {str(path)!r}: wait for it, or choose another output"
                stack.enter_context(exclusive_lock(_sibling(path, ".part.lock"), busy))
            chunk = chunk if resumes else 0
            yield stack.enter_context(_partial_file(path, header, settings, chunk, finish, restart=restart))


@contextmanager
def _partial_file(
    path: Path, header: str, settings: Mapping[str, Any], chunk: int, finish: Finish | None, *, restart: bool
) -> Iterator[Output]:
    """Collect rows beside ``path``, and create it at the end. ``chunk=0``: keep no rows for another run."""
    rows_file, settings_file = _sibling(path, ".part"), _sibling(path, ".part.json")
    if restart:
        _discard(rows_file, settings_file)
    stack = ExitStack()
    with _write_errors(path):
        try:
            _require_same_settings(rows_file, settings_file, json.loads(json.dumps(settings)))
            journal = stack.enter_context(Journal.open(rows_file, header.encode(), chunk))
        except OSError:
            if not _has_rows(rows_file):
                _discard(rows_file, settings_file)
            raise

    def append(lines: str) -> None:
        journal.append(lines.encode())

    output = Output(append, header, path, journal.kept, resumes=chunk > 0)
    try:
        with stack:
            yield output
        with _write_errors(path):
            if finish is None:
                rows_file.replace(path)
            else:
                output.note = _finish(rows_file, path, finish)
            settings_file.unlink(missing_ok=True)
    except BaseException as error:
        if isinstance(error, RowError) or not (output.resumes and output.rows):
            _discard(rows_file, settings_file)
        raise


def _finish(rows_file: Path, path: Path, finish: Finish) -> str:
    """Convert the collected rows to ``path``; they are only removed once it is complete."""
    new = _sibling(path, ".part.new")
    try:
        note = finish(rows_file, new)
        sync_to_disk(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    rows_file.unlink()
    return note


def require_not_input(output: Path | None, *sources: str) -> None:
    """Raise I2CLError if the output is the same file as an input (``-`` for stdin), also through links."""
    if output is None or not output.is_file():
        return
    for source in sources:
        state = None
        with suppress(OSError, ValueError):  # a missing file, or a stdin without a file descriptor
            state = os.fstat(sys.stdin.fileno()) if source == STDIN else Path(source).stat()
        if state is not None and os.path.samestat(state, output.stat()):
            raise I2CLError(f"{str(output)!r} is also an input: choose another output")


def require_writable_file(path: Path) -> None:
    """Check early what `open_output` requires. Raises I2CLError if the file cannot be written."""
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.exists():
            with suppress(FileNotFoundError):  # other errors, such as a name that is too long, are reported
                _sibling(path, ".part.lock").lstat()
            with tempfile.TemporaryFile(dir=os.path.realpath(path.parent)):
                pass


def source_state(source: str) -> list[Any]:
    """Return path, size and modification time of an input file, to detect changes."""
    path = Path(source).absolute()
    if not path.is_file():
        return [source]
    state = path.stat()
    return [str(path), state.st_size, state.st_mtime_ns]


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _write_errors(path: Path | None) -> AbstractContextManager[None]:
    return write_errors("stdout" if path is None else repr(str(path)))


def _discard(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _has_rows(rows_file: Path) -> bool:
    return rows_file.exists() and rows_file.stat().st_size > 0


def _require_same_settings(rows_file: Path, settings_file: Path, settings: dict[str, Any]) -> None:
    """Raise I2CLError if rows were made with other settings; store the settings if the file is empty."""
    if not _has_rows(rows_file):
        settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    try:
        stored = json.loads(settings_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        stored = None
    stored = stored if isinstance(stored, dict) else {}
    if changed := [name for name, value in settings.items() if (name, value) not in stored.items()]:
        raise I2CLError(
            f"{rows_file.name} beside the output contains rows of a run with another {', '.join(changed)} "
            f"(see {settings_file.name}): repeat that command, or discard the rows with --restart"
        )


def output_format(path: Path | None, named: OutputFormat | None, *, as_json: bool) -> OutputFormat:
    """Return the output format: the named one, else by the suffix of ``path``, else tab-separated.

    Raises:
        I2CLError: if ``--json`` contradicts the format, Parquet cannot be written, or the suffix is that of
            a format that `predict` reads but does not write.
    """
    suffix = "" if path is None else path.suffix.lower()
    if named is None and not as_json and suffix in UNSUPPORTED_SUFFIXES:
        raise I2CLError(
            f"{str(path)!r}: cannot write files ending in {suffix!r}: use {', '.join(SUFFIXES)}, or name the "
            "--output-format"
        )
    requested = named or SUFFIXES.get(suffix)
    if as_json and requested not in {None, "jsonl"}:
        source = "--output-format" if named else f"the suffix of {str(path)!r}"
        raise I2CLError(
            f"--json means JSON Lines, but {source} means {requested}: leave out --json, or change "
            "--output-format"
        )
    if requested == "parquet":
        if path is None or (path.exists() and not path.is_file()):
            raise I2CLError("Parquet needs an output file: give one with -o, or use another --output-format")
        require_packages("Parquet", "parquet", "pyarrow", instead="use another --output-format")
    return requested or ("jsonl" if as_json else "tsv")


@dataclass(frozen=True)
class Table:
    """Formats rows of `predict`: kept columns, the most probable label, and the probability of every label.

    For a multi-label task, the column ``labels`` holds the labels of a text, joined by `LABEL_SEPARATOR`.
    JSON Lines have a list.

    Attributes:
        labels: label words of the task; each has a column of probabilities.
        kind: file format.
        kept: names of input columns to repeat.
        numbered: whether the first column is the row number.
        deferred: whether rows are collected as JSON until `finish` writes the file (CSV and Parquet files).
        min_confidence: the label is left empty if its probability is lower; None to always give it. For a
            multi-label task, it replaces the thresholds.
        thresholds: minimum probability of each label of a multi-label task, else None.
    """

    labels: tuple[str, ...]
    kind: OutputFormat = "tsv"
    kept: tuple[str, ...] = ()
    numbered: bool = False
    deferred: bool = False
    min_confidence: float | None = None
    thresholds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.numbered and ROW_NUMBER_COLUMN in self.kept:
            raise I2CLError(
                f"--keep {ROW_NUMBER_COLUMN} and --row-number would both create a column "
                f"{ROW_NUMBER_COLUMN!r}: leave one out"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns before the label, as in the input."""
        return (ROW_NUMBER_COLUMN, *self.kept) if self.numbered else self.kept

    @property
    def label_name(self) -> str:
        """Name of the column of predicted labels."""
        return "label" if self.thresholds is None else "labels"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all output columns.

        In case of conflicts, labels are renamed to ``probability.NAME`` and kept columns to ``input.NAME``.
        """
        predicted = [self.label_name]
        for label in self.labels:
            name = label
            while name in predicted or (name != label and name in self.labels):
                name = f"probability.{name}"
            predicted.append(name)
        kept: list[str] = []
        for name in self.names:
            while name in predicted or name in kept:
                name = f"input.{name}"  # noqa: PLW2901
            kept.append(name)
        return (*kept, *predicted)

    @property
    def renamed(self) -> dict[str, str]:
        """New names of renamed kept columns; empty for JSON Lines, which nests them under "input"."""
        pairs = zip(self.names, self.columns, strict=False)
        return {} if self.kind == "jsonl" else {name: column for name, column in pairs if name != column}

    @property
    def header(self) -> str:
        """The header line; empty for formats without one."""
        return "" if self.deferred or self.kind == "jsonl" else self._line(self.columns)

    def lines(
        self,
        rows: Sequence[Sequence[float] | None],
        kept: Sequence[Sequence[object]] | None = None,
        errors: Sequence[str] | None = None,
    ) -> str:
        """Format rows, each as one line.

        Args:
            rows: probability of each label; None for a row that could not be classified.
            kept: values of the kept columns of each row.
            errors: why each row could not be classified, "" if it could. Only JSON Lines include it.
        """
        records = zip(rows, kept or [()] * len(rows), errors or [""] * len(rows), strict=True)
        return "".join(self._row(list(values), row, error) for row, values, error in records)

    def finish(self, collected: Path, new: Path) -> str:
        """Convert the collected rows to the file ``new``, and return a note for the user ("" for none)."""
        with collected.open(encoding="utf-8") as lines:
            rows = (json.loads(line) for line in lines)
            return self._parquet(rows, new) if self.kind == "parquet" else self._csv(rows, new)

    def _row(self, kept: list[object], row: Sequence[float] | None, error: str) -> str:
        chosen = () if row is None else predicted_labels(row, self.thresholds, self.min_confidence)
        words = [self.labels[index] for index in chosen]
        label = LABEL_SEPARATOR.join(words)
        probabilities = [None] * len(self.labels) if row is None else [round(value, 6) for value in row]
        if self.deferred:
            return json.dumps([*kept, label, *probabilities], ensure_ascii=False) + "\n"
        if self.kind != "jsonl":
            return self._line([*kept, label, *map(_decimal, probabilities)])
        record: dict[str, Any] = {"input": dict(zip(self.names, kept, strict=True))} if self.names else {}
        by_label = {} if row is None else dict(zip(self.labels, probabilities, strict=True))
        record |= {self.label_name: label if self.thresholds is None else words, "probabilities": by_label}
        record |= {"error": error} if error else {}
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _line(self, cells: Iterable[object]) -> str:
        if self.kind == "csv":
            return _csv_line(cells)
        return "\t".join(_text(cell).translate(_BREAKS_TO_SPACES) for cell in cells) + "\n"

    def formula_note(self, path: Path) -> str:
        """Return a note if a spreadsheet would interpret cells of a tab-separated file as formulas."""
        if self.kind != "tsv" or not path.is_file():
            return ""
        with path.open(encoding="utf-8", newline="\n") as file:
            count = sum(is_formula(cell) for line in file for cell in line.rstrip("\n").split("\t"))
        return formula_note(count)

    def _csv(self, rows: Iterator[list[Any]], new: Path) -> str:
        formulas = sum(map(is_formula, self.columns))
        with new.open("w", encoding="utf-8-sig", newline="") as file:  # Excel needs the BOM
            file.write(_csv_line(self.columns))
            for row in rows:
                texts = row[: len(self.names) + 1]
                formulas += sum(map(is_formula, texts))
                file.write(_csv_line([*texts, *map(_decimal, row[len(texts) :])]))
        return formula_note(formulas)

    def _parquet(self, rows: Iterator[list[Any]], new: Path) -> str:
        arrow: Any = import_module("pyarrow")
        types = [arrow.int64()] * self.numbered + [arrow.string()] * (len(self.kept) + 1)
        types += [arrow.float64()] * len(self.labels)
        schema = arrow.schema(list(zip(self.columns, types, strict=True)))
        with import_module("pyarrow.parquet").ParquetWriter(new, schema) as file:
            while group := list(islice(rows, ROW_GROUP_SIZE)):
                columns = [list(column) for column in zip(*group, strict=True)]
                for index in range(self.numbered, len(self.names)):
                    columns[index] = [None if cell is None else _text(cell) for cell in columns[index]]
                arrays = [arrow.array(*pair) for pair in zip(columns, types, strict=True)]
                file.write_table(arrow.Table.from_arrays(arrays, schema=schema))
        return ""


def _csv_line(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow("" if cell is None else _text(cell) for cell in cells)
    return line.getvalue()


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _text(cell: object) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def formula_note(count: int) -> str:
    """Return a note on this number of cells that a spreadsheet interprets as formulas; "" for none."""
    if not count:
        return ""
    return (
        f"cells that begin with =, +, - or @: {count}. A spreadsheet interprets them as formulas: import "
        "them as text if you do not trust the input"
    )


def is_formula(cell: object) -> bool:
    """Return whether a spreadsheet would interpret a cell as a formula."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA_PREFIXES):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
