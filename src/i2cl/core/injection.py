"""A fitted task: an edit of a frozen model, a label head, and a report of the fit.

Source: paper, subsection "Context Injection".
"""

import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from i2cl.core import artefact
from i2cl.core.ablations import Positions, at_positions
from i2cl.core.experts import LLM, EmbeddingsExpert, Expert, StatesExpert, TextExpert, pool, stored_experts
from i2cl.core.recipe import ExtractConfig
from i2cl.encoders import absolute
from i2cl.errors import I2CLError, require_type
from i2cl.models.decoder import DECODER_HINT, Decoder
from i2cl.models.edits import AffineEdit, Edit, RecordMean
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.label_tokens import Scoring
from i2cl.models.loading import usable_device
from i2cl.models.scoring import LabelScorer, Progress, label_log_probs
from i2cl.storage import layout
from i2cl.storage.atomic import new_folder
from i2cl.storage.hub import download, upload
from i2cl.tasks import Example, Task
from i2cl.tasks.labels import predicted_labels

LABEL_PRIOR = "label_prior"  # key in the settings with the origin of a label bias
DEFAULT_THRESHOLD = 0.5  # minimum probability of a label, in a multi-label task
TEMPERATURE_BOUNDS = (0.001, 1000.0)  # beyond, rounding could make different scores equal


class PrecisionWarning(UserWarning):
    """An injection is used on its model, but with another quantization."""


@dataclass(frozen=True, eq=False)
class LabelHead:
    """Turns the model's answer to a query into log-probabilities of the labels.

    Label scores are log-probabilities of first tokens or full sequences, or weighted means over the tokens of
    the label words (`i2cl.models.label_tokens.LabelTokens`). First the bias is added to them. Then they are
    divided by the temperature or, if there are experts, pooled with their scores (`i2cl.core.experts`).
    An LLM with a weight of exactly 0 does not run.

    In a multi-label task (``thresholds`` is not None) all members' scores are log-odds of each label: the
    sigmoid replaces the softmax, and a text has every label whose probability reaches its threshold.

    Attributes:
        scoring: how labels are scored, in the fit and in prediction.
        word_weights: fitted weights of the labels' words in each label's score
            (`i2cl.core.word_weights`); None: weights by inverse document frequency.
        bias: nats per label, added to the LLM's log-probabilities among the labels, or None.
        temperature: of the LLM alone: divides its log-probabilities among the labels, after the bias. Above
            1 it lowers confidence; predictions stay the same. An ensemble has a weight for the LLM instead.
        experts: the other members of the ensemble, the `StatesExpert` first; none for the LLM alone.
        expert_weights: weight of the LLM, 0 for a fit without it, then of each expert; not negative. Empty
            without experts.
        thresholds: minimum probability of each label of a multi-label task; None: a text has exactly one
            label, the most probable.
        llm_thresholds: thresholds for the LLM alone, if they were fitted.
    """

    scoring: Scoring = "auto"
    word_weights: Float[Tensor, "tokens labels"] | None = None
    bias: tuple[float, ...] | None = None
    temperature: float = 1.0
    experts: tuple[Expert, ...] = ()
    expert_weights: tuple[float, ...] = ()
    thresholds: tuple[float, ...] | None = None
    llm_thresholds: tuple[float, ...] | None = None

    @property
    def multi_label(self) -> bool:
        """Whether each label has its own probability, instead of one probability among the labels."""
        return self.thresholds is not None

    @property
    def uses_llm(self) -> bool:
        """Whether the answer depends on the LLM; without it, only the text experts run."""
        return not self.experts or self.expert_weights[0] > 0

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the experts that run, the LLM first."""
        return ((LLM,) if self.uses_llm else ()) + tuple(expert.name for expert in self.experts)

    @property
    def embeddings(self) -> EmbeddingsExpert | None:
        """The expert with a sentence encoder, if there is one."""
        return next((expert for expert in self.experts if isinstance(expert, EmbeddingsExpert)), None)

    @property
    def states(self) -> StatesExpert | None:
        """The expert on hidden states of the LLM, if there is one."""
        return next((expert for expert in self.experts if isinstance(expert, StatesExpert)), None)

    @property
    def text_experts(self) -> tuple[TextExpert, ...]:
        """The experts on the text alone."""
        return tuple(expert for expert in self.experts if isinstance(expert, TextExpert))

    @property
    def ensemble(self) -> dict[str, Any] | None:
        """JSON description of the ensemble; None for the LLM alone."""
        if not self.experts:
            return None
        names = (LLM, *(expert.name for expert in self.experts))
        description: dict[str, Any] = {"weights": dict(zip(names, self.expert_weights, strict=True))}
        if self.embeddings is not None:
            description["encoder"] = self.embeddings.encoder
        if self.states is not None:
            description["states_layer"] = self.states.layer
        if self.llm_thresholds is not None:
            description["llm_thresholds"] = list(self.llm_thresholds)
        return description

    def require_labels(self, count: int) -> None:
        """Check that the head fits ``count`` labels.

        Raises:
            I2CLError: if the bias is not one finite number per label, the temperature is outside
                `TEMPERATURE_BOUNDS`, word weights or text experts do not fit the labels, weights of an
                ensemble are negative or not one per member, there are word weights without word-level
                scoring, or the thresholds are not one probability per label.
        """
        if self.bias is not None and not (len(self.bias) == count and all(map(math.isfinite, self.bias))):
            raise I2CLError(
                f"label_bias {self.bias} is not one finite number for each of {count} labels: fit it again"
            )
        minimum, maximum = TEMPERATURE_BOUNDS
        if not minimum <= self.temperature <= maximum:
            raise I2CLError(
                f"temperature {self.temperature!r} is not a number from {minimum:g} to {maximum:g}: change it"
            )
        weights = self.word_weights
        if weights is not None and (self.scoring != "words" or weights.shape[1:] != (count,)):
            raise I2CLError(
                f"word weights {tuple(weights.shape)} with scoring {self.scoring!r} and {count} labels do "
                "not fit together: fit it again with scoring='words'"
            )
        thresholds = self.thresholds
        if thresholds is not None and not (
            len(thresholds) == count and all(0 < threshold < 1 for threshold in thresholds)
        ):
            raise I2CLError(
                f"thresholds {thresholds} are not one number between 0 and 1 for each of {count} labels: fit "
                "it again"
            )
        weights_fit = len(self.expert_weights) == (1 + len(self.experts) if self.experts else 0)
        if not weights_fit or not all(0 <= weight < math.inf for weight in self.expert_weights):
            raise I2CLError(
                f"ensemble weights {self.expert_weights} are not one per member, at least 0: fit it again"
            )
        if self.states is not None and not (self.uses_llm and self.experts[0] is self.states):
            raise I2CLError("the expert on hidden states needs the LLM, and comes first: fit it again")
        for expert in self.experts:
            if len(expert.weights) != count:
                shape = tuple(expert.weights.shape)
                raise I2CLError(f"{expert.name} weights {shape} do not fit {count} labels: fit it again")

    def text_scores(
        self, texts: Sequence[str], device: torch.device, progress: Progress | None = None
    ) -> Float[Tensor, "texts experts labels"] | None:
        """Compute the label scores of the text experts; None without any.

        ``progress`` is called by the first one. Raises I2CLError as `i2cl.core.experts.TextExpert.scores`.
        """
        if not self.text_experts:
            return None
        first, *others = self.text_experts
        scores = [first.scores(texts, str(device), progress)]
        return torch.stack([*scores, *(other.scores(texts, str(device)) for other in others)], 1)

    def log_probs(
        self,
        scores: Float[Tensor, "*queries labels"] | None,
        text_scores: Float[Tensor, "*queries experts labels"] | None = None,
        states: Float[Tensor, "*queries d"] | None = None,
    ) -> Float[Tensor, "*queries labels"]:
        """Turn label scores into log-probabilities among the labels, normalized, in float32.

        In a multi-label task, into the log-probability of each label.

        Args:
            scores: the LLM's scores of the labels, up to a constant per query; in a multi-label task,
                log-odds. None if the head does not use the LLM.
            text_scores: the text experts' scores; required if the head has text experts.
            states: the queries' hidden states at `StatesExpert.layer`; required if the head has this expert.
        """
        if self.text_experts and text_scores is None:
            raise ValueError("an ensemble needs the scores of its text experts")
        if self.states is not None and states is None:
            raise ValueError("this ensemble needs hidden states of the LLM")
        bias = None if self.bias is None else torch.tensor(self.bias)
        if scores is None:
            if self.uses_llm or text_scores is None:
                raise ValueError("the scores of the LLM are missing")
            logits = pool(text_scores, self.expert_weights[1:])
        elif not self.experts and not self.multi_label:
            return label_log_probs(scores, bias, self.temperature)
        else:
            llm_scores = scores.double() if bias is None else scores.double() + bias
            if not self.experts:
                logits = llm_scores / self.temperature
            else:
                members = [llm_scores[..., None, :]]
                if self.states is not None and states is not None:
                    members.append(self.states.scores(states)[..., None, :])
                if text_scores is not None:
                    members.append(text_scores)
                logits = pool(torch.cat(members, -2), self.expert_weights)
        return (logsigmoid(logits) if self.multi_label else logits.log_softmax(-1)).float()

    def probabilities(self, log_probs: Float[Tensor, "*queries labels"]) -> Float[Tensor, "*queries labels"]:
        """Return the probabilities of `log_probs`."""
        return log_probs.exp() if self.multi_label else log_probs.softmax(-1)


@dataclass(frozen=True, eq=False)
class Report:
    """Record of a fit: its settings, loss and measured accuracy. Predictions do not depend on it.

    Attributes:
        settings: settings of the fit, JSON-serializable.
        history: mean cross-entropy over the demonstrations in nats, without a prior or penalty: of each epoch
            or pass of `calibrate`; of `anchor` at the start and after each Gauss-Newton step, or at the
            start, on average during each pass of AdamW, and at the end.
        metrics: accuracy, macro-F1 and number of rows, if measured.
        command: the command line that reproduces it, if any.
        evaluation: comparison with baselines on held-out rows, with the verdict; JSON of
            `i2cl.experiments.evidence.fit_evaluation.FitEvaluation`.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    history: tuple[float, ...] = ()
    metrics: dict[str, int | float] = field(default_factory=dict)
    command: str = ""
    evaluation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Injection:
    """A fitted task: an edit of one base model and a label head (paper, "Context Injection").

    At the tokens of a query every sublayer outputs ``lambda * v + beta * a`` instead of ``a``. Other formulas
    of calibration are stored in this linear form, so (0, 1) always means an unchanged sublayer.

    Attributes:
        context: one vector per sublayer, extracted (I2CL) or fitted (anchored calibration); axes [layer,
            (mha, mlp), d], or [layer, 1, d] for ``sublayers="hidden"``.
        coefficients: axes [layer, (mha, mlp), (lambda, beta)].
        task: name, label words and template; saved without its splits.
        base: the model it belongs to.
        head: how labels are scored.
        report: settings and results of the fit.
        seed: of the fit, and of ``positions="random"``.
        positions: injected tokens of the query; other values than ``"all"`` are for the paper's ablation.
        examples: the rows of the fit, if the user wants them stored with it; see `i2cl update`. They are not
            pushed to the hub.
        extraction: which sublayers have a vector, and how it was extracted.
        demonstrations: number of examples that the vector was extracted from or fitted to.

    Raises:
        I2CLError: if the head does not fit the labels; see `LabelHead.require_labels`.
    """

    context: Float[Tensor, "layers sublayers d"] = field(repr=False)
    coefficients: Float[Tensor, "layers sublayers 2"] = field(repr=False)
    task: Task
    base: ModelIdentity
    head: LabelHead = field(default_factory=LabelHead)
    report: Report = field(default_factory=Report)
    seed: int = 0
    positions: Positions = "all"
    examples: tuple[Example, ...] = ()
    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    demonstrations: int = 0

    # Fields of the head and the report, for reading
    scoring = property(attrgetter("head.scoring"))
    label_bias = property(attrgetter("head.bias"))
    temperature = property(attrgetter("head.temperature"))
    word_weights = property(attrgetter("head.word_weights"))
    ensemble = property(attrgetter("head.ensemble"))
    settings = property(attrgetter("report.settings"))
    history = property(attrgetter("report.history"))
    metrics = property(attrgetter("report.metrics"))
    command = property(attrgetter("report.command"))
    evaluation = property(attrgetter("report.evaluation"))

    def __post_init__(self) -> None:
        self.head.require_labels(len(self.task.labels))
        if self.head.multi_label is not self.task.multi_label:
            state = "has" if self.head.multi_label else "has no"
            raise I2CLError(
                f"the task has multi_label={self.task.multi_label} and its head {state} thresholds: fit "
                "it again"
            )
        states = self.head.states
        if states is not None and not (
            states.weights.shape[1] == self.base.d_model + 1 and 0 <= states.layer < self.base.layers
        ):
            raise I2CLError("the stored weights of the hidden states are damaged: copy or fit it again")

    def with_head(self, **changes: Any) -> "Injection":
        """Return a copy with changed fields of the `LabelHead`."""
        return replace(self, head=replace(self.head, **changes))

    def require_llm(self) -> None:
        """Raise I2CLError for a task that was fitted without the LLM."""
        if not self.head.uses_llm:
            experts = ",".join(self.head.members)
            hint = "fit it again with --experts llm, or use `i2cl predict` or `i2cl serve`"
            raise I2CLError(f"task {self.task.name!r} has no LLM part (--experts {experts}): {hint}")

    def llm_alone(self) -> "Injection":
        """Return a copy without experts, which exports and vLLM cannot hold.

        In a multi-label task it has the thresholds of the LLM alone; `DEFAULT_THRESHOLD` without any. Raises
        I2CLError as `require_llm`.
        """
        self.require_llm()
        if not self.head.experts:
            return self
        alone = self.with_head(experts=(), expert_weights=(), llm_thresholds=None)
        if not self.task.multi_label:
            return alone
        default = (DEFAULT_THRESHOLD,) * len(self.task.labels)
        return alone.with_head(thresholds=self.head.llm_thresholds or default)

    def with_encoder(self, encoder: str) -> "Injection":
        """Return a copy that loads its sentence encoder from another location."""
        experts = [
            replace(expert, encoder=encoder) if isinstance(expert, EmbeddingsExpert) else expert
            for expert in self.head.experts
        ]
        return self.with_head(experts=tuple(experts))

    def with_report(self, **changes: Any) -> "Injection":
        """Return a copy with changed fields of the `Report`."""
        return replace(self, report=replace(self.report, **changes))

    def affine_edit(self) -> AffineEdit:
        """Return shift and scale of every sublayer's output, as an edit of all tokens."""
        return AffineEdit.linear(self.context, self.coefficients, self.extraction.hook_point)

    def edit(self) -> Edit:
        """Return the edit that applies this injection in `Decoder.forward`."""
        return at_positions(self.affine_edit(), self.positions, self.seed)

    def scorer(self, decoder: Decoder, scoring: Scoring | None = None) -> LabelScorer:
        """Return the task on a decoder, with the injection's scoring and word weights, or another scoring."""
        scoring = scoring or self.head.scoring
        weights = self.head.word_weights if scoring == "words" else None
        return LabelScorer(decoder, self.task, scoring, weights)

    def log_probs(
        self,
        decoder: Decoder | None,
        texts: Sequence[str],
        *,
        scoring: Scoring | None = None,
        progress: Progress | None = None,
        force: bool = False,
        device: str | None = None,
    ) -> Float[Tensor, "texts labels"]:
        """Compute the log-probability of each label among the labels of the task, for each text, in float32.

        Includes the label bias, and the ensemble or the temperature. The probabilities of a row sum to 1,
        except in a multi-label task, where each label has its own. `label_log_mass` returns how probable the
        labels are among all tokens.

        Args:
            decoder: the model that the injection was made on. Not used, and may be None, if the injection was
                fitted without the LLM (`LabelHead.uses_llm`).
            texts: what to classify.
            scoring: replaces the injection's scoring, which a label bias was measured with.
            progress: called as texts finish.
            force: see `require_base`.
            device: device of the sentence encoder if ``decoder`` is None. Default: an accelerator if there
                is one.

        Raises:
            I2CLError: on an empty text, or another model.
        """
        if not self.head.uses_llm:
            place = usable_device(device) if decoder is None else decoder.device
            return self.head.log_probs(None, self.head.text_scores(texts, place, progress))
        if decoder is None:
            raise I2CLError(f"task {self.task.name!r} uses the LLM, but decoder is None: {DECODER_HINT}")
        self.require_base(decoder, force=force)
        # before the LLM runs, so that a missing encoder is noticed early
        text_scores = self.head.text_scores(texts, decoder.device)
        if self.head.states is None:
            scores = self.scorer(decoder, scoring).scores(texts, edit=self.edit(), progress=progress)
            return self.head.log_probs(scores, text_scores)
        layer = self.head.states.layer
        scores, states = self.scores_and_states(decoder, texts, layer, scoring=scoring, progress=progress)
        return self.head.log_probs(scores, text_scores, states)

    def scores_and_states(
        self,
        decoder: Decoder,
        texts: Sequence[str],
        layer: int,
        *,
        scoring: Scoring | None = None,
        progress: Progress | None = None,
    ) -> tuple[Float[Tensor, "texts labels"], Float[Tensor, "texts d"]]:
        """Compute the LLM's score of each label, and the query's mean state where it enters a layer.

        Raises I2CLError on an empty text.
        """
        edit = RecordMean(self.edit(), {layer}, len(texts), decoder.d_model)
        scores = self.scorer(decoder, scoring).scores(texts, edit=edit, progress=progress)
        return scores, edit.states[layer]

    def label_log_mass(
        self, decoder: Decoder, texts: Sequence[str], *, force: bool = False
    ) -> Float[Tensor, " texts"]:
        """Compute the log of the total probability of all labels among everything that could follow a text.

        Near 0 if the model would generate a label. `log_probs` compares the labels with each other only.
        Label bias, temperature and ensemble are not included.

        Args:
            decoder: the model that the injection was made on.
            texts: what to classify.
            force: see `require_base`.

        Raises:
            I2CLError: on an empty text or another model, without the LLM, and for word-level scoring, whose
                label scores are means over tokens instead of probabilities.
        """
        self.require_llm()
        self.require_base(decoder, force=force)
        self.task.require_single_label("label_log_mass")
        scorer = self.scorer(decoder)
        if scorer.labels.word_tokens:
            raise I2CLError("label_log_mass is not defined for scoring='words', which yields no probability")
        return scorer.scores(texts, edit=self.edit()).logsumexp(-1)

    def predict(
        self, decoder: Decoder | None, texts: Sequence[str], *, force: bool = False
    ) -> list[str] | list[tuple[str, ...]]:
        """Return the most probable label word of each text; in a multi-label task, a tuple of label words.

        Arguments and errors as in `log_probs`.
        """
        log_probs, labels = self.log_probs(decoder, texts, force=force), self.task.labels
        if not self.task.multi_label:
            return [labels[index] for index in log_probs.argmax(-1).tolist()]
        rows = self.head.probabilities(log_probs).tolist()
        return [tuple(labels[index] for index in predicted_labels(row, self.head.thresholds)) for row in rows]

    def require_base(self, decoder: Decoder | ModelIdentity, *, force: bool = False) -> None:
        """Check that a decoder is the one that the injection was made on.

        The same checkpoint in another dtype passes. With another quantization it passes with a
        `PrecisionWarning`, since predictions can differ.

        Args:
            decoder: the candidate, or its identity.
            force: accept other weights, configuration or tokenizer if number of layers and width agree.

        Raises:
            I2CLError: naming the difference, or if ``decoder`` is not a `Decoder`.
        """
        if not isinstance(decoder, ModelIdentity):
            require_type("decoder", decoder, Decoder, DECODER_HINT)
        other = decoder.base if isinstance(decoder, Decoder) else decoder
        difference = self.base.difference(other)
        same_shape = (self.base.layers, self.base.d_model) == (other.layers, other.d_model)
        if difference and not (force and same_shape):
            hint = "fit it again on this model" + (", or force it (--force)" if same_shape else "")
            models = f"{self.base.name!r}, not {decoder.name!r} ({difference})"
            raise I2CLError(f"this injection was made on {models}: {hint}")
        if self.base.quantization != other.quantization:
            mine, theirs = (identity.quantization or "no quantization" for identity in (self.base, other))
            message = f"this injection was made with {mine} and the model is loaded with {theirs}"
            warnings.warn(f"{message}: fit it again if predictions differ", PrecisionWarning, stacklevel=2)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write safetensors, JSON and a model card, atomically.

        Replaces an existing injection, including its card. Raises I2CLError if the folder cannot be written
        or contains other files.
        """
        path = Path(folder)
        with new_folder(path, layout.own_files) as fresh:
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
        tensors = {"context_vector": self.context, "coefficients": self.coefficients}
        if self.head.word_weights is not None:
            tensors["word_weights"] = self.head.word_weights
        for expert in self.head.experts:
            tensors |= expert.tensors()
        examples = () if shared else self.examples
        artefact.write(folder, tensors, replace(self, examples=examples).description(), name, shared=shared)
        if examples:
            artefact.write_examples(folder, self.task, examples)

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
            I2CLError: if the injection is missing, damaged or of another format version, or gets a revision
                or an encoder that it cannot have.
        """
        folder = Path(name)
        if not folder.exists():
            folder = download(str(name), revision, layout.FILES)
        elif revision is not None:
            raise I2CLError(f"{str(name)!r} is a folder and has no revision: leave out revision={revision!r}")
        injection = cls._from_stored(*artefact.read(folder, str(name)))
        injection = replace(injection, examples=artefact.read_examples(folder, injection.task))
        if encoder is None:
            return injection
        if injection.head.embeddings is None:
            raise I2CLError(f"{str(name)!r} uses no sentence encoder: leave out {encoder!r}")
        return injection.with_encoder(absolute(encoder))

    @classmethod
    def _from_stored(cls, stored: artefact.Stored, tensors: Mapping[str, Tensor]) -> "Injection":
        ensemble = stored.ensemble or artefact.StoredEnsemble(weights={})
        return cls(
            context=tensors["context_vector"],
            coefficients=tensors["coefficients"],
            task=Task.from_dict(stored.task),
            base=ModelIdentity.from_dict(stored.base_model),
            head=LabelHead(
                scoring=stored.scoring,
                word_weights=tensors["word_weights"] if stored.word_weights else None,
                bias=stored.label_bias,
                temperature=stored.temperature,
                experts=stored_experts(ensemble.weights, ensemble.encoder, ensemble.states_layer, tensors),
                expert_weights=tuple(ensemble.weights.values()),
                thresholds=stored.thresholds,
                llm_thresholds=ensemble.llm_thresholds,
            ),
            report=Report(stored.settings, stored.history, stored.metrics, stored.command, stored.evaluation),
            seed=stored.seed,
            positions=stored.positions,
            extraction=stored.extraction,
            demonstrations=stored.demonstrations,
        )

    def description(self) -> dict[str, Any]:
        """Return the JSON description that `save_pretrained` writes."""
        head, report = self.head, self.report
        is_anchored = report.settings.get("method") == "anchored"  # its vectors are fitted, not extracted
        description = {
            "format_version": artefact.FORMAT_VERSION,
            "base_model": asdict(self.base),
            "task": self.task.to_dict(),
            "demonstrations": self.demonstrations,
            "extraction": self.extraction.model_dump(include={"sublayers"} if is_anchored else None),
            "positions": self.positions,
            "seed": self.seed,
            "scoring": head.scoring,
            "settings": report.settings,
            "history": list(report.history),
        }
        optional = {
            "word_weights": head.word_weights is not None,
            "label_bias": None if head.bias is None else list(head.bias),
            "temperature": head.temperature if head.temperature != 1 else None,
            "ensemble": head.ensemble,
            "thresholds": None if head.thresholds is None else list(head.thresholds),
            "kept_examples": bool(self.examples),
            "metrics": report.metrics,
            "command": report.command,
            "evaluation": report.evaluation,
        }
        return description | {name: value for name, value in optional.items() if value}
