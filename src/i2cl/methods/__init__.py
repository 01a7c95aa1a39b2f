"""Registry of methods. To add one, see docs/guide/extend.md."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from i2cl.core.recipe import find_recipe
from i2cl.errors import I2CLError, did_you_mean
from i2cl.methods.anchored import Anchored
from i2cl.methods.base import Cost, Method, Predictor
from i2cl.methods.classifiers import CharTfidf, MajorityClass, SentenceEmbeddings, SetFit, Tfidf
from i2cl.methods.compressors.autocompressor import AutoCompressor
from i2cl.methods.compressors.cepe import CEPE
from i2cl.methods.compressors.icae import ICAE
from i2cl.methods.ensemble import Ensemble
from i2cl.methods.i2cl import I2CL
from i2cl.methods.i2cl_variants import I2CLCorrupted, I2CLOverICL, I2CLUnseen, Noise
from i2cl.methods.icv import ICV
from i2cl.methods.injecting import Injector
from i2cl.methods.knn_prompting import KNNPrompting
from i2cl.methods.linear_probe import LinearProbe
from i2cl.methods.menu import Menu, MenuFewShot
from i2cl.methods.peft import IA3, LoRA, PrefixTuning, PromptTuning
from i2cl.methods.postprocessing import (
    BatchCalibration,
    ContextualCalibration,
    LabelPrior,
    Product,
    Temperature,
    Wrapper,
)
from i2cl.methods.prompting import FewShot, FewShotUncached, LabelAnchor, ZeroShot
from i2cl.methods.task_vector import TaskVector

_ALL: tuple[type[Method], ...] = (
    *(MajorityClass, ZeroShot, FewShot, FewShotUncached, Menu, MenuFewShot),
    *(Noise, LabelAnchor, TaskVector, ICV),
    *(I2CL, I2CLUnseen, I2CLCorrupted, I2CLOverICL, Anchored, PromptTuning, PrefixTuning, LoRA, IA3),
    *(LinearProbe, Tfidf, CharTfidf, SentenceEmbeddings, SetFit),
    *(ContextualCalibration, BatchCalibration, LabelPrior, Temperature, Ensemble),
    *(KNNPrompting, AutoCompressor, ICAE, CEPE),
)

METHODS: Mapping[str, type[Method]] = MappingProxyType({method.name: method for method in _ALL})
"""All methods by name. Read-only."""


def make_methods(
    names: Sequence[str], options: Mapping[str, Any] | None = None, recipe: str = "paper"
) -> list[Method]:
    """Construct methods from their names.

    Args:
        names: names of methods; ``inner+wrapper`` wraps a method and ``first+second`` is a `Product`.
        options: values by option name; each method takes the options that it has.
        recipe: calibration recipe of methods that calibrate as I2CL does (`CalibrationConfig.recipe`);
            ``options`` take precedence.

    Raises:
        I2CLError: on an unknown method or recipe, an option or recipe of none of the methods, or one string
            instead of a list.
    """
    if isinstance(names, str):
        raise I2CLError(f"names is the string {names!r}: give a list, such as [{names!r}]")
    options = options or {}
    chosen = [part for name in names for part in _split(name)]
    known = sorted({option for part in chosen for option in _find(part).options()})
    for option in options:
        if option not in known:
            choices = ", ".join(known) or "(no options)"
            raise I2CLError(f"no chosen method has the option {option!r}: choose from {choices}")
    if recipe != "paper" and not any(issubclass(_find(part), I2CL) for part in chosen):
        raise I2CLError(f"no chosen method has the recipe {recipe!r}: leave it out, or choose i2cl")
    return [_build(_split(name), options, find_recipe(recipe)) for name in names]


def make_injector(
    name: str | None = None, options: Mapping[str, Any] | None = None, recipe: str | None = None
) -> Injector:
    """Construct the method that fits an injection.

    Args:
        name: ``"anchored"`` or ``"i2cl"``. Default: ``"i2cl"`` if there is a recipe or an option that only
            I2CL has, else ``"anchored"``.
        options: options of the method.
        recipe: calibration recipe of I2CL.

    Raises:
        I2CLError: on a method that fits no injection, an unknown recipe or one with another method, or an
            option that the method does not have.
    """
    known = (Anchored.name, I2CL.name)
    if name not in (None, *known):
        raise I2CLError(f"unknown method {name!r}: choose one of {', '.join(known)}")
    if name not in (None, I2CL.name) and recipe is not None:
        raise I2CLError(f"method {name!r} takes no recipe: leave it out, or choose the method i2cl")
    if name is None:
        given = set(options or {})
        if recipe is not None or given & (set(I2CL.options()) - set(Anchored.options())):
            name = I2CL.name
        else:
            name = Anchored.name
    (method,) = make_methods([name], options, "paper" if recipe is None else recipe)
    return cast("Injector", method)


def is_stochastic(name: str) -> bool:
    """Return whether a method depends on the sampled demonstrations or the seed.

    Raises:
        I2CLError: on an unknown method.
    """
    return any(_find(part).is_stochastic for part in _split(name))


def _split(name: str) -> list[str]:
    """Split a full name into the names of its methods, innermost first, with the default inner method."""
    parts = name.split("+")
    innermost = _find(parts[0])
    return [innermost.default, *parts] if issubclass(innermost, Wrapper) else parts


def _build(parts: Sequence[str], options: Mapping[str, Any], recipe: Mapping[str, Any]) -> Method:
    """Construct the innermost method, then wrap it by the others or multiply it with them."""

    def configure(kind: type[Method]) -> Method:
        return kind.from_options({**recipe, **options} if issubclass(kind, I2CL) else options)

    innermost, *outer = map(_find, parts)
    method = configure(innermost)
    for kind in outer:
        if issubclass(kind, Wrapper):
            method = kind.from_options(options, method)
        else:
            method = Product(method, configure(kind))
    return method


def _find(name: str) -> type[Method]:
    """Look up the class of a method. Raises I2CLError on an unknown name."""
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise I2CLError(f"unknown method {name!r}: {hint}choose from {', '.join(METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Cost", "Injector", "Method", "Predictor", "make_injector", "make_methods"]
