"""Jobs in several processes: what stops one side stops the other."""

import os
import signal
import time
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path

import pytest

from i2cl.experiments.workers import run_jobs


@dataclass(frozen=True)
class Quick:
    """Says which signals do not reach its process."""

    def run(self, decoder):
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])


@dataclass(frozen=True)
class Slow:
    """Leaves a file when it has ended by itself."""

    mark: Path

    def run(self, decoder):
        time.sleep(20)
        self.mark.touch()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_workers_end_with_whom_they_work_for_and_leave_ctrl_c_to_it(tmp_path, monkeypatch, error):
    monkeypatch.setattr("i2cl.experiments.workers.get_context", lambda _: get_context("fork"))
    others, mine = set(active_children()), signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def interrupted():
        jobs = [Quick(), Slow(tmp_path / "ended by itself")]
        with closing(run_jobs(None, lambda: None, jobs, workers=2)) as results:
            place, deaf_to = next(results)
            assert (place, signal.SIGINT in deaf_to) == (0, True)
            assert set(active_children()) - others
            raise error

    with pytest.raises(error):
        interrupted()
    assert set(active_children()) <= others
    assert list(tmp_path.iterdir()) == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mine
