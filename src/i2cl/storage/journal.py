"""Files that only grow: one process writes whole lines, and after a kill it goes on behind the last of them.

Lines are on the disk before the next ones are made, so that a kill loses at most those in the making. What it
tore is cut off when the file is opened next. Reading needs no lock.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from i2cl.errors import I2CLError


class Journal:
    """A file to which lines are added for good."""

    def __init__(self, file: IO[bytes], kept: int) -> None:
        self._file = file
        self.kept = kept  # lines that were there and whole, the header aside

    @classmethod
    @contextmanager
    def opened(cls, path: Path, header: bytes = b"", group: int = 1) -> Iterator["Journal"]:
        """Open a file for adding to it, or make it.

        ``path``: the file; ``header``: what it begins with once it has lines; with none of them it is cut to
        nothing; ``group``: lines that belong together: what follows the last whole group is cut off. 0 keeps
        none. Raises OSError if it cannot be written.
        """
        with path.open("ab", buffering=0) as file:
            kept, size = _whole(path, header, group) if group else (0, 0)
            os.truncate(path, size)
            yield cls(file, kept)

    def append(self, lines: bytes) -> None:
        """Add whole lines; they are on the disk when this returns. Raises OSError if it cannot be done; what
        was written of them is cut off when the file is opened next.
        """
        rest = memoryview(lines)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())


def whole_lines(path: Path) -> list[bytes]:
    """All lines of a journal, each with its end, but for a torn last one."""
    with path.open("rb") as file:
        return [line for line in file if line.endswith(b"\n")]


def readable_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal that are objects of JSON: one that was spoiled takes no other with it."""
    objects = []
    for line in whole_lines(path):
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                objects.append(value)
    return objects


@contextmanager
def only_writer(lock: Path, busy: str) -> Iterator[None]:
    """Hold a lock while the block runs. Nobody waits for it.

    ``lock``: a file that stands for what is written; ``busy``: what to say if another process, or another
    block of this one, holds it. Raises I2CLError, saying so; OSError if the lock cannot be made.
    """
    lock.parent.resolve(strict=True)  # FileLock would make the folder
    held = FileLock(lock, timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise I2CLError(busy) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.release()


def _whole(path: Path, header: bytes, group: int) -> tuple[int, int]:
    """Lines and bytes up to the end of the last whole group."""
    lines = kept = end = 0
    with path.open("rb") as file:
        size = len(file.read(len(header)))
        for line in file:
            if not line.endswith(b"\n"):
                break
            lines, size = lines + 1, size + len(line)
            if lines % group == 0:
                kept, end = lines, size
    return kept, end
