"""The command line limits how long OpenMP's threads spin, unless the user has chosen otherwise."""

import os
from unittest.mock import patch

import pytest

from i2cl.interfaces import cli

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def variables_after_main(environment):
    """Return OpenMP's variables after a command that starts with this environment."""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with patch.dict(os.environ, others | environment, clear=True):
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_threads_spin_for_a_short_while():
    assert variables_after_main({}) == {"GOMP_SPINCOUNT": cli.SPIN_COUNT}


@pytest.mark.parametrize("environment", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}])
def test_variables_of_the_user_are_kept(environment):
    assert variables_after_main(environment) == environment
