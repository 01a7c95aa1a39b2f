"""Implicit in-context learning as a scikit-learn classifier of texts."""

from i2cl.interfaces.sklearn.estimator import I2CLClassifier

__all__ = ["I2CLClassifier"]
