"""Implicit in-context learning for frozen decoder LLMs.

A few labelled examples become one vector per sublayer, fitted around the plain model and added to the
sublayer's output: a query costs what a zero-shot prompt costs. Its names are listed in `__init__.pyi`;
each is loaded on first use, so importing the package is cheap.
"""

import lazy_loader

from i2cl.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
