"""I2CL as a method: a context vector, injected with calibrated coefficients."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from i2cl.core.calibration import calibrate
from i2cl.core.context import extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig, ExtractConfig
from i2cl.methods.base import Cost, Predictor
from i2cl.methods.injecting import Injector, injection_predictor
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import Scoring
from i2cl.models.training import Settings, StepProgress
from i2cl.tasks import Examples, Task


class CalibrationData(NamedTuple):
    """Inputs of a calibration, and the vector for prediction; variants of I2CL use different vectors."""

    task: Task
    demonstrations: Examples
    context: Injection  # vector whose coefficients are calibrated
    injected: Injection  # vector that replaces it afterwards


@dataclass(frozen=True)
class I2CL(Injector):
    """A context vector injected with calibrated coefficients. Source: paper, section "Methodology"."""

    name = "i2cl"
    summary = "context vector injected with calibrated coefficients"
    settings: ClassVar[tuple[type[Settings], ...]] = (ExtractConfig, CalibrationConfig)
    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @property
    def rounds(self) -> int:
        """Number of progress updates of a calibration."""
        return self.calibration.rounds

    def fit_cost(self, injection: Injection) -> Cost:
        """Return the number of trained coefficients."""
        return Cost(trained=self.calibration.parameters(injection.base.layers, self.extraction.sublayers))

    def prepare(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> "CalibrationData":
        """Extract the context vector. Raises I2CLError as `i2cl.core.context.extract`."""
        context = self.extract(decoder, task, demonstrations, seed)
        return CalibrationData(task, demonstrations, context, context)

    def extract(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Injection:
        """Extract the context vector of demonstrations."""
        return extract(decoder, task, demonstrations, self.extraction, seed=seed)

    def fit_injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Examples,
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Extract a context vector and calibrate its coefficients."""
        data = self.prepare(decoder, task, demonstrations, seed)
        injection = calibrate(
            decoder,
            data.task,
            data.demonstrations,
            data.context,
            self.calibration,
            seed=seed,
            scoring=scoring,
            progress=progress,
        )
        count = data.injected.demonstrations
        return replace(injection, context=data.injected.context, demonstrations=count)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit an injection and predict with it. Scoring is ``"auto"``, as in few-shot, for either loss."""
        injection = self.fit_injection(decoder, task, demonstrations, seed)
        cost = self.fit_cost(injection)
        return injection_predictor(injection, decoder, task, scoring="auto", cost=cost)
