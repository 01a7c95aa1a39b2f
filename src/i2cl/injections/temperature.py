"""A temperature: one number that says how sure an injection's label probabilities are; answers stay.

Source: Guo et al., On Calibration of Modern Neural Networks, https://arxiv.org/abs/1706.04599.
"""

from dataclasses import replace

from i2cl.core.injection import Injection


def with_temperature(injection: Injection, temperature: float) -> Injection:
    """The same injection with another `temperature`.

    What was measured of its answers stays, as they do. Its command does not: that makes no temperature.

    Args:
        injection: a temperature that it has is replaced.
        temperature: above 1 where probabilities are to be less sure, 1 for those of the model itself.

    Raises:
        I2CLError: on one outside `i2cl.core.injection.TEMPERATURES`.
    """
    return replace(injection, temperature=float(temperature), command="")
