"""Implicit in-context learning for frozen decoder LLMs.

A few labelled examples become one context vector plus four scalars a layer, injected into the
residual stream: few-shot accuracy at zero-shot cost. Names are loaded on first use, so importing
the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from i2cl.version import __version__ as __version__

if TYPE_CHECKING:
    from i2cl.core.anchored import AnchoredConfig as AnchoredConfig
    from i2cl.core.anchored import anchor as anchor
    from i2cl.core.calibration import calibrate as calibrate
    from i2cl.core.calibration import calibrate_many as calibrate_many
    from i2cl.core.context import ContextVector as ContextVector
    from i2cl.core.context import ExtractConfig as ExtractConfig
    from i2cl.core.context import extract as extract
    from i2cl.core.context import extract_classes as extract_classes
    from i2cl.core.injection import Injection as Injection
    from i2cl.core.recipe import CalibrationConfig as CalibrationConfig
    from i2cl.errors import I2CLError as I2CLError
    from i2cl.experiments.evaluation import evaluate as evaluate
    from i2cl.experiments.evaluation import summarize as summarize
    from i2cl.experiments.records import Run as Run
    from i2cl.injections.label_prior import with_label_prior as with_label_prior
    from i2cl.injections.pool import InjectionPool as InjectionPool
    from i2cl.injections.pool import predict as predict
    from i2cl.injections.temperature import with_temperature as with_temperature
    from i2cl.injections.transfer import TransferConfig as TransferConfig
    from i2cl.injections.transfer import transfer as transfer
    from i2cl.interfaces.sklearn import I2CLClassifier as I2CLClassifier
    from i2cl.methods import METHODS as METHODS
    from i2cl.methods import Method as Method
    from i2cl.methods import Predictor as Predictor
    from i2cl.methods import make_methods as make_methods
    from i2cl.models.architectures import ARCHITECTURES as ARCHITECTURES
    from i2cl.models.architectures import Architecture as Architecture
    from i2cl.models.decoder import Decoder as Decoder
    from i2cl.tasks import Example as Example
    from i2cl.tasks import Task as Task
    from i2cl.tasks import Template as Template
    from i2cl.tasks import list_tasks as list_tasks
    from i2cl.tasks import load_task as load_task

_HOMES = {
    "tasks": "Example Task Template list_tasks load_task",
    "errors": "I2CLError",
    "models.architectures": "ARCHITECTURES Architecture",
    "models.decoder": "Decoder",
    "core.anchored": "AnchoredConfig anchor",
    "core.context": "ContextVector ExtractConfig extract extract_classes",
    "core.recipe": "CalibrationConfig",
    "core.calibration": "calibrate calibrate_many",
    "core.injection": "Injection",
    "injections.label_prior": "with_label_prior",
    "injections.pool": "InjectionPool predict",
    "injections.temperature": "with_temperature",
    "injections.transfer": "TransferConfig transfer",
    "methods": "METHODS Method Predictor make_methods",
    "experiments.evaluation": "evaluate summarize",
    "experiments.records": "Run",
    "interfaces.sklearn": "I2CLClassifier",
}
"""Public names by the module they live in."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - the list of names stands above, once


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'i2cl' has no attribute {name!r}")
    return getattr(import_module(f"i2cl.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
