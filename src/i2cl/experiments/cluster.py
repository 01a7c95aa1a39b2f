"""Cells on a Ray cluster: one actor per GPU, or per core without any; each loads the model once.

Source: https://docs.ray.io/en/latest/ray-core/actors.html.
The store's folder is to be on a file system that all machines share.
"""

from collections.abc import Callable, Iterator, Sequence

from i2cl.decoder import Decoder
from i2cl.experiments.records import Record
from i2cl.experiments.runner import CellJob
from i2cl.ray_cluster import joined


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
    with joined(address) as cluster:
        import ray
        from ray.util import ActorPool

        count = min(workers or cluster.workers, len(jobs))
        actor = ray.remote(**cluster.share)(_Worker)
        pool = ActorPool([actor.remote(source) for _ in range(count)])
        yield from pool.map_unordered(lambda one, job: one.run.remote(job), list(jobs))


class _Worker:
    """Holds the model of one actor."""

    def __init__(self, source: Callable[[], Decoder]) -> None:
        self._decoder = source()

    def run(self, job: CellJob) -> Record:
        """Run one cell."""
        return job.run(self._decoder)
