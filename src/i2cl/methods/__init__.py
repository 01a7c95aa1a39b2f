"""Every compared method by name. A new one is a file, a name here and a parametrised test."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from i2cl.core import encoder_bias
from i2cl.core.encoder_bias import EmbeddingsConfig
from i2cl.core.recipe import RECIPES
from i2cl.errors import I2CLError, did_you_mean
from i2cl.methods.anchored import Anchored, AnchoredWithEmbeddings
from i2cl.methods.base import Cost, Method, Predictor, Product, Wrapper
from i2cl.methods.calibrated import label_calibration as mended
from i2cl.methods.compressors.autocompressor import AutoCompressor
from i2cl.methods.compressors.cepe import CEPE
from i2cl.methods.compressors.icae import ICAE
from i2cl.methods.embeddings import SentenceEmbeddings, SetFit, Tfidf
from i2cl.methods.few_shot import FewShot, FewShotUncached, ZeroShot
from i2cl.methods.i2cl import I2CL, I2CLCorrupted, I2CLOverICL, I2CLUnseen, InjectionMethod, Noise
from i2cl.methods.icv import ICV
from i2cl.methods.knn_prompting import KNNPrompting
from i2cl.methods.label_anchor import LabelAnchor
from i2cl.methods.linear_probe import LinearProbe
from i2cl.methods.majority import MajorityClass
from i2cl.methods.peft import IA3, LoRA, PrefixTuning, PromptTuning
from i2cl.methods.task_vector import TaskVector

_ALL: tuple[type[Method], ...] = (
    *(MajorityClass, ZeroShot, FewShot, FewShotUncached, Noise, LabelAnchor, TaskVector, ICV),
    *(I2CL, I2CLUnseen, I2CLCorrupted, I2CLOverICL, Anchored, PromptTuning, PrefixTuning, LoRA, IA3),
    *(LinearProbe, Tfidf, SentenceEmbeddings, SetFit),
    *(mended.ContextualCalibration, mended.BatchCalibration, mended.LabelPrior, mended.Temperature),
    *(KNNPrompting, AutoCompressor, ICAE, CEPE),
)

Injector = I2CL | Anchored  # a method that makes an `i2cl.Injection`
METHODS: Mapping[str, type[Method]] = MappingProxyType({method.name: method for method in _ALL})
"""Every method by its name. Read-only."""


def make_methods(
    names: Sequence[str], options: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> list[Method]:
    """Methods by name, or ``below+other``, see `Product`; each takes those of the options that it knows.
    The recipe is more options, of lower rank, for what calibrates as I2CL does; other methods keep theirs.
    Raises I2CLError on an unknown method, or an option that none of them knows.
    """
    options = options or {}
    chosen = [part for name in names for part in _parts(name)]
    known = sorted({option for part in chosen for option in _known(part).options()})
    for option in options:
        if option not in known:
            cure = f"known are {', '.join(known) or 'none'}"
            raise I2CLError(f"no chosen method has the option {option!r}: {cure}")
    return [_built(_parts(name), options, recipe or {}) for name in names]


def calibrating_method(
    name: str | None = None, options: Mapping[str, Any] | None = None, recipe: str | None = None
) -> Injector:
    """What makes an injection: the named method; else I2CL where a recipe or an option of its own is given,
    and a sentence encoder with anchored calibration where that is.
    Raises I2CLError on a method that makes none, a recipe that does not exist or is for another method, or an
    option that the method has not.
    """
    known = (Anchored.name, I2CL.name, AnchoredWithEmbeddings.name)
    if name not in (None, *known):
        raise I2CLError(f"unknown method {name!r}: choose one of {', '.join(known)}")
    if recipe not in (None, *RECIPES):
        raise I2CLError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
    if name not in (None, I2CL.name) and recipe is not None:
        raise I2CLError("a recipe is I2CL's: leave the recipe out, or take the method i2cl")
    if name is None:
        of_i2cl_alone = set(I2CL.options()) - set(Anchored.options())
        wanted = recipe is not None or not of_i2cl_alone.isdisjoint(options or {})
        encoded = not wanted and not set(EmbeddingsConfig.model_fields).isdisjoint(options or {})
        name = I2CL.name if wanted else (AnchoredWithEmbeddings if encoded else Anchored).name
    (method,) = make_methods([name], options, RECIPES[recipe or "paper"])
    if name == AnchoredWithEmbeddings.name:
        here = {"encoder": encoder_bias.local_encoder() or encoder_bias.HUB_ID}
        method = AnchoredWithEmbeddings.configured(here | dict(options or {}))
    return cast("Injector", method)


def draws(name: str) -> bool:
    """Whether demonstrations or the seed change what a method makes (I2CLError on an unknown one)."""
    return any(_known(part).drawn for part in _parts(name))


def _parts(name: str) -> list[str]:
    """The methods a name stacks up, lowest first."""
    parts = name.split("+")
    lowest = _known(parts[0])
    return [lowest.default, *parts] if issubclass(lowest, Wrapper) else parts


def _built(parts: Sequence[str], options: Mapping[str, Any], recipe: Mapping[str, Any]) -> Method:
    def alone(kind: type[Method]) -> Method:
        return kind.configured({**recipe, **options} if issubclass(kind, InjectionMethod) else options)

    lowest, *others = map(_known, parts)
    method = alone(lowest)
    for kind in others:
        wraps = issubclass(kind, Wrapper)
        method = kind.configured(options, method) if wraps else Product(method, alone(kind))
    return method


def _known(name: str) -> type[Method]:
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise I2CLError(f"unknown method {name!r}: {hint}known are {', '.join(METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Cost", "Injector", "Method", "Predictor", "calibrating_method", "make_methods"]
