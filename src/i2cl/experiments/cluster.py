"""Cells on a Ray cluster: one actor per GPU, or per core without any; each loads the model once.

Source: https://docs.ray.io/en/latest/ray-core/actors.html. The package ``ray`` is the extra of that name.
The store's folder is to be on a file system that all machines share.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from i2cl.decoder import Decoder
from i2cl.errors import I2CLError
from i2cl.experiments.records import Record
from i2cl.experiments.runner import CellJob


def run_on_ray(
    source: Callable[[], Decoder], jobs: Sequence[CellJob], address: str | None, workers: int | None = None
) -> Iterator[Record]:
    """Records of all jobs as they end.

    Args:
        source: loads the model, in every actor.
        jobs: what to run.
        address: of a running cluster, such as ``auto`` or ``ray://head:10001``; None starts one here.
        workers: actors; default: one per GPU of the cluster, or per core without any.

    Raises:
        I2CLError: if the package ray is lacking, or no cluster answers.
    """
    try:
        import ray
        from ray.util import ActorPool
    except ImportError:
        raise I2CLError("--executor ray needs the package ray: pip install 'i2cl[ray]'") from None
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError) as error:
        raise I2CLError(
            f"no Ray cluster at {address!r} ({error}): start one with `ray start --head`"
        ) from None
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        cores = int(ray.cluster_resources().get("CPU", 1))
        share: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        count = min(workers or gpus or cores, len(jobs))
        actor = ray.remote(**share)(_Worker)
        pool = ActorPool([actor.remote(source) for _ in range(count)])
        yield from pool.map_unordered(lambda one, job: one.run.remote(job), list(jobs))
    finally:
        ray.shutdown()


class _Worker:
    """Holds the model of one actor."""

    def __init__(self, source: Callable[[], Decoder]) -> None:
        self._decoder = source()

    def run(self, job: CellJob) -> Record:
        """Run one cell."""
        return job.run(self._decoder)
