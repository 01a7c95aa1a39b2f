"""Implicit in-context learning for frozen decoder LLMs.

A few labelled examples become one context vector plus four scalars a layer, injected into the
residual stream: few-shot accuracy at zero-shot cost. Names are loaded on first use, so importing
the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from i2cl.architectures import ARCHITECTURES, Architecture
    from i2cl.calibration import calibrate
    from i2cl.classes import extract_classes
    from i2cl.classifier import I2CLClassifier
    from i2cl.composition import combine
    from i2cl.context import ContextVector, ExtractConfig, extract
    from i2cl.decoder import Decoder
    from i2cl.errors import I2CLError
    from i2cl.evaluation import Run, evaluate, summarize
    from i2cl.injection import Injection
    from i2cl.joint import calibrate_many
    from i2cl.methods import METHODS, Method, Predictor, make_methods
    from i2cl.pool import InjectionPool, predict
    from i2cl.recipe import CalibrationConfig
    from i2cl.tasks import Example, Task, Template, list_tasks, load_task
    from i2cl.transfer import TransferConfig

_HOMES = {
    "ARCHITECTURES": "architectures",
    "Architecture": "architectures",
    "CalibrationConfig": "recipe",
    "ContextVector": "context",
    "Decoder": "decoder",
    "Example": "tasks",
    "ExtractConfig": "context",
    "I2CLClassifier": "classifier",
    "I2CLError": "errors",
    "Injection": "injection",
    "InjectionPool": "pool",
    "METHODS": "methods",
    "Method": "methods",
    "Predictor": "methods",
    "Run": "evaluation",
    "Task": "tasks",
    "Template": "tasks",
    "TransferConfig": "transfer",
    "calibrate": "calibration",
    "calibrate_many": "joint",
    "combine": "composition",
    "evaluate": "evaluation",
    "extract": "context",
    "extract_classes": "classes",
    "list_tasks": "tasks",
    "load_task": "tasks",
    "make_methods": "methods",
    "predict": "pool",
    "summarize": "evaluation",
}

__all__ = [
    "ARCHITECTURES",
    "METHODS",
    "Architecture",
    "CalibrationConfig",
    "ContextVector",
    "Decoder",
    "Example",
    "ExtractConfig",
    "I2CLClassifier",
    "I2CLError",
    "Injection",
    "InjectionPool",
    "Method",
    "Predictor",
    "Run",
    "Task",
    "Template",
    "TransferConfig",
    "calibrate",
    "calibrate_many",
    "combine",
    "evaluate",
    "extract",
    "extract_classes",
    "list_tasks",
    "load_task",
    "make_methods",
    "predict",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'i2cl' has no attribute {name!r}")
    return getattr(import_module(f"i2cl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
