"""Export an injection as a PEFT adapter, and load adapters.

LoRA with ``lora_bias`` adds a vector to the output of any linear map, with matrices of zeros. It cannot scale
the output, so every beta must be 1, as in the default fit.
Source: https://huggingface.co/docs/peft/package_reference/lora.
"""

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_line, require_packages
from i2cl.export.causal_lm import left_padded, write_card
from i2cl.export.folding import (
    USE_HOOKS,
    added_and_scales,
    output_projections,
    require_exportable,
    skeleton,
)
from i2cl.export.golden import make_golden
from i2cl.models.decoder import Decoder
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.storage.atomic import new_folder, require_writable

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
USE_CLASSIFIER = f"export with --to classifier or causal-lm, or {USE_HOOKS}"


def export_peft(
    decoder: Decoder,
    injection: Injection,
    output: str | Path,
    *,
    golden: bool = True,
    force: bool = False,
) -> None:
    """Write a LoRA adapter that does to its base model what the injection does.

    ``peft.PeftModel.from_pretrained(base, output)`` loads it. Arguments: see `export_classifier`.

    Raises:
        I2CLError: if LoRA cannot express the injection, the folder cannot be used, the injection was fitted
            on another model, or peft is not installed.
    """
    path = Path(output)
    require_writable(path, frozenset())
    labels = require_exportable(decoder, injection)
    config, tensors = lora_adapter(decoder, injection)
    injection.require_base(decoder, force=force)
    with new_folder(path, frozenset()) as fresh:
        config.save_pretrained(str(fresh))
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        left_padded(decoder.tokenizer).save_pretrained(fresh)
        write_card(fresh, path.resolve().name, injection, labels, "peft")
        if golden:
            make_golden(decoder, injection).of_export("peft", decoder.model.dtype).write(fresh)


def lora_adapter(decoder: Decoder, injection: Injection) -> tuple["LoraConfig", dict[str, Tensor]]:
    """Express an injection by LoRA.

    Returns:
        The config of the adapter, and its tensors by their names in files.

    Raises:
        I2CLError: if LoRA cannot express it, or peft is not installed.
    """
    require_exportable(decoder, injection)
    peft = _peft()
    empty, vectors = adapted_outputs(decoder.model.config, injection)
    # the layers are the same in all blocks
    targets = sorted({re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in vectors})
    transposed = any(not isinstance(empty.get_submodule(name), nn.Linear) for name in vectors)  # Conv1D
    options = {"r": 1, "lora_alpha": 1, "lora_bias": True, "fan_in_fan_out": transposed}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **options)
    config.target_modules = targets  # PEFT makes it a set, whose order in files varies
    config.inference_mode = True
    with warnings.catch_warnings(action="ignore"):  # about merging lora_bias
        adapted = peft.get_peft_model(empty, config)
        state = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # after get_peft_model, which writes the path of the loaded files here
    config.base_model_name_or_path, config.revision = decoder.name, decoder.base.revision
    tensors = {}
    for name, like in state.items():
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.bias")
        tensors[name] = vectors[layer].contiguous() if layer in vectors else torch.zeros(like.shape)
    return config, tensors


def adapted_outputs(
    config: PreTrainedConfig, injection: Injection
) -> tuple[Any, dict[str, Float[Tensor, " d"]]]:
    """Return the model without memory for its weights, and the vector added to each linear map, by its name.

    Raises:
        I2CLError: if LoRA cannot express the injection, or peft is not installed.
    """
    require_packages("a PEFT adapter", "peft", "peft")
    if injection.scoring == "words":
        problem = "word-level scoring changes the LM head, which an adapter does not"
        raise I2CLError(f"{problem}: {USE_CLASSIFIER}")
    added, betas = added_and_scales(injection)
    if (betas != 1).any():
        problem = "an adapter cannot scale the output of a layer, as this injection does"
        raise I2CLError(f"{problem}: fit with --method anchored (the default), {USE_CLASSIFIER}")
    empty = skeleton(config)
    vectors = {
        name: added[layer, sublayer]
        for layer, pair in enumerate(output_projections(empty))
        for sublayer, name in enumerate(pair)
    }
    return empty, vectors


def _peft() -> Any:
    """Import peft. Raises I2CLError if it is not installed."""
    require_packages("a PEFT adapter", "peft", "peft")
    import peft

    return peft


def load_adapter(
    folder: str | Path, model: str | None = None, device: str | torch.device | None = None
) -> nn.Module:
    """Load an adapter on its base model, in float32.

    Args:
        folder: folder of the adapter.
        model: base model; default: the one that the adapter's config names.
        device: see `i2cl.Decoder.from_pretrained`.

    Raises:
        I2CLError: if either cannot be read, or they do not fit together.
    """
    peft, path = _peft(), str(folder)
    try:
        config = peft.PeftConfig.from_pretrained(path)
        name, revision = model or config.base_model_name_or_path, None if model else config.revision
        base, _ = load_model_and_tokenizer(name, dtype="float32", device=device, revision=revision)
        with warnings.catch_warnings(action="ignore"):  # about merging lora_bias
            adapted: nn.Module = peft.PeftModel.from_pretrained(base, path, use_safetensors=True).eval()
    except I2CLError as error:
        raise I2CLError(f"{error} (the adapter's base model; --model names another place)") from None
    except Exception as error:  # noqa: BLE001 - a damaged file can raise anything
        hint = "export it again, or name its base model with --model"
        raise I2CLError(f"cannot load the adapter {path!r} ({first_line(error)}): {hint}") from None
    return adapted
