"""A short fit of I2CL."""

import pytest

from fitting import injected
from i2cl import CalibrationConfig


@pytest.fixture
def injection(decoder, task):
    return injected(decoder, task, task.sample(2), CalibrationConfig(epochs=2))
