"""A log-linear pool of the LLM and text experts, as a method; `i2cl fit` stores the same as one injection."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from i2cl.core.experts import LLM, EmbeddingsExpert, TfidfExpert, pool
from i2cl.errors import I2CLError
from i2cl.injections.ensemble import TEXT_PRIORS, EnsembleConfig, WeightPrior, likely_weights
from i2cl.methods.base import Cost, LabelScores, Method, Predictor
from i2cl.methods.classifiers import CharTfidf, SentenceEmbeddings
from i2cl.methods.cross_validation import FOLDS, cross_validate, cross_validation_error
from i2cl.methods.postprocessing import Wrapper
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress
from i2cl.tasks import Examples, Task


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
    """A log-linear pool of a method and text experts, with weights from a cross-validation.

    With one example per class, cross-validation is not possible, and the weights are the means of their
    priors. If only some classes have one example, the weights are fitted to the rows of the others.
    """

    name = "ensemble"
    default = "anchored"
    summary = "another method pooled with classifiers on embeddings and character n-grams"
    needs = "what the inner method needs, and its time again for each refit"
    settings = (EnsembleConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Fit the text experts and the weights. Raises I2CLError as `EnsembleConfig.members`, and without the
        LLM.
        """
        methods_by_name = text_methods(self.config)
        device = str(decoder.device)
        if not self.config.uses_llm:
            raise I2CLError(f"{self.full_name} needs the LLM: add {LLM!r} to experts")
        names = self.config.text_experts([row.text for row in shown], device)
        methods = [self.inner, *(methods_by_name[name] for name in names)]
        priors = [llm_prior(self.inner), *(TEXT_PRIORS[name] for name in names)]
        fitted = [inner, *(method.fit(decoder, task, shown, seed) for method in methods[1:])]
        weights = tuple(prior.mean for prior in priors)
        if not cross_validation_error(task, shown, FOLDS, seed):
            held_out = [
                cross_validate(task, shown, partial(method.fit, decoder, task, seed=seed), FOLDS, seed)
                for method in methods
            ]
            scored = [row for row in shown if row.text in held_out[0].fold_of]
            queries, gold = [row.text for row in scored], np.array([row.label for row in scored])
            log_probs = [predictor.log_probs(queries).double().log_softmax(-1) for predictor in held_out]
            weights = likely_weights(torch.stack(log_probs).numpy(), gold, priors)
        return PooledPredictor(tuple(fitted), weights)
