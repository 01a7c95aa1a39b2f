"""What tests of the command line share."""

import pytest

from i2cl.interfaces.cli import main


@pytest.fixture
def call(capsys):
    """Run a command; its exit code, stdout and stderr."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return stop.value.code, told.out, told.err

    return run
