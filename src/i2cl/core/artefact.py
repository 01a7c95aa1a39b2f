"""File format of an injection: tensors, description and model card. The paper defines none."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from i2cl.core.context import SITES, ContextVector, ExtractConfig
from i2cl.core.edits import Positions
from i2cl.core.encoder_bias import EncoderBias
from i2cl.errors import I2CLError, first_problem
from i2cl.models.encoding import Scoring
from i2cl.models.fingerprint import ModelIdentity
from i2cl.storage import layout
from i2cl.storage.atomic import public_name
from i2cl.storage.card import model_card
from i2cl.tasks import Task

FORMAT_VERSION = 9  # older versions miss some of the fields with a default
TENSORS, DESCRIPTION, CARD, FILES = layout.TENSORS, layout.DESCRIPTION, layout.CARD, layout.FILES
own_files = layout.own_files
ENCODER_TENSORS = {
    "encoder_weights": "weights",
    "encoder_probe": "probe",
}  # fields of the encoder, by the name of their tensor
_UNCHANGED_FIELDS = (
    "positions",
    "scoring",
    "seed",
    "metrics",
    "command",
    "worth",
    "label_bias",
    "temperature",
)


class Stored(pydantic.BaseModel):
    """The JSON description of an artefact. Fields with a default are optional."""

    model_config = pydantic.ConfigDict(extra="forbid")

    format_version: int
    base_model: dict[str, Any]
    task: dict[str, Any]
    demonstrations: int
    extraction: ExtractConfig
    positions: Positions
    scoring: Scoring
    seed: int
    calibration: dict[str, Any]
    loss: list[float]
    metrics: dict[str, int | float] = {}
    command: str = ""
    worth: dict[str, Any] = {}
    label_bias: tuple[float, ...] | None = None
    temperature: float = 1.0
    encoder: str = ""
    word_weights: bool = False  # whether the tensors have them

    @pydantic.field_validator("format_version")
    @classmethod
    def _known(cls, version: int) -> int:
        if version > FORMAT_VERSION:
            raise ValueError(f"format version {version} is newer than this i2cl supports: upgrade i2cl")
        return version

    def fields(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the fields of an `i2cl.Injection`.

        Raises KeyError if a tensor is missing, and I2CLError on unexpected shapes or values.
        """
        values, coefficients = tensors["context_vector"], tensors["coefficients"]
        base = ModelIdentity.from_dict(self.base_model)
        shape = (base.layers, len(SITES[self.extraction.writers]), base.d_model)
        if values.shape != shape or coefficients.shape != (*shape[:2], 2):
            shapes = f"{tuple(values.shape)} and {tuple(coefficients.shape)}"
            described = f"{shape} and {(*shape[:2], 2)}"
            raise I2CLError(f"{TENSORS} holds shapes {shapes}, but {described} are described: fit it again")
        for name, tensor in tensors.items():
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise I2CLError(f"{name} in {TENSORS} is not finite: copy the file again, or fit it again")
        of_encoder = {field: tensors[name] for name, field in ENCODER_TENSORS.items()} if self.encoder else {}
        return {
            "context": ContextVector(values, self.extraction, self.demonstrations, base),
            "coefficients": coefficients,
            "word_weights": tensors["word_weights"] if self.word_weights else tensors.get("word_weights"),
            "encoder_bias": EncoderBias(self.encoder, **of_encoder) if self.encoder else None,
            "task": Task.from_dict(self.task),
            "base": base,
            "settings": self.calibration,
            "history": tuple(self.loss),
            **{name: getattr(self, name) for name in _UNCHANGED_FIELDS},
        }


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    description: Mapping[str, Any],
    name: str,
    shared: bool = False,
) -> None:
    """Write the files of an injection.

    Args:
        folder: where to.
        tensors: by name.
        description: the fields of `Stored`.
        name: title of the model card.
        shared: shorten local paths to their last part.

    Raises:
        I2CLError: if `read` could not load the description.
    """
    try:
        Stored.model_validate(description)
    except pydantic.ValidationError as error:
        raise I2CLError(
            f"this injection could not be loaded again ({first_problem(error)}): correct that field"
        ) from None
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(whole, folder / TENSORS, metadata={"format": "pt"})
    card = model_card(dict(description), name)
    if shared:
        base = description["base_model"]
        description = {**description, "base_model": base | {"name": public_name(base["name"])}}
        if "encoder" in description:
            description["encoder"] = public_name(description["encoder"])
    text = json.dumps(description, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
    (folder / CARD).write_text(card, encoding="utf-8")


def read(folder: Path, name: str) -> dict[str, Any]:
    """Read the fields of an `i2cl.Injection`. Raises I2CLError if it is missing, damaged or too new."""
    if not (folder / DESCRIPTION).is_file():
        raise I2CLError(f"{name!r} is not an injection: it has no {DESCRIPTION} (written by `i2cl fit`)")
    try:
        stored = Stored.model_validate_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return stored.fields(load_file(folder / TENSORS))
    except (pydantic.ValidationError, UnicodeDecodeError) as error:
        raise I2CLError(
            f"{folder / DESCRIPTION} cannot be read ({first_problem(error)}): fit it again"
        ) from None
    except (SafetensorError, OSError, KeyError) as error:
        raise I2CLError(
            f"{folder / TENSORS} is damaged or missing ({error}): copy the file again, or fit it again"
        ) from None
