"""Results on disk: a folder with one line of JSON per cell, appended by a single writer.

A killed run loses at most the cells it was running (`i2cl.storage.journal`). `Store.pack` compresses a
finished store.
"""

import gzip
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pydantic
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from i2cl.errors import I2CLError, first_problem
from i2cl.experiments.records import STORED_IN_CELL, Record
from i2cl.storage.atomic import new_folder, write_errors
from i2cl.storage.journal import Journal, complete_lines, exclusive_lock

CELLS = "cells.jsonl"
PACKED = "cells.jsonl.gz"
LOCK = ".lock"
VECTORS = "vectors"  # folder with one file per cell
PACKED_VECTORS = "vectors.safetensors"

Vectors = Mapping[str, Mapping[str, np.ndarray]]
"""context_vector, coefficients and class_vectors by cell key, see `i2cl.experiments.runner.Bench.save`."""


@dataclass
class Store:
    """A folder of results with at most one writing process.

    Attributes:
        folder: its path.
        records: the newest record of every cell, by key.
        write_line: appends a line durably; None if the store was opened for reading.
    """

    folder: Path
    records: dict[str, Record]
    write_line: Callable[[bytes], None] | None = None

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """Open a store, packed or not, for reading.

        Raises I2CLError if there is no store, or if any line but the last is damaged.
        """
        path = Path(folder)
        if (path / PACKED).is_file():
            lines = _decompress(path / PACKED)
        elif (path / CELLS).is_file():
            lines = complete_lines(path / CELLS)
        else:
            raise I2CLError(
                f"no store at {str(folder)!r}: create one with `i2cl experiment run NAME --store DIR`"
            )
        return cls(path, _parse_records(lines, path))

    @classmethod
    @contextmanager
    def writing(cls, folder: str | Path) -> Iterator["Store"]:
        """Open a store for appending, or create it. Raises I2CLError if another process writes to it."""
        path = Path(folder)
        if (path / PACKED).is_file():
            raise I2CLError(
                f"the store at {str(folder)!r} is packed: unpack it with `i2cl experiment unpack STORE OUT`"
            )
        with ExitStack() as stack:
            with store_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                stack.callback(_remove_empty, path)  # runs after the lock is released
                busy = f"another run is writing to {str(folder)!r}: wait for it, or choose another --store"
                stack.enter_context(exclusive_lock(path / LOCK, busy))
                journal = stack.enter_context(Journal.open(path / CELLS))
            store = cls(path, _parse_records(complete_lines(path / CELLS), path), journal.append)
            try:
                yield store
            finally:
                if not store.records:  # a run that could not start leaves no empty store behind
                    (path / CELLS).unlink()

    def done(self, key: str) -> bool:
        """Whether a cell has a record that is done or skipped."""
        return key in self.records and self.records[key].status != "failed"

    def append(self, record: Record) -> None:
        """Write a record durably, inside `writing` only. Raises I2CLError if it cannot be written."""
        if self.write_line is None:
            raise ValueError("the store was opened for reading")
        with store_errors(self.folder):
            self.write_line(_to_line(record))
        _add(self.records, record)

    def vectors(self) -> Vectors:
        """Load the vectors of all cells that have some. Raises I2CLError naming a damaged file."""
        packed = self.folder / PACKED_VECTORS
        loaded: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
        if packed.is_file():
            for name, value in _load_tensors(packed, "pack the store again").items():
                key, _, part = name.partition(".")
                loaded[key][part] = value
        for path in sorted((self.folder / VECTORS).glob("*.safetensors")):
            hint = f"remove it and the line of its cell in {CELLS}, and run the cell again"
            loaded[path.stem] = _load_tensors(path, hint)
        return {key: loaded[key] for key in loaded if key in self.records}

    def unpack(self, folder: str | Path) -> None:
        """Write the store with plain lines and one file of vectors per cell.

        Raises I2CLError if the folder is not empty.
        """
        with new_folder(Path(folder), frozenset()) as new:
            (new / CELLS).write_bytes(self._lines())
            for key, tensors in self.vectors().items():
                save_vectors(new / VECTORS, key, tensors)

    def pack(self, folder: str | Path) -> None:
        """Write the newest record of every cell to one compressed file, and all vectors to another."""
        with new_folder(Path(folder), {PACKED, PACKED_VECTORS}) as new:
            (new / PACKED).write_bytes(gzip.compress(self._lines(), mtime=0))
            vectors = self.vectors().items()
            flat = {f"{key}.{part}": value for key, parts in vectors for part, value in parts.items()}
            if flat:
                save_file(flat, new / PACKED_VECTORS)

    def _lines(self) -> bytes:
        return b"".join(map(_to_line, self.records.values()))


def _to_line(record: Record) -> bytes:
    return record.model_dump_json(exclude_none=True, exclude={"outcome": STORED_IN_CELL}).encode() + b"\n"


def _add(records: dict[str, Record], record: Record) -> None:
    """Add the newest record of a cell; a failure does not replace a success."""
    if record.status != "failed" or record.key not in records or records[record.key].status == "failed":
        records[record.key] = record


def _remove_empty(folder: Path) -> None:
    if (folder / CELLS).exists():
        return
    for empty in (folder / VECTORS, folder):
        with suppress(OSError):  # not empty
            empty.rmdir()


def store_errors(folder: Path) -> AbstractContextManager[None]:
    """Turn errors of writing to a store into one-line messages; see `i2cl.storage.atomic.write_errors`."""
    return write_errors(f"to {str(folder)!r}", "free space or choose another --store")


def _decompress(path: Path) -> list[bytes]:
    try:
        return gzip.decompress(path.read_bytes()).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise I2CLError(f"{str(path)!r} is damaged ({error}): copy it or pack the store again") from None


def _load_tensors(path: Path, hint: str) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise I2CLError(f"{str(path)!r} is damaged or missing ({error}): {hint}") from None


def _parse_records(lines: list[bytes], path: Path) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.model_validate_json(line)
        except pydantic.ValidationError as error:
            raise I2CLError(
                f"line {number} of the store {str(path)!r} cannot be read ({first_problem(error)}): "
                "remove that line and run its cell again"
            ) from None
        _add(records, record)
    return records


def save_vectors(folder: Path, key: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a cell's vectors atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{key}.{os.getpid()}"
    try:
        save_file(dict(tensors), temporary)
        temporary.chmod(folder.stat().st_mode & 0o666)  # safetensors creates files with mode 0600
        temporary.replace(folder / f"{key}.safetensors")
    finally:
        temporary.unlink(missing_ok=True)
