"""What a GGUF file says about itself, read with the package gguf.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import importlib
from pathlib import Path
from typing import Any

from i2cl.errors import I2CLError, needs

GOLDEN_FIELD = "i2cl.golden"
"""Key of the golden values, as JSON."""

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path means a GGUF file and no folder."""
    return path.suffix == SUFFIX and not path.is_dir()


def gguf_package() -> Any:
    """The package gguf.

    Raises:
        I2CLError: if it is not installed.
    """
    return imported("gguf")


def imported(name: str) -> Any:
    """A package of the extra gguf.

    Raises:
        I2CLError: if it is not installed.
    """
    needs("GGUF", "gguf", name)
    return importlib.import_module(name)


def reader(path: Path) -> Any:
    """A ``gguf.GGUFReader``, which maps the file into memory.

    Raises:
        I2CLError: if it is no GGUF file, or a damaged one.
    """
    package = gguf_package()
    if not path.is_file():
        raise I2CLError(f"no file {str(path)!r}: give one made by `i2cl export --to gguf`")
    try:
        return package.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise I2CLError(f"{str(path)!r} is no GGUF file, or damaged ({error}): export it again") from None


def read_field(path: Path, key: str) -> str | None:
    """One string of a GGUF file, None where it has none.

    Raises:
        I2CLError: if it is no GGUF file, or a damaged one.
    """
    found = reader(path).get_field(key)
    return None if found is None else str(found.contents())
