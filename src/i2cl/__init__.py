"""Implicit in-context learning for frozen decoder LLMs.

A few labelled examples become one context vector plus four scalars a layer, injected into the
residual stream: few-shot accuracy at zero-shot cost. Its names are listed in `__init__.pyi`; each is
loaded on first use, so importing the package is cheap.
"""

import lazy_loader

from i2cl.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
