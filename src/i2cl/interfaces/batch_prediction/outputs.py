"""Predictions out: to stdout, or to a file that a killed run goes on with.

While the file OUT is made, its rows are in ``.OUT.part`` beside it, and ``.OUT.part.json`` says what they
depend on. The same run again keeps the whole chunks that are there. OUT appears by a rename at the end, of
the rows or of what is made of them then.
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
from i2cl.storage.atomic import synced, write_errors
from i2cl.storage.journal import Journal, only_writer
from i2cl.tasks.files import RowError
from i2cl.tasks.formats import STDIN

# Makes the second file of the rows in the first, and says what somebody should know of it.
Finish = Callable[[Path, Path], str]


class Output:
    """Where predictions go."""

    def __init__(
        self, add: Callable[[str], None], header: str, path: Path | None, kept: int = 0, *, resumes: bool
    ) -> None:
        self._add, self._header, self._path = add, header, path
        self.kept = kept  # rows of an earlier run
        self.rows = kept  # rows that are there
        self.note = ""  # what somebody should know of the file that was made
        self.resumes = resumes  # whether they survive the end of this process

    def write(self, lines: str, rows: int) -> None:
        """Add rows' lines, the header before the first, at once. Raises I2CLError if it cannot be written."""
        with _write_errors(self._path):
            self._add(lines if self.rows else self._header + lines)
        self.rows += rows


@contextmanager
def written(
    path: Path | None,
    header: str,
    settings: Mapping[str, Any],
    *,
    chunk: int,
    resumes: bool = True,
    restart: bool = False,
    finish: Finish | None = None,
) -> Iterator[Output]:
    """stdout, or a file that appears under its name only when the block ends without an error.

    What is no regular file, such as /dev/null or a pipe, is written to and not replaced, and of a link what
    it leads to is. An older file stays until the new one is whole. After an error the
    rows are kept, unless it was a `RowError`: the texts have to change then, and the rows with them.

    Args:
        path: the file; None for stdout.
        header: what comes before the first row.
        settings: what the rows depend on, JSON-able.
        chunk: rows written at a time: kept rows are a multiple of it, so that the same chunks follow.
        resumes: whether the texts can be read again from the start.
        restart: discard what an earlier run left.
        finish: makes the file that appears of the rows, where that is another one; see `Table.finish`.

    Raises:
        I2CLError: if the file cannot be written, another process is writing it, or rows are there that were
            made with other settings.
    """
    shown = partial(print, end="", flush=True)
    if path is None:
        yield Output(partial(shown, file=sys.stdout), header, path, resumes=False)
    elif path.exists() and not path.is_file():
        with _write_errors(path):
            handle = path.open("w", encoding="utf-8")
        try:
            yield Output(partial(shown, file=handle), header, path, resumes=False)
        finally:
            with _write_errors(path):  # what a full disk refused is tried once more
                handle.close()
    else:
        path = Path(os.path.realpath(path))
        with ExitStack() as stack:
            with _write_errors(path):
                busy = f"another process is writing {str(path)!r}: wait for it, or choose another place"
                stack.enter_context(only_writer(_beside(path, ".part.lock"), busy))
            chunk = chunk if resumes else 0
            yield stack.enter_context(_growing(path, header, settings, chunk, finish, restart=restart))


@contextmanager
def _growing(
    path: Path, header: str, settings: Mapping[str, Any], chunk: int, finish: Finish | None, *, restart: bool
) -> Iterator[Output]:
    """A file in the making; chunk 0 means that nothing of it outlives this process."""
    rows_file, note = _beside(path, ".part"), _beside(path, ".part.json")
    if restart:
        _discard(rows_file, note)
    file = ExitStack()
    with _write_errors(path):
        try:
            _require_same(rows_file, note, json.loads(json.dumps(settings)))
            journal = file.enter_context(Journal.opened(rows_file, header.encode(), chunk))
        except OSError:
            if not _has_rows(rows_file):
                _discard(rows_file, note)
            raise
    kept, resumes = journal.kept, chunk > 0
    output = Output(lambda lines: journal.append(lines.encode()), header, path, kept, resumes=resumes)
    try:
        with file:
            yield output
        with _write_errors(path):
            if finish is None:
                rows_file.replace(path)
            else:
                output.note = _finished(rows_file, path, finish)
            note.unlink(missing_ok=True)
    except BaseException as error:
        if isinstance(error, RowError) or not (output.resumes and output.rows):
            _discard(rows_file, note)
        raise


def _finished(rows_file: Path, path: Path, finish: Finish) -> str:
    """Make the file of the rows, which are there until it is."""
    new = _beside(path, ".part.new")
    try:
        note = finish(rows_file, new)
        synced(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    rows_file.unlink()
    return note


def require_other(output: Path | None, *sources: str) -> None:
    """Refuse an output that is also read, by whatever name; ``-`` is stdin. Raises I2CLError if it is."""
    if output is None or not output.is_file():
        return
    for source in sources:
        read = None
        with suppress(OSError, ValueError):  # what is not there, or a stdin of no file, is another
            read = os.fstat(sys.stdin.fileno()) if source == STDIN else Path(source).stat()
        if read is not None and os.path.samestat(read, output.stat()):
            raise I2CLError(f"{str(output)!r} is what is read: choose another output")


def require_writable_file(path: Path) -> None:
    """Fail early where `written` would fail later. Raises I2CLError if the file cannot be written."""
    with _write_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.exists():
            with suppress(FileNotFoundError):  # also raises for a name that is too long
                _beside(path, ".part.lock").lstat()
            with tempfile.TemporaryFile(dir=os.path.realpath(path.parent)):
                pass


def source_state(source: str) -> list[Any]:
    """Path, size and time of a file of texts: another state may hold other texts."""
    path = Path(source).absolute()
    if not path.is_file():
        return [source]
    state = path.stat()
    return [str(path), state.st_size, state.st_mtime_ns]


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _write_errors(path: Path | None) -> AbstractContextManager[None]:
    return write_errors("stdout" if path is None else repr(str(path)))


def _discard(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _has_rows(rows_file: Path) -> bool:
    return rows_file.exists() and rows_file.stat().st_size > 0


def _require_same(rows_file: Path, note: Path, settings: dict[str, Any]) -> None:
    """Refuse rows that were made with other settings; where there are no rows, note these settings."""
    if not _has_rows(rows_file):
        note.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    try:
        before = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        before = None
    known = before if isinstance(before, dict) else {}
    if others := [name for name, value in settings.items() if (name, value) not in known.items()]:
        raise I2CLError(
            f"{rows_file.name} beside the output holds rows made with another {', '.join(others)} "
            f"(see {note.name}): repeat that command, or discard them with --restart"
        )
