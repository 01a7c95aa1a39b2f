"""Starts Ray here, or joins a cluster that runs already, and says what one worker takes of it.

Source: https://docs.ray.io/en/latest/ray-core/api/doc/ray.init.html. ``ray`` is the extra of that name.
"""

import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from i2cl.errors import I2CLError, needs
from i2cl.experiments.records import Record
from i2cl.experiments.runner import GroupJob
from i2cl.models.decoder import Decoder

PATIENCE = 5.0  # seconds that a cluster has to answer; Ray waits for minutes, and then ends the process
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How HTTP/2 begins, on which Ray speaks; a server answers with settings, frame type 4 (RFC 9113, 3.4)."""


@dataclass(frozen=True)
class Cluster:
    """A cluster in use: what one worker takes (a GPU, or a core where there are none), and how many fit."""

    share: dict[str, Any]
    workers: int


@contextmanager
def joined(address: str | None) -> Iterator[Cluster]:
    """A cluster while the block runs; raises I2CLError if Ray is not installed, or no cluster answers."""
    needs("--executor ray", "ray", "ray")
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    try:
        _require_answer(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, OverflowError) as error:
        cure = "correct --address, or `ray start --head`"
        raise I2CLError(f"no Ray cluster at {address!r} ({error}): {cure}") from None
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        cores = int(ray.cluster_resources().get("CPU", 1))
        yield Cluster({"num_gpus": 1} if gpus else {"num_cpus": 1}, gpus or cores)
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise OSError unless whatever listens at HOST:PORT, if it is such an address, speaks HTTP/2."""
    match = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)
    if match is None or os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    with socket.create_connection((match[1], int(match[2])), timeout=PATIENCE) as line:
        line.sendall(_HELLO)
        if line.recv(4)[3:] != b"\4":
            raise ConnectionError("what answers there is no Ray")


@contextmanager
def quiet_core() -> Iterator[None]:
    """Keep what Ray's C++ core writes to stderr away from users; Python's own stderr stays.
    Ray Data makes it warn of its own doing with every actor: https://github.com/ray-project/ray/issues/57733.
    """
    before = sys.stderr
    kept = os.dup(2)
    try:
        shares_it = before.fileno() == 2
    except OSError:  # replaced by something in memory
        shares_it = False
    with open(os.devnull, "wb") as nowhere, os.fdopen(kept, "w", encoding=before.encoding) as still:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)
        if shares_it:
            sys.stderr = still
        try:
            yield
        finally:
            sys.stderr = before
            still.flush()
            os.dup2(kept, 2)


def run_on_ray(
    source: Callable[[], Decoder], jobs: Sequence[GroupJob], address: str | None, workers: int | None = None
) -> Iterator[list[Record]]:
    """Records of each job as it ends.
    See `joined` for the address; by default one worker per GPU of the cluster, or per core without any.
    Raises I2CLError if the package ray is lacking, no cluster answers, the model cannot be loaded, a store
    cannot be written, or an actor dies.
    """
    with joined(address) as cluster:
        import ray
        from ray.util import ActorPool

        count = min(workers or cluster.workers, len(jobs))
        actor = ray.remote(**cluster.share)(_Worker)
        pool = ActorPool([actor.remote(source) for _ in range(count)])
        try:
            yield from pool.map_unordered(lambda one, job: one.run.remote(job), list(jobs))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, I2CLError):  # alone, it is one line
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError:
            cure = "run again with fewer --workers"
            raise I2CLError(f"a Ray worker died, perhaps for lack of memory: {cure}") from None


class _Worker:
    """Holds the model of one actor."""

    def __init__(self, source: Callable[[], Decoder]) -> None:
        # Called by the first job, whose error is told: that of an actor's start is not.
        self._decoder = cache(source)

    def run(self, job: GroupJob) -> list[Record]:
        """Run one job."""
        return job.run(self._decoder())
