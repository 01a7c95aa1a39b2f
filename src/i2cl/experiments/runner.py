"""Runs the cells of a grid that a store lacks."""

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
    """Cells that are fitted together, since they differ in their seed alone; or a single cell.
    ``lacking`` are those whose records are wanted; ``cells`` also those that a store holds already.
    """

    cells: tuple[Cell, ...]
    lacking: tuple[Cell, ...]


Fingerprint = tuple[str, str, str]
"""In a store: of the weights in a precision, of a task's rows, or of its wording (see `Bench.hashes`)."""


def fingerprints(store: Store, like: Cell) -> set[Fingerprint]:
    """Those of a store's cells with the same model, as given at loading."""
    known: set[Fingerprint] = set()
    for record in store.records.values():
        cell, origin = record.cell, record.provenance
        same = (cell.model, cell.revision, cell.dtype) == (like.model, like.revision, like.dtype)
        if record.status == "done" and same and "rows" in origin:  # before these, weights had other hashes
            places = {"weights": origin.get("dtype", ""), "rows": cell.task, "wording": cell.task}
            known |= {(part, where, origin[part]) for part, where in places.items() if part in origin}
    return known


def require_same(known: Collection[Fingerprint], bench: Bench, cells: Iterable[Cell]) -> None:
    """Refuse to add results of other weights or other rows (I2CLError naming the model or the task)."""

    def differs(part: str, where: str, now: str) -> bool:
        return any(one[:2] == (part, where) and one[2] != now for one in known)

    decoder = bench.decoder
    if differs("weights", software(decoder)["dtype"], decoder.base.weights):
        cure = "choose another --store"
        raise I2CLError(f"the store has results of other weights than {decoder.name!r} has now: {cure}")
    for task, cell in sorted({cell.task: cell for cell in cells}.items()):
        hashes = bench.hashes(cell)
        if differs("rows", task, hashes["rows"]):
            cure = "choose another --store, or the --data-dir they were made with"
            raise I2CLError(f"the store has results on other rows of task {task!r}: {cure}")
        if differs("wording", task, hashes["wording"]):
            raise I2CLError(
                f"the store has results of task {task!r} with another template, label words, instruction "
                "or shots: choose another --store, or set the task back"
            )


def run_standing(
    groups: Sequence[Group],
    data_dir: str | None,
    vectors: Path,
    known: Collection[Fingerprint],
    decoder: Decoder,
) -> list[Record]:
    """Records of what groups on one fit lack, failures too; raises I2CLError as `require_same` does."""
    bench = Bench(decoder, data_dir, vectors)
    require_same(known, bench, [cell for group in groups for cell in group.lacking])
    return [record for group in groups for record in _records(bench, group)]


def _records(bench: Bench, group: Group) -> list[Record]:
    started, memory = datetime.now(UTC).isoformat(timespec="seconds"), 0
    fitted: dict[str, Fitted] = {}
    if len(group.cells) > 1:
        with peak_memory(bench.decoder.device) as peak, suppress(Exception):  # told by the cell it comes from
            fits = fit_cells(bench, group.cells)
            fitted = {cell.key: one for cell, one in zip(group.cells, fits, strict=True)}
        memory = peak.bytes
    return [_recorded(bench, cell, fitted.get(cell.key), started, memory) for cell in group.lacking]


def _recorded(bench: Bench, cell: Cell, fitted: Fitted | None, started: str, memory: int) -> Record:
    """Score a cell, which is fitted first if it is not yet; ``memory`` was the most until now."""
    outcome, error, status = None, None, "done"
    with peak_memory(bench.decoder.device) as peak:
        try:
            outcome = run_cell(bench, cell, fitted or fit_cells(bench, [cell])[0])
        except WriteError:  # every other cell would meet it too
            raise
        except NoCompressorError as lacking:
            status, error = "skipped", str(lacking)
        except Exception as raised:  # noqa: BLE001 - one cell's error, of whatever kind, stops no other
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
    """Groups of cells, each once, of which the store lacks some or holds them as failed.
    Seed by seed, so that an unfinished run leaves whole tables of fewer seeds; and plain methods before
    studies that use what those were fitted to. By itself stands what gains nothing from company, what is
    timed, and what other cells use, so that they find the same whoever comes first. ``timed`` are keys of
    cells whose seconds are to be those of a single fit (`Experiment.timed`): one that the store holds as
    fitted with others is lacking.
    """
    wanted = {cell.key: cell for cell in cells}
    others = [cell for cell in wanted.values() if cell.study != "method"]
    used = [plain(cell, task) for cell in others for task in (cell.task, *cell.sources)]
    alone = {*timed, *(cell.key for cell in used)}
    groups: dict[tuple[str, bool], list[Cell]] = defaultdict(list)
    for key, cell in wanted.items():
        joint = key not in alone and is_joint(cell)
        groups[cell.model_copy(update={"seed": 0}).key if joint else key, joint].append(cell)
    plan = [
        Group(tuple(group), tuple(cell for cell in group if not _kept(store, cell, cell.key in alone)))
        for group in (sorted(group, key=lambda cell: cell.seed) for group in groups.values())
    ]
    plan.sort(key=lambda group: (group.cells[0].seed, group.cells[0].study != "method"))
    return [group for group in plan if group.lacking]


def _kept(store: Store, cell: Cell, alone: bool) -> bool:
    if not store.done(cell.key):
        return False
    outcome = store.records[cell.key].outcome
    return not (alone and outcome is not None and outcome.together > 1)


def run_groups(
    groups: Sequence[Group],
    store: Store,
    source: DecoderSource,
    workers: int | None,
    data_dir: str | None,
    watch: Callable[[Record], None] | None = None,
) -> Counter[str]:
    """Run what groups lack, append the records, and count them by status.
    Raises I2CLError as `require_same` and `run_jobs` do.
    """
    same: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        same[fit_key(group.cells[0])].append(group)
    known = fingerprints(store, groups[0].cells[0]) if groups else ()
    vectors = (store.folder / VECTORS).resolve()
    jobs = [partial(run_standing, standing, data_dir, vectors, known) for standing in same.values()]
    statuses: Counter[str] = Counter()
    for records in run_jobs(source(), source, jobs, workers) if jobs else ():
        for record in records:
            store.append(record)
            statuses[record.status] += 1
            if watch is not None:
                watch(record)
    return statuses


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
