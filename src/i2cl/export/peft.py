"""A calibrated injection as a PEFT adapter, where one of PEFT's tuners expresses it exactly: made and loaded.

LoRA with ``lora_bias`` adds a vector behind any linear map. GLoRA also scales the map, but adds only where
there is a bias: ``(W + W A) h + b + b D + E`` with ``A = D = beta - 1`` and ``E = lambda v``.
Sources: https://huggingface.co/docs/peft/package_reference/lora and .../package_reference/glora.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_line, needs
from i2cl.export.calls import write_readme
from i2cl.export.checkpoint import with_bias
from i2cl.export.families import FAMILIES, HOOKED, LAST_MAPS, REFUSED, family_of
from i2cl.export.folding import require_known, require_plain, require_unbiased, skeleton
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


@dataclass
class Change:
    """What becomes of one linear map."""

    scale: float = 1.0  # beta
    # ``lambda * v`` in float32, of its own writer and of one that has no bias for it
    constant: Float[Tensor, " d"] | None = None


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter.

    Attributes:
        tuner: LoRA or GLoRA.
        config: of the tuner.
        tensors: as PEFT names them in files.
        constants: names of those that hold ``lambda * v``.
    """

    tuner: str
    config: "PeftConfig"
    tensors: dict[str, Tensor] = field(repr=False)
    constants: tuple[str, ...]


def make_adapter(config: PreTrainedConfig, injection: Injection) -> Adapter:
    """Express an injection by one of PEFT's tuners: LoRA where every beta is 1, else GLoRA.

    ``config``: of the base model, whose weights are not needed; ``injection``: at all positions, into the
    residual writers. Raises I2CLError if no tuner expresses it, saying why and what to do instead, or peft is
    not installed.
    """
    require_plain(injection)
    require_unbiased(injection)
    paths = _paths(config, injection)
    empty = skeleton(config)
    layers = f"{empty.base_model_prefix}.{ARCHITECTURES[config.model_type].layers}"
    if bool((injection.coefficients[..., 1] == 1).all()):
        return _lora(empty, _changes(injection, layers, paths, paths))
    joint = FAMILIES[config.model_type].joint if config.model_type in FAMILIES else ""
    attention, mlp = LAST_MAPS[config.model_type]
    homes = {"": (attention, mlp), "attention": (attention, attention), "mlp": (mlp, mlp)}[joint]
    changes = _changes(injection, layers, paths, homes)
    _require_glora(config, empty, changes)
    return _glora(empty, changes)


def _paths(config: PreTrainedConfig, injection: Injection) -> tuple[str, str]:
    """The last linear maps of attention and MLP, "" for one that is left alone."""
    kind = config.model_type
    if getattr(config, "quantization_config", None):
        raise _refusal(config, "its weights are quantized, export from the unquantized checkpoint")
    if kind not in LAST_MAPS:
        reason = REFUSED.get(kind, f"only {', '.join(sorted(LAST_MAPS))} are known to hold one")
        raise _refusal(config, reason)
    amounts, scales = injection.coefficients.float().cpu().unbind(-1)
    added = amounts[..., None] * injection.context.values.float().cpu()
    paths = []
    for site, path in enumerate(LAST_MAPS[kind]):
        alone = bool((scales[:, site] == 1).all()) and not added[:, site].any()
        if not path and not alone:
            cure = ""
            if LAST_MAPS[kind][0]:
                cure = ", fit with --set writers=mha"
                cure += "" if (scales == 1).all() else f" {_ADD}"
            raise _refusal(config, f"its experts are no linear layer{cure}")
        paths.append("" if alone else path)
    if not any(paths):
        raise _refusal(config, "it changes nothing, as it adds zeros and every beta is 1")
    return paths[0], paths[1]


def _changes(
    injection: Injection, layers: str, paths: tuple[str, str], homes: tuple[str, str]
) -> dict[str, Change]:
    """What becomes of each linear map, by its name; `homes` are the maps that take the constants."""
    values, pairs = injection.context.values.float().cpu(), injection.coefficients.float().cpu()
    changes: dict[str, Change] = {}
    for layer in range(len(values)):
        for site in range(2):
            if not paths[site]:
                continue
            amount, scale = pairs[layer, site].tolist()
            changes.setdefault(f"{layers}.{layer}.{paths[site]}", Change()).scale = scale
            home = changes.setdefault(f"{layers}.{layer}.{homes[site]}", Change())
            added = amount * values[layer, site]
            home.constant = added if home.constant is None else home.constant + added
    return changes


def _require_glora(config: PreTrainedConfig, empty: nn.Module, changes: Mapping[str, Change]) -> None:
    for name, change in changes.items():
        linear: Any = empty.get_submodule(name)
        kind = type(linear)
        moved = change.constant is not None and bool(change.constant.any())
        if kind is not nn.Linear:
            reason = f"GLoRA knows torch.nn.Linear alone and {name} is a {kind.__name__}"
        elif moved and linear.bias is None:
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


def _lora(empty: Any, changes: Mapping[str, Change]) -> Adapter:
    with installed():
        from peft import LoraConfig
    transposed = any(not isinstance(empty.get_submodule(name), nn.Linear) for name in changes)
    own: dict[str, Any] = {"lora_bias": True, "fan_in_fan_out": transposed}  # of GPT-2's Conv1D
    config = LoraConfig(r=1, lora_alpha=1, **own, **_shared(changes))
    return Adapter("LoRA", config, *_filled(config, empty, changes, "lora_B.bias"))


def _glora(empty: Any, changes: Mapping[str, Change]) -> Adapter:
    with installed():
        from peft import GloraConfig
    own: dict[str, Any] = {"config_A_B": "constant", "config_C": "none", "config_D_E": "vector"}
    config = GloraConfig(**own, **_shared(changes))
    return Adapter("GLoRA", config, *_filled(config, empty, changes, "glora_E.X"))


def _shared(changes: Mapping[str, Change]) -> dict[str, Any]:
    """What both tuners' configs say; maps have the same names in all layers."""
    targets = sorted({re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in changes})
    return {"target_modules": targets, "task_type": "CAUSAL_LM"}


def _filled(
    config: "PeftConfig", empty: Any, changes: Mapping[str, Change], constant: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tuner's own tensors on an empty model, and which of them hold constants."""
    from peft import get_peft_model, get_peft_model_state_dict

    with quiet():
        names = get_peft_model_state_dict(get_peft_model(empty, config), save_embedding_layers=False)
    tensors, constants = {}, []
    for name, like in names.items():
        module, part = re.split(r"\.(?=g?lora_)", name.removeprefix(_PREFIX), maxsplit=1)
        change = changes[module]
        value = torch.full(like.shape, change.scale - 1 if part in {"glora_A.X", "glora_D.X"} else 0.0)
        if part == constant:
            constants.append(name)
            value = value if change.constant is None else change.constant
        tensors[name] = value.contiguous()
    return tensors, tuple(constants)


@contextmanager
def installed() -> Iterator[None]:
    """Raise an I2CLError that names what to install where a name of PEFT cannot be imported."""
    needs("a PEFT adapter", "peft", "peft")
    try:
        yield
    except ImportError:
        raise I2CLError("this version of peft lacks the tuner that it takes: pip install -U peft") from None


@contextmanager
def quiet() -> Iterator[None]:
    """No advice from PEFT, such as that LoRA's vector cannot be merged where a layer has no bias."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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

    ``folder``: holds the adapter, in safetensors; ``model``: base model; default: the one that the adapter's
    config names; ``device``: see `i2cl.Decoder.from_pretrained`. Raises I2CLError if either cannot be read,
    or they do not fit together.
    """
    with installed():
        from peft import PeftModel
    path = Path(folder)
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
        with quiet():
            return PeftModel.from_pretrained(base, str(path)).eval(), state
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        what = f"the adapter {str(path)!r} does not fit {name!r} ({first_line(error)})"
        raise I2CLError(f"{what}: give its base") from None
