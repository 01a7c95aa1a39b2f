"""What the command line sets for its process: OpenMP's spinning, the allocator and the end of Python."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest

import processes
from i2cl.interfaces import cli
from i2cl.version import __version__

OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def variables_after_main(names, environment):
    """Return the variables of these names after a command that starts with this environment."""
    others = {name: value for name, value in os.environ.items() if name not in names}
    with patch.dict(os.environ, others | environment, clear=True):
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        return {name: os.environ[name] for name in names if name in os.environ}


def test_threads_spin_for_a_short_while():
    assert variables_after_main(OPENMP, {}) == {"GOMP_SPINCOUNT": cli.SPIN_COUNT}


@pytest.mark.skipif(sys.platform != "linux", reason="thresholds of glibc")
def test_freed_memory_is_kept():
    assert variables_after_main(MALLOC, {}) == dict.fromkeys(MALLOC[:2], str(cli.KEPT_BYTES))


@pytest.mark.parametrize(
    ("names", "environment"),
    [
        (OPENMP, {"OMP_WAIT_POLICY": "ACTIVE"}),
        (OPENMP, {"GOMP_SPINCOUNT": "1000"}),
        (MALLOC, {"MALLOC_TRIM_THRESHOLD_": "1000000"}),
        (MALLOC, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    ],
)
def test_variables_of_the_user_are_kept(names, environment):
    assert variables_after_main(names, environment) == environment


def test_garbage_is_not_collected_at_exit():
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
    program += "from i2cl.interfaces.cli import main; main(['--version'])"
    command = [sys.executable, "-c", program]
    output = subprocess.check_output(command, env=processes.environment(), text=True)
    assert output.splitlines() == [__version__, "True"]
