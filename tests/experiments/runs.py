"""A small grid and helpers that run its cells."""

from i2cl.experiments.grid import Cell
from i2cl.experiments.runner import pending_cells, run_cells, run_job
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
    (record,) = run_job([cell], None, folder, (), decoder)
    return record


def run_missing(cells, decoder, folder, data_dir=None):
    """Run the cells that a store does not have, and count them by status."""
    with Store.writing(folder) as store:
        return run_cells(pending_cells(cells, store), store, lambda: decoder, 1, data_dir)


def kept(record):
    """Results that must not depend on the order of cells."""
    numbers = {"coefficients", "predictions", "cost", "accuracy", "demonstrations"}
    return record.outcome.model_dump(include=numbers)
