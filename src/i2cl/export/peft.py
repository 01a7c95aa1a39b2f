"""PEFT adapters on disk: written, and loaded on their base model again."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.export.adapter import Adapter, installed, make_adapter, quiet
from i2cl.export.checkpoint import with_bias
from i2cl.export.folding import require_known
from i2cl.export.golden import make_golden
from i2cl.export.greedy.calls import write_readme
from i2cl.models.decoder import Decoder
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.storage.atomic import new_folder, require_writable

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def export_peft(
    decoder: Decoder,
    injection: Injection,
    output: str | Path,
    *,
    golden: bool = True,
    force: bool = False,
    revision: str | None = None,
) -> Adapter:
    """Write a PEFT adapter that does on its base model what the injection does.

    ``peft.PeftModel.from_pretrained(base, output)`` loads it. The folder appears when it is complete. Where
    the model does not say a label by itself, it also holds a generation config that makes `generate` say one.

    Args:
        decoder: the base model, which is left as it is.
        injection: at all positions, into the residual writers.
        output: a folder that is new or empty.
        golden: also write what `i2cl.export.verify` compares with.
        force: accept other weights of the same shape than those the injection was made on.
        revision: of the base model, for the adapter's config.

    Raises:
        I2CLError: if no tuner expresses it, the folder cannot be used, or the injection was made on
            another model.
    """
    path = Path(output)
    require_writable(path, frozenset())
    require_known(decoder)
    injection.require_base(decoder, force=force)
    made = make_adapter(decoder.model.config, injection)
    made.config.base_model_name_or_path, made.config.revision = decoder.name, revision
    made.config.inference_mode = True
    expected = make_golden(decoder, injection) if golden else None
    with new_folder(path, frozenset()) as fresh:
        made.config.save_pretrained(str(fresh))
        save_file(made.tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        if expected is not None:
            norms = {name: float(made.tensors[name].norm()) for name in made.constants}
            kind = decoder.model.config.model_type
            known = expected.model_copy(update={"model_type": kind, "biases": norms})
            known.write(fresh)
            write_readme(fresh, path.resolve().name, known, "peft")
            if known.forced:
                own = decoder.model.generation_config or GenerationConfig()
                with_bias(own, known).save_pretrained(fresh)
    return made


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (Path(folder) / CONFIG).is_file()


def generation_of(folder: str | Path) -> GenerationConfig | None:
    """The generation config that an adapter holds; None of other exports, and where there is none."""
    there = is_adapter(folder) and (Path(folder) / GENERATION_CONFIG_NAME).is_file()
    return GenerationConfig.from_pretrained(folder) if there else None


def load_adapter(
    folder: str | Path, model: str | None = None, device: str | torch.device | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The base model in float32 wearing an adapter, and the adapter's tensors by name.

    Args:
        folder: holds the adapter, in safetensors.
        model: base model; default: the one that the adapter's config names.
        device: see `i2cl.Decoder.from_pretrained`.

    Raises:
        I2CLError: if either cannot be read, or they do not fit together.
    """
    with installed():
        from peft import PeftModel
    path = Path(folder)
    try:
        told = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        name, revision = model or told["base_model_name_or_path"], None if model else told.get("revision")
        state = load_file(path / WEIGHTS)  # also says that these are no pickles
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise I2CLError(f"{str(path)!r} holds a damaged adapter ({error}): export it again") from None
    try:
        base, _ = load_model_and_tokenizer(name, dtype="float32", device=device, revision=revision)
    except I2CLError as error:
        raise I2CLError(f"{error} (the adapter's base model; --model names another place)") from None
    try:
        with quiet():
            return PeftModel.from_pretrained(base, str(path)).eval(), state
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        line = str(error).strip().splitlines()[0].rstrip(":")
        raise I2CLError(f"the adapter {str(path)!r} does not fit {name!r} ({line}): give its base") from None
