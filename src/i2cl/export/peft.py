"""A calibrated injection as a PEFT adapter, where one of PEFT's tuners expresses it exactly: made and loaded.

LoRA with ``lora_bias`` adds a vector behind any linear map. GLoRA also scales the map, but adds only where
there is a bias: ``(W + W A) h + b + b D + E`` with ``A = D = beta - 1`` and ``E = lambda v``.
Sources: https://huggingface.co/docs/peft/package_reference/lora and .../package_reference/glora.
"""

import importlib
import json
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_line, needs
from i2cl.export.calls import write_golden
from i2cl.export.checkpoint import with_bias
from i2cl.export.families import FAMILIES, HOOKED, LAST_MAPS, REFUSED, family_of
from i2cl.export.folding import added_and_kept, require_known, require_plain, require_unbiased, skeleton
from i2cl.export.golden import make_golden
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.decoder import Decoder
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.storage.atomic import new_folder, require_writable

if TYPE_CHECKING:
    from peft import PeftConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ADD = "--set formula=add"

# What becomes of linear maps, by their names: beta; and ``lambda * v`` in float32, of the map's own writer
# and of one that has no bias for it.
_Scales = dict[str, float]
_Constants = dict[str, Float[Tensor, " d"]]


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter."""

    tuner: str  #: LoRA or GLoRA
    config: "PeftConfig"  #: of the tuner
    tensors: dict[str, Tensor] = field(repr=False)  #: as PEFT names them in files
    constants: tuple[str, ...]  #: names of those that hold ``lambda * v``


def make_adapter(config: PreTrainedConfig, injection: Injection) -> Adapter:
    """Express an injection by one of PEFT's tuners: LoRA where every beta is 1, else GLoRA.
    ``config``: of the base model, whose weights are not needed; ``injection``: at all positions, into the
    residual writers. Raises I2CLError if no tuner expresses it, saying why and what to do instead, or peft is
    not installed.
    """
    require_plain(injection)
    require_unbiased(injection)
    if injection.scoring == "words":
        what = "labels are scored by several words each, and an adapter leaves the head as it is"
        raise I2CLError(f"{what}: export --to hf, or {HOOKED}")
    added, kept = added_and_kept(injection)
    sites = _changed_sites(config, added, kept)
    kind, lora = config.model_type, bool((kept == 1).all())
    empty, maps = skeleton(config), LAST_MAPS[kind]
    layers = f"{empty.base_model_prefix}.{ARCHITECTURES[kind].layers}"
    joint = FAMILIES[kind].joint if kind in FAMILIES and not lora else ""
    scales: _Scales = {}
    constants: _Constants = {}
    for layer, site in product(range(len(added)), sites):
        scales[f"{layers}.{layer}.{maps[site]}"] = float(kept[layer, site])
        home = f"{layers}.{layer}.{maps[{'attention': 0, 'mlp': 1}.get(joint, site)]}"
        constant = added[layer, site]
        constants[home] = constants[home] + constant if home in constants else constant.clone()
    if not lora:
        _require_glora(config, empty, scales, constants)
    return _adapter(empty, scales, constants, lora=lora)


def _changed_sites(config: PreTrainedConfig, added: Tensor, kept: Tensor) -> list[int]:
    """Which writers are not left alone: 0 is the attention, 1 the MLP. Refuses what no tuner can hold."""
    kind = config.model_type
    if getattr(config, "quantization_config", None):
        raise _refusal(config, "its weights are quantized, export from the unquantized checkpoint")
    if kind not in LAST_MAPS:
        reason = REFUSED.get(kind, f"only {', '.join(sorted(LAST_MAPS))} are known to hold one")
        raise _refusal(config, reason)
    sites = [site for site in range(2) if added[:, site].any() or (kept[:, site] != 1).any()]
    if not sites:
        raise _refusal(config, "it changes nothing, as it adds zeros and every beta is 1")
    if not all(LAST_MAPS[kind][site] for site in sites):
        cure = ", fit with --set writers=mha" if LAST_MAPS[kind][0] else ""
        cure += f" {_ADD}" if cure and not (kept == 1).all() else ""
        raise _refusal(config, f"its experts are no linear layer{cure}")
    return sites


def _require_glora(
    config: PreTrainedConfig, empty: nn.Module, scales: _Scales, constants: _Constants
) -> None:
    for name in scales | constants:
        linear: Any = empty.get_submodule(name)
        kind = type(linear)
        if kind is not nn.Linear:
            reason = f"GLoRA knows torch.nn.Linear alone and {name} is a {kind.__name__}"
        elif linear.bias is None and name in constants and constants[name].any():
            reason = f"no tuner both scales and adds where a layer has no bias, as {name}"
        else:
            continue
        raise _refusal(config, f"{reason}; fit with {_ADD}, where LoRA can hold it")


def _refusal(config: PreTrainedConfig, reason: str) -> I2CLError:
    instead = HOOKED
    with suppress(I2CLError):
        family_of(config)
        instead = f"export --to hf, or {HOOKED}"
    kind = config.model_type
    return I2CLError(f"no PEFT adapter holds this injection into a {kind!r} model: {reason}; else {instead}")


def _adapter(empty: Any, scales: _Scales, constants: _Constants, *, lora: bool) -> Adapter:
    """The tuner's config, and its own tensors on an empty model."""
    fields: dict[str, Any]
    if lora:
        tuner, constant = "LoRA", "lora_B.bias"
        transposed = any(not isinstance(empty.get_submodule(name), nn.Linear) for name in scales)
        # transposed: of GPT-2's Conv1D
        fields = {"r": 1, "lora_alpha": 1, "lora_bias": True, "fan_in_fan_out": transposed}
    else:
        tuner, constant = "GLoRA", "glora_E.X"
        fields = {"config_A_B": "constant", "config_C": "none", "config_D_E": "vector"}
    # maps have the same names in all layers
    targets = sorted({re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in scales | constants})
    config = _of_peft("LoraConfig" if lora else "GloraConfig")(
        task_type="CAUSAL_LM", target_modules=targets, **fields
    )
    config.target_modules = targets  # PEFT makes a set of it, whose order varies in files
    with warnings.catch_warnings(action="ignore"):  # LoRA's vector cannot be merged where a layer has no bias
        wearing = _of_peft("get_peft_model")(empty, config)
        names = _of_peft("get_peft_model_state_dict")(wearing, save_embedding_layers=False)
    tensors, held = {}, []
    for name, like in names.items():
        module, part = re.split(r"\.(?=g?lora_)", name.removeprefix(_PREFIX), maxsplit=1)
        minus = scales.get(module, 1.0) - 1 if part in {"glora_A.X", "glora_D.X"} else 0.0
        tensors[name] = torch.full(like.shape, minus)
        if part == constant:
            held.append(name)
            tensors[name] = constants.get(module, tensors[name]).contiguous()
    return Adapter(tuner, config, tensors, tuple(held))


def _of_peft(name: str) -> Any:
    """Something of PEFT. Raises I2CLError that names what to install where there is none."""
    needs("a PEFT adapter", "peft", "peft")
    try:
        return getattr(importlib.import_module("peft"), name)
    except (ImportError, AttributeError):
        raise I2CLError("this version of peft lacks the tuner that it takes: pip install -U peft") from None


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
            write_golden(fresh, path.resolve().name, known, "peft")
            if known.forced:
                generation = decoder.model.generation_config or GenerationConfig()
                with_bias(generation, known).save_pretrained(fresh)
    return made


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (Path(folder) / CONFIG).is_file()


def load_adapter(
    folder: str | Path, model: str | None = None, device: str | torch.device | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The base model in float32 wearing an adapter, and the adapter's tensors by name.
    ``folder``: holds the adapter, in safetensors; ``model``: base model; default: the one that the adapter's
    config names; ``device``: see `i2cl.Decoder.from_pretrained`. Raises I2CLError if either cannot be read,
    or they do not fit together.
    """
    wearing, path = _of_peft("PeftModel"), Path(folder)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        name, revision = model or config["base_model_name_or_path"], None if model else config.get("revision")
        state = load_file(path / WEIGHTS)  # also says that these are no pickles
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise I2CLError(f"{str(path)!r} holds a damaged adapter ({error}): export it again") from None
    try:
        base, _ = load_model_and_tokenizer(name, dtype="float32", device=device, revision=revision)
    except I2CLError as error:
        raise I2CLError(f"{error} (the adapter's base model; --model names another place)") from None
    try:
        with warnings.catch_warnings(action="ignore"):
            return wearing.from_pretrained(base, str(path)).eval(), state
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        what = f"the adapter {str(path)!r} does not fit {name!r} ({first_line(error)})"
        raise I2CLError(f"{what}: give its base") from None
