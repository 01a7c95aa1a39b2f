"""Identify a model by its weights, configuration and tokenizer, independently of its name."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import pydantic
import torch
from huggingface_hub import cached_assets_path
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from i2cl.errors import I2CLError, first_problem
from i2cl.models.checkpoint import stored_weights
from i2cl.models.precision import dequantize, offloaded_weight
from i2cl.storage.atomic import write_text_atomic

# Values processed at once: small enough for a CPU's cache, large enough for a transfer from a device.
CHUNK_SIZE, DEVICE_CHUNK_SIZE = 2**15, 2**22
CACHE_MIN_BYTES = 10**8  # the fingerprints of smaller models are not cached
CHECKSUM_WORDS = 256  # 8-byte words per checksum
MAX_QUANTIZATION_ERROR = 0.2  # relative; 8 bits have about 0.01, 4 bits 0.1
# Configuration fields that do not change the outputs of a model in evaluation mode.
IGNORED_CONFIG_FIELDS = re.compile(
    r"dropout|pdrop|layerdrop|jitter|initializer|^init_|^lambda_std|aux_loss"  # training
    r"|_token_ids?$|^output_|^use_cache$|^return_dict$|^is_|^add_cross_attention$|^chunk_size_feed_forward$"
    r"|id2label|label2id|^num_labels$|^problem_type$|^summary_|^classifier_|^pooling$|^task_specific_params$"
    r"|dtype$|quantization|implementation|^pretraining_tp$|^slow_but_exact$"  # storage and execution
    r"|name_or_path|version|^architectures$|^auto_map$|^tokenizer_class$"
    r"|^tie_"  # visible in the names of the weights
)
MAX_LISTED_DIFFERENCES = 5  # in an error message


@dataclass(frozen=True)
class ModelIdentity:
    """The model that an injection was fitted on."""

    name: str  #: hub id or folder name, as given at loading
    revision: str | None  #: hub revision, or None
    model_type: str  #: ``config.model_type``
    layers: int  #: number of blocks
    d_model: int  #: width of the residual stream
    weights: str  #: fingerprint of the weights (see `weights_fingerprint`)
    tokenizer: str  #: fingerprint of the tokenizer (see `tokenizer_fingerprint`)
    dtype: str | None = None  #: precision, such as ``"bfloat16"``; None if unknown
    quantization: str | None = None  #: quantization, such as ``"bitsandbytes 8bit"``, or None
    config: dict[str, Any] = field(hash=False, kw_only=True)  #: see `inference_config`

    def __repr__(self) -> str:
        """Show name, revision and fingerprint."""
        revision = "" if self.revision is None else f", revision={self.revision!r}"
        return f"ModelIdentity({self.name!r}{revision}, weights={self.weights!r})"

    def difference(self, other: "ModelIdentity") -> str | None:
        """Describe the differences from another model; None if there are none.

        Name, revision and precision are ignored. Only configuration fields that both have are compared, since
        new versions of transformers add fields.
        """
        names = ("model_type", "layers", "d_model", "weights", "tokenizer")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        shared = sorted(self.config.keys() & other.config.keys() - {"model_type"})
        pairs |= {f"config.{name}": (self.config[name], other.config[name]) for name in shared}
        differences = [
            f"{name} {value!r} and not {other_value!r}"
            for name, (value, other_value) in pairs.items()
            if value != other_value
        ]
        unlisted = len(differences) - MAX_LISTED_DIFFERENCES
        more = [f"{unlisted} more"] if unlisted > 0 else []
        return ", ".join(differences[:MAX_LISTED_DIFFERENCES] + more) or None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelIdentity":
        """Inverse of `dataclasses.asdict`. Raises I2CLError on missing, unknown or mistyped fields."""
        try:
            return pydantic.TypeAdapter(cls).validate_python(vars(cls(**fields)))
        except (TypeError, pydantic.ValidationError) as error:
            problem = first_problem(error)
            raise I2CLError(
                f"the artefact's base_model entry is malformed ({problem}): fit it again"
            ) from None


def inference_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the text model's settings that can change its outputs, as JSON, with numbers to six digits."""

    def keep_relevant(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if not IGNORED_CONFIG_FIELDS.search(name)}

    numbers: Any = {"parse_constant": str, "parse_float": lambda number: float(f"{float(number):.6g}")}
    text = json.dumps(config.get_text_config().to_dict(), default=str)
    fields: dict[str, Any] = json.loads(text, object_hook=keep_relevant, **numbers)
    return fields


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash names, shapes and values of all parameters and persistent buffers, to 16 hex digits.

    A checkpoint has the same fingerprint in every precision that it can be loaded in. Values are rounded to
    bfloat16, so that float32 and bfloat16 give the same one; integers are exact. From float16 and quantized
    weights, the bfloat16 values cannot be recovered. They are read from the checkpoint if it is on this
    machine and agrees with the weights in memory: exactly for float16, and to `MAX_QUANTIZATION_ERROR` for
    quantized ones. Otherwise, for example for a model constructed in memory, the values in memory are used.

    Tensors are read or dequantized one by one, at about one gigabyte per second.

    For models of `CACHE_MIN_BYTES` or more, the result is cached among huggingface_hub's assets. The cache is
    valid while the checkpoint's files have the same size and time, and the weights in memory have the same
    `_checksums`.
    """
    path = _cache_path(model)
    if path is not None:
        with suppress(OSError, ValueError):
            cached = path.read_text(encoding="ascii")
            if re.fullmatch(r"[0-9a-f]{16}", cached):
                return cached
    fingerprint = tensors_fingerprint(_checkpoint_weights(model))
    if path is not None:
        with suppress(I2CLError):
            write_text_atomic(path, fingerprint)
    return fingerprint


def _cache_path(model: PreTrainedModel) -> Path | None:
    """Return the file that caches the fingerprint; None for a small model or one not loaded from files."""
    named = named_weights(model)
    if any(weight.is_meta for _, weight in named):  # offloaded
        return None
    is_large = sum(weight.nbytes for _, weight in named) >= CACHE_MIN_BYTES
    paths = _source_files(model) if is_large else []
    if not paths:
        return None
    digest = hashlib.sha256()
    # torchao's tensors do not expose their bytes and raise various errors; their fingerprint is not cached
    with suppress(OSError, ValueError, RuntimeError, AssertionError, TypeError):
        for path in paths:
            status = path.stat()
            digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
        for name, weight in named:
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
            for sums in _checksums(weight.detach()):
                digest.update(sums.cpu().numpy().tobytes())
        return cached_assets_path("i2cl", "fingerprints") / digest.hexdigest()
    return None


def _source_files(model: PreTrainedModel) -> list[Path]:
    """Return the files that a model was loaded from: safetensors, or one GGUF file; none if unknown."""
    stored, name = stored_weights(model), str(model.name_or_path or "")
    if stored is not None:
        return stored.paths
    return [Path(name)] if name and Path(name).is_file() else []


def _checksums(weight: Tensor) -> Iterator[Tensor]:
    """Yield checksums of a tensor, which change if any of its values changes.

    The bytes are read as 64-bit integers, and `CHECKSUM_WORDS` of them at a time are added modulo 2^64. This
    is limited by memory bandwidth only; a hash takes ten times as long.
    """
    data = weight.contiguous().reshape(-1).view(torch.uint8)
    block = 8 * CHECKSUM_WORDS
    end = len(data) // block * block if data.storage_offset() % 8 == 0 else 0
    for part in data[:end].view(torch.int64).view(-1, CHECKSUM_WORDS).split(DEVICE_CHUNK_SIZE):
        yield part.sum(1)
    yield data[end:]


def tensors_fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash (name, tensor) pairs in the order of `named_weights`."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        for part in flat.split(CHUNK_SIZE if flat.device.type == "cpu" else DEVICE_CHUNK_SIZE):
            values = part.to(torch.bfloat16).view(torch.int16) if part.is_floating_point() else part
            digest.update(values.cpu().numpy())
    return digest.hexdigest()[:16]


def named_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Return parameters and persistent buffers, sorted by name."""
    persistent = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    return sorted([*model.named_parameters(), *buffers], key=itemgetter(0))


def _checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of every weight; see `weights_fingerprint`."""
    files = cache(lambda: stored_weights(model))  # opened only if needed
    for name, weight in named_weights(model):
        if weight.is_meta and name in model.all_tied_weights_keys:
            continue  # the same tensor under another name
        module_name, _, parameter_name = name.rpartition(".")
        module, values = model.get_submodule(module_name), weight
        if weight.is_meta:
            values = offloaded_weight(module, parameter_name)
        dequantized = dequantize(module, values)
        values = values if dequantized is None else dequantized
        if dequantized is not None or values.dtype == torch.float16:
            stored = files()
            if stored is not None and name in stored.names:
                original = stored.read(name)
                if _agrees(original, values, quantized=dequantized is not None):
                    values = original
        yield name, values


def _agrees(stored: Tensor, values: Tensor, *, quantized: bool) -> bool:
    """Return whether the values in memory can come from a checkpoint's values."""
    if stored.shape != values.shape or not stored.is_floating_point():  # integers: a quantized checkpoint
        return False
    stored = stored.to(values.device)
    if not quantized:
        return torch.equal(stored.to(values.dtype), values)
    error = torch.linalg.vector_norm(values.float() - stored.float())
    return bool(error <= MAX_QUANTIZATION_ERROR * torch.linalg.vector_norm(stored.float()))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the tokenizer's JSON and the token ids of a probe sentence, to 16 hex digits.

    Padding and truncation settings are ignored, since callers change them. Slow tokenizers, which have no
    JSON, are identified by their vocabulary.
    """
    probe = tokenizer("Review: a good film.\nSentiment: positive\n")["input_ids"]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary: Any = sorted(tokenizer.get_vocab().items())
    else:
        # Disabled options are dropped, since new versions of the library add options.
        vocabulary = json.loads(backend.to_str(), object_hook=_enabled_options)
        for state in ("version", "truncation", "padding"):
            vocabulary.pop(state, None)
    return hashlib.sha256(json.dumps([vocabulary, list(probe)]).encode()).hexdigest()[:16]


def _enabled_options(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value or type(value) is int}  # ids can be 0
