"""Run Python programs in separate processes, forked from one that has imported torch and transformers.

A new interpreter takes seconds for these imports. Otherwise a fork behaves like ``python -c``: it has its own
memory, files, signals and exit code. The fork imports the command line itself.
"""

import os
import signal
import sys
import time
from multiprocessing import forkserver, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

import i2cl

COMMAND = "from i2cl.interfaces.cli import main; main()"
"""The program behind ``i2cl``."""

FORKED = get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "i2cl.experiments.runner",
        "i2cl.interfaces.batch_prediction",
        "i2cl.interfaces.server.app",
        "i2cl.interfaces.sklearn",
        "transformers.models.llama.modeling_llama",
    ]
)


def environment():
    """Environment of a process that can import the package, and uses one core."""
    paths = [str(Path(i2cl.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def start(_=None):
    """Return the context that forks such processes, and start its fork server."""
    with patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return FORKED


def until(come, seconds=120.0, program=None):
    """Wait until ``come()`` is true, and return its value. Fails on a timeout, or if the program ends."""
    end = time.monotonic() + seconds
    while not (result := come()):
        assert program is None or program.process.is_alive(), program.output()
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)
    return result


class Program:
    """A running program whose output goes to files.

    Attributes:
        process: see `multiprocessing.Process`.
        out: file that stdout goes to; a named pipe of yours if you give one.
        err: file that stderr goes to.
    """

    def __init__(self, code, *arguments, out=None, **variables):
        self._folder = TemporaryDirectory()
        self.out = out or Path(self._folder.name) / "out"
        self.err = Path(self._folder.name) / "err"
        for path in (self.out, self.err):
            path.touch()
        value = (code, ["-c", *map(str, arguments)], (self.out, self.err), environment() | variables)
        self.process = start().Process(target=_run, args=value)
        self.process.start()

    def output(self):
        """Return the output on stdout and stderr up to now."""
        return self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8")

    def wait(self, timeout=120):
        """Wait until the program ends, and return exit code, stdout and stderr. Fails on a timeout."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            pytest.fail(f"it did not end: {self.said()}")
        return self.process.exitcode, *self.output()


def finished(code, *arguments, **variables):
    """Run a program to its end, and return exit code, stdout and stderr."""
    return Program(code, *arguments, **variables).wait()


def _run(code, words, files, variables):
    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "pthread_sigmask"):  # the server may have started while it was blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = words
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
