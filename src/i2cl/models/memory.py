"""Memory of the machine and of accelerators: sizes, limits of batches, recovery from out-of-memory errors."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

RECOVERY_BATCHES = 64  # batches at a lowered limit before a larger one is tried again
TRAINING_SHARE = 0.5  # of the memory that the weights leave, for one training batch

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
# Names of the limit, of the usage, and of the reclaimable page cache in ``memory.stat``.
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")


class MemoryWarning(UserWarning):
    """Something did not fit into memory and continues in smaller parts."""


class BatchLimit:
    """Token limit of a batch: lowered when memory runs out, doubled after `RECOVERY_BATCHES` that fit."""

    def __init__(self) -> None:
        self._tokens: int | None = None  # None: no limit beyond the configured budget
        self._fitted = 0

    def apply(self, budget: int) -> int:
        """Return the smaller of a configured budget and the current limit."""
        return budget if self._tokens is None else min(budget, self._tokens)

    def shrink(self, tokens: int) -> None:
        """Lower the limit after a batch ran out of memory."""
        self._tokens, self._fitted = tokens, 0

    def record_fit(self, budget: int) -> None:
        """Count a batch that fitted; double the limit after enough of them, up to the budget."""
        self._fitted += 1
        if self._tokens is not None and self._fitted >= RECOVERY_BATCHES:
            self._tokens = 2 * self._tokens if 2 * self._tokens < budget else None
            self._fitted = 0


def training_memory(model: nn.Module, device: torch.device) -> int:
    """Return the bytes that the activations and gradients of one training batch may take.

    This is `TRAINING_SHARE` of the device's memory minus the weights, and at least an eighth of its memory.
    It does not depend on the free memory, so that fits are reproducible.
    """
    total = total_memory(device)
    weights = sum(weight.nbytes for weight in model.parameters() if weight.device == device)
    return int(max(TRAINING_SHARE * (total - weights), total / 8))


def total_memory(device: torch.device) -> int:
    """Return the size of a device's memory in bytes; for a CPU, of the memory that the process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_memory())])


def free_memory() -> int:
    """Return the bytes of main memory that this process can still allocate without swapping.

    A container's limit (cgroup v1 or v2) counts. Page cache that the kernel would reclaim counts as free.
    """
    return min([int(psutil.virtual_memory().available), *(free for _, free in _cgroup_memory())])


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """Yield (limit, free) in bytes for each cgroup of this process or above it that limits its memory."""
    try:
        lines = CGROUP_MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (CGROUPS / "memory", _CGROUP_V1) if controllers else (CGROUPS, _CGROUP_V2)
        limit_name, usage_name, cache_name = names
        # Inside a container the path may be the host's, so all its ancestors below the mount point are tried.
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for depth in range(len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            with suppress(OSError, ValueError):  # no such file, or "max"
                limit = int((folder / limit_name).read_text(encoding="ascii"))
                used = int((folder / usage_name).read_text(encoding="ascii"))
                yield limit, max(0, limit - used + _read_field(folder / "memory.stat", cache_name))


@dataclass
class Peak:
    """Highest number of bytes in use during a block: of a GPU's allocator, or resident on a CPU."""

    bytes: int = 0
    start: int = 0

    @property
    def added(self) -> int:
        """Bytes beyond those in use when the block began."""
        return max(0, self.bytes - self.start)


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of a block; the numbers are available when it ends.

    On Linux freed memory is returned and the process's high-water mark is reset first
    (https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html). Elsewhere the mark covers the whole
    life of the process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        peak = Peak(start=torch.cuda.memory_allocated(device))
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    if sys.platform == "linux":
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    peak = Peak(start=_resident_peak())
    yield peak
    peak.bytes = _resident_peak()


def _resident_peak() -> int:
    """Return the highest number of bytes that this process has had resident; 0 on Windows."""
    if peak := _read_field(Path("/proc/self/status"), "VmHWM:"):
        return 1024 * peak
    if os.name == "nt":
        return 0
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def _read_field(path: Path, name: str) -> int:
    """Return the number after a name in a file with one name and number per line; 0 if either is missing."""
    try:
        fields = map(str.split, path.read_text(encoding="utf-8").splitlines())
    except OSError:
        return 0
    return next((int(words[1]) for words in fields if words[:1] == [name]), 0)
