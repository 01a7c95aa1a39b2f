"""Methods that fit an `i2cl.Injection`, which can be stored, served and exported."""

from abc import abstractmethod
from dataclasses import replace

import torch

from i2cl.core.injection import LABEL_PRIOR, Injection
from i2cl.methods.base import Cost, Method, Predictor
from i2cl.methods.postprocessing import PostProcessedPredictor
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import Scoring
from i2cl.models.training import StepProgress
from i2cl.tasks import Examples, Task

NO_COST = Cost()


class Injector(Method):
    """A method that fits an injection."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Maximum number of progress updates of a fit."""

    @abstractmethod
    def fit_injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Examples,
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Fit an injection to the demonstrations.

        Args:
            decoder: the frozen model.
            task: label words and template.
            demonstrations: labelled examples.
            seed: seed of everything random.
            progress: called after each step.
            scoring: how labels are scored.

        Raises:
            I2CLError: if the model or the demonstrations are unsuitable, or the fit diverges.
        """

    def weighted(self, task: Task, demonstrations: Examples) -> Examples:
        """Return the demonstrations with the weights that the fit gives them."""
        return demonstrations

    @abstractmethod
    def fit_cost(self, injection: Injection) -> Cost:
        """Return the cost of the fit: number of trained parameters, and data besides the demonstrations."""

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit an injection and predict with it, at a temperature of 1."""
        injection = self.fit_injection(decoder, task, demonstrations, seed)
        return injection_predictor(injection, decoder, task, cost=self.fit_cost(injection))


def injection_predictor(
    injection: Injection,
    decoder: Decoder,
    task: Task,
    *,
    scoring: Scoring | None = None,
    cost: Cost = NO_COST,
) -> Predictor:
    """Return a predictor for an injection's LLM alone, at a temperature of 1.

    Args:
        injection: the injection.
        decoder: its model.
        task: the task to classify, which may differ from the injection's.
        scoring: how labels are scored. Default: as in the injection.
        cost: cost of the fit, in addition to the storage of the injection.
    """
    cost += injection_cost(injection)
    scorer = replace(injection.scorer(decoder, scoring), task=task)
    predictor = PromptPredictor(scorer, edit=injection.edit(), injection=injection, cost=cost)
    head = injection.with_head(temperature=1.0).llm_alone().head
    if head.bias is None:
        return predictor
    return PostProcessedPredictor(predictor, lambda scores, _: head.log_probs(scores), cost)


def injection_cost(injection: Injection) -> Cost:
    """Return the storage cost of an injection's LLM part, without its coefficients."""
    head = injection.head
    bias = None if head.bias is None else torch.tensor(head.bias)
    texts = injection.settings.get(LABEL_PRIOR, {}).get("texts", 0)
    return Cost.of(injection.context, head.word_weights, bias, unlabelled=texts)
