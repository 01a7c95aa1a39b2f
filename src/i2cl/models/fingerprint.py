"""Which model an artefact belongs to, told from the weights themselves and not from a name."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from i2cl.errors import I2CLError
from i2cl.models.checkpoint import Files, stored_weights
from i2cl.models.precision import dequantized, offloaded_weight

SAMPLES_PER_TENSOR = 64

QUANTIZATION_ERROR = 0.3
"""Relative error of a tensor's samples up to which 4-bit weights count as those of the checkpoint.

The error of 4-bit codes is about 0.1; that of another checkpoint's weights is above 1.
"""


@dataclass(frozen=True)
class ModelIdentity:
    """The model an injection was made on.

    Attributes:
        name: hub id or folder name, as given at loading.
        revision: hub revision, if any.
        model_type: ``config.model_type``.
        layers: number of blocks.
        d_model: width of the residual stream.
        weights: fingerprint of the weights (see `weights_fingerprint`).
        tokenizer: fingerprint of the vocabulary.
        dtype: precision that it ran in, such as ``"bfloat16"``; None in artefacts of older versions.
        quantization: how its weights were stored in memory, such as ``"bitsandbytes 8bit"``, or None.
    """

    name: str
    revision: str | None
    model_type: str
    layers: int
    d_model: int
    weights: str
    tokenizer: str
    dtype: str | None = None
    quantization: str | None = None

    def difference(self, other: "ModelIdentity") -> str | None:
        """What sets two base models apart, in words, or None. Name, revision and precision do not count."""
        found = [
            f"{field} {mine!r} and not {theirs!r}"
            for field, mine in asdict(self).items()
            if field not in _CIRCUMSTANCES and mine != (theirs := getattr(other, field))
        ]
        return ", ".join(found) or None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelIdentity":
        """Inverse of ``dataclasses.asdict``.

        Raises:
            I2CLError: on missing or unknown fields.
        """
        try:
            return cls(**fields)
        except TypeError as error:
            raise I2CLError(f"the artefact's base_model entry is malformed ({error}): fit it again") from None


_CIRCUMSTANCES = {"name", "revision", "dtype", "quantization"}


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash of names, shapes and evenly spaced values of all parameters, as 16 hex digits.

    It is that of the checkpoint, however it was loaded. Values are rounded to bfloat16, so float32 and
    bfloat16 give one fingerprint. float16 and quantized weights lose what another rounding needs: their
    values are read from the files that the model was loaded from, if those are on this machine and round
    to what is in memory. Otherwise, as for a model made in memory, what is in memory counts. Offloaded
    weights are read from where they are.

    Only the samples are read, which takes well under a second for billions of parameters, but quantized
    tensors are dequantized one by one. A change of quantized weights that is smaller than their own error
    is not seen. A tensor that is split over processes is put together first, so all of them are to call
    this.
    """
    return _digest(_samples(model))


def tensors_fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of a model whose parameters come one by one, sorted by name."""
    return _digest((name, tuple(tensor.shape), _values(tensor)) for name, tensor in named)


def _digest(entries: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, shape, values in entries:
        digest.update(f"{name}{shape}".encode())
        digest.update(values.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _picks(size: int) -> Tensor:
    return torch.linspace(0, size - 1, min(SAMPLES_PER_TENSOR, size), dtype=torch.float64).long()


def _values(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[_picks(flat.numel()).to(flat.device)]


def _samples(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Name, shape and sampled values of every parameter, sorted by name."""
    stored: Files | None = None
    looked = False
    for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0]):
        if parameter.is_meta and name in model.all_tied_weights_keys:
            continue  # in memory it is one tensor with another name
        module = model.get_submodule(name.rpartition(".")[0])
        whole, coded = _whole(module, name.rpartition(".")[2], parameter)
        values, shape = _values(whole).cpu(), tuple(whole.shape)
        if coded or whole.dtype == torch.float16:
            if not looked:
                stored, looked = stored_weights(model), True
            if stored is not None and name in stored.names and stored.shape(name) == shape:
                found = stored.values(name, _picks(whole.numel()).tolist())
                values = found if _rounds(found, values, coded=coded) else values
        yield name, shape, values


def _whole(module: torch.nn.Module, name: str, parameter: Tensor) -> tuple[Tensor, bool]:
    """A parameter's numbers, wherever and however they are held, and whether that is as codes."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(), False
    if parameter.is_meta:
        return offloaded_weight(module, name), False
    found = dequantized(module, parameter)
    return (parameter, False) if found is None else (found, True)


def _rounds(stored: Tensor, values: Tensor, *, coded: bool) -> bool:
    """Whether a checkpoint's values are those in memory before they were rounded, or made into codes."""
    if not stored.is_floating_point():  # the checkpoint is quantized itself
        return False
    if not coded:
        return torch.equal(stored.to(values.dtype), values)
    error = torch.dist(stored.float(), values.float())
    return bool(error <= QUANTIZATION_ERROR * stored.float().norm())


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary and of one probe sentence's ids, as 16 hex digits."""
    probe = tokenizer("Review: a good film.\nSentiment: positive\n")["input_ids"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), list(probe)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
