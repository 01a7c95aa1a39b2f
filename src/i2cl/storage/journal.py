"""Append-only files that survive a kill.

A single process appends complete lines, each synced to disk before the next are computed. A kill therefore
loses at most the lines being computed. A torn last line is cut off when the file is opened again. Reading
needs no lock.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from i2cl.errors import I2CLError


class Journal:
    """A file opened for appending.

    Attributes:
        kept: number of complete lines already in the file, without the header.
    """

    def __init__(self, file: IO[bytes], kept: int) -> None:
        self._file = file
        self.kept = kept

    @classmethod
    @contextmanager
    def open(cls, path: Path, header: bytes = b"", group: int = 1) -> Iterator["Journal"]:
        """Open or create a file for appending.

        Args:
            path: the file.
            header: beginning of a file that has lines. A file with only a header is truncated to nothing.
            group: number of lines that belong together; incomplete groups are cut off. 0 discards all lines.

        Raises:
            OSError: if the file cannot be written.
        """
        with path.open("ab", buffering=0) as file:
            kept, size = _complete_groups(path, header, group) if group else (0, 0)
            os.truncate(path, size)
            yield cls(file, kept)

    def append(self, lines: bytes) -> None:
        """Append complete lines and sync them to disk.

        Raises OSError on failure; lines written partially are cut off when the file is opened again.
        """
        rest = memoryview(lines)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())


def complete_lines(path: Path) -> list[bytes]:
    """Return all lines of a journal, with their line ends, except a torn last line."""
    with path.open("rb") as file:
        return [line for line in file if line.endswith(b"\n")]


@contextmanager
def exclusive_lock(lock: Path, busy: str) -> Iterator[None]:
    """Hold a lock file during the block, without waiting for it.

    Args:
        lock: the lock file.
        busy: message of the error if the lock is held by another process or another block of this one.

    Raises:
        I2CLError: if the lock is held.
        OSError: if the lock file cannot be created.
    """
    lock.parent.resolve(strict=True)  # FileLock would create the folder
    file_lock = FileLock(lock, timeout=0)
    try:
        file_lock.acquire()
    except Timeout:
        raise I2CLError(busy) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file_lock.release()


def _complete_groups(path: Path, header: bytes, group: int) -> tuple[int, int]:
    """Return the number of lines, and the size in bytes, up to the end of the last complete group."""
    lines = kept = kept_size = 0
    with path.open("rb") as file:
        size = len(file.read(len(header)))
        for line in file:
            if not line.endswith(b"\n"):
                break
            lines, size = lines + 1, size + len(line)
            if lines % group == 0:
                kept, kept_size = lines, size
    return kept, kept_size
