"""Run jobs on one model in several processes, because a small model cannot use all cores."""

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

# parameters up to which, on a CPU, one single-threaded process per core is faster than one process
SMALL_MODEL = 50_000_000
DecoderSource = Callable[[], Decoder]  # loads the model in each process; must be picklable
_WORKER: list[Decoder] = []  # the model of this process, if it is a worker

R = TypeVar("R")


def is_small(decoder: Decoder) -> bool:
    """Whether the model runs on the CPU and is too small to gain from several threads."""
    size = sum(parameter.numel() for parameter in decoder.model.parameters())
    return decoder.device.type == "cpu" and size <= SMALL_MODEL


def _default_workers(decoder: Decoder, jobs: int) -> int:
    """Return one process per core for a small model and enough jobs to amortize the start, else 1."""
    if not is_small(decoder) or jobs < 4:
        return 1
    return max(1, min(os.cpu_count() or 1, jobs // 2))


def run_jobs(
    decoder: Decoder, source: DecoderSource, jobs: Sequence[Callable[[Decoder], R]], workers: int | None
) -> Iterator[R]:
    """Run jobs, and yield the result of each as it finishes.

    The worker processes share the threads of this one, their warnings are emitted here, and they end with the
    generator.

    Args:
        decoder: the model, used if there is one worker.
        source: loads the model in each of several workers.
        jobs: functions of the model; with several workers, jobs and results must be picklable.
        workers: number of processes. Default: chosen by the model's size.

    Raises:
        I2CLError: if a job raises one, or a process dies; the remaining jobs are cancelled.
    """
    workers = workers or _default_workers(decoder, len(jobs))
    if workers == 1:
        yield from (job(decoder) for job in jobs)
        return
    threads = max(1, torch.get_num_threads() // workers)
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (source, threads))
    try:
        with _sigint_blocked():  # inherited by the workers that submit starts: this process ends them
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
            raise I2CLError(
                "a worker process died, perhaps out of memory: run again with fewer --workers"
            ) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT during the block, and forever in processes that start in it. No effect on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(source: DecoderSource, threads: int) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # where SIGINT is not blocked, exit without a traceback
    torch.set_num_threads(threads)
    _WORKER.append(source())


def _exit_with_parent() -> None:
    """Exit when the parent is killed; otherwise the worker would wait for jobs forever."""
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
