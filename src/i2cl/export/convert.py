"""Pickled weights of a checkpoint rewritten as safetensors, one file in memory at a time."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.models.checkpoint import INDEX, unpickled
from i2cl.storage.atomic import new_folder

PICKLES = "pytorch_model.bin"
PICKLE_INDEX = f"{PICKLES}.index.json"
BESIDE = {".json", ".txt", ".model", ".jinja", ".md"}
"""Endings of what is copied: configuration, tokenizer, model card. No code is."""


def convert(source: str | Path, output: str | Path) -> list[Path]:
    """Write a folder like ``source`` whose weights are safetensors.

    Numbers and names stay as they are; what the pickles hold beside tensors is left out. Nothing of them is
    run: see `i2cl.models.checkpoint.unpickled`.

    Returns:
        The files of weights.

    Raises:
        I2CLError: if the folder holds no pickled weights, they would run code or are damaged, or ``output``
            holds anything or cannot be written.
    """
    source, output = Path(source), Path(output)
    shards = _shards(source)
    homes: dict[str, str] = {}
    size = 0
    with new_folder(output, frozenset()) as folder:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors" if shards[1:] else "model.safetensors"
            names, bytes_of_it = _rewritten(shard, folder / name)
            homes |= dict.fromkeys(names, name)
            size += bytes_of_it
        if shards[1:]:
            index = {"metadata": {"total_size": size}, "weight_map": homes}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in BESIDE and path.name != PICKLE_INDEX:
                shutil.copyfile(path, folder / path.name)
    return [output / name for name in sorted(set(homes.values()))]


def _shards(source: Path) -> list[Path]:
    """The files of pickled weights, in their order."""
    if not source.is_dir():
        raise I2CLError(f"{str(source)!r} is no folder: download the model, and give its folder")
    index = source / PICKLE_INDEX
    names = {PICKLES}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            names = set()
        if not names or not all(isinstance(name, str) for name in names):
            raise I2CLError(f"{str(index)!r} is damaged: download or copy it again")
    found = [source / name for name in sorted(names)]
    for path in found:
        if not path.is_file() or path.parent != source:
            raise I2CLError(
                f"{str(source)!r} holds no {path.name}: give a folder with all of {PICKLES}'s parts"
            )
    return found


def _rewritten(shard: Path, output: Path) -> tuple[list[str], int]:
    """Names and bytes of one file's tensors, which go when this returns."""
    found = {key: one for key, one in unpickled(shard).items() if isinstance(one, Tensor)}
    if not found:
        raise I2CLError(f"{str(shard)!r} holds no tensors by name: give a checkpoint of a model")
    try:
        tensors = _apart(found)
        save_file(tensors, output, {"format": "pt"})
    except (NotImplementedError, KeyError, ValueError, RuntimeError) as error:
        kind = type(error).__name__
        raise I2CLError(
            f"{str(shard)!r} holds tensors that safetensors cannot ({kind}): give plain, dense weights"
        ) from None
    return list(tensors), sum(one.nbytes for one in tensors.values())


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own, as safetensors wants it: two names may share what is tied."""
    seen: set[int] = set()
    for name, one in tensors.items():
        place = one.untyped_storage().data_ptr()
        tensors[name] = one.contiguous().clone() if place in seen else one.contiguous()
        seen.add(place)
    return tensors
