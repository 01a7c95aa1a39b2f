"""Implicit in-context learning as a scikit-learn classifier of texts."""

from i2cl.errors import require_packages

require_packages("I2CLClassifier", "sklearn", "sklearn")

from i2cl.interfaces.sklearn.estimator import I2CLClassifier  # noqa: E402

__all__ = ["I2CLClassifier"]
