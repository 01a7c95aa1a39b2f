"""What a GGUF file says about itself, read with the package gguf.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import importlib
from pathlib import Path
from typing import Any

from i2cl.errors import needs
from i2cl.models.loading import gguf_reader

GOLDEN_FIELD = "i2cl.golden"  # key of the golden values, as JSON


def import_package(name: str) -> Any:
    """A package of the extra gguf or llama-cpp. Raises I2CLError if it is not installed."""
    needs("GGUF", "llama-cpp" if name == "llama_cpp" else "gguf", name)
    return importlib.import_module(name)


def reader(path: Path) -> Any:
    """A ``gguf.GGUFReader``, which maps the file into memory. Raises I2CLError on a damaged or other file."""
    return gguf_reader(path, "export it again")


def read_field(path: Path, key: str) -> str | None:
    """One string of a GGUF file, None where it has none. Raises I2CLError on a damaged or other file."""
    field = reader(path).get_field(key)
    return None if field is None else str(field.contents())
