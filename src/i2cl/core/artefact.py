"""File format of an injection: tensors, description and model card. The paper defines none."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from i2cl.core.ablations import Positions
from i2cl.core.experts import EXPERTS
from i2cl.core.recipe import ACTIVE_SUBLAYERS, ExtractConfig
from i2cl.errors import I2CLError, first_problem
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.label_tokens import Scoring
from i2cl.storage.atomic import public_name
from i2cl.storage.card import model_card
from i2cl.storage.layout import CARD, DESCRIPTION, EXAMPLES, TENSORS
from i2cl.tasks import Example, Task
from i2cl.tasks.rows import read_labelled

FORMAT_VERSION = 1


class StoredEnsemble(pydantic.BaseModel):
    """The JSON description of an ensemble (`i2cl.core.injection.LabelHead.ensemble`)."""

    model_config = pydantic.ConfigDict(extra="forbid")

    weights: dict[str, float]  # by member, the LLM first
    encoder: str | None = None
    states_layer: int | None = None
    llm_thresholds: tuple[float, ...] | None = None


class Stored(pydantic.BaseModel):
    """The JSON description of an injection. Fields with a default are optional."""

    model_config = pydantic.ConfigDict(extra="forbid")

    format_version: int
    base_model: dict[str, Any]
    task: dict[str, Any]
    demonstrations: int
    extraction: ExtractConfig
    positions: Positions
    seed: int
    scoring: Scoring
    settings: dict[str, Any]
    history: tuple[float, ...]
    word_weights: bool = False  # whether there is a tensor with them
    label_bias: tuple[float, ...] | None = None
    temperature: float = 1.0
    ensemble: StoredEnsemble | None = None
    thresholds: tuple[float, ...] | None = None
    kept_examples: bool = False
    metrics: dict[str, int | float] = {}
    command: str = ""
    evaluation: dict[str, Any] = {}

    @pydantic.field_validator("format_version")
    @classmethod
    def _check_version(cls, version: int) -> int:
        if version != FORMAT_VERSION:
            raise ValueError(f"this i2cl reads version {FORMAT_VERSION}, upgrade it for a newer one")
        return version

    def require_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise KeyError if a tensor is missing, and I2CLError on unexpected shapes or values."""
        names = ["context_vector", "coefficients"] + ["word_weights"] * self.word_weights
        if self.ensemble is not None:
            experts = [expert for name, expert in EXPERTS.items() if name in self.ensemble.weights]
            names += [name for expert in experts for name in expert.tensor_names]
        for name in names:
            tensor = tensors[name]
            dtype_fits = tensor.is_floating_point() or name == "tfidf_buckets"
            if not (dtype_fits and tensor.isfinite().all()):
                raise I2CLError(f"{name} in {TENSORS} is not finite: copy the file again, or fit it again")
        base = ModelIdentity.from_dict(self.base_model)
        layers, sublayers = base.layers, len(ACTIVE_SUBLAYERS[self.extraction.sublayers])
        described = (layers, sublayers, base.d_model), (layers, sublayers, 2)
        shapes = tuple(tensors["context_vector"].shape), tuple(tensors["coefficients"].shape)
        if shapes != described:
            raise I2CLError(
                f"{TENSORS} holds shapes {shapes[0]} and {shapes[1]}, but {described[0]} and {described[1]} "
                "are described: fit it again"
            )


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    description: Mapping[str, Any],
    name: str,
    shared: bool = False,
) -> None:
    """Write the files of an injection.

    Args:
        folder: the folder to write to.
        tensors: tensors by name.
        description: the fields of `Stored`.
        name: title of the model card.
        shared: shorten local paths to their last part, for others who load it.

    Raises:
        I2CLError: if `read` could not load the description.
    """
    try:
        Stored.model_validate(description)
    except pydantic.ValidationError as error:
        raise I2CLError(
            f"this injection could not be loaded again ({first_problem(error)}): correct that field"
        ) from None
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / TENSORS, metadata={"format": "pt"})
    card = model_card(dict(description), name)
    if shared:
        base = description["base_model"]
        description = {**description, "base_model": base | {"name": public_name(base["name"])}}
        ensemble = description.get("ensemble", {})
        if "encoder" in ensemble:
            description["ensemble"] = ensemble | {"encoder": public_name(ensemble["encoder"])}
    text = json.dumps(description, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
    (folder / CARD).write_text(card, encoding="utf-8")


def read(folder: Path, name: str) -> tuple[Stored, dict[str, Tensor]]:
    """Read description and tensors of an `i2cl.Injection`.

    Raises I2CLError if it is missing, damaged or of another format version.
    """
    if not (folder / DESCRIPTION).is_file():
        raise I2CLError(f"{name!r} is not an injection: it has no {DESCRIPTION} (written by `i2cl fit`)")
    try:
        stored = Stored.model_validate_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        stored.require_tensors(tensors)
    except (pydantic.ValidationError, UnicodeDecodeError) as error:
        raise I2CLError(
            f"{folder / DESCRIPTION} cannot be read ({first_problem(error)}): fit it again"
        ) from None
    except (SafetensorError, OSError, KeyError) as error:
        raise I2CLError(
            f"{folder / TENSORS} is damaged or missing ({error}): copy the file again, or fit it again"
        ) from None
    return stored, tensors


def write_examples(folder: Path, task: Task, examples: Sequence[Example]) -> None:
    """Write the rows of a fit as JSON Lines, which `i2cl fit` and `read_examples` can read."""
    with (folder / EXAMPLES).open("w", encoding="utf-8") as file:
        for example in examples:
            words = [task.labels[label] for label in example.ids]
            row = {"text": example.text, "label": words if task.multi_label else words[0]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_examples(folder: Path, task: Task) -> tuple[Example, ...]:
    """Read the rows of a fit; empty if they were not stored. Raises I2CLError if the file is damaged."""
    path = folder / EXAMPLES
    if not path.is_file():
        return ()
    return read_labelled(path, task.labels, multi_label=task.multi_label)[0]
