"""Weights as a checkpoint's safetensors hold them, read one tensor at a time."""

import json
from collections.abc import Callable, Iterator, Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from i2cl.errors import I2CLError, first_line
from i2cl.storage.hub import download_file

INDEX = "model.safetensors.index.json"


class Files:
    """The weights in a folder of safetensors; each is read by itself, so that no pages stay in memory."""

    def __init__(self, folder: Path, model: PreTrainedModel, head: str) -> None:
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        names, prefix = {name for name, _ in named}, model.base_model_prefix
        self._homes: dict[str, tuple[Path, str]] = {}
        # as in the model's state dict; older files leave out the base model's prefix
        self.names: AbstractSet[str] = self._homes.keys()
        self.paths = _weight_files(folder)  # sorted
        for path in self.paths:
            with _readable(path), safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    whole = name if name in names else _whole(name, prefix, head)
                    self._homes[whole] = (path, name)
        if not self._homes:
            raise I2CLError(f"{str(folder)!r} holds no *.safetensors: give a folder with weights")

    def read(self, name: str) -> Tensor:
        """One of them, on the CPU."""
        path, stored = self._homes[name]
        with _readable(path), safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        return tensor


def stored_weights(model: PreTrainedModel) -> Files | None:
    """The checkpoint that a model was loaded from, where its files are on this machine."""
    folder = folder_of(model)
    try:
        return None if folder is None else Files(folder, model, "embed_out")
    except I2CLError:  # no weights, or damaged ones
        return None


def folder_of(model: PreTrainedModel) -> Path | None:
    """The folder of files that a model was loaded from, where they are on this machine."""
    name = str(model.name_or_path or "")
    if name and Path(name).is_dir():
        return Path(name)
    try:
        commit = getattr(model.config, "_commit_hash", None)
        path = try_to_load_from_cache(name, "config.json", revision=commit)
    except ValueError:  # a name that is no hub id
        return None
    return Path(path).parent if isinstance(path, str) else None


def stored_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors of a folder's weights, on the CPU, by name: those that its safetensors lack come of the pickles
    beside them. Raises I2CLError as `read_tensors` does.
    """
    for paths in (_weight_files(folder), sorted(folder.glob("pytorch_model*.bin"))):
        if tensors := {name: one for path in paths for name, one in _tensors(path, wanted).items()}:
            return tensors
    return {}


def read_tensors(name: str, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Those tensors of one file, on the CPU, whose name is wanted; what is no tensor is left out.
    The name is that of a file in safetensors or a pickle, here or owner/repository/file of the hub. A pickle
    is read by torch's loader that runs no code of the file. Raises I2CLError if there is no such file, or it
    is damaged or no mere weights.
    """
    path = Path(name)
    try:
        here = path.is_file()
    except OSError as error:
        raise I2CLError(f"{name[:120]!r} cannot be a file ({error.strerror}): correct it") from None
    return _tensors(path if here else download_file(name), wanted)


def _tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with _readable(path), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    held = _unpickled(path).items()
    return {name: value for name, value in held if wanted(name) and isinstance(value, Tensor)}


def _unpickled(path: Path) -> dict[str, Any]:
    """Source: https://docs.pytorch.org/docs/stable/generated/torch.load.html, ``weights_only``."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a damaged file raises whatever its bytes lead to
        what = f"{str(path)!r} is damaged, or would run code when loaded ({shorten(first_line(error), 120)})"
        raise I2CLError(f"{what}: take a copy in safetensors from those who made it") from None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise I2CLError(f"{str(path)!r} holds no weights by name: give a checkpoint's file")
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers would load: some repositories hold a copy under other names beside them."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file() and not single.is_file():
        try:
            homes = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise I2CLError(f"{str(index)!r} is damaged: download or copy it again") from None
        return [folder / name for name in sorted(set(homes))]
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _whole(name: str, prefix: str, head: str) -> str:
    """The name in the model's state dict of what a file calls ``name``."""
    for stored in (head, "lm_head"):
        if name.startswith(f"{stored}."):
            return f"lm_head{name.removeprefix(stored)}"
    return name if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise I2CLError(f"{str(path)!r} is damaged ({error}): download or copy it again") from None
