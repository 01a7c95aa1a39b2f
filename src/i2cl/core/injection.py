"""Injection: what context vectorization and calibration come to, applied to a decoder.

Source: paper, subsection "Context Injection".
"""

import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core import artefact
from i2cl.core.context import ContextVector
from i2cl.core.edits import LinearEdit, Positions
from i2cl.core.encoder_bias import EncoderBias, absolute
from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.scoring import LabelScorer, Progress, label_log_probs
from i2cl.storage.atomic import new_folder
from i2cl.storage.hub import download, upload
from i2cl.tasks import Task

LABEL_PRIOR = "label_prior"  # key in the settings with the origin of a label bias
TEMPERATURES = (0.001, 1000.0)  # minimum and maximum: within them, different scores stay different


class PrecisionWarning(UserWarning):
    """An injection is used on its model, but with another quantization."""


@dataclass(frozen=True, eq=False)
class Injection:
    """Context vector, coefficients and task, bound to one base model (paper, "Context Injection").

    At the tokens of a query every sublayer outputs ``lambda * v + beta * a`` instead of ``a``. Other formulas
    of calibration are stored in this linear form, so (0, 1) always means an unchanged sublayer.

    Attributes:
        context: the context vector, axes [layer, (mha, mlp), d].
        coefficients: axes [layer, (mha, mlp), (lambda, beta)].
        task: name, label words and template; saved without its splits.
        base: the model it belongs to.
        positions: injected tokens of the query.
        scoring: how labels are scored, in the fit and in prediction.
        seed: of calibration, and of ``positions="random"``.
        settings: of calibration, JSON-serializable.
        history: mean cross-entropy over the demonstrations in nats, without a prior or penalty: of each epoch
            or pass of `calibrate`; of `anchor` at the start and after each Gauss-Newton step, or at the
            start, on average during each pass of AdamW, and at the end.
        metrics: accuracy, macro-F1 and number of rows, if measured
            (`i2cl.experiments.evidence.fit_evaluation.evaluate_fit`).
        command: the command line that reproduces it, if any.
        worth: held-out evaluation beside baselines, with the verdict; JSON of
            `i2cl.experiments.evidence.fit_evaluation.FitEvaluation`.
        label_bias: nats per label, added to the log-probabilities among the labels
            (`i2cl.models.scoring.add_label_bias`), or None.
        temperature: divides the log-probabilities among the labels, after the label bias
            (`i2cl.models.scoring.label_log_probs`). Above 1 confidence falls; predictions stay the same.
        word_weights: fitted weights of the labels' words in each label's score
            (`i2cl.core.word_weights`); None: weights by inverse document frequency
            (`i2cl.models.encoding.LabelTokens`).
        encoder_bias: classifier on a sentence encoder, added to the log-probabilities among the labels, or
            None.

    Raises:
        I2CLError: if the label bias is not one finite number per label, the temperature is outside
            `TEMPERATURES`, word weights or encoder bias do not fit the labels, or there are word weights
            without word-level scoring.
    """

    context: ContextVector
    coefficients: Float[Tensor, "layers sites 2"]
    task: Task
    base: ModelIdentity
    positions: Positions = "all"
    scoring: Scoring = "auto"
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    history: tuple[float, ...] = ()
    metrics: dict[str, int | float] = field(default_factory=dict)
    command: str = ""
    worth: dict[str, Any] = field(default_factory=dict)
    label_bias: tuple[float, ...] | None = None
    temperature: float = 1.0
    word_weights: Float[Tensor, "tokens labels"] | None = None
    encoder_bias: EncoderBias | None = None

    def __post_init__(self) -> None:
        bias, count = self.label_bias, len(self.task.labels)
        if bias is not None and not (len(bias) == count and all(map(math.isfinite, bias))):
            raise I2CLError(
                f"label_bias {bias} is not one finite number for each of {count} labels: fit it again"
            )
        least, most = TEMPERATURES
        if not least <= self.temperature <= most:
            raise I2CLError(
                f"temperature {self.temperature!r} is not a number from {least:g} to {most:g}: change it"
            )
        weights = self.word_weights
        if weights is not None and (self.scoring != "words" or weights.shape[1:] != (count,)):
            what = f"word weights {tuple(weights.shape)} with scoring {self.scoring!r} and {count} labels"
            raise I2CLError(f"{what} do not fit together: fit it again with scoring='words'")
        encoder = self.encoder_bias
        if encoder is not None and encoder.weights.shape != (count, len(encoder.probe) + 1):
            what = f"encoder weights {tuple(encoder.weights.shape)} for {count} labels"
            raise I2CLError(f"{what} and embeddings of {len(encoder.probe)} values: fit it again")

    def edit(self) -> LinearEdit:
        """Return the edit that applies this injection in `Decoder.forward`."""
        values, site = self.context.values, self.context.config.site
        return LinearEdit(values, self.coefficients, site, self.positions, self.seed)

    def scorer(self, decoder: Decoder, scoring: Scoring | None = None) -> LabelScorer:
        """Return the task on a decoder, with the injection's scoring and word weights, or another scoring."""
        scoring = scoring or self.scoring
        return LabelScorer(decoder, self.task, scoring, self.word_weights if scoring == "words" else None)

    def log_probs(
        self,
        decoder: Decoder,
        texts: Sequence[str],
        *,
        scoring: Scoring | None = None,
        progress: Progress | None = None,
        force: bool = False,
    ) -> Float[Tensor, "texts labels"]:
        """Compute the log-probability of each label among the labels of the task, for each text, in float32.

        Includes the label bias, the encoder bias and the temperature. The probabilities of a row sum to 1;
        `label_log_mass` returns how probable the labels are among all tokens.

        Args:
            decoder: the model that the injection was made on.
            texts: what to classify.
            scoring: replaces the injection's scoring, which a label bias was measured with.
            progress: called as texts finish.
            force: see `require_base`.

        Raises:
            I2CLError: on an empty text, or another model.
        """
        self._check(decoder, force=force)
        biases = self.biases(texts, decoder)  # first, so that a missing encoder fails early
        scores = self.scorer(decoder, scoring).scores(texts, edit=self.edit(), progress=progress)
        return label_log_probs(scores, biases, self.temperature)

    def label_log_mass(
        self, decoder: Decoder, texts: Sequence[str], *, force: bool = False
    ) -> Float[Tensor, " texts"]:
        """Compute the log of the total probability of all labels among everything that could follow a text.

        Near 0 if the model would say a label unprompted. `scores` cannot tell, since it compares labels with
        each other only. Biases and the temperature are not included.

        Args:
            decoder: the model that the injection was made on.
            texts: what to classify.
            force: see `require_base`.

        Raises:
            I2CLError: on an empty text or another model, and for word-level scoring, whose label scores are
                means over tokens instead of probabilities.
        """
        self._check(decoder, force=force)
        scorer = self.scorer(decoder)
        if scorer.labels.words:
            raise I2CLError("label_log_mass is not defined for scoring='words', which yields no probability")
        return scorer.scores(texts, edit=self.edit()).logsumexp(-1)

    def biases(self, texts: Sequence[str], decoder: Decoder) -> Float[Tensor, "... labels"] | None:
        """Compute the biases of each label, in nats, from the label bias and the sentence encoder.

        The encoder runs on the decoder's device. Returns None without either. Raises I2CLError as
        `i2cl.core.encoder_bias.EncoderBias.of`.
        """
        fixed = None if self.label_bias is None else torch.tensor(self.label_bias)
        if self.encoder_bias is None:
            return fixed
        by_text = self.encoder_bias.of(texts, str(decoder.device))
        return by_text if fixed is None else by_text + fixed

    def predict(self, decoder: Decoder, texts: Sequence[str], *, force: bool = False) -> list[str]:
        """Return the most probable label word of each text. Arguments and errors as in `scores`."""
        best = self.log_probs(decoder, texts, force=force).argmax(-1)
        return [self.task.labels[place] for place in best.tolist()]

    def require_base(self, decoder: Decoder | ModelIdentity, *, force: bool = False) -> None:
        """Check that a decoder is the one that the injection was made on.

        The same checkpoint in another dtype passes. With another quantization it passes with a
        `PrecisionWarning`, since predictions can differ.

        Args:
            decoder: the candidate, or its identity.
            force: accept other weights, configuration or tokenizer if number of layers and width agree.

        Raises:
            I2CLError: naming the difference.
        """
        self._check(decoder, force=force)

    def _check(self, decoder: Decoder | ModelIdentity, *, force: bool) -> None:
        """Run `require_base`, with warnings that point to the caller of the public method."""
        other = decoder.base if isinstance(decoder, Decoder) else decoder
        difference = self.base.difference(other)
        same_shape = (self.base.layers, self.base.d_model) == (other.layers, other.d_model)
        if difference and not (force and same_shape):
            hint = "fit it again on this model" + (", or force it (--force)" if same_shape else "")
            models = f"{self.base.name!r}, not {decoder.name!r} ({difference})"
            raise I2CLError(f"this injection was made on {models}: {hint}")
        if self.base.quantization != other.quantization:
            mine, theirs = (one.quantization or "no quantization" for one in (self.base, other))
            message = f"this injection was made with {mine} and the model is loaded with {theirs}"
            warnings.warn(f"{message}: fit it again if predictions differ", PrecisionWarning, stacklevel=3)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write safetensors, JSON and a model card, atomically.

        Replaces an existing injection, including its card. Raises I2CLError if the folder cannot be written
        or contains other files.
        """
        path = Path(folder)
        with new_folder(path, artefact.own_files) as fresh:
            self._write(fresh, path.resolve().name, shared=False)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Upload the injection with its model card. Local paths of base models are shortened.

        Args:
            repo_id: such as ``"user/name"``; the default user is the token's. Created if missing.
            private: whether a new repository is private.
            token: default: from the login (`hf auth login`) or HF_TOKEN.
            commit_message: default: names the task.
            revision: branch, created if missing; default: main.

        Returns:
            URL of the commit.

        Raises:
            I2CLError: without a login, for an invalid name, or if the hub refuses or cannot be reached.
        """
        message = commit_message or f"I2CL injection for {self.task.name}"
        with tempfile.TemporaryDirectory() as scratch:
            self._write(Path(scratch), repo_id, shared=True)
            return upload(Path(scratch), repo_id, message, private=private, token=token, revision=revision)

    def _write(self, folder: Path, name: str, *, shared: bool) -> None:
        tensors = {"context_vector": self.context.values, "coefficients": self.coefficients}
        if self.word_weights is not None:
            tensors["word_weights"] = self.word_weights
        if self.encoder_bias is not None:
            held = artefact.ENCODER_TENSORS.items()
            tensors |= {name: getattr(self.encoder_bias, field) for name, field in held}
        artefact.write(folder, tensors, self.description(), name, shared=shared)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, revision: str | None = None, encoder: str | None = None
    ) -> "Injection":
        """Load an injection from a folder, or from the hub if there is no such folder.

        Args:
            name: the folder, or an id such as ``"user/name"``.
            revision: hub branch, tag or commit.
            encoder: new location of the sentence encoder, if it has moved since the fit.

        Raises:
            I2CLError: if the injection is missing, damaged or too new, or uses no encoder but gets one.
        """
        folder = Path(name)
        if not folder.exists():
            folder = download(str(name), revision, artefact.FILES)
        injection = cls(**artefact.read(folder, str(name)))
        if encoder is None:
            return injection
        if injection.encoder_bias is None:
            raise I2CLError(f"{str(name)!r} uses no sentence encoder: leave out {encoder!r}")
        return replace(injection, encoder_bias=replace(injection.encoder_bias, encoder=absolute(encoder)))

    def _extraction(self) -> dict[str, Any]:
        """Return the extraction settings; for fitted vectors, only which sites have one."""
        fitted = self.settings.get("method") == "anchored"
        return self.context.config.model_dump(include={"writers"} if fitted else None)

    def description(self) -> dict[str, Any]:
        """Return the JSON description that `save_pretrained` writes."""
        optional: dict[str, Any] = {"metrics": self.metrics, "command": self.command, "worth": self.worth}
        optional["word_weights"] = self.word_weights is not None
        if self.label_bias is not None:
            optional["label_bias"] = list(self.label_bias)
        if self.temperature != 1:
            optional["temperature"] = self.temperature
        if self.encoder_bias is not None:
            optional["encoder"] = self.encoder_bias.encoder
        return {
            "format_version": artefact.FORMAT_VERSION,
            "base_model": asdict(self.base),
            "task": self.task.to_dict(),
            "demonstrations": self.context.demonstrations,
            "extraction": self._extraction(),
            "positions": self.positions,
            "scoring": self.scoring,
            "seed": self.seed,
            "calibration": self.settings,
            "loss": list(self.history),
        } | {name: value for name, value in optional.items() if value}
