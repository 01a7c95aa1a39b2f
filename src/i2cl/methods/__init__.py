"""Every compared method by name. A new one is a file, a line here and a parametrised test."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from i2cl.errors import I2CLError
from i2cl.methods.base import Method, Predictor
from i2cl.methods.few_shot import FewShot, FewShotUncached
from i2cl.methods.i2cl import I2CL
from i2cl.methods.noise import Noise
from i2cl.methods.zero_shot import ZeroShot

_ALL: tuple[type[Method], ...] = (
    ZeroShot,
    FewShot,
    FewShotUncached,
    I2CL,
    Noise,
)

METHODS: Mapping[str, type[Method]] = MappingProxyType({method.name: method for method in _ALL})


def make_methods(names: list[str], options: Mapping[str, Any] | None = None) -> list[Method]:
    """Methods by name; each takes those of the options that it knows.

    Raises:
        I2CLError: on an unknown method, or an option that none of them knows.
    """
    for name in names:
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise I2CLError(f"unknown method {name!r}: {hint}known are {', '.join(METHODS)}")
    chosen = [METHODS[name] for name in names]
    known = sorted({option for method in chosen for option in method.options()})
    for option in options or {}:
        if option not in known:
            raise I2CLError(
                f"no chosen method has the option {option!r}: known are {', '.join(known) or 'none'}"
            )
    return [method.configured(options or {}) for method in chosen]


__all__ = ["METHODS", "Method", "Predictor", "make_methods"]
