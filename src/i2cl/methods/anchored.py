"""Anchored calibration as a method. Beyond the paper; see `i2cl.core.anchored`."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.injection import Injection
from i2cl.core.weights import apply_class_weight
from i2cl.injections.temperature import TEMPERATURE_SPREAD, TYPICAL_TEMPERATURE
from i2cl.methods.base import Cost
from i2cl.methods.injecting import Injector
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import Scoring
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class Anchored(Injector):
    """A vector for every sublayer, fitted to the demonstrations' labels."""

    name = "anchored"
    summary = "a vector for every sublayer, fitted around the plain model among the label words"
    settings: ClassVar[tuple[type[Settings], ...]] = (AnchoredConfig,)
    anchoring: AnchoredConfig = field(default_factory=AnchoredConfig)

    @property
    def temperature_prior(self) -> tuple[float, float]:
        """Typical best temperature, as measured, and the spread of its logarithm."""
        return TYPICAL_TEMPERATURE, TEMPERATURE_SPREAD

    @property
    def rounds(self) -> int:
        """Maximum number of progress updates."""
        return self.anchoring.steps

    def fit_cost(self, injection: Injection) -> Cost:
        """Return the number of trained values: vectors, and word weights if there are any."""
        layers, vectors, width = injection.context.shape
        vectors = vectors if self.anchoring.sublayers == "both" else 1
        weights = injection.word_weights
        return Cost(trained=layers * vectors * width + (0 if weights is None else weights.numel()))

    def fit_injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Examples,
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Fit an injection; see `i2cl.core.anchored.anchor`."""
        return anchor(
            decoder, task, demonstrations, self.anchoring, seed=seed, scoring=scoring, progress=progress
        )

    def weighted(self, task: Task, demonstrations: Examples) -> Examples:
        """Return the demonstrations with class weights."""
        return apply_class_weight(demonstrations, task.labels, self.anchoring.class_weight)

    def with_solver_of(self, injection: Injection) -> Self:
        """Return the method with the solver that made an injection, for refits to fewer demonstrations.

        Gauss-Newton need not be requested: a smaller fit uses it as well, unless memory has become scarce.
        """
        if injection.settings.get("solved_by") != "adamw":
            return self
        return replace(self, anchoring=self.anchoring.model_copy(update={"solver": "adamw"}))
