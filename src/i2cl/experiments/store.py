"""Where results are kept: one line of JSON per cell, appended by a single writer.

A kill loses at most the cells in the making (`i2cl.storage.journal`). `pack` compresses a finished store.
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
from i2cl.experiments.records import TOLD_BY_RECORD, Record
from i2cl.storage.atomic import new_folder, write_errors
from i2cl.storage.journal import Journal, complete_lines, exclusive_lock

CELLS = "cells.jsonl"
PACKED = "cells.jsonl.gz"
LOCK = ".lock"
VECTORS = "vectors"  # a folder, where cells put their vectors, one file each
PACKED_VECTORS = "vectors.safetensors"

Vectors = Mapping[str, Mapping[str, np.ndarray]]
"""By cell key: context_vector, coefficients and class_vectors, see `i2cl.experiments.studies`."""


@dataclass
class Store:
    """A folder of results; one process at a time writes. ``records`` has the newest of every cell."""

    folder: Path
    records: dict[str, Record]
    keep: Callable[[bytes], None] | None = None  # adds a line for good; None where it is only read

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """Read a store, packed or not; raises I2CLError if it is none, or a line but the last is damaged."""
        path = Path(folder)
        if (path / PACKED).is_file():
            lines = _unpacked(path / PACKED)
        elif (path / CELLS).is_file():
            lines = complete_lines(path / CELLS)
        else:
            raise I2CLError(f"no store at {str(folder)!r}: `i2cl experiment run NAME --store DIR` makes one")
        return cls(path, _by_key(lines, path))

    @classmethod
    @contextmanager
    def writing(cls, folder: str | Path) -> Iterator["Store"]:
        """Open a store for appending, or make it; raises I2CLError if another process writes to it."""
        path = Path(folder)
        if (path / PACKED).is_file():
            raise I2CLError(f"the store at {str(folder)!r} is packed: `i2cl experiment unpack` it first")
        with ExitStack() as stack:
            with store_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                stack.callback(_remove_bare, path)  # once the lock is gone
                busy = f"another run writes to {str(folder)!r}: wait for it, or choose another --store"
                stack.enter_context(exclusive_lock(path / LOCK, busy))
                journal = stack.enter_context(Journal.open(path / CELLS))
            store = cls(path, _by_key(complete_lines(path / CELLS), path), journal.append)
            try:
                yield store
            finally:
                if not store.records:  # a run that could not start leaves no empty store behind
                    (path / CELLS).unlink()

    @classmethod
    @contextmanager
    def following(cls, folder: str | Path) -> Iterator["Store"]:
        """What a further process of a run holds: it reads, and writes nothing."""
        records = cls.open(folder).records if (Path(folder) / CELLS).is_file() else {}
        yield cls(Path(folder), records, lambda _line: None)

    def done(self, key: str) -> bool:
        """Whether a cell ended well, or was skipped since its method needs another model."""
        return key in self.records and self.records[key].status != "failed"

    def append(self, record: Record) -> None:
        """Keep a record for good. Only inside `writing`. Raises I2CLError if it cannot be written."""
        if self.keep is None:
            raise ValueError("the store was opened for reading")
        with store_errors(self.folder):
            self.keep(_line(record))
        _put(self.records, record)

    def vectors(self) -> Vectors:
        """Vectors of every cell that kept some. Raises I2CLError on a damaged file, naming it."""
        packed = self.folder / PACKED_VECTORS
        loaded: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
        if packed.is_file():
            for name, value in _tensors(packed, "pack the store again").items():
                key, _, part = name.partition(".")
                loaded[key][part] = value
        for path in sorted((self.folder / VECTORS).glob("*.safetensors")):
            cure = f"remove it, and from {CELLS} the line of its cell, which is then run again"
            loaded[path.stem] = _tensors(path, cure)
        return {key: loaded[key] for key in loaded if key in self.records}

    def unpack(self, folder: str | Path) -> None:
        """Write lines and single files of vectors; raises I2CLError on a folder that is not empty."""
        with new_folder(Path(folder), frozenset()) as fresh:
            (fresh / CELLS).write_bytes(self._lines())
            for key, tensors in self.vectors().items():
                save_vectors(fresh / VECTORS, key, tensors)

    def pack(self, folder: str | Path) -> None:
        """Write the newest record of every cell as one compressed file, all vectors as another."""
        with new_folder(Path(folder), {PACKED, PACKED_VECTORS}) as fresh:
            (fresh / PACKED).write_bytes(gzip.compress(self._lines(), mtime=0))
            held = self.vectors().items()
            flat = {f"{key}.{part}": value for key, parts in held for part, value in parts.items()}
            if flat:
                save_file(flat, fresh / PACKED_VECTORS)

    def _lines(self) -> bytes:
        return b"".join(map(_line, self.records.values()))


def _line(record: Record) -> bytes:
    return record.model_dump_json(exclude_none=True, exclude={"outcome": TOLD_BY_RECORD}).encode() + b"\n"


def _put(records: dict[str, Record], record: Record) -> None:
    if record.status != "failed" or record.key not in records or records[record.key].status == "failed":
        records[record.key] = record


def _remove_bare(folder: Path) -> None:
    if (folder / CELLS).exists():
        return
    for empty in (folder / VECTORS, folder):
        with suppress(OSError):  # it holds something
            empty.rmdir()


def store_errors(folder: Path) -> AbstractContextManager[None]:
    """Say in one line what could not be written to a store; see `i2cl.storage.atomic.write_errors`."""
    return write_errors(f"to {str(folder)!r}", "free space or choose another --store")


def _unpacked(path: Path) -> list[bytes]:
    try:
        return gzip.decompress(path.read_bytes()).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise I2CLError(f"{str(path)!r} is damaged ({error}): copy it or pack the store again") from None


def _tensors(path: Path, cure: str) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise I2CLError(f"{str(path)!r} is damaged or missing ({error}): {cure}") from None


def _by_key(lines: list[bytes], path: Path) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.model_validate_json(line)
        except pydantic.ValidationError as error:
            what = f"line {number} of the store {str(path)!r} cannot be read ({first_problem(error)})"
            raise I2CLError(f"{what}: remove that line, its cell is then run again") from None
        _put(records, record)
    return records


def save_vectors(folder: Path, key: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Keep a cell's vectors: all of the file or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{key}.{os.getpid()}"
    try:
        save_file(dict(tensors), scratch)
        scratch.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private
        scratch.replace(folder / f"{key}.safetensors")
    finally:
        scratch.unlink(missing_ok=True)
