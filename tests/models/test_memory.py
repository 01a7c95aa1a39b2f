import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from i2cl import Decoder, I2CLError
from i2cl.models.batching import MemoryWarning
from processes import finished

CPU = torch.device("cpu")
MEASURED = """
import torch
from i2cl.models.batching import peak_memory

torch.ones(30_000_000)  # 120 MB that are gone before the block
with peak_memory(torch.device("cpu")) as large:
    torch.ones(10_000_000)
with peak_memory(torch.device("cpu")) as small:
    pass
print(large.added, small.added)
"""
ERRORS = [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


class Runner(Decoder):
    """A decoder without a model: what it batches is what is looked at."""

    device = CPU
    rope_limits = ()

    def __init__(self, token_budget):
        self.token_budget = token_budget


def rows(count):
    return [tuple(range(1, 2 + (7 * number) % 11)) for number in range(count)]


@pytest.mark.parametrize("budget", [1, 7, 20, 1000])
@pytest.mark.parametrize("reserve", [0, 1, 30])
def test_batches_hold_every_row_once_within_the_budget(monkeypatch, budget, reserve):
    monkeypatch.setattr("i2cl.models.decoder.CPU_KEPT_BUDGET", 100)
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


def test_a_large_budget_makes_one_batch():
    for reserve, count in ((0, 1), (30, 1), (2000, 2)):
        assert len(list(Runner(6).run_batches([(1, 2), (2, 3), (4, 5)], Mock(), reserve=reserve))) == count
    assert list(Runner(6).run_batches([], Mock())) == []


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu"])
def test_what_exceeds_the_memory_is_halved_and_said_once(error):
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
    assert 15 < runner.token_budget <= 33
    assert {warning.category for warning in caught} == {MemoryWarning}


def test_a_single_query_that_exceeds_the_memory_is_told_and_other_errors_are_not_hidden():
    message = "a query of 11 tokens does not fit into memory"
    with pytest.warns(MemoryWarning), pytest.raises(I2CLError, match=message):
        list(Runner(50).run_batches(rows(23), Mock(side_effect=ERRORS[0])))
    with pytest.raises(RuntimeError, match="shapes"):
        list(Runner(50).run_batches(rows(3), Mock(side_effect=RuntimeError("shapes do not match"))))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can set the mark back")
def test_peak_memory_is_that_of_the_block():
    """In a process of its own: what other tests leave to be freed would be freed meanwhile."""
    code, out, err = finished(MEASURED)
    assert code == 0, err
    large, small = map(int, out.split())
    assert 35e6 < large < 80e6
    assert small < 20e6
