"""Evaluation of many cells in several processes: small models leave most of a machine idle."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from i2cl.decoder import Decoder
from i2cl.evaluation import Run, evaluate
from i2cl.methods import Method
from i2cl.tasks import Task

SMALL_MODEL = 50_000_000
"""Parameters up to which one model a core beats one model on all cores (on a CPU)."""

DecoderSource = Callable[[], Decoder]
"""Loads the model anew in each process; must be picklable, such as a partial of a function."""

_WORKER: list[Decoder] = []  # the one model of this process, if it is a worker


@dataclass(frozen=True)
class Cell:
    """One run to be made: see `i2cl.evaluation.evaluate`."""

    task: Task
    method: Method
    seed: int
    shots: int | None = None
    limit: int | None = None

    def run(self, decoder: Decoder) -> Run:
        """Evaluate it."""
        return evaluate(decoder, self.task, self.method, shots=self.shots, seed=self.seed, limit=self.limit)


def is_small(decoder: Decoder) -> bool:
    """Whether the model runs on the CPU and is so small that several threads only wait for each other."""
    size = sum(parameter.numel() for parameter in decoder.model.parameters())
    return decoder.device.type == "cpu" and size <= SMALL_MODEL


def suggested_workers(decoder: Decoder, cells: int) -> int:
    """One process a core for a small model on the CPU and enough cells to repay the start, else one."""
    if not is_small(decoder) or cells < 4:
        return 1
    return max(1, min(os.cpu_count() or 1, cells // 2))


def run_cells(
    decoder: Decoder, source: DecoderSource, cells: Sequence[Cell], workers: int
) -> Iterator[tuple[int, Run]]:
    """Place and result of each cell as it is done.

    Every process has its share of the threads, and warns through this one.

    Args:
        decoder: used for one worker.
        source: used for several.
        cells: what to run.
        workers: how many processes.

    Raises:
        I2CLError: from the first cell that cannot be run; the others are dropped.
    """
    if workers == 1:
        yield from ((place, cell.run(decoder)) for place, cell in enumerate(cells))
        return
    threads = max(1, torch.get_num_threads() // workers)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (source, threads))
    try:
        places = {pool.submit(_run, cell): place for place, cell in enumerate(cells)}
        for future in as_completed(places):
            run, messages = future.result()
            for message, category in messages:
                warnings.warn(message, category, stacklevel=2)
            yield places[future], run
    finally:
        pool.shutdown(cancel_futures=True)


def _start(source: DecoderSource, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once
    torch.set_num_threads(threads)
    _WORKER.append(source())


def _run(cell: Cell) -> tuple[Run, list[tuple[str, type[Warning]]]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = cell.run(_WORKER[0])
    ours = [warning for warning in caught if warning.category.__module__.startswith("i2cl")]
    return run, [(str(warning.message), warning.category) for warning in ours]
