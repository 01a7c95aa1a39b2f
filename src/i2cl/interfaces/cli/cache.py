"""`i2cl cache`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from i2cl.interfaces.cli import console, options
from i2cl.storage import model_cache


def cache(
    clear: Annotated[bool, Option("--clear", help="Delete the converted models.")] = False,
    json: options.Json = False,
) -> None:
    """List the converted GGUF models in the cache, or delete them.

    A GGUF file is converted once, when it is first loaded. The folder is in I2CL_CACHE, if that is set.
    """
    folder = model_cache.cache_folder()
    if clear:
        count = model_cache.clear()
        text = f"Deleted {_models(count)} from {folder}."
        console.answer({"folder": str(folder), "deleted": count}, text, as_json=json)
        return
    entries = model_cache.list_entries()
    if json:
        records = [asdict(entry) | {"folder": str(entry.folder)} for entry in entries]
        console.print_json({"folder": str(folder), "models": records})
        return
    if entries:
        rows = [
            {"GGUF file": Path(entry.source).name, "dtype": entry.dtype, "MB": round(entry.bytes / 1e6)}
            for entry in entries
        ]
        console.print_table("", rows)
    console.say(f"{_models(len(entries))} in {folder}.")


def _models(count: int) -> str:
    return "1 converted model" if count == 1 else f"{count} converted models"
