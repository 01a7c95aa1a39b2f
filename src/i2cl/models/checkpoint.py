"""Weights as a checkpoint's safetensors hold them, read one tensor at a time."""

import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from i2cl.errors import I2CLError

INDEX = "model.safetensors.index.json"


class Files:
    """The weights in a folder of safetensors, read one at a time.

    A file is opened for one tensor and closed again, so that no pages of it stay in memory.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, head: str) -> None:
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        names, prefix = {name for name, _ in named}, model.base_model_prefix
        self._homes: dict[str, tuple[Path, str]] = {}
        for path in _weight_files(folder):
            with _readable(path), safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    whole = name if name in names else _whole(name, prefix, head)
                    self._homes[whole] = (path, name)
        if not self._homes:
            raise I2CLError(f"{str(folder)!r} holds no *.safetensors: give a folder with weights")

    @property
    def names(self) -> AbstractSet[str]:
        """Names as in the model's state dict; older files leave out the base model's prefix."""
        return self._homes.keys()

    def read(self, name: str) -> Tensor:
        """One of them, on the CPU."""
        path, stored = self._homes[name]
        with _readable(path), safe_open(path, "pt") as file:
            found: Tensor = file.get_tensor(stored)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one of them, from the file's header."""
        path, stored = self._homes[name]
        with _readable(path), safe_open(path, "pt") as file:
            return tuple(file.get_slice(stored).get_shape())


def stored_weights(model: PreTrainedModel) -> Files | None:
    """The checkpoint that a model was loaded from, where its files are on this machine."""
    name = str(model.name_or_path or "")
    folder = Path(name)
    try:
        if not name or not folder.is_dir():
            commit = getattr(model.config, "_commit_hash", None)
            found = try_to_load_from_cache(name, "config.json", revision=commit)
            if not isinstance(found, str):
                return None
            folder = Path(found).parent
        return Files(folder, model, "embed_out")
    except (I2CLError, ValueError):  # no weights, damaged ones, or a name that is no hub id
        return None


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers would load: some repositories hold a copy under other names beside them."""
    index = folder / INDEX
    if index.is_file():
        try:
            homes = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise I2CLError(f"{str(index)!r} is damaged: download or copy it again") from None
        return [folder / name for name in sorted(set(homes))]
    single = folder / "model.safetensors"
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
