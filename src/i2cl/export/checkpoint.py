"""Read a base model for an export, from memory, a folder or the hub, and write safetensors shard by shard."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_line
from i2cl.export.families import family_of
from i2cl.export.folding import (
    Folding,
    StateDict,
    Weights,
    require_known_architecture,
    require_unquantized,
    skeleton,
)
from i2cl.models.checkpoint import INDEX, CheckpointFiles
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import ModelIdentity, inference_config, tokenizer_fingerprint
from i2cl.models.loading import is_gguf, load_model_and_tokenizer, resolve_name


@dataclass(frozen=True)
class BaseModel:
    """The model that an export is made from.

    Attributes:
        source: what the caller gave: a decoder, or the name of a model.
        config: its config.
        weights: its weights, in memory or on disk.
        tokenizer: its tokenizer.
        generation: its generation config, if it has one.
    """

    source: Decoder | str | Path
    config: PreTrainedConfig
    weights: Weights
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None

    def require_base_of(self, injection: Injection, folding: Folding, *, force: bool) -> None:
        """Raise I2CLError if the injection was fitted on another model."""
        if isinstance(self.source, Decoder):
            injection.require_base(self.source, force=force)
            return
        sizes = self.config.model_type, self.config.num_hidden_layers, self.config.hidden_size
        prints = folding.fingerprint(), tokenizer_fingerprint(self.tokenizer)
        config = inference_config(self.config)
        injection.require_base(
            ModelIdentity(str(self.source), None, *sizes, *prints, config=config), force=force
        )


def open_base(source: Decoder | str | Path, revision: str | None) -> BaseModel:
    """Open a base model: a decoder, a GGUF file (loaded in float32), or a checkpoint that stays on disk.

    Raises I2CLError if it cannot be found or read, is quantized or partly offloaded, has an architecture of
    the caller's, or is of a type that cannot be folded.
    """
    if isinstance(source, Decoder):
        require_known_architecture(source)
        require_unquantized(source.model.config)
        model, tokenizer = source.model, source.tokenizer
    elif is_gguf(Path(resolve_name(str(source)))):
        options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "revision": revision}
        model, tokenizer = load_model_and_tokenizer(str(source), **options)
    else:
        return _from_files(str(source), revision)
    return BaseModel(source, model.config, StateDict(model), tokenizer, model.generation_config)


def _from_files(name: str, revision: str | None) -> BaseModel:
    folder = checkpoint_folder(name, revision)
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise I2CLError(f"cannot read the model {name!r}: {first_line(error)}") from None
    require_unquantized(config)
    head = family_of(config).head  # raises for types without a skeleton
    return BaseModel(
        name, config, CheckpointFiles(folder, skeleton(config), head), tokenizer, _generation_config(folder)
    )


def _generation_config(folder: Path) -> GenerationConfig | None:
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        hint = "copy it again, or remove it"
        raise I2CLError(f"{str(path)!r} is damaged ({first_line(error)}): {hint}") from None


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a bundled, local or hub model. Raises I2CLError if there is none."""
    folder = Path(resolve_name(name))
    if not folder.is_dir():
        try:
            allowed = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
            ignored: Any = {"ignore_patterns": ["*/*", "consolidated*"]}
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=allowed, **ignored))
        except (OSError, ValueError) as error:
            reason = f"no such folder, and the hub says {type(error).__name__}"
            raise I2CLError(f"no model at {name!r}: {reason}") from None
    if not (folder / "config.json").is_file():
        raise I2CLError(f"{name!r} is not a model folder: it has no config.json")
    return folder


def write_shards(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    tensor: Callable[[str], Tensor],
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> None:
    """Write safetensors shard by shard, with an index if there are several.

    ``tensor`` returns each one by its name when its shard is written. Raises I2CLError on an invalid shard
    size.
    """
    with torch.device("meta"):
        empty = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    try:
        plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    except ValueError:
        hint = "give one such as 500MB or 5GB"
        raise I2CLError(f"{max_shard_size!r} is not a valid shard size: {hint}") from None
    size = 0
    for file, names in plan.filename_to_tensors.items():
        loaded = ((name, tensor(name).cpu()) for name in names)
        # safetensors rejects tensors that share memory
        shard = {name: one.clone(memory_format=torch.contiguous_format) for name, one in loaded}
        save_file(shard, folder / file, metadata={"format": "pt"})
        size += sum(one.nbytes for one in shard.values())
        shard.clear()  # free it before the next one is made
    if plan.is_sharded:
        index = {"metadata": {"total_size": size}, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
