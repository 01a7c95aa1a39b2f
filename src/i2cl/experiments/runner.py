"""Run the cells of a grid that are missing from a store."""

import os
import platform
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import torch

from i2cl.errors import I2CLError
from i2cl.experiments.evaluation import Fitted, software
from i2cl.experiments.grid import Cell
from i2cl.experiments.records import Record
from i2cl.experiments.store import VECTORS, Store
from i2cl.experiments.studies import Bench, fit_cells, fit_key, is_joint, plain, run_cell
from i2cl.experiments.workers import DecoderSource, run_jobs
from i2cl.methods.compressors.base import NoCompressorError
from i2cl.models.decoder import Decoder
from i2cl.models.memory import peak_memory
from i2cl.storage.atomic import WriteError


@dataclass(frozen=True)
class Group:
    """Cells that are fitted in one call because they differ only in their seed, or a single cell.

    ``missing`` are the cells to run; ``cells`` also contains those that the store already has.
    """

    cells: tuple[Cell, ...]
    missing: tuple[Cell, ...]


Fingerprint = tuple[str, str, str]
"""What is hashed ("weights", "rows" or "wording"), of which precision or task, and the hash."""


def fingerprints(store: Store, like: Cell) -> set[Fingerprint]:
    """Return the fingerprints of a store's cells with the same model name, revision and precision."""
    known: set[Fingerprint] = set()
    for record in store.records.values():
        cell, origin = record.cell, record.provenance
        same = (cell.model, cell.revision, cell.dtype) == (like.model, like.revision, like.dtype)
        if record.status == "done" and same and "rows" in origin:  # older records hash weights differently
            owners = {"weights": origin.get("dtype", ""), "rows": cell.task, "wording": cell.task}
            known |= {(part, owner, origin[part]) for part, owner in owners.items() if part in origin}
    return known


def check_fingerprints(known: Collection[Fingerprint], bench: Bench, cells: Iterable[Cell]) -> None:
    """Raise I2CLError if the store has results of other weights, or of other rows of the cells' tasks."""

    def differs(part: str, owner: str, now: str) -> bool:
        return any(one[:2] == (part, owner) and one[2] != now for one in known)

    decoder = bench.decoder
    if differs("weights", software(decoder)["dtype"], decoder.base.weights):
        raise I2CLError(
            f"the weights of {decoder.name!r} differ from those of the store's results: "
            "choose another --store"
        )
    for task, cell in sorted({cell.task: cell for cell in cells}.items()):
        hashes = bench.hashes(cell)
        if differs("rows", task, hashes["rows"]):
            raise I2CLError(
                f"the rows of task {task!r} differ from those of the store's results: "
                "choose another --store, or the same --data-dir as before"
            )
        if differs("wording", task, hashes["wording"]):
            raise I2CLError(
                f"the template, label words, instruction or shots of task {task!r} differ from those of the "
                "store's results: choose another --store, or restore the task"
            )


def run_job(
    groups: Sequence[Group],
    data_dir: str | None,
    vectors: Path,
    known: Collection[Fingerprint],
    decoder: Decoder,
) -> list[Record]:
    """Run the missing cells of groups that share a fit, and return their records, failures included.

    Raises I2CLError as `check_fingerprints` does.
    """
    bench = Bench(decoder, data_dir, vectors)
    check_fingerprints(known, bench, [cell for group in groups for cell in group.missing])
    return [record for group in groups for record in _run_group(bench, group)]


def _run_group(bench: Bench, group: Group) -> list[Record]:
    started, memory = datetime.now(UTC).isoformat(timespec="seconds"), 0
    fitted: dict[str, Fitted] = {}
    if len(group.cells) > 1:
        # an error is reported below, by the cell that causes it when it is fitted separately
        with peak_memory(bench.decoder.device) as peak, suppress(Exception):
            fits = fit_cells(bench, group.cells)
            fitted = {cell.key: one for cell, one in zip(group.cells, fits, strict=True)}
        memory = peak.bytes
    return [_run_cell(bench, cell, fitted.get(cell.key), started, memory) for cell in group.missing]


def _run_cell(bench: Bench, cell: Cell, fitted: Fitted | None, started: str, memory: int) -> Record:
    """Fit a cell unless it is ``fitted`` already, and score it. ``memory`` is the peak of that fit."""
    outcome, error, status = None, None, "done"
    with peak_memory(bench.decoder.device) as peak:
        try:
            outcome = run_cell(bench, cell, fitted or fit_cells(bench, [cell])[0])
        except WriteError:  # would also stop every other cell
            raise
        except NoCompressorError as unsupported:
            status, error = "skipped", str(unsupported)
        except Exception as raised:  # noqa: BLE001 - recorded; the other cells continue
            status, error = "failed", f"{type(raised).__name__}: {raised}"
    decoder = bench.decoder
    return Record(
        key=cell.key,
        cell=cell,
        status=status,
        outcome=outcome,
        error=error,
        started=started,
        peak_memory_bytes=max(memory, peak.bytes),
        provenance={
            **software(decoder),
            "weights": decoder.base.weights,
            "commit": _commit(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "accelerator": torch.cuda.get_device_name() if decoder.device.type == "cuda" else None,
            **(bench.hashes(cell) if outcome else {}),
        },
    )


def pending(cells: Iterable[Cell], store: Store, timed: Collection[str] = ()) -> list[Group]:
    """Group the cells that the store does not have, or has as failed, in the order in which to run them.

    The order is seed by seed, so that an interrupted run has complete tables of fewer seeds, and methods
    before the studies that use their fits. Seeds are fitted in one call if the method gains from it. Cells
    that are timed or that a study uses are fitted separately, so their results do not depend on the grid.

    Args:
        cells: all cells of the grids; duplicates are run once.
        store: the results so far.
        timed: keys of cells that need the seconds of a separate fit (`Experiment.timed`). If the store has
            such a cell from a joint fit, it is run again.
    """
    by_key = {cell.key: cell for cell in cells}
    studies = [cell for cell in by_key.values() if cell.study != "method"]
    used = [plain(cell, task) for cell in studies for task in (cell.task, *cell.sources)]
    separate = {*timed, *(cell.key for cell in used)}
    groups: dict[tuple[str, bool], list[Cell]] = defaultdict(list)
    for key, cell in by_key.items():
        joint = key not in separate and is_joint(cell)
        groups[cell.model_copy(update={"seed": 0}).key if joint else key, joint].append(cell)
    plan = [
        Group(
            tuple(group),
            tuple(cell for cell in group if not _is_stored(store, cell, separate=cell.key in separate)),
        )
        for group in (sorted(group, key=lambda cell: cell.seed) for group in groups.values())
    ]
    plan.sort(key=lambda group: (group.cells[0].seed, group.cells[0].study != "method"))
    return [group for group in plan if group.missing]


def _is_stored(store: Store, cell: Cell, *, separate: bool) -> bool:
    if not store.done(cell.key):
        return False
    outcome = store.records[cell.key].outcome
    return not (separate and outcome is not None and outcome.together > 1)


def run_groups(
    groups: Sequence[Group],
    store: Store,
    source: DecoderSource,
    workers: int | None,
    data_dir: str | None,
    on_record: Callable[[Record], None] | None = None,
) -> Counter[str]:
    """Run the missing cells of groups, append their records to the store, and count them by status.

    Raises I2CLError as `check_fingerprints` and `run_jobs` do.
    """
    by_fit: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_fit[fit_key(group.cells[0])].append(group)
    known = fingerprints(store, groups[0].cells[0]) if groups else ()
    vectors = (store.folder / VECTORS).resolve()
    jobs = [partial(run_job, sharing, data_dir, vectors, known) for sharing in by_fit.values()]
    statuses: Counter[str] = Counter()
    for records in run_jobs(source(), source, jobs, workers) if jobs else ():
        for record in records:
            store.append(record)
            statuses[record.status] += 1
            if on_record is not None:
                on_record(record)
    return statuses


@cache
def _commit() -> str | None:
    """Return the Git commit of the package's source, with "+" if it has changes; None outside a checkout."""
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
