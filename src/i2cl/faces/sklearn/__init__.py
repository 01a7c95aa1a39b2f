"""Implicit in-context learning as a scikit-learn classifier of texts."""

from importlib.util import find_spec

from i2cl.errors import I2CLError

if find_spec("sklearn") is None:
    raise I2CLError("I2CLClassifier needs scikit-learn: pip install 'i2cl[sklearn]'")

from i2cl.faces.sklearn.estimator import I2CLClassifier

__all__ = ["I2CLClassifier"]
