"""I2CLClassifier: implicit in-context learning as a scikit-learn classifier of texts.

It follows scikit-learn's API (https://scikit-learn.org/stable/developers/develop.html). The model is never
copied: clones share it, and pickles contain its name and fingerprint instead of its weights.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Float, Shaped
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.draw import up_to, warn_of_small_classes
from i2cl.experiments.evidence.fit_evaluation import FitRequest, plan_evaluation
from i2cl.experiments.fitting import fit_task
from i2cl.injections.ensemble import EnsembleConfig
from i2cl.injections.temperature import log_softmax
from i2cl.interfaces.sklearn.inputs import (
    Classes,
    as_examples,
    as_indicators,
    as_multi_label_examples,
    as_texts,
    label_names,
    label_words,
)
from i2cl.interfaces.sklearn.shared import NO_MODEL, ModelSource, find_decoder, quiet_unless_verbose
from i2cl.methods import METHODS, make_injector
from i2cl.methods.i2cl import I2CL
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import Scoring, require_scoring
from i2cl.models.precision import dtype_name
from i2cl.models.training import Settings
from i2cl.tasks import Task, Template
from i2cl.tasks.labels import require_confidence
from i2cl.tasks.template import DEFAULT_TEMPLATE

SETTINGS_KEY = "classifier"  # of the classifier's own state in `Injection.settings`
CLASS_DTYPES = re.compile(r"[|<>=]?(O|b1|[iuf][1248]|U\d{1,5})")  # allowed in an artefact


class I2CLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Classifies texts with a frozen decoder LLM and one injection fitted to the training texts.

    If y is an indicator matrix, such as that of scikit-learn's ``MultiLabelBinarizer``, a text has any number
    of labels: `predict` returns indicators, and `predict_proba` a probability of each label.

    Args:
        model: name, folder, GGUF file or hub id, loaded once per process; or a `Decoder`, which clones share;
            or a `ModelIdentity`, which also checks the model's fingerprint. Required by `fit`.
        template: prompt format with ``{text}``, and ``{label}`` at its end, or a `Template`.
        chat: use the model's own chat template instead.
        instruction: text before everything else; in a chat, the system turn.
        labels: the words that the model says for the classes: a dict from each class to its word, or a list
            for classes that are numbered from 0 or booleans, in their order. Either form also covers classes
            that scikit-learn has numbered. Default: the classes themselves, if they are strings. For an
            indicator matrix: a word per column; default: the columns of a data frame.
        shots: examples per class, drawn with ``random_state``, or all if a class has fewer; None uses all
            training texts.
        method: how the LLM is fitted: ``"anchored"``, an injection fitted around the plain model among the
            labels, or ``"i2cl"``, the paper's method. Default: ``"anchored"``, or the method that a recipe or
            an option belongs to.
        recipe: calibration recipe of I2CL: ``"paper"`` (its default), ``"released"`` or ``"fast"``.
        experts: names of the classifiers that are combined: ``"llm"``, ``"states"``,
            ``"embeddings"`` and ``"tfidf"``.
            Default: all that are available; see `i2cl.injections.ensemble.EnsembleConfig`. Without
            ``"llm"``, the model is loaded by `fit`, but does not run.
        settings: options of the method over the recipe's, which `i2cl ls methods` lists, and of the experts,
            such as ``{"encoder": "minilm"}``.
        class_weight: ``"balanced"``, which weights a class inversely to its frequency among the examples; a
            dict from class to weight; or None for equal weights of all examples.
        unlabelled: 32 or more texts without labels, to correct label bias, see
            `i2cl.injections.label_prior.with_label_prior`; assumes that classes are equally frequent there.
        min_confidence: `predict` returns an empty string, or -1 for numeric classes, for texts whose highest
            probability is below this; `score` counts them as wrong. For an indicator matrix, a text has every
            label with at least this probability. Can be changed after `fit`.
        scoring: ``"first_token"``, ``"sequence"`` or ``"words"`` of each label, or ``"auto"``.
        random_state: seed of examples and calibration: an int, a RandomState, or None to draw one.
        evaluate: maximum number of training texts left over by ``shots`` that are scored for `report_` and
            used to fit the temperature of the probabilities; 0 saves the time.
        device: such as ``"cuda:0"``, for a model given by name. Default: an accelerator if there is one.
        dtype: such as ``"bfloat16"``, for a model given by name. Default: float32 on a CPU, else its own.
        verbose: show progress bars and deprecation warnings of other libraries.

    Attributes:
        classes_: the classes, sorted; the columns of `predict_proba`. For an indicator matrix: the label
            words, in the order of the columns.
        report_: evaluation beside zero-shot and few-shot baselines; None if nothing was scored.
        injection_: the fitted injection. If it was loaded, its label words are in their stored order.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        *,
        template: str | Template = DEFAULT_TEMPLATE,
        chat: bool = False,
        instruction: str = "",
        labels: Mapping[Any, str] | Sequence[str] | None = None,
        shots: int | None = None,
        method: str | None = None,
        recipe: str | None = None,
        experts: Sequence[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        unlabelled: Sequence[str] | None = None,
        min_confidence: float | None = None,
        scoring: Scoring = "auto",
        random_state: int | np.random.RandomState | None = 0,
        evaluate: int = 160,
        device: str | None = None,
        dtype: str | None = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.template = template
        self.chat = chat
        self.instruction = instruction
        self.labels = labels
        self.shots = shots
        self.method = method
        self.recipe = recipe
        self.experts = experts
        self.settings = settings
        self.class_weight = class_weight
        self.unlabelled = unlabelled
        self.min_confidence = min_confidence
        self.scoring = scoring
        self.random_state = random_state
        self.evaluate = evaluate
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    @quiet_unless_verbose
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "I2CLClassifier":
        """Fit an injection to labelled texts.

        Args:
            X: n texts: a list, an array or a pandas Series.
            y: n classes: strings, or anything that ``labels`` has words for; or an indicator matrix with n
                rows and a column per label.
            sample_weight: n factors of the texts' losses, multiplied with ``class_weight``. Texts of weight 0
                are left out.

        Raises:
            I2CLError: without a model, on texts or classes that are not valid, a class without a word, a
                parameter that does not exist, or a model that cannot be used.
        """
        shots = self._validate_parameters()
        texts = as_texts(X)
        indicators = as_indicators(y, len(texts))
        if indicators is None:
            classes, rows = as_examples(texts, y, sample_weight)
            words = label_words(classes, self.labels)
        else:
            words = label_names(y, indicators.shape[1], self.labels)
            rows = as_multi_label_examples(texts, indicators, sample_weight)
            classes = np.array(words)
        options = self._options(classes, words)
        ensemble, options = EnsembleConfig.take_from(options)
        ensemble.members()  # raises if an encoder is missing
        method = make_injector(self.method, options, self.recipe)
        template = self.template if isinstance(self.template, Template) else Template(self.template)
        task = Task("texts", words, template, train=rows, multi_label=indicators is not None)
        seed = self._seed()
        if shots is not None:
            warn_of_small_classes(task, shots)
        demonstrations = rows if shots is None else up_to(task, shots, seed)
        # Baselines use scoring="auto", so other scorings would not be comparable.
        evaluate = self.evaluate if self.scoring == "auto" else 0
        plan = plan_evaluation(task, demonstrations, evaluate, folds=0, seed=seed)
        decoder = self._decoder()
        task = task.with_prompt_options(
            decoder.tokenizer, chat=self.chat, instruction=self.instruction or None
        )
        unlabelled = [] if self.unlabelled is None else as_texts(self.unlabelled, "unlabelled")
        request = FitRequest(method, ensemble, seed, self.scoring, unlabelled)
        injection = fit_task(decoder, task, demonstrations, request, plan)
        state = {"classes": classes.tolist(), "dtype": classes.dtype.str, "shots": shots}
        self.injection_ = injection.with_report(settings=injection.settings | {SETTINGS_KEY: state})
        self.classes_ = classes
        return self

    @property
    def report_(self) -> dict[str, Any] | None:
        """Held-out evaluation: fields of `i2cl.experiments.evidence.fit_evaluation.FitEvaluation`, or None.

        Raises NotFittedError before `fit`.
        """
        check_is_fitted(self)
        return self.injection_.evaluation or None

    def predict(self, X: Any) -> Shaped[np.ndarray, "n ..."]:
        """Return the most probable class of each text, or the placeholder below ``min_confidence``.

        After a fit to an indicator matrix: 1 for each label that reaches its threshold, else 0.

        Raises:
            I2CLError: on input that is not a list of texts, a model that has changed since the fit, an
                invalid ``min_confidence``, or a class that is equal to the placeholder.
        """
        check_is_fitted(self)
        require_confidence(self.min_confidence)
        scores = self._scores(X)
        if (thresholds := self.injection_.head.thresholds) is not None:
            minimum = thresholds if self.min_confidence is None else self.min_confidence
            return np.asarray(np.exp(scores) >= minimum).astype(int)
        best = self.classes_[scores.argmax(-1)]
        if self.min_confidence is None:
            return cast("np.ndarray", best)
        classes = self.classes_.tolist()
        placeholder = "" if isinstance(classes[0], str) else -1
        if placeholder in classes:
            problem = f"{placeholder!r} is a class, but min_confidence uses it for 'no prediction'"
            raise I2CLError(f"{problem}: rename the class")
        if best.dtype.kind in "ub":  # cannot represent -1
            best = best.astype(np.int64)
        return np.where(np.exp(log_softmax(scores)).max(-1) < self.min_confidence, placeholder, best)

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n classes"]:
        """Return the probability of each class. Raises as `predict`."""
        return cast("np.ndarray", np.exp(self.predict_log_proba(X)))

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n classes"]:
        """Return the log-probability of each class, in nats. Raises as `predict`."""
        scores = self._scores(X)
        return scores if self.injection_.head.multi_label else log_softmax(scores)

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return the log-odds of the second class, in nats; with more classes, log-probabilities of all.

        After a fit to an indicator matrix: the log-odds of each label minus those of its threshold.

        To measure how well a text fits the task, see `Injection.label_log_mass`. Raises as `predict`.
        """
        scores = self._scores(X)
        if (thresholds := self.injection_.head.thresholds) is not None:
            limits = np.array(thresholds)
            odds = scores - np.log(-np.expm1(np.minimum(scores, -1e-12)))
            return cast("np.ndarray", odds - np.log(limits / (1 - limits)))
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the injection to a folder, which `i2cl predict` can also read.

        Raises:
            I2CLError: if the folder cannot be written, or contains something else.
            NotFittedError: before `fit`.
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
        """Load a fitted classifier from a saved injection.

        The classes of an injection from `i2cl fit` are its label words.

        Args:
            name: folder or hub id of the injection.
            model: its model, which is loaded when first needed. Default: the recorded name.
            revision: hub revision of the injection.
            encoder: location of its sentence encoder. Default: the recorded one.
            device: as in the constructor.
            dtype: as in the constructor.

        Raises:
            I2CLError: on a missing, damaged or newer artefact, or if an encoder is given for an injection
                without one.
        """
        injection = Injection.from_pretrained(name, revision=revision, encoder=encoder)
        words = injection.task.labels
        state = injection.settings.get(SETTINGS_KEY, {"classes": list(words), "shots": None})
        classes = _stored_classes(state)
        method = METHODS.get(injection.settings.get("method", I2CL.name), I2CL)
        settings = injection.extraction.model_dump() | injection.settings
        configs: list[type[Settings]] = [*method.settings, EnsembleConfig]
        fields = {option: field for config in configs for option, field in config.model_fields.items()}
        changed = {
            option: value
            for option, value in settings.items()
            if option in fields and value != fields[option].default
        }
        if injection.head.embeddings is not None:
            changed["encoder"] = injection.head.embeddings.encoder
        template = injection.task.template
        classifier = cls(
            model if model is not None else injection.base,
            template=template.format if template == Template(template.format) else template,
            labels=(
                list(words)
                if injection.task.multi_label
                else _as_label_list(dict(zip(classes.tolist(), words, strict=True)))
            ),
            shots=state["shots"],
            method=method.name,
            experts=list(injection.head.members),
            class_weight=changed.pop("class_weight", None),
            settings=changed or None,
            scoring=injection.scoring,
            random_state=injection.seed,
            device=device,
            dtype=dtype,
        )
        classifier.classes_ = classes if injection.task.multi_label else np.sort(classes)
        classifier.injection_ = injection
        return classifier

    @quiet_unless_verbose
    def _scores(self, X: Any) -> Float[np.ndarray, "n classes"]:
        check_is_fitted(self)
        texts = as_texts(X)
        injection = self.injection_
        stored = injection.settings.get(SETTINGS_KEY, {"classes": injection.task.labels})["classes"]
        decoder = self._decoder() if injection.head.uses_llm else None
        log_probs = injection.log_probs(decoder, texts, device=self.device).double().numpy()
        return log_probs if injection.task.multi_label else log_probs[:, np.argsort(stored)]

    def _options(self, classes: Classes, words: Sequence[str]) -> dict[str, Any]:
        """Return the options of the method and of the experts, with class weights by label word."""
        options, weights = dict(self.settings or {}), self.class_weight
        if self.experts is not None:
            if "experts" in options:
                raise I2CLError("experts is given twice: leave it out of settings")
            options["experts"] = self.experts
        if weights is None:
            return options
        if "class_weight" in options:
            raise I2CLError("class_weight is given twice: leave it out of settings")
        if isinstance(weights, str) and weights == "balanced":
            return options | {"class_weight": "balanced"}
        if not isinstance(weights, Mapping):
            raise I2CLError(f"class_weight is {weights!r}: pass 'balanced' or a dict from class to weight")
        by_word = {}
        for value, word in zip(classes.tolist(), words, strict=True):
            if value in weights or word in weights:
                by_word[word] = weights[value] if value in weights else weights[word]
        unknown = [name for name in weights if name not in {*classes.tolist(), *words}]
        if unknown and len(by_word) < len(words):  # as in scikit-learn, absent classes are ignored otherwise
            raise I2CLError(f"class_weight has a weight for {unknown[0]!r}, which is not a class: remove it")
        return options | {"class_weight": by_word}

    def _validate_parameters(self) -> int | None:
        """Validate all parameters and return the number of shots. Raises I2CLError on an invalid value."""
        if self.model is None:
            raise I2CLError(NO_MODEL)
        shots, limit = self.shots, 2**63
        is_integer = isinstance(shots, int | np.integer) and not isinstance(shots, bool)
        if shots is not None and not (is_integer and shots > 0):
            raise I2CLError(f"shots is {shots!r}: pass a whole number above 0, or None for all texts")
        evaluate = self.evaluate
        if isinstance(evaluate, bool) or not isinstance(evaluate, int | np.integer) or evaluate < 0:
            raise I2CLError(f"evaluate is {evaluate!r}: give a whole number, 0 for none")
        require_scoring(self.scoring)
        require_confidence(self.min_confidence)
        if not isinstance(self.template, str | Template):
            raise I2CLError(f"template is {self.template!r}: give a string with {{text}} and {{label}}")
        if self.settings is not None and not isinstance(self.settings, Mapping):
            raise I2CLError(f"settings is a {type(self.settings).__name__}: give a dict of options")
        if isinstance(self.random_state, int | np.integer) and not -limit <= self.random_state < limit:
            raise I2CLError(f"random_state is {self.random_state}: give a whole number of at most 63 bits")
        return None if shots is None else int(shots)

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _decoder(self) -> Decoder:
        decoder = find_decoder(self.model, dtype=self.dtype, device=self.device)
        self._loaded_decoder = decoder  # keeps the model in memory as long as the classifier
        return decoder

    def __repr__(self, N_CHAR_MAX: int = 180) -> str:
        """Show the parameters that differ from their defaults, in up to three lines."""
        return cast("str", super().__repr__(N_CHAR_MAX))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the model's name, fingerprint and precision instead of its weights."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_loaded_decoder"}
        if isinstance(self.model, Decoder):
            state["model"] = self.model.base
            state["dtype"] = dtype_name(self.model.model.dtype)
        return state

    def __copy__(self) -> "I2CLClassifier":
        """Copy the classifier and share the model, without the conversion for pickles."""
        duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(vars(self))
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> "I2CLClassifier":
        """Copy everything but the model, which is frozen and therefore shared."""
        memo[id(self)] = duplicate = copy.copy(self)
        memo |= {id(value): value for value in vars(self).values() if isinstance(value, Decoder)}
        duplicate.__dict__.update(copy.deepcopy(vars(self), memo))
        return duplicate

    def __sklearn_tags__(self) -> Any:
        """Declare the input as a one-dimensional array of strings."""
        tags = super().__sklearn_tags__()
        inputs = tags.input_tags
        inputs.one_d_array, inputs.two_d_array, inputs.string = True, False, True
        tags.classifier_tags.multi_label = True
        return tags


def _stored_classes(state: Mapping[str, Any]) -> Classes:
    """Return the classes of an artefact in their dtype, in the order of its label words."""
    dtype = state.get("dtype")
    if dtype is not None and not CLASS_DTYPES.fullmatch(str(dtype)):
        raise I2CLError(f"the artefact's classes have the unknown dtype {dtype!r}: copy or fit it again")
    return np.array(state["classes"], dtype=dtype)


def _as_label_list(labels: Mapping[Any, str]) -> Mapping[Any, str] | list[str]:
    """Convert a dict of label words to a list in the order of the classes, if `label_words` accepts that."""
    classes = sorted(labels)
    same = all(isinstance(value, str) and value == word for value, word in labels.items())
    numbered = classes == list(range(len(classes)))
    return [labels[value] for value in classes] if same or numbered else labels
