"""A small grid and helpers that run its cells."""

from i2cl.experiments.grid import Cell
from i2cl.experiments.runner import Group, pending, run_groups, run_job
from i2cl.experiments.store import Store

ONE, OTHER = "mood-colour-1", "job-letter-1"
GRID = """
title = "cheap"
measures = "cheap methods"
views = ["tasks"]
tasks = ["mood-colour-1", "job-letter-1"]
rows = [
  { name = "Zero-shot", method = "zero_shot", seeds = 1 },
  { name = "Few-shot (ICL)", method = "few_shot" },
  { name = "I2CL", method = "i2cl", options = { epochs = 1 } },
]
full = { seeds = 3, limit = 12 }
"""


def cell(**changes):
    return Cell.model_validate({"model": "reference", "task": ONE, "limit": 12} | changes)


def run_alone(cell, decoder, folder):
    """Run a cell separately, and return its record."""
    (record,) = run_job(single(cell), None, folder, (), decoder)
    return record


def run_groups_of(cells, decoder, folder, data_dir=None):
    """Run the cells that a store does not have, and count them by status."""
    with Store.writing(folder) as store:
        return run_groups(pending(cells, store), store, lambda: decoder, 1, data_dir)


def single(*cells):
    return [Group((one,), (one,)) for one in cells]


def shot(seed, **changes):
    """A cell of a method without joint fits."""
    return cell(method="few_shot", seed=seed, **changes)


def quick(seed, **changes):
    """A cell that is fitted jointly with those of other seeds."""
    return cell(seed=seed, options={"epochs": 2}, **changes)


def kept(record):
    """Results that must not depend on the order of cells."""
    numbers = {"coefficients", "predictions", "cost", "together", "accuracy", "demonstrations"}
    return record.outcome.model_dump(include=numbers)
