"""Which model an artefact belongs to, told from weights, configuration and tokenizer, and not from a name."""

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
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from i2cl.errors import I2CLError, first_problem
from i2cl.models.checkpoint import stored_weights
from i2cl.models.precision import dequantize, offloaded_weight, quantize_and_dequantize
from i2cl.storage.atomic import replaced_file

# Values rounded at a time: few enough for one thread and its cache; on a device, a copy that is worth it.
PART, DEVICE_PART = 2**15, 2**22
KEPT_FROM = 2 * 10**9  # bytes in memory: reading fewer is quick enough
BLOCK = 256  # words of 8 bytes that a checksum adds up
# Fields of a configuration that do not change what a model in evaluation mode answers.
WITHOUT_EFFECT = re.compile(
    r"dropout|pdrop|layerdrop|jitter|initializer|^init_|^lambda_std|aux_loss"  # of training
    r"|_token_ids?$|^output_|^use_cache$|^return_dict$|^is_|^add_cross_attention$|^chunk_size_feed_forward$"
    r"|id2label|label2id|^num_labels$|^problem_type$|^summary_|^classifier_|^pooling$|^task_specific_params$"
    r"|dtype$|quantization|implementation|^pretraining_tp$|^slow_but_exact$"  # how it is held, and run
    r"|name_or_path|version|^architectures$|^auto_map$|^tokenizer_class$"
    r"|^tie_"  # the names of the weights tell
)
MOST_NAMED = 5  # differences that an error spells out


@dataclass(frozen=True)
class ModelIdentity:
    """The model an injection was made on."""

    name: str  #: hub id or folder name, as given at loading
    revision: str | None  #: hub revision, if any
    model_type: str  #: ``config.model_type``
    layers: int  #: number of blocks
    d_model: int  #: width of the residual stream
    weights: str  #: fingerprint of the weights (see `weights_fingerprint`)
    tokenizer: str  #: fingerprint of the tokenizer (see `tokenizer_fingerprint`)
    dtype: str | None = None  #: precision that it ran in, such as ``"bfloat16"``, or None where nobody says
    #: how its weights were stored in memory, such as ``"bitsandbytes 8bit"``, or None
    quantization: str | None = None
    config: dict[str, Any] = field(hash=False, kw_only=True)  #: fields that change results (`told_config`)

    def __repr__(self) -> str:
        """Name, revision and fingerprint, which fit into one line."""
        revision = "" if self.revision is None else f", revision={self.revision!r}"
        return f"ModelIdentity({self.name!r}{revision}, weights={self.weights!r})"

    def difference(self, other: "ModelIdentity") -> str | None:
        """What sets two base models apart, in words, or None. Name, revision and precision do not count.
        Of the configurations, fields that both have are compared, since versions of transformers add some.
        """
        names = ("model_type", "layers", "d_model", "weights", "tokenizer")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        shared = sorted(self.config.keys() & other.config.keys() - {"model_type"})
        pairs |= {f"config.{name}": (self.config[name], other.config[name]) for name in shared}
        differences = [f"{name} {one!r} and not {two!r}" for name, (one, two) in pairs.items() if one != two]
        more = [f"{len(differences) - MOST_NAMED} more"] if len(differences) > MOST_NAMED else []
        return ", ".join(differences[:MOST_NAMED] + more) or None

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


def told_config(config: PreTrainedConfig) -> dict[str, Any]:
    """The text model's settings that can change what it answers, as JSON reads them, to six digits."""

    def telling(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if not WITHOUT_EFFECT.search(name)}

    numbers: Any = {"parse_constant": str, "parse_float": lambda number: float(f"{float(number):.6g}")}
    text = json.dumps(config.get_text_config().to_dict(), default=str)
    fields: dict[str, Any] = json.loads(text, object_hook=telling, **numbers)
    return fields


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash of names, shapes and all values of parameters and of the buffers that checkpoints hold.
    It is 16 hex digits, and that of the checkpoint, however it was loaded. Values are rounded to bfloat16, so
    float32 and bfloat16 give one fingerprint; integers count as they are. float16 and quantized weights lose
    what another rounding needs: their values are read from the files that the model was loaded from, if those
    are on this machine and give what is in memory when they are rounded, or quantized with the same
    quantizer, again. Otherwise, as for a model made in memory, what is in memory counts. Offloaded weights
    are read from where they are. Tensors are read one by one, at about a gigabyte a second; quantized ones
    are dequantized one by one. A tensor that is split over processes is put together first, so all of them
    are to call this.
    From `KEPT_FROM` on the result is kept among huggingface_hub's assets. It is taken from there while the
    files of the checkpoint have the same size and time, and the weights in memory the same `_checksums`.
    """
    kept = _kept_place(model)
    if kept is None:
        return tensors_fingerprint(_checkpoint_weights(model))
    with suppress(OSError, ValueError):
        held = kept.read_text(encoding="ascii")
        if re.fullmatch(r"[0-9a-f]{16}", held):
            return held
    fingerprint = tensors_fingerprint(_checkpoint_weights(model))
    with suppress(I2CLError):
        replaced_file(kept, fingerprint)
    return fingerprint


def _kept_place(model: PreTrainedModel) -> Path | None:
    """The file that keeps the fingerprint of a large model as it is in memory, loaded from files here."""
    named = named_weights(model)
    if any(weight.is_meta or isinstance(weight, DTensor) for _, weight in named):
        return None  # offloaded or sharded
    large = sum(weight.nbytes for _, weight in named) >= KEPT_FROM
    stored = stored_weights(model) if large else None
    if stored is None:
        return None
    digest = hashlib.sha256()
    # Tensors of torchao have no bytes, and say so by several kinds of errors; all weights are then read.
    with suppress(OSError, ValueError, RuntimeError, AssertionError, TypeError):
        for path in stored.paths:
            held = path.stat()
            digest.update(f"{path.resolve()} {held.st_size} {held.st_mtime_ns}".encode())
        for name, weight in named:
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
            for sums in _checksums(weight.detach()):
                digest.update(sums.cpu().numpy().tobytes())
        return cached_assets_path("i2cl", "fingerprints") / digest.hexdigest()
    return None


def _checksums(weight: Tensor) -> Iterator[Tensor]:
    """Yield sums of a tensor's bytes that tell whether any of its values has changed.

    The bytes are read as 64-bit integers, and every `BLOCK` of them is added up modulo 2^64. This runs at
    the speed of memory, where a hash takes ten times as long.
    """
    data = weight.contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) // (8 * BLOCK) * 8 * BLOCK if data.storage_offset() % 8 == 0 else 0
    for part in data[:whole].view(torch.int64).view(-1, BLOCK).split(DEVICE_PART):
        yield part.sum(1)
    yield data[whole:]


def tensors_fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of a model whose `named_weights` come one by one."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        for part in flat.split(PART if flat.device.type == "cpu" else DEVICE_PART):
            held = part.to(torch.bfloat16).view(torch.int16) if part.is_floating_point() else part
            digest.update(held.cpu().numpy())
    return digest.hexdigest()[:16]


def named_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """What a fingerprint is made of, sorted by name."""
    kept = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    return sorted([*model.named_parameters(), *buffers], key=itemgetter(0))


def _checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every weight, those of the checkpoint where they can be told."""
    files = cache(lambda: stored_weights(model))  # looked for where they are needed
    for name, weight in named_weights(model):
        if weight.is_meta and name in model.all_tied_weights_keys:
            continue  # in memory it is one tensor with another name
        module = model.get_submodule(name.rpartition(".")[0])
        whole, coded = _whole(module, name.rpartition(".")[2], weight)
        stored = files() if coded or whole.dtype == torch.float16 else None
        if stored is not None and name in stored.names:
            values = stored.read(name)
            if values.shape == whole.shape and _gives(values, whole, weight if coded else None, model):
                whole = values
        yield name, whole


def _whole(module: torch.nn.Module, name: str, weight: Tensor) -> tuple[Tensor, bool]:
    """A weight's numbers, wherever and however they are held, and whether that is as codes."""
    if isinstance(weight, DTensor):
        return weight.full_tensor(), False
    if weight.is_meta:
        return offloaded_weight(module, name), False
    numbers = dequantize(module, weight)
    return (weight, False) if numbers is None else (numbers, True)


def _gives(stored: Tensor, held: Tensor, codes: Tensor | None, model: PreTrainedModel) -> bool:
    """Whether a checkpoint's values are those in memory before they were rounded, or made into codes."""
    if not stored.is_floating_point():  # the checkpoint is quantized itself
        return False
    if codes is None:
        return torch.equal(stored.to(held.device, held.dtype), held)
    settings = model.config.quantization_config
    dtypes = dict.fromkeys((model.dtype, stored.dtype))  # transformers rounds first
    again = (quantize_and_dequantize(codes, stored.to(dtype), settings) for dtype in dtypes)
    return any(values is not None and torch.equal(values, held) for values in again)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the tokenizer's whole JSON and of one probe sentence's ids, as 16 hex digits.
    How it pads and cuts is left out, since callers change that. A tokenizer without such JSON, a slow one, is
    told by its vocabulary.
    """
    probe = tokenizer("Review: a good film.\nSentiment: positive\n")["input_ids"]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary: Any = sorted(tokenizer.get_vocab().items())
    else:
        # What is off counts as absent, since versions of the library add switches.
        vocabulary = json.loads(backend.to_str(), object_hook=_switched_on)
        for state in ("version", "truncation", "padding"):
            vocabulary.pop(state, None)
    return hashlib.sha256(json.dumps([vocabulary, list(probe)]).encode()).hexdigest()[:16]


def _switched_on(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value or type(value) is int}  # an id may be 0
