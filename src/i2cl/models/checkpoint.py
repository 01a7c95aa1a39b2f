"""Read the tensors of a checkpoint without loading the whole of it."""

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


class CheckpointFiles:
    """The safetensors files of a checkpoint.

    Files are opened for each tensor, so that their pages do not stay in memory.

    Args:
        folder: folder with the files.
        model: the model that they belong to.
        head: name that older checkpoints give to ``lm_head``.

    Raises:
        I2CLError: if a file is missing or damaged.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, head: str) -> None:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        names = {name for name, _ in tensors}
        self._locations: dict[str, tuple[Path, str]] = {}  # file, and name in that file
        self.names: AbstractSet[str] = self._locations.keys()  # as in the model's state dict
        self.paths = _weight_files(folder)  # sorted
        for path in self.paths:
            with _report_damage(path), safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    key = name if name in names else _state_dict_name(name, model.base_model_prefix, head)
                    self._locations[key] = (path, name)
        if not self._locations:
            raise I2CLError(f"{str(folder)!r} has no *.safetensors files: give a folder with weights")

    def read(self, name: str) -> Tensor:
        """Read a tensor into CPU memory, by its name in the model's state dict."""
        path, stored_name = self._locations[name]
        with _report_damage(path), safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(stored_name)
        return tensor


def stored_weights(model: PreTrainedModel) -> CheckpointFiles | None:
    """Return the checkpoint that a model was loaded from, or None if it is not on this machine."""
    folder = checkpoint_folder(model)
    try:
        return None if folder is None else CheckpointFiles(folder, model, "embed_out")
    except I2CLError:  # no safetensors, or damaged ones
        return None


def checkpoint_folder(model: PreTrainedModel) -> Path | None:
    """Return the folder that a model was loaded from, or None if it is not on this machine."""
    name = str(model.name_or_path or "")
    if name and Path(name).is_dir():
        return Path(name)
    try:
        commit = getattr(model.config, "_commit_hash", None)
        path = try_to_load_from_cache(name, "config.json", revision=commit)
    except ValueError:  # not a hub id
        return None
    return Path(path).parent if isinstance(path, str) else None


def stored_tensors(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read some tensors of a checkpoint into CPU memory.

    Args:
        folder: folder of the checkpoint. Pickles are used only if the safetensors have none of the tensors.
        is_wanted: returns whether to read the tensor with a name.

    Raises:
        I2CLError: as `read_tensors`.
    """
    for paths in (_weight_files(folder), sorted(folder.glob("pytorch_model*.bin"))):
        tensors: dict[str, Tensor] = {}
        for path in paths:
            tensors |= _read_file(path, is_wanted)
        if tensors:
            return tensors
    return {}


def read_tensors(name: str, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read some tensors of one file into CPU memory.

    Args:
        name: path of a safetensors file or a pickle, or owner/repository/file on the hub. Pickles are loaded
            without running code.
        is_wanted: returns whether to read the tensor with a name.

    Raises:
        I2CLError: if the file does not exist, is damaged, or has more than weights in it.
    """
    path = Path(name)
    try:
        exists = path.is_file()
    except OSError as error:
        raise I2CLError(f"{name[:120]!r} cannot be a file ({error.strerror}): correct it") from None
    return _read_file(path if exists else download_file(name), is_wanted)


def _read_file(path: Path, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with _report_damage(path), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if is_wanted(name)}  # noqa: SIM118
    values = _load_pickle(path).items()
    return {name: value for name, value in values if is_wanted(name) and isinstance(value, Tensor)}


def _load_pickle(path: Path) -> dict[str, Any]:
    """Load a pickle without running code of it.

    Source: ``weights_only`` in https://docs.pytorch.org/docs/stable/generated/torch.load.html.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
        raise I2CLError(
            f"{str(path)!r} is damaged, or would run code when loaded ({shorten(first_line(error), 120)}): "
            "ask its authors for safetensors"
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise I2CLError(f"{str(path)!r} is not a dict of weights: give a checkpoint's file")
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load; some repositories contain further copies."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file() and not single.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise I2CLError(f"{str(index)!r} is damaged: download or copy it again") from None
        return [folder / name for name in sorted(names)]
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _state_dict_name(name: str, prefix: str, head: str) -> str:
    """Convert a name in a checkpoint's file to the one in the model's state dict.

    Older files omit the base model's prefix, and some name the LM head ``head``.
    """
    for stored in (head, "lm_head"):
        if name.startswith(f"{stored}."):
            return f"lm_head{name.removeprefix(stored)}"
    return name if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise I2CLError(f"{str(path)!r} is damaged ({error}): download or copy it again") from None
