"""Many jobs on one model in several processes: small models leave most of a machine idle."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import TypeVar

import torch

from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder

SMALL_MODEL = 50_000_000  # parameters up to which one model a core beats one model on all cores (on a CPU)
# Loads the model anew in each process; must be picklable, such as a partial of a function.
DecoderSource = Callable[[], Decoder]
_WORKER: list[Decoder] = []  # the one model of this process, if it is a worker

R = TypeVar("R")


def is_small(decoder: Decoder) -> bool:
    """Whether the model runs on the CPU and is so small that several threads only wait for each other."""
    size = sum(parameter.numel() for parameter in decoder.model.parameters())
    return decoder.device.type == "cpu" and size <= SMALL_MODEL


def _suggested_workers(decoder: Decoder, jobs: int) -> int:
    """One process a core for a small model on the CPU and enough jobs to repay the start, else one."""
    if not is_small(decoder) or jobs < 4 or "RANK" in os.environ:  # torchrun has its processes already
        return 1
    return max(1, min(os.cpu_count() or 1, jobs // 2))


def run_jobs(
    decoder: Decoder, source: DecoderSource, jobs: Sequence[Callable[[Decoder], R]], workers: int | None
) -> Iterator[R]:
    """What each job gives, as it is done, by so many processes, or as many as the model's size says.
    Every process has its share of the threads, warns through this one, and ends when the generator does. With
    one worker the decoder is used, with several the source; jobs and what they give have to be picklable.
    Raises I2CLError from the first job that fails with one, or if a process dies; the others are dropped.
    """
    workers = workers or _suggested_workers(decoder, len(jobs))
    if workers == 1:
        yield from (job(decoder) for job in jobs)
        return
    threads = max(1, torch.get_num_threads() // workers)
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (source, threads))
    try:
        with _deaf_to_ctrl_c():  # so are the workers, which submit starts: this process ends them
            futures = [pool.submit(_run, job) for job in jobs]
        for future in as_completed(futures):
            result, messages = future.result()
            for message, category in messages:
                warnings.warn(message, category, stacklevel=2)
            yield result
    except BaseException as error:
        for worker in set(active_children()) - others:
            worker.terminate()
        if isinstance(error, BrokenProcessPool):
            cure = "run again with fewer --workers"
            raise I2CLError(f"a worker process died, perhaps for lack of memory: {cure}") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Put SIGINT off until the block ends; processes that start in it never get it. Not on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(source: DecoderSource, threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # where it was not put off, it ends a worker at once
    torch.set_num_threads(threads)
    _WORKER.append(source())


def _end_with_parent() -> None:
    """A killed parent tells its workers nothing: without this they would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(job: Callable[[Decoder], R]) -> tuple[R, list[tuple[str, type[Warning]]]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = job(_WORKER[0])
    ours = [warning for warning in caught if warning.category.__module__.startswith("i2cl")]
    return result, [(str(warning.message), warning.category) for warning in ours]
