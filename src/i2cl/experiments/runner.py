"""Runs the cells of a grid that a store lacks, here or on a Ray cluster."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from i2cl.experiments.evaluation import software
from i2cl.experiments.grid import Cell
from i2cl.experiments.records import Record
from i2cl.experiments.store import Store
from i2cl.experiments.studies import Bench, run_study
from i2cl.models.batching import peak_memory
from i2cl.models.decoder import Decoder


@dataclass(frozen=True)
class CellJob:
    """One cell, with all that a worker needs beside the model."""

    cell: Cell
    data_dir: str | None
    vectors: Path

    def run(self, decoder: Decoder) -> Record:
        """Run it; what goes wrong becomes part of the record."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        outcome, error = None, None
        with peak_memory(decoder.device) as peak:
            try:
                outcome = run_study(Bench(decoder, self.data_dir, self.vectors), self.cell)
            except Exception as raised:  # noqa: BLE001 - one cell's error, of whatever kind, stops no other
                error = f"{type(raised).__name__}: {raised}"
        return Record(
            key=self.cell.key,
            cell=self.cell,
            status="done" if outcome else "failed",
            outcome=outcome,
            error=error,
            started=started,
            peak_memory_bytes=peak.bytes,
            provenance=provenance(decoder),
        )


Execute = Callable[[Sequence[CellJob]], Iterator[Record]]
"""Runs jobs and yields their records in any order."""


@dataclass(frozen=True)
class Tally:
    """What a run came to.

    Attributes:
        done: cells that ended well.
        failed: cells that did not.
    """

    done: int
    failed: int


def pending(cells: Iterable[Cell], store: Store) -> list[Cell]:
    """Cells that the store lacks or holds as failed, each once.

    Seed by seed, so that an unfinished run leaves whole tables of fewer seeds; and plain methods before
    studies that use what those were fitted to.
    """
    lacking = {cell.key: cell for cell in cells if not store.done(cell.key)}
    return sorted(lacking.values(), key=lambda cell: (cell.seed, cell.study != "method"))


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    execute: Execute,
    data_dir: str | None,
    watch: Callable[[Record], None] | None = None,
) -> Tally:
    """Run cells and append their records.

    Args:
        cells: what to run, see `pending`.
        store: opened for writing.
        execute: where.
        data_dir: of the tasks.
        watch: called with every record.
    """
    jobs = [CellJob(cell, data_dir, store.vectors_folder.resolve()) for cell in cells]
    done = failed = 0
    for record in execute(jobs):
        store.append(record)
        done += record.status == "done"
        failed += record.status == "failed"
        if watch is not None:
            watch(record)
    return Tally(done, failed)


def provenance(decoder: Decoder) -> dict[str, Any]:
    """What a result depends on beside its cell."""
    return {
        **software(decoder),
        "weights": decoder.base.weights,
        "commit": _commit(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "accelerator": torch.cuda.get_device_name() if decoder.device.type == "cuda" else None,
    }


@cache
def _commit() -> str | None:
    """Git commit of this package's source, with a plus where it was changed; None for an installed one."""
    here = Path(__file__).parent
    git = ("git", "-C", str(here))
    try:
        commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout  # noqa: S603 - fixed words
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", str(here.parent)))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")
