"""Methods that fit an `i2cl.Injection`, which can be stored, served and exported."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch

from i2cl.core.injection import LABEL_PRIOR, Injection
from i2cl.methods.base import Cost, Method, Predictor
from i2cl.methods.cross_validation import without_rows
from i2cl.methods.postprocessing import PostProcessedPredictor
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
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

    def fit_folds(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Examples,
        folds: Sequence[Sequence[int]],
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> tuple[Injection, tuple[Injection, ...]]:
        """Fit an injection, and approximate the fits without each fold if the method can do so at no cost.

        Args:
            decoder: the frozen model.
            task: label words and template.
            demonstrations: labelled examples.
            folds: numbers of the demonstrations of each fold.
            seed: seed of everything random.
            progress: called after each step.
            scoring: how labels are scored.

        Returns:
            The injection, and one without each fold or none.
        """
        return self.fit_injection(decoder, task, demonstrations, seed, progress, scoring), ()

    def with_solver_of(self, injection: Injection) -> Self:
        """Return the method with the solver that made an injection, for refits to fewer demonstrations.

        The automatic choice could differ, and a cross-validation would measure a different kind of fit.
        """
        return self

    def weighted(self, task: Task, demonstrations: Examples) -> Examples:
        """Return the demonstrations with the weights that the fit gives them."""
        return demonstrations

    @abstractmethod
    def fit_cost(self, injection: Injection) -> Cost:
        """Return what the fit used: the number of trained parameters, and data besides demonstrations."""

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit an injection and predict with it, at a temperature of 1."""
        injection = self.fit_injection(decoder, task, demonstrations, seed)
        return injection_predictor(injection, decoder, task, cost=self.fit_cost(injection))


def fit_with_refits(
    method: Injector,
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    folds: Sequence[Sequence[int]],
    seed: int = 0,
    progress: StepProgress | None = None,
    scoring: Scoring = "auto",
    refit_progress: StepProgress | None = None,
) -> tuple[Injection, Callable[[Examples], Injection]]:
    """Fit an injection, and prepare the refits of a cross-validation.

    Args:
        method: fits the injection.
        decoder: the frozen model.
        task: label words and template.
        demonstrations: labelled examples.
        folds: numbers of the demonstrations of each fold; none for no cross-validation.
        seed: seed of everything random.
        progress: called after each step of the fit.
        scoring: how labels are scored.
        refit_progress: called after each step of a refit.

    Returns:
        The injection, and a function from the demonstrations without a fold to their injection. It fits only
        if the method could not approximate that fit (`Injector.fit_folds`).
    """
    injection, without = method.fit_folds(decoder, task, demonstrations, folds, seed, progress, scoring)
    rests = (without_rows(demonstrations, fold) for fold in folds)
    approximate = dict(zip(rests, without, strict=False))

    def refit(rest: Examples) -> Injection:
        if (known := approximate.get(tuple(rest))) is not None:
            return known
        same_solver = method.with_solver_of(injection)
        return same_solver.fit_injection(decoder, task, rest, seed, refit_progress, injection.scoring)

    return injection, refit


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
        cost: what the fit used, in addition to the storage of the injection.
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
