"""Pickled weights of a checkpoint rewritten as safetensors, one file in memory at a time."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.export.checkpoint import PATTERN, write_shards
from i2cl.models.checkpoint import unpickled
from i2cl.storage.atomic import new_folder

PICKLES = "pytorch_model.bin"
PICKLE_INDEX = f"{PICKLES}.index.json"
# Endings of what is copied: configuration, tokenizer, model card. No code is.
BESIDE = {".json", ".txt", ".model", ".jinja", ".md"}


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
    suffixes = [f"-{number:05}-of-{len(shards):05}" for number in range(1, len(shards) + 1)]
    names = [PATTERN.format(suffix=suffix if shards[1:] else "") for suffix in suffixes]
    with new_folder(output, frozenset()) as folder:
        try:
            files = write_shards(folder, zip(names, map(_tensors, shards), strict=True))
        except (NotImplementedError, KeyError, RuntimeError) as error:
            what = f"{str(source)!r} holds tensors that safetensors cannot ({type(error).__name__})"
            raise I2CLError(f"{what}: give plain, dense weights") from None
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in BESIDE and path.name != PICKLE_INDEX:
                shutil.copyfile(path, folder / path.name)
    return [output / name for name in files]


def _shards(source: Path) -> list[Path]:
    if not source.is_dir():
        raise I2CLError(f"{str(source)!r} is no folder: download the model, and give its folder")
    index = source / PICKLE_INDEX
    names = {PICKLES}
    if index.is_file():
        with suppress(ValueError, KeyError, AttributeError, TypeError, RecursionError):
            names = set()
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not names or not all(isinstance(name, str) for name in names):
            raise I2CLError(f"{str(index)!r} is damaged: download or copy it again")
    paths = [source / name for name in sorted(names)]
    for path in paths:
        if not path.is_file() or path.parent != source:
            cure = f"give a folder with all of {PICKLES}'s parts"
            raise I2CLError(f"{str(source)!r} holds no {path.name}: {cure}")
    return paths


def _tensors(shard: Path) -> dict[str, Tensor]:
    tensors = {key: one for key, one in unpickled(shard).items() if isinstance(one, Tensor)}
    if not tensors:
        raise I2CLError(f"{str(shard)!r} holds no tensors by name: give a checkpoint of a model")
    return tensors
