"""Which model an artefact belongs to, told from the weights themselves and not from a name."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from i2cl.errors import I2CLError

SAMPLES_PER_TENSOR = 64


@dataclass(frozen=True)
class BaseModel:
    """The model an injection was made on.

    Attributes:
        name: hub id or folder name, as given at loading.
        revision: hub revision, if any.
        model_type: ``config.model_type``.
        layers: number of blocks.
        d_model: width of the residual stream.
        weights: fingerprint of the weights (see `weights_fingerprint`).
        tokenizer: fingerprint of the vocabulary.
    """

    name: str
    revision: str | None
    model_type: str
    layers: int
    d_model: int
    weights: str
    tokenizer: str

    def difference(self, other: "BaseModel") -> str | None:
        """What sets two base models apart, in words, or None. Name and revision do not count."""
        found = [
            f"{field} {mine!r} and not {theirs!r}"
            for field, mine in asdict(self).items()
            if field not in {"name", "revision"} and mine != (theirs := getattr(other, field))
        ]
        return ", ".join(found) or None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "BaseModel":
        """Inverse of ``dataclasses.asdict``.

        Raises:
            I2CLError: on missing or unknown fields.
        """
        try:
            return cls(**fields)
        except TypeError as error:
            raise I2CLError(f"the artefact's base_model entry is malformed ({error}): fit it again") from None


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash of names, shapes and evenly spaced values of all parameters, as 16 hex digits.

    Values are rounded to bfloat16 first, so a checkpoint loaded in float32 and in bfloat16 has one
    fingerprint; one loaded in float16 may differ, since rounding twice is not rounding once. Sampling
    keeps it to well under a second for billions of parameters. A tensor that is split over processes is
    put together first, so all of them are to call this.
    """
    return tensors_fingerprint(sorted(model.named_parameters()))


def tensors_fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of a model whose parameters come one by one, sorted by name."""
    digest = hashlib.sha256()
    for name, parameter in named:
        whole: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        flat = whole.detach().reshape(-1)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if flat.device.type != "meta":
            count = min(SAMPLES_PER_TENSOR, flat.numel())
            picks = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long()
            values = flat[picks.to(flat.device)].to(torch.bfloat16).cpu()
            digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary and of one probe sentence's ids, as 16 hex digits."""
    probe = tokenizer("Review: a good film.\nSentiment: positive\n")["input_ids"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), list(probe)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
