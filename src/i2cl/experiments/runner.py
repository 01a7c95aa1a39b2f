"""Run the cells of grids that are missing from a store."""

import hashlib
import json
import os
import platform
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from i2cl.core.context import extract_classes
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.evaluation import Fitted, fit_method, fit_wrappers, innermost, measure, software
from i2cl.experiments.grid import Cell, Wording
from i2cl.experiments.paper import Move, Transfer, worst_demonstrations
from i2cl.experiments.records import Record, Run
from i2cl.experiments.store import VECTORS, Store, save_vectors, store_errors
from i2cl.experiments.workers import DecoderSource, run_jobs
from i2cl.methods import Method, make_methods
from i2cl.methods.compressors.base import NoCompressorError
from i2cl.models.decoder import Decoder
from i2cl.models.memory import peak_memory
from i2cl.storage.atomic import WriteError
from i2cl.tasks import Task, load_task
from i2cl.tasks.loaders import default_template

Fingerprint = tuple[str, str, str]
"""What is hashed ("weights", "rows" or "wording"), of which precision or task, and the hash."""


@dataclass(frozen=True)
class Bench:
    """Shared state of the cells that run on one model.

    Attributes:
        decoder: the model.
        data_dir: folder with the rows of tasks, see `i2cl.load_task`; None for the hub.
        vectors: folder for the vectors and coefficients of default I2CL, which other cells and figures use.
        fits: fits of innermost methods so far, by `fit_key`.
    """

    decoder: Decoder
    data_dir: str | None
    vectors: Path
    fits: dict[str, Fitted] = field(default_factory=dict)

    def task(self, cell: Cell) -> Task:
        """Load a cell's task, once per process. Raises I2CLError if a chat cell has no chat template."""
        task = _load_task(cell.task, self.data_dir, cell.wording)
        return task.chat(self.decoder.tokenizer) if cell.chat else task

    def hashes(self, cell: Cell) -> dict[str, str]:
        """Return two hashes of a cell's task, 16 hexadecimal digits each.

        ``rows`` covers both splits; ``wording`` covers template, label words, instruction and shots.
        """
        return _hash_task(cell.task, self.data_dir, cell.wording)

    def fit(self, cell: Cell) -> Fitted:
        """Fit a cell, or reuse the fit of a cell with the same `fit_key`. Raises I2CLError if it fails."""
        task, skewed = self.task(cell), self._skewed_task(cell)
        skewed.queries(cell.limit)  # raises without queries, before anything is fitted
        method, key = self._method(cell), fit_key(cell)
        if key not in self.fits:
            if cell.demonstrations == "worst":
                shown, judging_rows = worst_demonstrations(self.decoder, task, cell.shots, cell.seed)
            else:
                shown, judging_rows = task.sample(cell.shots, cell.seed), ()
            fitted = fit_method(self.decoder, task, innermost(method), shown, cell.seed)
            self.fits[key] = replace(fitted, held_out=len(judging_rows))
        return fit_wrappers(self.decoder, method, self.fits[key], skewed)

    def run(self, cell: Cell) -> Run:
        """Fit and score a cell, and save the vectors of default I2CL. Raises I2CLError if it fails."""
        fitted, task = self.fit(cell), self._skewed_task(cell)
        run = measure(self.decoder, task, fitted, task.queries(cell.limit))
        self.save(cell, fitted)
        weights = fitted.method.weights if isinstance(fitted.method, Transfer) else {}
        return run.model_copy(update={"weights": weights})

    def injection(self, cell: Cell) -> Injection:
        """Load the injection of a default I2CL cell; fit and save it first if it is missing."""
        path = self.vectors / f"{cell.key}.safetensors"
        if not path.is_file():
            self.save(cell, self.fit(cell))
        tensors = load_file(path)
        parts = (tensors["context_vector"], tensors["coefficients"], self.task(cell).without_data())
        return Injection(*parts, self.decoder.base, seed=cell.seed)

    def save(self, cell: Cell, fitted: Fitted) -> None:
        """Save context vector, coefficients and float16 class vectors of a default I2CL cell.

        Does nothing for any other cell.
        """
        injection = fitted.injection
        if injection is not None and cell == default_i2cl(cell, cell.task):
            task = self.task(cell)
            classes = [
                vectors.context for vectors in extract_classes(self.decoder, task, fitted.demonstrations)
            ]
            tensors = {
                "context_vector": injection.context.numpy(),
                "coefficients": injection.coefficients.numpy(),
                "class_vectors": torch.stack(classes).numpy().astype(np.float16),
            }
            with store_errors(self.vectors):
                save_vectors(self.vectors, cell.key, tensors)

    def _method(self, cell: Cell) -> Method:
        if cell.study == "method":
            return make_methods([cell.method], cell.options)[0]
        sources = [self.injection(default_i2cl(cell, source)) for source in cell.sources]
        if cell.study == "move":
            return Move(sources[0])
        return Transfer(self.injection(default_i2cl(cell, cell.task)), sources)

    def _skewed_task(self, cell: Cell) -> Task:
        """Load a cell's task and apply its skew to the queries and the unlabelled texts."""
        task = self.task(cell)
        return task if cell.skew == 1 else task.skewed(cell.skew, cell.limit)


@lru_cache
def _load_task(name: str, data_dir: str | None, wording: Wording) -> Task:
    template = wording.template or default_template(name)
    return load_task(name, data_dir=data_dir, template=template, test_path=wording.test)


@lru_cache
def _hash_task(name: str, data_dir: str | None, wording: Wording) -> dict[str, str]:
    task, not_in_prompts = _load_task(name, data_dir, wording), {"name", "title", "description", "group"}
    rows = [[(example.text, example.label) for example in split] for split in (task.train, task.test)]
    words = {key: value for key, value in task.to_dict().items() if key not in not_in_prompts}
    texts = {"rows": json.dumps(rows), "wording": json.dumps(words, sort_keys=True)}
    return {part: hashlib.sha256(text.encode()).hexdigest()[:16] for part, text in texts.items()}


def default_i2cl(cell: Cell, task: str) -> Cell:
    """Return the cell of default I2CL on ``task`` with the same model, seed, queries and wording."""
    wordings = {name: wording for name, wording in cell.own.items() if name == task}
    same = ("model", "revision", "dtype", "seed", "limit", "chat")
    return Cell(task=task, own=wordings, **{name: getattr(cell, name) for name in same})


def fit_key(cell: Cell) -> str:
    """Return a key that is equal for cells that share a fit: they differ in wrappers and queries only."""
    if cell.study == "method":
        with suppress(I2CLError):  # an invalid method is reported when the cell is run
            method = innermost(*make_methods([cell.method], cell.options))
            options = {name: value for name, value in cell.options.items() if name in method.options()}
            cell = cell.model_copy(update={"method": method.full_name, "options": options})
    return cell.model_copy(update={"limit": None, "skew": 1}).key


def read_fingerprints(store: Store, like: Cell) -> set[Fingerprint]:
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


def pending_cells(cells: Iterable[Cell], store: Store) -> list[Cell]:
    """Return the cells that the store does not have, or has as failed, in the order in which to run them.

    The order is seed by seed, so that an interrupted run has complete tables of fewer seeds, and methods
    before the studies that use their fits. Duplicates are dropped.
    """
    missing = {cell.key: cell for cell in cells if not store.done(cell.key)}
    return sorted(missing.values(), key=lambda cell: (cell.seed, cell.study != "method"))


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    source: DecoderSource,
    workers: int | None,
    data_dir: str | None,
    on_record: Callable[[Record], None] | None = None,
) -> Counter[str]:
    """Run cells, append their records to the store, and count them by status.

    Raises I2CLError as `check_fingerprints` and `run_jobs` do.
    """
    by_fit: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_fit[fit_key(cell)].append(cell)
    known = read_fingerprints(store, cells[0]) if cells else ()
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


def run_job(
    cells: Sequence[Cell],
    data_dir: str | None,
    vectors: Path,
    known: Collection[Fingerprint],
    decoder: Decoder,
) -> list[Record]:
    """Run cells that share a fit, and return their records, failures included.

    Raises I2CLError as `check_fingerprints` does.
    """
    bench = Bench(decoder, data_dir, vectors)
    check_fingerprints(known, bench, cells)
    return [_run_cell(bench, cell) for cell in cells]


def _run_cell(bench: Bench, cell: Cell) -> Record:
    """Run a cell and record its result, or why it failed. Only errors of writing are raised."""
    started, decoder = datetime.now(UTC).isoformat(timespec="seconds"), bench.decoder
    outcome, error, status = None, None, "done"
    with peak_memory(decoder.device) as peak:
        try:
            outcome = bench.run(cell)
        except WriteError:  # would also stop every other cell
            raise
        except NoCompressorError as unsupported:
            status, error = "skipped", str(unsupported)
        except Exception as raised:  # noqa: BLE001 - recorded; the other cells continue
            status, error = "failed", f"{type(raised).__name__}: {raised}"
    return Record(
        key=cell.key,
        cell=cell,
        status=status,
        outcome=outcome,
        error=error,
        started=started,
        peak_memory_bytes=peak.bytes,
        provenance={
            **software(decoder),
            "weights": decoder.base.weights,
            "commit": _commit(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "accelerator": torch.cuda.get_device_name() if decoder.device.type == "cuda" else None,
            **(bench.hashes(cell) if outcome else {}),
        },
    )


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
