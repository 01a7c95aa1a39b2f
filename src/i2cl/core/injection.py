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
from i2cl.models.scoring import Progress, Questions, label_log_probs
from i2cl.storage.atomic import new_folder
from i2cl.storage.hub import download, upload
from i2cl.tasks import Task

LABEL_PRIOR = "label_prior"  # where settings tell what `i2cl.injections.label_prior` measured a label bias on
TEMPERATURES = (0.001, 1000.0)  # the least and the most: within them, scores that differ stay different


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
        history: mean cross-entropy over the demonstrations in nats, without a prior or penalty: of each epoch
            or pass of `calibrate`; of `anchor` at the start and after each Gauss-Newton step, or at the
            start, on average during each pass of AdamW, and at the end.
        metrics: accuracy, macro-F1 and number of rows, where they were measured
            (`i2cl.experiments.evidence.fit_evaluation.evaluate_fit`).
        command: the command line that makes it again, where one does.
        worth: held-out evaluation beside baselines, with the verdict; JSON of
            `i2cl.experiments.evidence.fit_evaluation.FitEvaluation`.
        label_bias: a number for each label, in nats, added to the log-probabilities among the labels
            (`i2cl.models.scoring.add_label_bias`); None adds nothing.
        temperature: what the log-probabilities among the labels are divided by, behind the label bias
            (`i2cl.models.scoring.label_log_probs`). Above 1 they are less sure; the answers stay.
        word_weights: fitted weights of the labels' words in each label's score
            (`i2cl.core.word_weights`); None: weights by inverse document frequency
            (`i2cl.models.encoding.LabelTokens`).
        encoder_bias: what a sentence encoder adds to the log-probabilities among the labels, beside the label
            bias; None where there is no encoder.

    Raises:
        I2CLError: on a label bias that is not one finite number for each label, a temperature outside
            `TEMPERATURES`, word weights or an encoder bias of other labels, or word weights where labels are
            not scored by words.
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
            cure = "fit it again"
            raise I2CLError(f"label_bias {bias} is not one finite number for each of {count} labels: {cure}")
        least, most = TEMPERATURES
        if not least <= self.temperature <= most:
            limits = f"from {least:g} to {most:g}"
            raise I2CLError(f"temperature {self.temperature!r} is no number {limits}: give one")
        weights = self.word_weights
        if weights is not None and (self.scoring != "words" or weights.shape[1:] != (count,)):
            what = f"word weights {tuple(weights.shape)} with scoring {self.scoring!r} and {count} labels"
            raise I2CLError(f"{what}: fit it again, so that words are scored and each label has its own")
        encoder = self.encoder_bias
        if encoder is not None and encoder.weights.shape != (count, len(encoder.probe) + 1):
            what = f"encoder weights {tuple(encoder.weights.shape)} for {count} labels"
            raise I2CLError(f"{what} and vectors of {len(encoder.probe)} numbers: fit it again")

    def edit(self) -> LinearEdit:
        """The edit that applies this injection to `Decoder.forward`."""
        values, site = self.context.values, self.context.config.site
        return LinearEdit(values, self.coefficients, site, self.positions, self.seed)

    def questions(self, decoder: Decoder, scoring: Scoring | None = None) -> Questions:
        """The task as this injection asks and reads it; or with another scoring."""
        scoring = scoring or self.scoring
        return Questions(decoder, self.task, scoring, self.word_weights if scoring == "words" else None)

    def scores(
        self,
        decoder: Decoder,
        texts: Sequence[str],
        *,
        scoring: Scoring | None = None,
        progress: Progress | None = None,
        force: bool = False,
    ) -> Float[Tensor, "texts labels"]:
        """Compute the log-probability of each label among the labels of the task, for each text, in float32.

        The label bias, the encoder bias and the temperature are included. Each row's probabilities sum to 1;
        `label_log_mass` says how probable the labels are among all words.

        Args:
            decoder: the model that this was made on.
            texts: what to classify.
            scoring: instead of its own, which a label bias was measured with.
            progress: called as texts finish.
            force: see `require_base`, which a decoder has to pass; its identity is read once.

        Raises:
            I2CLError: on an empty text, or another model.
        """
        self._check(decoder, force=force)
        biases = self.biases(texts, decoder)  # first: an encoder that is not here is told at once
        scores = self.questions(decoder, scoring).scores(texts, edit=self.edit(), progress=progress)
        return label_log_probs(scores, biases, self.temperature)

    def label_log_mass(
        self, decoder: Decoder, texts: Sequence[str], *, force: bool = False
    ) -> Float[Tensor, " texts"]:
        """Compute the log of the total probability of all labels among everything that could follow a text.

        Near 0 where the model would say a label by itself; `scores` does not tell, since it compares labels
        with each other only. Biases and the temperature have no part in it.

        Args:
            decoder: the model that this was made on.
            texts: what to classify.
            force: see `require_base`.

        Raises:
            I2CLError: on an empty text or another model, and for word-level scoring, where a label's score
                is a mean over its tokens and not a probability.
        """
        self._check(decoder, force=force)
        questions = self.questions(decoder)
        if questions.labels.words:
            raise I2CLError("label_log_mass is not defined for scoring='words', which yields no probability")
        return questions.scores(texts, edit=self.edit()).logsumexp(-1)

    def biases(self, texts: Sequence[str], decoder: Decoder) -> Float[Tensor, "... labels"] | None:
        """Nats for each label of each text, by the label bias and the encoder, which runs on the decoder's
        device; None without either. Raises I2CLError as `i2cl.core.encoder_bias.EncoderBias.of`.
        """
        fixed = None if self.label_bias is None else torch.tensor(self.label_bias)
        if self.encoder_bias is None:
            return fixed
        by_text = self.encoder_bias.of(texts, str(decoder.device))
        return by_text if fixed is None else by_text + fixed

    def predict(self, decoder: Decoder, texts: Sequence[str], *, force: bool = False) -> list[str]:
        """The most probable label word of each text; arguments and errors are those of `scores`."""
        best = self.scores(decoder, texts, force=force).argmax(-1)
        return [self.task.labels[place] for place in best.tolist()]

    def require_base(self, decoder: Decoder | ModelIdentity, *, force: bool = False) -> None:
        """Refuse a decoder that is not the one this was made on.

        The same checkpoint in another dtype is that one. Where it is quantized in another way, a
        `PrecisionWarning` says so: answers can differ.

        Args:
            decoder: the candidate, or what is known of it.
            force: accept other weights, configuration or tokenizer where layers and width agree.

        Raises:
            I2CLError: naming the difference.
        """
        self._check(decoder, force=force)

    def _check(self, decoder: Decoder | ModelIdentity, *, force: bool) -> None:
        """`require_base`, whose warnings are told where that, or `scores`, was called."""
        other = decoder.base if isinstance(decoder, Decoder) else decoder
        difference = self.base.difference(other)
        same_shape = (self.base.layers, self.base.d_model) == (other.layers, other.d_model)
        if difference and not (force and same_shape):
            cure = "fit it again on this model" + (", or force it (--force)" if same_shape else "")
            models = f"{self.base.name!r}, not {decoder.name!r} ({difference})"
            raise I2CLError(f"this injection was made on {models}: {cure}")
        if self.base.quantization != other.quantization:
            mine, theirs = (one.quantization or "no quantization" for one in (self.base, other))
            message = f"this injection was made with {mine} and the model is loaded with {theirs}"
            warnings.warn(f"{message}: fit it again if answers differ", PrecisionWarning, stacklevel=3)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write safetensors, JSON and a model card; all of it or, on an error, nothing.
        An artefact that is there is replaced, its card too. Raises I2CLError if the folder cannot be written
        or holds something else.
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
        """Upload it with its model card. A base model's local path is shortened to its last part.

        Args:
            repo_id: such as ``"user/name"``, without a user that of the token; made if it is not there.
            private: of a repository that is made now.
            token: default: that of the login (`hf auth login`), or HF_TOKEN.
            commit_message: default: says what it is.
            revision: branch, made if it is not there; default: main.

        Returns:
            The commit's address.

        Raises:
            I2CLError: if nobody is logged in, the name is invalid, or the hub refuses or cannot be reached.
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
            held = artefact.OF_ENCODER.items()
            tensors |= {name: getattr(self.encoder_bias, field) for name, field in held}
        artefact.write(folder, tensors, self.description(), name, shared=shared)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, revision: str | None = None, encoder: str | None = None
    ) -> "Injection":
        """Load from a folder, or from a hub repository where no such folder exists.

        Args:
            name: the folder, or an id such as ``"user/name"``.
            revision: hub branch, tag or commit.
            encoder: where the sentence encoder of the fit is now, if the artefact names another place.

        Raises:
            I2CLError: on a missing, damaged or newer artefact, or an encoder for one that takes none.
        """
        folder = Path(name)
        if not folder.exists():
            folder = download(str(name), revision, artefact.FILES)
        injection = cls(**artefact.read(folder, str(name)))
        if encoder is None:
            return injection
        if injection.encoder_bias is None:
            raise I2CLError(f"{str(name)!r} takes no sentence encoder: leave {encoder!r} out")
        return replace(injection, encoder_bias=replace(injection.encoder_bias, encoder=absolute(encoder)))

    def _extraction(self) -> dict[str, Any]:
        """How the vectors were extracted; of fitted vectors, only which sublayers have one."""
        fitted = self.settings.get("method") == "anchored"
        return self.context.config.model_dump(include={"writers"} if fitted else None)

    def description(self) -> dict[str, Any]:
        """What `save_pretrained` writes beside the tensors."""
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
