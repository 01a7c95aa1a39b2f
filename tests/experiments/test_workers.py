"""Jobs in several processes: the end of the parent ends the workers, and vice versa."""

import os
import signal
import time
from contextlib import closing
from functools import partial
from multiprocessing import active_children, get_context

import pytest

from i2cl.experiments.workers import run_jobs


def signals(_decoder):
    """Signals that are blocked in the process."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def slow(mark, _decoder):
    """Write a file if the job is not interrupted."""
    time.sleep(20)
    mark.touch()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_workers_end_with_the_parent_and_ignore_ctrl_c(tmp_path, monkeypatch, error):
    monkeypatch.setattr("i2cl.experiments.workers.get_context", lambda _: get_context("fork"))
    others, mine = set(active_children()), signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def interrupted():
        jobs = [signals, partial(slow, tmp_path / "ended by itself")]
        with closing(run_jobs(None, lambda: None, jobs, workers=2)) as results:
            assert signal.SIGINT in next(results)
            assert set(active_children()) - others
            raise error

    with pytest.raises(error):
        interrupted()
    assert set(active_children()) <= others
    assert list(tmp_path.iterdir()) == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mine
