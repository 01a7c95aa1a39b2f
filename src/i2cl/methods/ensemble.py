"""A log-linear pool of a method and other experts; `i2cl fit` stores the same in one injection."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from i2cl.core.experts import LLM, EmbeddingsExpert, StatesExpert, TfidfExpert, pool
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.injections.ensemble import (
    EXPERT_PRIORS,
    EnsembleConfig,
    WeightPrior,
    likely_weights,
    with_states_expert,
)
from i2cl.methods.base import Cost, LabelScores, Method, Predictor
from i2cl.methods.classifiers import CharTfidf, SentenceEmbeddings
from i2cl.methods.cross_validation import FOLDS, cross_validate, cross_validation_error
from i2cl.methods.injecting import Injector
from i2cl.methods.postprocessing import Wrapper
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress
from i2cl.tasks import Example, Examples, Task


def text_methods(config: EnsembleConfig, progress: Progress | None = None) -> dict[str, Method]:
    """Return the methods without an LLM that a fit is compared or combined with, by name of the expert.

    ``progress`` is called as a fit of one of them embeds demonstrations.
    """
    methods: dict[str, Method] = {TfidfExpert.name: CharTfidf()}
    if config.embeddings is not None:
        methods[EmbeddingsExpert.name] = SentenceEmbeddings(config.embeddings, progress)
    return methods


def llm_prior(method: Method) -> WeightPrior:
    """Return the prior of the LLM's weight, which corresponds to the method's prior of the temperature."""
    temperature, spread = method.temperature_prior
    return WeightPrior(1 / temperature, spread / temperature)


@dataclass(frozen=True)
class StatesPredictor:
    """The expert on hidden states of an injection's LLM."""

    injection: Injection
    decoder: Decoder

    @property
    def cost(self) -> Cost:
        """Cost of the expert; the LLM's is not included."""
        return Cost.of(self._expert.weights)

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return the expert's log-probabilities."""
        layer = self._expert.layer
        _, states = self.injection.scores_and_states(self.decoder, texts, layer, progress=progress)
        return self._expert.scores(states).log_softmax(-1)

    @property
    def _expert(self) -> StatesExpert:
        if (expert := self.injection.head.states) is None:
            raise ValueError("the injection has no expert on hidden states")
        return expert


@dataclass(frozen=True)
class HiddenStates(Method):
    """Logistic regression on hidden states of the LLM that a method has edited; a member of an ensemble."""

    inner: Injector

    name = StatesExpert.name
    summary = "logistic regression on hidden states of the edited LLM"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> StatesPredictor:
        """Fit the inner method, then the classifier."""
        injection = self.inner.fit_injection(decoder, task, demonstrations, seed)
        return self.fit_on(injection, decoder, demonstrations)

    def fit_on(self, injection: Injection, decoder: Decoder, demonstrations: Examples) -> StatesPredictor:
        """Fit the classifier to a fitted injection. Raises I2CLError if a label has no demonstration."""
        weighted = self.inner.weighted(injection.task, demonstrations)
        fitted = with_states_expert(injection, decoder, llm_prior(self.inner), weighted)
        if fitted.head.states is None:
            raise I2CLError(f"the expert {self.name!r} needs an example of every label: add them")
        return StatesPredictor(fitted, decoder)


@dataclass(frozen=True)
class PooledPredictor:
    """Predictors whose log-probabilities are pooled."""

    members: tuple[Predictor, ...]
    weights: tuple[float, ...]

    @property
    def cost(self) -> Cost:
        """Cost of all members, and of storing the weights."""
        costs = (member.cost for member in self.members)
        return sum(costs, Cost.of(torch.tensor(self.weights)))

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return the pool's log-probabilities; ``progress`` is called by the first member."""
        first, *others = self.members
        scores = [first.log_probs(texts, progress), *(other.log_probs(texts) for other in others)]
        return pool(torch.stack(scores, 1), self.weights).log_softmax(-1).float()


class Ensemble(Wrapper):
    """A log-linear pool of a method and other experts, with weights from a cross-validation.

    With one example per class, cross-validation is not possible, and the weights are the means of their
    priors. If only some classes have one example, the weights are fitted to the rows of the others.
    """

    name = "ensemble"
    default = "anchored"
    summary = "another method pooled with classifiers on embeddings and character n-grams"
    needs = "what the inner method needs, and its time again for each refit"
    settings = (EnsembleConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Fit the experts and the weights.

        Raises I2CLError as `EnsembleConfig.members`, without the LLM, or for hidden states of a method that
        does not edit it.
        """
        methods_by_name: dict[str, Method] = dict(text_methods(self.config))
        device = str(decoder.device)
        if not self.config.uses_llm:
            raise I2CLError(f"{self.full_name} needs the LLM: add {LLM!r} to experts")
        names = list(self.config.text_experts([row.text for row in shown], device))

        @cache
        def fit_inner(rest: tuple[Example, ...]) -> Predictor:
            return inner if rest == tuple(shown) else self.inner.fit(decoder, task, rest, seed)

        def fit(name: str, rest: tuple[Example, ...]) -> Predictor:
            if name == LLM:
                return fit_inner(rest)
            if name == StatesExpert.name:
                return self._fit_states(fit_inner(rest), decoder, rest)
            return methods_by_name[name].fit(decoder, task, rest, seed)

        if StatesExpert.name in self.config.members():
            names.insert(0, StatesExpert.name)
        priors = [llm_prior(self.inner), *(EXPERT_PRIORS[name] for name in names)]
        fitted = [fit(name, tuple(shown)) for name in (LLM, *names)]
        weights = tuple(prior.mean for prior in priors)
        if not cross_validation_error(task, shown, FOLDS, seed):
            held_out = [
                cross_validate(task, shown, partial(fit, name), FOLDS, seed) for name in (LLM, *names)
            ]
            scored = [row for row in shown if row.text in held_out[0].fold_of]
            queries, gold = [row.text for row in scored], np.array([row.label for row in scored])
            log_probs = [predictor.log_probs(queries).double().log_softmax(-1) for predictor in held_out]
            weights = likely_weights(torch.stack(log_probs).numpy(), gold, priors)
        return PooledPredictor(tuple(fitted), weights)

    def _fit_states(
        self, inner: Predictor, decoder: Decoder, demonstrations: tuple[Example, ...]
    ) -> StatesPredictor:
        injection = inner.injection if isinstance(inner, PromptPredictor) else None
        if injection is None or not isinstance(self.inner, Injector):
            raise I2CLError(
                f"the expert {StatesExpert.name!r} needs a method that edits the LLM, and "
                f"{self.inner.full_name} does not: leave it out of experts, or use anchored"
            )
        return HiddenStates(self.inner).fit_on(injection, decoder, demonstrations)
