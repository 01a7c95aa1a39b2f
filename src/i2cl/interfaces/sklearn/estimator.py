"""I2CLClassifier: implicit in-context learning as a scikit-learn classifier of texts.

It keeps scikit-learn's contract (https://scikit-learn.org/stable/developers/develop.html). The model is
never copied: clones share it, and a pickle holds its name and fingerprint instead of its weights.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from jaxtyping import Float, Shaped
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.evidence.fit_evaluation import plan_evaluation
from i2cl.experiments.fitting import FitRequest, fit_task
from i2cl.injections.confidence import require_confidence
from i2cl.injections.temperature import normalised
from i2cl.interfaces.sklearn.inputs import as_classes, as_texts, label_words
from i2cl.interfaces.sklearn.shared import ModelSource, find_decoder
from i2cl.methods import METHODS, calibrating_method
from i2cl.methods.anchored import AnchoredWithEmbeddings
from i2cl.methods.calibrated.folds import require_folds
from i2cl.methods.i2cl import I2CL
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.precision import dtype_name
from i2cl.tasks import Example, Task, Template

# The prompt format where none is given; words of the task itself serve a large model better.
TEMPLATE = "{text}\nAnswer: {label}"

STORED = "classifier"  # where an injection's settings keep what only the classifier knows


class I2CLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Classifies texts with a frozen decoder LLM and one injection fitted to the training texts.

    Args:
        model: name, folder, GGUF file or hub id, loaded once a process; or a `Decoder`, which clones
            share; or a `ModelIdentity`, which names one and says what its fingerprint has to be.
        template: prompt format with ``{text}`` and ``{label}`` at its end, or a `Template`.
        chat: ask in the model's own chat template instead.
        instruction: stands before everything else; of a chat, its system turn.
        labels: the word that the model is to say for each class. Default: the class names themselves,
            where they are strings.
        shots: demonstrations per class, drawn with ``random_state``; None takes all training texts.
        method: ``"anchored"``, an injection fitted around the plain model among the labels; ``"i2cl"``, the
            paper's; or ``"anchored+sentence_embeddings"``, the first and a sentence encoder, a second, small
            model. Default: the first; another where a recipe or an option of its own is given.
        recipe: of I2CL's calibration: ``"paper"`` (its default), ``"released"`` or ``"fast"``.
        settings: options of the method over the recipe's, such as ``{"encoder": "minilm"}``; `i2cl ls
            methods` lists them.
        unlabelled: texts as they will come, 32 or more, that a label prior is measured on, see
            `i2cl.injections.label_prior.with_label_prior`; it takes classes for equally frequent there.
        min_confidence: `predict` gives no class to a text whose highest probability is below it, but an
            empty string, or -1 where classes are numbers; `score` counts it as wrong. Also set after `fit`.
        scoring: score a label by its first token, its whole sequence, its words, or as the labels demand.
        random_state: of demonstrations and calibration: an int, a RandomState, or None to draw one.
        evaluate: at most so many of the training texts that ``shots`` left over are scored for `report_`;
            0 for none, which takes less time. They choose the temperature of the probabilities too.
        folds: where no such texts remain, refit so often, each time without one part of the texts, to score
            that part; 0 for none, so that nothing is reported and probabilities stay as they are.
        device: such as ``"cuda:0"``, for a model given by name. Default: an accelerator if there is one.
        dtype: such as ``"bfloat16"``, for a model given by name. Default: float32 on a CPU, else its own.

    Attributes:
        classes_: the classes, sorted; the columns of `predict_proba`.
        report_: how it does beside zero-shot and few-shot, on training texts that ``shots`` left over, or by
            refits.
        injection_: what was fitted; of a loaded one the label words keep the order in which they were stored.
    """

    def __init__(
        self,
        model: ModelSource = "reference",
        *,
        template: str | Template = TEMPLATE,
        chat: bool = False,
        instruction: str = "",
        labels: Mapping[Any, str] | None = None,
        shots: int | None = None,
        method: str | None = None,
        recipe: str | None = None,
        settings: Mapping[str, Any] | None = None,
        unlabelled: Sequence[str] | None = None,
        min_confidence: float | None = None,
        scoring: Scoring = "auto",
        random_state: int | np.random.RandomState | None = 0,
        evaluate: int = 160,
        folds: int = 0,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        self.model = model
        self.template = template
        self.chat = chat
        self.instruction = instruction
        self.labels = labels
        self.shots = shots
        self.method = method
        self.recipe = recipe
        self.settings = settings
        self.unlabelled = unlabelled
        self.min_confidence = min_confidence
        self.scoring = scoring
        self.random_state = random_state
        self.evaluate = evaluate
        self.folds = folds
        self.device = device
        self.dtype = dtype

    def fit(self, X: Any, y: Any) -> "I2CLClassifier":
        """Extract a context vector from labelled texts and calibrate it (paper, section "Methodology").

        Args:
            X: n texts: a list, an array or a pandas Series.
            y: n classes: strings, or anything that ``labels`` gives words for.

        Raises:
            I2CLError: on input that is no list of texts with a class each, classes without a word, too
                few texts for ``shots``, a parameter that does not exist, or a model that cannot be used.
        """
        shots = self._checked()
        texts = as_texts(X)
        classes, ids = as_classes(y, len(texts))
        method = calibrating_method(self.method, self.settings, self.recipe)
        template = self.template if isinstance(self.template, Template) else Template(self.template)
        rows = tuple(Example(text, label) for text, label in zip(texts, ids, strict=True))
        task = Task("texts", label_words(classes, self.labels), template, train=rows)
        seed = self._seed()
        shown = rows if shots is None else task.sample(shots, seed)
        # Baselines choose their scoring by the labels, so another one would not be comparable.
        evaluate = self.evaluate if self.scoring == "auto" else 0
        plan = plan_evaluation(task, shown, evaluate, self.folds, seed)
        decoder = self._decoder()
        task = task.worded(decoder.tokenizer, chat=self.chat, instruction=self.instruction or None)
        unlabelled = [] if self.unlabelled is None else as_texts(self.unlabelled, "unlabelled")
        request = FitRequest(method, seed, self.scoring, unlabelled)
        injection = fit_task(decoder, task, shown, request, plan)
        stored = {STORED: {"classes": classes.tolist(), "shots": shots}}
        self.injection_ = replace(injection, settings=injection.settings | stored)
        self.classes_ = classes
        return self

    @property
    def report_(self) -> dict[str, Any] | None:
        """Held-out evaluation: fields of `i2cl.experiments.evidence.fit_evaluation.FitEvaluation`, or None.

        Raises NotFittedError before `fit`.
        """
        check_is_fitted(self)
        return self.injection_.worth or None

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """The most probable class of each text; see ``min_confidence`` for those that get none. Raises
        I2CLError on input that is no list of texts, a model that is not the one fitted on, or a
        ``min_confidence`` that is none, or whose answer for no class is the name of a class.
        """
        check_is_fitted(self)
        require_confidence(self.min_confidence)
        scores = self._scores(X)
        best = self.classes_[scores.argmax(-1)]
        if self.min_confidence is None:
            return cast("np.ndarray", best)
        classes = self.classes_.tolist()
        none = "" if isinstance(classes[0], str) else -1
        if none in classes:
            cure = "fit with another name for it"
            raise I2CLError(f"{none!r} is a class and what min_confidence answers: {cure}")
        if best.dtype.kind in "ub":  # which have no -1
            best = best.astype(np.int64)
        return np.where(np.exp(normalised(scores)).max(-1) < self.min_confidence, none, best)

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n classes"]:
        """Probability of each class, among the classes. Raises as `predict`."""
        return cast("np.ndarray", np.exp(self.predict_log_proba(X)))

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n classes"]:
        """Log-probability of each class among the classes, in nats. Raises as `predict`."""
        return normalised(self._scores(X))

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Log-odds of the second class, in nats; with more classes, the log-probability of each among them.

        `Injection.label_log_mass` tells how well a text fits the task. Raises as `predict`.
        """
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the injection, see `Injection.save_pretrained`; `i2cl predict` reads it too. Raises I2CLError
        if the folder cannot be written or holds something else or NotFittedError before `fit`.
        """
        check_is_fitted(self)
        self.injection_.save_pretrained(folder)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        model: str | Path | Decoder | None = None,
        revision: str | None = None,
        encoder: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> "I2CLClassifier":
        """A fitted classifier from any saved injection, also one of `i2cl fit`, whose classes are its words.

        Args:
            name: folder or hub id of the injection.
            model: where its model is. Default: where it was; loaded when first needed.
            revision: of the injection on the hub.
            encoder: where its sentence encoder is. Default: where it was.
            device: as in the constructor.
            dtype: as in the constructor.

        Raises:
            I2CLError: on a missing, damaged or newer artefact, or an encoder for one that takes none.
        """
        injection = Injection.from_pretrained(name, revision=revision, encoder=encoder)
        words = injection.task.labels
        stored = injection.settings.get(STORED, {"classes": list(words), "shots": None})
        classes = np.array(stored["classes"])
        method = METHODS.get(injection.settings.get("method", I2CL.name), I2CL)
        method = AnchoredWithEmbeddings if injection.encoder_bias is not None else method
        settings = injection.context.config.model_dump() | injection.settings
        if injection.encoder_bias is not None:
            settings["encoder"] = injection.encoder_bias.encoder
        options = method.options()
        made = cls(
            model if model is not None else injection.base,
            template=injection.task.template,
            labels=dict(zip(classes.tolist(), words, strict=True)),
            shots=stored["shots"],
            method=method.name,
            settings={option: value for option, value in settings.items() if option in options},
            scoring=injection.scoring,
            random_state=injection.seed,
            device=device,
            dtype=dtype,
        )
        made.classes_, made.injection_ = np.sort(classes), injection
        return made

    def _scores(self, X: Any) -> Float[np.ndarray, "n classes"]:
        check_is_fitted(self)
        texts = as_texts(X)
        injection = self.injection_
        stored = injection.settings.get(STORED, {"classes": injection.task.labels})["classes"]
        return injection.scores(self._decoder(), texts).double().numpy()[:, np.argsort(stored)]

    def _checked(self) -> int | None:
        """Shots, once all parameters are of a kind that can be used."""
        shots, most = self.shots, 2**63
        if shots is not None and (isinstance(shots, bool) or not isinstance(shots, int | np.integer)):
            raise I2CLError(f"shots is {shots!r}: give a whole number, or None for all texts")
        for name, value in (("evaluate", self.evaluate), ("folds", self.folds)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
                raise I2CLError(f"{name} is {value!r}: give a whole number, 0 for none")
        if self.scoring not in get_args(Scoring):
            raise I2CLError(f"scoring is {self.scoring!r}: choose one of {', '.join(get_args(Scoring))}")
        require_confidence(self.min_confidence)
        if self.folds:
            require_folds(self.folds)
        if not isinstance(self.template, str | Template):
            raise I2CLError(f"template is {self.template!r}: give a string with {{text}} and {{label}}")
        if self.settings is not None and not isinstance(self.settings, Mapping):
            raise I2CLError(f"settings is a {type(self.settings).__name__}: give a dict of options")
        if isinstance(self.random_state, int | np.integer) and not -most <= self.random_state < most:
            raise I2CLError(f"random_state is {self.random_state}: give a whole number of at most 63 bits")
        return None if shots is None else int(shots)

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _decoder(self) -> Decoder:
        decoder = find_decoder(self.model, dtype=self.dtype, device=self.device)
        self._held = decoder  # so that it stays loaded as long as this classifier lives
        return decoder

    def __getstate__(self) -> dict[str, Any]:
        """The model by reference: a pickle holds its name, its fingerprint and its precision."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_held"}
        if isinstance(self.model, Decoder):
            state["model"] = self.model.base
            state["dtype"] = dtype_name(self.model.model.dtype)
        return state

    def __copy__(self) -> "I2CLClassifier":
        """With the same model, which needs no pickle."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "I2CLClassifier":
        """With the same model: a frozen one is shared."""
        memo[id(self)] = twin = copy.copy(self)
        memo |= {id(value): value for value in vars(self).values() if isinstance(value, Decoder)}
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin

    def __sklearn_tags__(self) -> Any:
        """One text a row, and no numbers."""
        tags = super().__sklearn_tags__()
        inputs = tags.input_tags
        inputs.one_d_array, inputs.two_d_array, inputs.string = True, False, True
        return tags
