"""Injection: a calibrated task as a small artefact, applied to a decoder."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pydantic
from huggingface_hub import snapshot_download
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from i2cl.context import ContextVector, ExtractConfig
from i2cl.decoder import Decoder
from i2cl.edits import LinearEdit, Positions
from i2cl.errors import I2CLError
from i2cl.files import new_folder
from i2cl.fingerprint import BaseModel
from i2cl.scoring import Progress, Scoring, encode_queries, label_tokens, score
from i2cl.tasks import Task

FORMAT_VERSION = 1
TENSORS = "injection.safetensors"
DESCRIPTION = "injection.json"
FILES = frozenset({TENSORS, DESCRIPTION})


class PrecisionWarning(UserWarning):
    """An injection is used on its own model, but with weights quantized in another way."""


@dataclass(frozen=True, eq=False)
class Injection:
    """Context vector, coefficients and task, bound to one base model (paper, "Context Injection").

    At a query's tokens every layer adds ``lambda * v + beta * a`` instead of ``a``. Other formulas of
    calibration are stored in this linear form, so (0, 1) always means an untouched writer.

    Attributes:
        context: the context vector, axes [layer, (mha, mlp), d].
        coefficients: axes [layer, (mha, mlp), (lambda, beta)].
        task: name, label words and template; its splits are left out when saved.
        base: the model it belongs to.
        positions: which query tokens are injected.
        scoring: how labels were calibrated, and are scored.
        seed: of calibration, and of ``positions="random"``.
        settings: of calibration, JSON-able.
        history: mean calibration loss of each epoch, in nats.
    """

    context: ContextVector
    coefficients: Float[Tensor, "layers sites 2"]
    task: Task
    base: BaseModel
    positions: Positions = "all"
    scoring: Scoring = "auto"
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    history: tuple[float, ...] = ()

    def edit(self) -> LinearEdit:
        """The edit that applies this injection to `Decoder.forward`."""
        return LinearEdit(
            self.context.values,
            self.coefficients,
            site=self.context.config.site,
            positions=self.positions,
            seed=self.seed,
        )

    def scores(
        self,
        decoder: Decoder,
        texts: Sequence[str],
        *,
        scoring: Scoring | None = None,
        progress: Progress | None = None,
    ) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word after each text, injected.

        Raises:
            I2CLError: on an empty text, or a decoder of other sizes.
        """
        shape = (decoder.layers, decoder.d_model)
        if (self.base.layers, self.base.d_model) != shape:
            mine = (self.base.layers, self.base.d_model)
            raise I2CLError(
                f"this injection is for (layers, width) {mine}, the model has {shape}: fit it again"
            )
        labels = label_tokens(decoder, self.task.template, self.task.labels, scoring or self.scoring)
        queries = encode_queries(decoder, self.task.template.query, texts, labels)
        return score(decoder, queries, labels, edit=self.edit(), progress=progress)

    def predict(self, decoder: Decoder, texts: Sequence[str]) -> list[str]:
        """The most probable label word of each text."""
        return [self.task.labels[best] for best in self.scores(decoder, texts).argmax(-1).tolist()]

    def require_base(self, decoder: Decoder | BaseModel, *, force: bool = False) -> None:
        """Refuse a decoder that is not the one this was made on.

        The same checkpoint in another dtype is that one. Where it is quantized in another way, a
        `PrecisionWarning` says so: answers can differ.

        Args:
            decoder: the candidate, or what is known of it.
            force: accept other weights or another tokenizer where layers and width agree.

        Raises:
            I2CLError: naming the difference.
        """
        other = decoder.base if isinstance(decoder, Decoder) else decoder
        difference = self.base.difference(other)
        same_shape = (self.base.layers, self.base.d_model) == (other.layers, other.d_model)
        if difference and not (force and same_shape):
            cure = "fit it again on this model" + (", or force it (--force)" if same_shape else "")
            raise I2CLError(
                f"this injection was made on {self.base.name!r}, not {decoder.name!r} ({difference}): {cure}"
            )
        if self.base.quantization != other.quantization:
            mine, theirs = (
                found or "no quantization" for found in (self.base.quantization, other.quantization)
            )
            message = (
                f"this injection was made with {mine} and the model is loaded with {theirs}: fit it again"
            )
            warnings.warn(f"{message} if answers differ", PrecisionWarning, stacklevel=2)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write safetensors and JSON; all of it or, on an error, nothing.

        Raises:
            I2CLError: if the folder cannot be written or holds something else.
        """
        tensors = {
            "context_vector": self.context.values.contiguous(),
            "coefficients": self.coefficients.contiguous(),
        }
        with new_folder(Path(folder), FILES) as fresh:
            save_file(tensors, fresh / TENSORS, metadata={"format": "pt"})
            text = json.dumps(self.description(), indent=2, ensure_ascii=False)
            (fresh / DESCRIPTION).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> "Injection":
        """Load from a folder, or from a hub repository where no such folder exists.

        Raises:
            I2CLError: on a missing, damaged or newer artefact.
        """
        folder = Path(name)
        if not folder.exists():
            folder = _download(str(name), revision)
        if not (folder / DESCRIPTION).is_file():
            raise I2CLError(f"{str(name)!r} is no injection: it has no {DESCRIPTION} (made by `i2cl fit`)")
        try:
            stored = _Stored.model_validate_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
            tensors = load_file(folder / TENSORS)
            values, coefficients = tensors["context_vector"], tensors["coefficients"]
        except (pydantic.ValidationError, UnicodeDecodeError) as error:
            raise I2CLError(
                f"{folder / DESCRIPTION} cannot be read ({_first_problem(error)}): fit it again"
            ) from None
        except (SafetensorError, OSError, KeyError) as error:
            raise I2CLError(
                f"{folder / TENSORS} is damaged or missing ({error}): copy or fit it again"
            ) from None
        return stored.injection(values, coefficients)

    def description(self) -> dict[str, Any]:
        """What `save_pretrained` writes beside the tensors."""
        return {
            "format_version": FORMAT_VERSION,
            "base_model": asdict(self.base),
            "task": self.task.to_dict(),
            "demonstrations": self.context.demonstrations,
            "extraction": self.context.config.model_dump(),
            "positions": self.positions,
            "scoring": self.scoring,
            "seed": self.seed,
            "calibration": self.settings,
            "loss": list(self.history),
        }


class _Stored(pydantic.BaseModel):
    """The JSON half of an artefact."""

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

    @pydantic.field_validator("format_version")
    @classmethod
    def _known(cls, version: int) -> int:
        if version > FORMAT_VERSION:
            raise ValueError(f"format version {version} is newer than this i2cl reads, upgrade i2cl")
        return version

    def injection(self, values: Tensor, coefficients: Tensor) -> Injection:
        base = BaseModel.from_dict(self.base_model)
        sites = 1 if self.extraction.site == "hidden" else 2
        shape = (base.layers, sites, base.d_model)
        if values.shape != shape or coefficients.shape != (base.layers, sites, 2):
            found = f"{tuple(values.shape)} and {tuple(coefficients.shape)}"
            raise I2CLError(
                f"{TENSORS} holds shapes {found}, {shape} and {(*shape[:2], 2)} are described: fit it again"
            )
        return Injection(
            context=ContextVector(values, self.extraction, self.demonstrations),
            coefficients=coefficients,
            task=Task.from_dict(self.task),
            base=base,
            positions=self.positions,
            scoring=self.scoring,
            seed=self.seed,
            settings=self.calibration,
            history=tuple(self.loss),
        )


def _download(name: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[TENSORS, DESCRIPTION]))
    except (OSError, ValueError) as error:
        raise I2CLError(
            f"no injection at {name!r}: no such folder, and the hub says {type(error).__name__}; "
            "make one with `i2cl fit MODEL TASK -o FOLDER`"
        ) from None


def _first_problem(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
