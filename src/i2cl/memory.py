"""Batches that fit into memory, and how much of it is used."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from i2cl.batching import Batch, Ids, longest_first, make_batch
from i2cl.errors import I2CLError

T = TypeVar("T")

KEPT_BUDGET = 16384
CPU_KEPT_BUDGET = 4096
"""Tokens of keys and values that a batch may hold, cached ones included; a larger token budget raises it.

Every row gets a copy of the cached ones, which beyond a few thousand costs a CPU more than a larger batch
saves: docs/performance.md.
"""


class MemoryWarning(UserWarning):
    """A batch did not fit into memory; from then on batches are smaller."""


class Budgeted(Protocol):
    """Something that runs batches on a device, such as a decoder."""

    token_budget: int

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        ...


def run_batches(
    runner: Budgeted, ids: Sequence[Ids], run: Callable[[Batch], T], reserve: int = 0
) -> Iterator[tuple[Batch, T]]:
    """What ``run`` returns for each batch of queries of similar length, longest first.

    A batch that exceeds the memory is run again as two, and the runner's token budget is lowered, so
    that this happens, and is told, once. The queries' order does not change what a batch holds.

    Args:
        runner: has the device and the number of padded tokens that a batch may hold.
        ids: token ids of each query.
        run: what to do with a batch.
        reserve: cached tokens in front of every query: they are kept, but not run, so that they count
            towards `KEPT_BUDGET` (`CPU_KEPT_BUDGET`) alone.

    Raises:
        I2CLError: if a single query exceeds the memory.
    """
    order = longest_first(ids)
    start = 0
    kept = CPU_KEPT_BUDGET if runner.device.type == "cpu" else KEPT_BUDGET
    while start < len(order):
        length = len(ids[order[start]])
        room = max(runner.token_budget, kept) // (length + reserve)
        rows = order[start : start + max(1, min(runner.token_budget // length, room))]
        batch = make_batch([ids[row] for row in rows], runner.device, rows)
        result = _unless_out_of_memory(run, batch)
        if result is None:
            _shrink(runner, len(rows), length, reserve)
        else:
            yield batch, result[0]
            start += len(rows)


def _unless_out_of_memory(run: Callable[[Batch], T], batch: Batch) -> tuple[T] | None:
    """What ``run`` returns, or None; the error is gone by then, with all the tensors it holds on to."""
    try:
        return (run(batch),)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an accelerator or the CPU's allocator had no room."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _shrink(runner: Budgeted, rows: int, length: int, reserve: int) -> None:
    if rows == 1:
        raise I2CLError(
            f"a query of {length + reserve} tokens does not fit into memory: shorten it, or load the "
            "model in bfloat16 or with device_map='auto'"
        )
    runner.token_budget = (rows + 1) // 2 * length
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
    message = f"out of memory with {rows} queries of {length} tokens; using smaller batches"
    warnings.warn(message, MemoryWarning, stacklevel=4)


@dataclass
class Peak:
    """Most bytes in use during a block: of a GPU's allocator, or resident on a CPU."""

    bytes: int = 0
    start: int = 0

    @property
    def added(self) -> int:
        """Bytes beyond those in use when the block began."""
        return max(0, self.bytes - self.start)


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure a block's peak memory; the numbers are there when it ends.

    On Linux the process's own high-water mark is set back first
    (https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html). Elsewhere it is that of the
    whole process so far.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        peak.start = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    peak.start = resident_peak()
    yield peak
    peak.bytes = resident_peak()


def resident_peak() -> int:
    """Most bytes that this process has had resident; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii").splitlines()
        marks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        if marks:
            return 1024 * int(marks[0])
    try:
        import resource
    except ImportError:  # Windows has no such module
        return 0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size
