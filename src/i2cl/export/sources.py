"""Where a base model's config, tokenizer and weights come from: memory, a folder, or the hub."""

import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from i2cl.decoder import Decoder
from i2cl.errors import I2CLError
from i2cl.export.families import family_of
from i2cl.export.folding import StateDict, Tensors, require_known, skeleton
from i2cl.loading import REFERENCE, reference_folder

INDEX = "model.safetensors.index.json"
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Source:
    """What a checkpoint is made from.

    Attributes:
        config: of the model.
        tensors: its weights.
        tokenizer: saved beside the result.
        generation: its generation settings, if any.
    """

    config: PreTrainedConfig
    tensors: Tensors
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None


class Files:
    """The weights in a folder of safetensors, read one at a time.

    A file is opened for one tensor and closed again, so that no pages of it stay in memory.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, head: str) -> None:
        names, prefix = model.state_dict().keys(), model.base_model_prefix
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


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers would load: some repositories hold a copy under other names beside them."""
    index = folder / INDEX
    if index.is_file():
        try:
            homes = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError):
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


def from_memory(decoder: Decoder) -> Source:
    """A model that is loaded.

    Raises:
        I2CLError: if its writers are not those of the table, or parts of it are offloaded.
    """
    require_known(decoder)
    model = decoder.model
    return Source(model.config, StateDict(model), decoder.tokenizer, model.generation_config)


def from_files(name: str, revision: str | None = None) -> Source:
    """``"reference"``, a folder or a hub id, whose weights stay on disk.

    Raises:
        I2CLError: if it cannot be found or read, or its family cannot be folded.
    """
    folder = checkpoint_folder(name, revision)
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise I2CLError(f"cannot read the model {name!r}: {str(error).splitlines()[0]}") from None
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    head = family_of(config).head
    files = Files(folder, skeleton(config), head)
    return Source(config, files, tokenizer, generation)


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """Where the files of a model are: bundled, a folder, or the hub's snapshot.

    Raises:
        I2CLError: if there is none.
    """
    folder = reference_folder() if name == REFERENCE else Path(name)
    if not folder.is_dir():
        try:
            found = snapshot_download(
                name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED
            )
            folder = Path(found)
        except (OSError, ValueError) as error:
            raise I2CLError(
                f"no model at {name!r}: no such folder, and the hub says {type(error).__name__}"
            ) from None
    if not (folder / "config.json").is_file():
        raise I2CLError(f"{name!r} is no model folder: it has no config.json")
    return folder


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise I2CLError(f"{str(path)!r} is damaged ({error}): download or copy it again") from None
