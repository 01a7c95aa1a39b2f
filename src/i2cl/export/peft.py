"""Export an injection as a PEFT adapter, if one of PEFT's tuners expresses it exactly, and load adapters.

LoRA with ``lora_bias`` adds a vector to the output of any linear map. GLoRA also scales the map, but only
adds to an existing bias: ``(W + W A) h + b + b D + E`` with ``A = D = beta - 1`` and ``E = lambda v``.
Sources: https://huggingface.co/docs/peft/package_reference/lora and .../package_reference/glora.
"""

import importlib
import json
import re
import warnings
from collections.abc import Callable
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
from transformers import PreTrainedConfig

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_line, require_packages
from i2cl.export.causal_lm import left_padded, write_card
from i2cl.export.families import FAMILIES, LAST_MAPS, REFUSED, USE_HOOKS, family_of
from i2cl.export.folding import added_and_scales, require_foldable, require_known_architecture, skeleton
from i2cl.export.golden import Golden
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.decoder import Decoder
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.storage.atomic import new_folder, require_writable

if TYPE_CHECKING:
    from peft import PeftConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ADDITIVE = "--set formula=add"

# By the names of linear maps: beta; and the vector to add, ``lambda * v`` in float32.
_Scales = dict[str, float]
_Constants = dict[str, Float[Tensor, " d"]]


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter.

    Attributes:
        tuner: LoRA or GLoRA.
        config: of the tuner.
        tensors: by their names in files.
        constants: names of those that hold ``lambda * v``.
    """

    tuner: str
    config: "PeftConfig"
    tensors: dict[str, Tensor] = field(repr=False)
    constants: tuple[str, ...]


def export_peft(
    decoder: Decoder,
    injection: Injection,
    output: str | Path,
    *,
    golden: Callable[[], Golden] | None = None,
    force: bool = False,
    revision: str | None = None,
) -> Adapter:
    """Write a PEFT adapter that does to its base model what the injection does.

    ``peft.PeftModel.from_pretrained(base, output)`` loads it.

    Args:
        decoder: the base model, which is not changed.
        injection: fitted task, injected at all positions into the residual writers.
        output: a folder that is new or empty; it appears when it is complete.
        golden: returns golden answers (`make_golden`).
        force: accept other weights of the same shape than those the injection was fitted on.
        revision: of the base model, for the adapter's config.

    Raises:
        I2CLError: if no tuner expresses the injection, the folder cannot be used, or the injection was fitted
            on another model.
    """
    path = Path(output)
    require_writable(path, frozenset())
    require_known_architecture(decoder)
    injection.require_base(decoder, force=force)
    made = make_adapter(decoder.model.config, injection)
    made.config.base_model_name_or_path, made.config.revision = decoder.name, revision
    made.config.inference_mode = True
    answers = golden() if golden is not None else None
    with new_folder(path, frozenset()) as fresh:
        made.config.save_pretrained(str(fresh))
        save_file(made.tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        left_padded(decoder.tokenizer).save_pretrained(fresh)
        if answers is not None:
            nonzero = [name for name in made.constants if made.tensors[name].any()]
            answers.of_export("peft", decoder.model.dtype, nonzero).write(fresh)
        write_card(fresh, path.resolve().name, injection, decoder.tokenizer, "peft")
    return made


def make_adapter(config: PreTrainedConfig, injection: Injection) -> Adapter:
    """Express an injection by one of PEFT's tuners: LoRA if every beta is 1, else GLoRA.

    Args:
        config: of the base model, whose weights are not needed.
        injection: fitted task, injected at all positions into the residual writers.

    Raises:
        I2CLError: if no tuner expresses it, or peft is not installed.
    """
    require_foldable(injection)
    if injection.scoring == "words":
        what = "word-level scoring changes the LM head, which an adapter does not"
        raise I2CLError(f"{what}: export with --to classifier or causal-lm, or {USE_HOOKS}")
    added, betas = added_and_scales(injection)
    sublayers = _changed_sublayers(config, added, betas)
    kind, lora = config.model_type, bool((betas == 1).all())
    empty, maps = skeleton(config), LAST_MAPS[kind]
    layers = f"{empty.base_model_prefix}.{ARCHITECTURES[kind].layers}"
    joint = FAMILIES[kind].joint if kind in FAMILIES and not lora else ""
    scales: _Scales = {}
    constants: _Constants = {}
    for layer, sublayer in product(range(len(added)), sublayers):
        scales[f"{layers}.{layer}.{maps[sublayer]}"] = float(betas[layer, sublayer])
        home = f"{layers}.{layer}.{maps[{'attention': 0, 'mlp': 1}.get(joint, sublayer)]}"
        constant = added[layer, sublayer]
        constants[home] = constants[home] + constant if home in constants else constant.clone()
    if not lora:
        _require_glora(config, empty, scales, constants)
    return _adapter(empty, scales, constants, lora=lora)


def _changed_sublayers(config: PreTrainedConfig, added: Tensor, betas: Tensor) -> list[int]:
    """Return the sublayers that the injection changes: 0 is the attention, 1 the MLP.

    Raises I2CLError if no tuner can change them.
    """
    kind = config.model_type
    if getattr(config, "quantization_config", None):
        raise _refusal(config, "its weights are quantized, export from the unquantized checkpoint")
    if kind not in LAST_MAPS:
        raise _refusal(config, REFUSED.get(kind, f"supported are {', '.join(sorted(LAST_MAPS))}"))
    changed = [one for one in range(2) if added[:, one].any() or (betas[:, one] != 1).any()]
    if not changed:
        raise _refusal(config, "it changes nothing: it adds zeros, and every beta is 1")
    if not all(LAST_MAPS[kind][one] for one in changed):
        hint = ", fit with --set writers=mha" if LAST_MAPS[kind][0] else ""
        hint += f" {_ADDITIVE}" if hint and not (betas == 1).all() else ""
        raise _refusal(config, f"its experts are not linear layers{hint}")
    return changed


def _require_glora(
    config: PreTrainedConfig, empty: nn.Module, scales: _Scales, constants: _Constants
) -> None:
    for name in scales | constants:
        linear: Any = empty.get_submodule(name)
        kind = type(linear)
        if kind is not nn.Linear:
            reason = f"GLoRA supports torch.nn.Linear only, and {name} is a {kind.__name__}"
        elif linear.bias is None and name in constants and constants[name].any():
            reason = f"no tuner both scales and adds to a layer without a bias, such as {name}"
        else:
            continue
        raise _refusal(config, f"{reason}; fit with {_ADDITIVE} to use LoRA")


def _refusal(config: PreTrainedConfig, reason: str) -> I2CLError:
    instead = USE_HOOKS
    with suppress(I2CLError):
        family_of(config)
        instead = f"export with --to classifier or causal-lm, or {USE_HOOKS}"
    kind = config.model_type
    return I2CLError(
        f"no PEFT adapter expresses this injection into a {kind!r} model: {reason}; or {instead}"
    )


def _adapter(empty: Any, scales: _Scales, constants: _Constants, *, lora: bool) -> Adapter:
    """Make the tuner's config and tensors, from the tensors that it has on an empty model."""
    fields: dict[str, Any]
    if lora:
        tuner, constant = "LoRA", "lora_B.bias"
        transposed = any(not isinstance(empty.get_submodule(name), nn.Linear) for name in scales)  # Conv1D
        fields = {"r": 1, "lora_alpha": 1, "lora_bias": True, "fan_in_fan_out": transposed}
    else:
        tuner, constant = "GLoRA", "glora_E.X"
        fields = {"config_A_B": "constant", "config_C": "none", "config_D_E": "vector"}
    # maps have the same names in all layers
    targets = sorted({re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in scales | constants})
    config = _import_from_peft("LoraConfig" if lora else "GloraConfig")(
        task_type="CAUSAL_LM", target_modules=targets, **fields
    )
    config.target_modules = targets  # PEFT makes it a set, whose order in files varies
    with warnings.catch_warnings(action="ignore"):  # about merging lora_bias
        adapted = _import_from_peft("get_peft_model")(empty, config)
        state = _import_from_peft("get_peft_model_state_dict")(adapted, save_embedding_layers=False)
    tensors, names = {}, []
    for name, like in state.items():
        module, part = re.split(r"\.(?=g?lora_)", name.removeprefix(_PREFIX), maxsplit=1)
        value = scales.get(module, 1.0) - 1 if part in {"glora_A.X", "glora_D.X"} else 0.0
        tensors[name] = torch.full(like.shape, value)
        if part == constant:
            names.append(name)
            tensors[name] = constants.get(module, tensors[name]).contiguous()
    return Adapter(tuner, config, tensors, tuple(names))


def _import_from_peft(name: str) -> Any:
    """Import an attribute of peft. Raises I2CLError if peft is not installed or too old."""
    require_packages("a PEFT adapter", "peft", "peft")
    try:
        return getattr(importlib.import_module("peft"), name)
    except (ImportError, AttributeError):
        raise I2CLError(f"this version of peft has no {name}: pip install -U peft") from None


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds a PEFT adapter."""
    return (Path(folder) / CONFIG).is_file()


def load_adapter(
    folder: str | Path, model: str | None = None, device: str | torch.device | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Load an adapter on its base model, in float32.

    Args:
        folder: of the adapter, in safetensors.
        model: base model; default: the one that the adapter's config names.
        device: see `i2cl.Decoder.from_pretrained`.

    Returns:
        The model with the adapter, and the adapter's tensors by name.

    Raises:
        I2CLError: if either cannot be read, or they do not fit together.
    """
    peft_model, path = _import_from_peft("PeftModel"), Path(folder)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        name, revision = model or config["base_model_name_or_path"], None if model else config.get("revision")
        state = load_file(path / WEIGHTS)  # also makes sure that these are not pickles
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise I2CLError(f"{str(path)!r} holds a damaged adapter ({error}): export it again") from None
    try:
        base, _ = load_model_and_tokenizer(name, dtype="float32", device=device, revision=revision)
    except I2CLError as error:
        raise I2CLError(f"{error} (the adapter's base model; --model names another place)") from None
    try:
        with warnings.catch_warnings(action="ignore"):
            return peft_model.from_pretrained(base, str(path)).eval(), state
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        what = f"the adapter {str(path)!r} does not fit {name!r} ({first_line(error)})"
        raise I2CLError(f"{what}: name its base model with --model") from None
