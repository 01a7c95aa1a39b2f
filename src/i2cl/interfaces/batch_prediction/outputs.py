"""Write predictions to stdout, or to a file that an interrupted run can resume.

Rows of the output file OUT are collected in ``.OUT.part``; ``.OUT.part.json`` contains the settings that they
depend on. The same run resumes after the last complete chunk. At the end, OUT is created by a rename.
"""

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from i2cl.errors import I2CLError
from i2cl.storage.atomic import sync_to_disk, write_errors
from i2cl.storage.journal import Journal, exclusive_lock
from i2cl.tasks.files import RowError
from i2cl.tasks.formats import STDIN

# Converts the collected rows (first path) to the output file (second path), and returns a note for the user.
Finish = Callable[[Path, Path], str]


class Output:
    """An output that predictions are written to.

    Attributes:
        kept: rows of an earlier run.
        rows: all rows written, including those.
        note: note for the user about the finished file; empty if there is none.
        resumes: whether rows survive the end of this process.
    """

    def __init__(
        self, append: Callable[[str], None], header: str, path: Path | None, kept: int = 0, *, resumes: bool
    ) -> None:
        self._append, self._header, self._path = append, header, path
        self.kept = kept
        self.rows = kept
        self.note = ""
        self.resumes = resumes

    def write(self, lines: str, rows: int) -> None:
        """Write the lines of ``rows`` rows, with the header before the first. Raises I2CLError on failure."""
        with _write_errors(self._path):
            self._append(lines if self.rows else self._header + lines)
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
        yield Output(partial(print_text, file=sys.stdout), header, path, resumes=False)
    elif path.exists() and not path.is_file():
        with _write_errors(path):
            handle = path.open("w", encoding="utf-8")
        try:
            yield Output(partial(print_text, file=handle), header, path, resumes=False)
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
    output = Output(
        lambda lines: journal.append(lines.encode()), header, path, journal.kept, resumes=chunk > 0
    )
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
    known = stored if isinstance(stored, dict) else {}
    if changed := [name for name, value in settings.items() if (name, value) not in known.items()]:
        raise I2CLError(
            f"{rows_file.name} beside the output contains rows of a run with another {', '.join(changed)} "
            f"(see {settings_file.name}): repeat that command, or discard the rows with --restart"
        )
