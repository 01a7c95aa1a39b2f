"""What tests of the command line share."""

from functools import partial

import pytest

from commands import heard


@pytest.fixture
def call(capsys):
    """Run a command; its exit code, stdout and stderr."""
    return partial(heard, capsys)
