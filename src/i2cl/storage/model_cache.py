"""Cache of GGUF models converted to safetensors, in the user's cache folder.

An entry is a folder as `save_pretrained` writes it, named after the content of the GGUF file, the dtype and
the versions of the converting libraries, so it cannot be confused with another model's. The folder is
``gguf`` in ``$I2CL_CACHE`` or in the platform's cache folder (https://platformdirs.readthedocs.io).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_path

from i2cl.errors import I2CLError
from i2cl.storage.atomic import WriteError, new_folder, write_errors

CACHE_VARIABLE = "I2CL_CACHE"
FORMAT_VERSION = 1  # increase when the conversion changes
CONVERTERS = ("transformers", "gguf")  # packages whose version can change the result
DESCRIPTION = "i2cl.json"


@dataclass(frozen=True)
class CacheEntry:
    """One converted model."""

    source: str  #: path of the GGUF file
    dtype: str  #: dtype of the weights, such as ``"float32"``
    bytes: int  #: size on disk
    folder: Path


def cache_folder() -> Path:
    """Return the folder of the converted models, which may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    root = Path(chosen).expanduser() if chosen else user_cache_path("i2cl", appauthor=False)
    return root / "gguf"


def entry_folder(path: Path, dtype: str) -> Path:
    """Return the folder of a GGUF file's conversion, whether it exists or not.

    Reads the whole file, at 1 to 2 GB/s. Raises OSError if that fails, and PackageNotFoundError if the
    package gguf is not installed.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps([FORMAT_VERSION, *map(version, CONVERTERS)]).encode())
    return cache_folder() / f"{digest.hexdigest()[:32]}-{dtype}"


def add_entry(folder: Path, source: Path, dtype: str, size: int, write: Callable[[Path], None]) -> bool:
    """Create an entry, unless there is no space for it or it cannot be written.

    Other processes see all of it or nothing. If another process adds the same entry first, that one stays.

    Args:
        folder: result of `entry_folder`.
        source: the GGUF file.
        dtype: dtype of the weights.
        size: bytes that the entry will take; at least as many have to stay free on the disk.
        write: writes the files into an empty folder. Its I2CLError is passed on.

    Returns:
        Whether the entry exists now.
    """
    try:
        with write_errors(repr(str(folder))):
            folder.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder.parent).free < 2 * size:
                return False
        with new_folder(folder, frozenset()) as fresh:
            write(fresh)
            description = {"source": str(source.resolve()), "dtype": dtype}
            (fresh / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
    except WriteError:
        pass
    except I2CLError:
        if not folder.is_dir():  # otherwise another process has added it
            raise
    return folder.is_dir()


def remove_entry(folder: Path) -> None:
    """Delete an entry, such as a damaged one. A process that has loaded it is not affected."""
    shutil.rmtree(folder, ignore_errors=True)


def list_entries() -> list[CacheEntry]:
    """Return the entries, sorted by source and dtype."""
    entries = []
    for description in cache_folder().glob(f"*/{DESCRIPTION}"):
        with suppress(OSError, ValueError, KeyError):  # being deleted, or damaged
            fields = json.loads(description.read_text(encoding="utf-8"))
            size = sum(path.stat().st_size for path in description.parent.iterdir())
            entries.append(CacheEntry(fields["source"], fields["dtype"], size, description.parent))
    return sorted(entries, key=lambda entry: (entry.source, entry.dtype))


def clear() -> int:
    """Delete all entries, and what interrupted conversions left. Returns the number of entries."""
    entries = list_entries()
    for folder in (*(entry.folder for entry in entries), *cache_folder().glob(".*-*")):
        remove_entry(folder)
    return len(entries)
