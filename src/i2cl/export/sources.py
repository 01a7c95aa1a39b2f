"""Where a base model's config, tokenizer and weights come from: memory, a folder, or the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from i2cl.errors import I2CLError
from i2cl.export.families import family_of
from i2cl.export.folding import StateDict, Tensors, require_known, require_unquantized, skeleton
from i2cl.models.checkpoint import Files
from i2cl.models.decoder import Decoder
from i2cl.models.loading import is_gguf, load_model_and_tokenizer, located

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Source:
    """What a checkpoint is made from."""

    config: PreTrainedConfig  # of the model
    tensors: Tensors  # its weights
    tokenizer: PreTrainedTokenizerBase  # saved beside the result
    generation: GenerationConfig | None  # its generation settings, if any


def from_memory(decoder: Decoder) -> Source:
    """A loaded model. Raises I2CLError if it is quantized, in part offloaded, or has writers of its own."""
    require_known(decoder)
    model = decoder.model
    require_unquantized(model.config)
    return Source(model.config, StateDict(model), decoder.tokenizer, model.generation_config)


def from_files(name: str, revision: str | None = None) -> Source:
    """A model by its name. Weights of a folder or a hub id stay on disk; a GGUF file is loaded in float32.
    Raises I2CLError if it cannot be found or read, or its family cannot be folded.
    """
    if is_gguf(Path(located(name))):
        model, tokens = load_model_and_tokenizer(name, dtype="float32", device="cpu", revision=revision)
        return Source(model.config, StateDict(model), tokens, model.generation_config)
    folder = checkpoint_folder(name, revision)
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise I2CLError(f"cannot read the model {name!r}: {str(error).splitlines()[0]}") from None
    require_unquantized(config)
    there = (folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(folder) if there else None
    head = family_of(config).head
    return Source(config, Files(folder, skeleton(config), head), tokenizer, generation)


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """A model's files: bundled, a folder, or the hub's snapshot. Raises I2CLError if there are none."""
    folder = Path(located(name))
    if not folder.is_dir():
        try:
            patterns: dict[str, Any] = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
            folder = Path(snapshot_download(name, revision=revision, **patterns))
        except (OSError, ValueError) as error:
            why = f"no such folder, and the hub says {type(error).__name__}"
            raise I2CLError(f"no model at {name!r}: {why}") from None
    if not (folder / "config.json").is_file():
        raise I2CLError(f"{name!r} is no model folder: it has no config.json")
    return folder
