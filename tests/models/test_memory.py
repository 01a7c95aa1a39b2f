import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from i2cl import Decoder, I2CLError
from i2cl.errors import is_out_of_memory
from i2cl.models import memory
from i2cl.models.memory import BatchLimit, MemoryWarning, free_memory
from processes import finished

CPU = torch.device("cpu")
MEASURED = """
import torch
from i2cl.models.memory import peak_memory

torch.ones(30_000_000)  # 120 MB that are gone before the block
with peak_memory(torch.device("cpu")) as large:
    torch.ones(10_000_000)
with peak_memory(torch.device("cpu")) as small:
    pass
print(large.added, small.added)
"""
ERRORS = [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


class Runner(Decoder):
    """A decoder without a model, to inspect its batches."""

    device = CPU
    layers, d_model = 2, 8
    training_memory = 10**9

    def __init__(self, token_budget):
        self.token_budget = token_budget
        self.model = SimpleNamespace(dtype=torch.float32)
        self._inference_limit, self._training_limit = BatchLimit(), BatchLimit()


def rows(count):
    return [tuple(range(1, 2 + (7 * number) % 11)) for number in range(count)]


@pytest.mark.parametrize("budget", [1, 7, 20, 1000])
@pytest.mark.parametrize("reserve", [0, 1, 30])
def test_batches_contain_every_row_once_within_the_budget(monkeypatch, budget, reserve):
    monkeypatch.setattr("i2cl.models.decoder.CPU_KEY_BUDGET", 100)
    ids = rows(23)
    batches = [batch for batch, _ in Runner(budget).run_batches(ids, lambda _: 0, reserve=reserve)]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(ids)))
    widths = [batch.input_ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    for batch in batches:
        lines, width = batch.input_ids.shape
        assert lines == 1 or lines * width <= budget
        assert lines == 1 or lines * (width + reserve) <= max(budget, 100)
        for row, values, last in zip(batch.rows, batch.input_ids, batch.last, strict=True):
            assert tuple(values[: last + 1].tolist()) == ids[row]


def test_large_budget_gives_one_batch():
    for reserve, count in ((0, 1), (30, 1), (2000, 2)):
        assert len(list(Runner(6).run_batches([(1, 2), (2, 3), (4, 5)], Mock(), reserve=reserve))) == count
    assert list(Runner(6).run_batches([], Mock())) == []


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu"])
def test_batches_are_halved_on_an_out_of_memory_error_with_one_warning(error):
    tried = []

    def run(batch):
        tried.append(batch.input_ids.numel())
        if batch.input_ids.numel() > 30:
            raise error
        return batch.rows

    runner = Runner(1000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        result = [row for _, done in runner.run_batches(rows(23), run) for row in done]
    assert sorted(result) == list(range(23))
    assert sum(size > 30 for size in tried) == 3  # then the budget holds for all others
    assert 15 < runner._inference_limit.apply(1000) <= 33
    assert runner.token_budget == 1000
    assert {warning.category for warning in caught} == {MemoryWarning}


def test_query_that_does_not_fit_is_reported_and_other_errors_propagate():
    message = "a query of 11 tokens does not fit into memory"
    with pytest.warns(MemoryWarning), pytest.raises(I2CLError, match=message):
        list(Runner(50).run_batches(rows(23), Mock(side_effect=ERRORS[0])))
    with pytest.raises(RuntimeError, match="shapes"):
        list(Runner(50).run_batches(rows(3), Mock(side_effect=RuntimeError("shapes do not match"))))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can set the mark back")
@pytest.mark.parametrize("kept_bytes", ["0", str(2**31 - 1)])
def test_peak_memory_covers_only_the_block(kept_bytes, monkeypatch):
    """In a separate process, since garbage of other tests would be freed during the block."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", kept_bytes)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", kept_bytes)
    code, out, err = finished(MEASURED)
    assert code == 0, err
    large, small = map(int, out.split())
    assert 35e6 < large < 80e6
    assert small < 20e6


@pytest.mark.parametrize(
    "message",
    [
        "MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ],
)
@pytest.mark.parametrize("accelerate", [True, False])
def test_out_of_memory_is_recognized_on_every_backend(message, accelerate, monkeypatch):
    if not accelerate:
        monkeypatch.setitem(sys.modules, "accelerate", None)
        monkeypatch.setattr("i2cl.errors.find_spec", lambda _: None)
    assert is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def exceeding(limit):
    """Run batches of up to ``limit`` padded tokens; larger ones run out of memory."""

    def run(batch):
        if batch.input_ids.numel() > limit:
            raise torch.OutOfMemoryError("no room")

    return run


def widths(runner, run, **options):
    return [batch.input_ids.numel() for batch, _ in runner.run_batches(rows(23), run, **options)]


def test_inference_budget_recovers_after_an_out_of_memory_error(monkeypatch):
    monkeypatch.setattr(memory, "RECOVERY_BATCHES", 4)
    runner = Runner(1000)
    whole = widths(runner, Mock())
    with pytest.warns(MemoryWarning):
        assert max(widths(runner, exceeding(30))) <= 30
    assert runner._inference_limit.apply(1000) < 100
    for _ in range(20):  # the shortage is over
        last = widths(runner, Mock())
    assert last == whole
    assert runner._inference_limit.apply(1000) == 1000


def test_out_of_memory_in_training_does_not_change_the_inference_budget():
    runner = Runner(1000)
    with pytest.warns(MemoryWarning):
        assert max(widths(runner, exceeding(30), training=True)) <= 30
    assert runner._inference_limit.apply(1000) == 1000
    assert max(widths(runner, Mock(), training=True)) <= 33


def test_training_batches_stay_within_the_training_memory():
    runner = Runner(1000)
    runner.training_memory = 40 * runner.token_bytes
    assert runner.training_budget == 40
    assert max(widths(runner, Mock())) > 40 >= max(widths(runner, Mock(), training=True))
    each = 10 * runner.token_bytes  # of every row, whatever its length
    for batch, _ in runner.run_batches(rows(23), Mock(), training=True, row_bytes=each):
        lines, width = batch.input_ids.shape
        assert lines == 1 or lines * (width + 10) <= 40


def test_training_memory_is_a_share_of_the_memory_without_weights(monkeypatch):
    model = torch.nn.Linear(1000, 1000, bias=False)  # 4 MB
    for total, share in ((104_000_000, 50_000_000), (4_000_000, 500_000)):
        monkeypatch.setattr(memory, "total_memory", lambda _, total=total: total)
        assert memory.training_memory(model, CPU) == share


def cgroup(folder, limit, used, cache, version):
    """Write the files of a cgroup."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used, f"anon 1\n{names[2]} {cache}\n"), strict=True):
        path = folder / ("memory.stat" if name == names[2] else name)
        path.write_text(str(value))


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """The folder of the cgroup file systems, and the file that names the cgroups of this process."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "CGROUP_MEMBERSHIP", tmp_path / "membership")
    available = SimpleNamespace(available=10**9, total=2 * 10**9)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: available)
    return tmp_path, tmp_path / "membership"


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_respects_the_limit_of_a_container(cgroups, version):
    root, membership = cgroups
    line, folder = {1: ("4:cpu,memory:/pod/app", "memory/pod"), 2: ("0::/pod/app", "pod")}[version]
    membership.write_text(f"9:name=systemd:/\n{line}\n")
    assert free_memory() == 10**9, "no cgroup has a limit"
    cgroup(root / folder, 500_000_000, 300_000_000, 50_000_000, version)
    assert free_memory() == 250_000_000, "the parent's limit, less what cannot be reclaimed"
    cgroup(root / folder / "app", 400_000_000, 390_000_000, 0, version)
    assert free_memory() == 10_000_000, "the process's own limit"
    assert memory.total_memory(CPU) == 400_000_000
    cgroup(root / folder / "app", 400_000_000, 410_000_000, 0, version)
    assert free_memory() == 0


def test_host_path_of_a_container_is_resolved_at_the_mount_point(cgroups):
    root, membership = cgroups
    membership.write_text("0::/../../docker/0123")
    cgroup(root, 700_000_000, 0, 0, 2)
    assert free_memory() == 700_000_000


def test_free_memory_without_cgroup_limits_is_the_systems(cgroups):
    root, membership = cgroups
    assert free_memory() == 10**9
    membership.write_text("0::/pod")
    cgroup(root / "pod", "max", 300_000_000, 0, 2)
    assert free_memory() == 10**9


def test_free_memory_is_at_most_the_total():
    assert 0 < free_memory() <= memory.total_memory(CPU)
