"""Loads a causal language model and its tokenizer from the hub or a folder, safetensors only."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig

from i2cl.errors import I2CLError, needs
from i2cl.models.precision import Quantization, quantization_config

REFERENCE = "reference"
"""The name of the bundled model."""

TENSOR_PARALLEL = "tensor_parallel"
"""The device map that splits every layer over the processes of ``torchrun``."""

LONGEST_REASON = 300
"""Characters of another library's message that a line of ours quotes."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model_and_tokenizer(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    offload_folder: str | Path | None = None,
    quantization: Quantization | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in evaluation mode and its tokenizer.

    Args:
        name: ``"reference"``, a folder, or a hub id.
        dtype: ``"auto"`` (the checkpoint's own), ``"float32"``, ``"bfloat16"``, ``"float16"`` or a
            `torch.dtype`. Default: float32 on CPU, the checkpoint's own elsewhere.
        device: such as ``"cpu"`` or ``"cuda:1"``. Default: an accelerator where there is one.
        device_map: passed to transformers (needs the package accelerate), or ``"tensor_parallel"``: split
            over the processes that ``torchrun`` started
            (https://huggingface.co/docs/transformers/perf_infer_gpu_multi); excludes ``device``.
        offload_folder: where weights that the device map puts on ``"disk"`` are written, if their
            checkpoint cannot be read in place.
        quantization: ``"8bit"`` or ``"4bit"`` (bitsandbytes: LLM.int8 or NF4), or a config of transformers
            (https://huggingface.co/docs/transformers/main_classes/quantization). Default: as the
            checkpoint is.
        revision: hub branch, tag or commit.
        trust_remote_code: run code that the repository brings. Only for sources you trust.

    Raises:
        I2CLError: a path or id that holds no such model, pickle weights, damaged or incomplete weights,
            or a package that is lacking.
    """
    source = str(reference_folder()) if name == REFERENCE else name
    if Path(source).exists():
        _check_folder(Path(source))
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise I2CLError(f"model folder {name!r} does not exist: give a folder, a hub id, or 'reference'")
    if device is not None and device_map is not None:
        raise I2CLError("device and device_map exclude each other: give one of them")
    target = _device(device)
    wanted = _dtype(dtype, target)
    config = quantization_config(quantization, wanted)
    if config is not None and device_map is None:
        device_map = {"": str(target)}  # it is quantized on its way there
    placement = _placement(device_map, offload_folder, quantized=config is not None)
    if config is not None:  # None would undo that of a quantized checkpoint
        placement["quantization_config"] = config
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _told(f"the tokenizer of {name!r}"):
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    with _told(f"the model {name!r}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=wanted,
            **placement,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, in a line of our own
            **common,
        )
    model, info = loaded
    _check_complete(name, info)
    if device_map is None:
        model = model.to(target)
    return model.eval(), tokenizer


def _placement(
    device_map: str | dict[str, Any] | None, offload_folder: str | Path | None, *, quantized: bool
) -> dict[str, Any]:
    if device_map == TENSOR_PARALLEL:
        if "RANK" not in os.environ:
            raise I2CLError(
                "device map tensor_parallel needs torchrun: torchrun --nproc-per-node 2 --no-python i2cl ..."
            )
        if quantized:
            raise I2CLError("a quantized model cannot be split by tensor_parallel: leave one of them out")
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    if device_map is not None:
        needs("a device map", "hub", "accelerate")
    if isinstance(device_map, dict):
        for place in {str(place) for place in device_map.values()} - {"disk"}:
            _device(f"cuda:{place}" if place.isdigit() else place)
    return {"device_map": device_map, "offload_folder": offload_folder}


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise I2CLError(f"{what} has damaged weights ({error}): download or copy them again") from None
    except (OSError, ValueError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise I2CLError(
                f"{what} brings its own code: if you trust it, pass trust_remote_code (--trust-remote-code)"
            ) from None
        raise I2CLError(f"cannot load {what}: {_first_line(error)}") from error


def _check_complete(name: str, info: dict[str, Any]) -> None:
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise I2CLError(f"the checkpoint {name!r} lacks weights ({some}, ...): it is incomplete")
    if info["mismatched_keys"]:
        first, found, expected = sorted(info["mismatched_keys"])[0]
        raise I2CLError(
            f"the checkpoint {name!r} holds {first} as {tuple(found)} where its config.json says "
            f"{tuple(expected)}: one of the two files is of another model"
        )


def reference_folder() -> Path:
    """Where the bundled model is."""
    return Path(str(resources.files("i2cl.models").joinpath("reference")))


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise I2CLError(f"{str(folder)!r} is no model folder: it has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise I2CLError(
            f"{str(folder)!r} holds only pickle weights ({pickles[0]}), which can run code when loaded: "
            "convert them with model.save_pretrained(folder) in a place you trust"
        )
    raise I2CLError(f"{str(folder)!r} holds no weights: expected *.safetensors beside config.json")


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return _default_device()
    try:
        return torch.empty(1, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises the latter
        raise I2CLError(
            f"cannot use device {str(device)!r} ({_first_line(error)}): choose cpu, or one this machine has"
        ) from None


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    if dtype is None:
        return "float32" if device.type == "cpu" else "auto"
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise I2CLError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return dtype


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (
        shorten(lines[0].rstrip(":"), LONGEST_REASON, placeholder=" ...") if lines else type(error).__name__
    )
