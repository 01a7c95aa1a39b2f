"""`i2cl experiment ls|run|pack|unpack` and `i2cl report`."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt

if TYPE_CHECKING:
    from i2cl.experiments.grid import Cell, Experiment, Scale
    from i2cl.experiments.records import Record

app = typer.Typer(
    help="Run the paper's tables and figures, or your own grids: list, run, pack.", no_args_is_help=True
)

NewFolder = Annotated[Path, Argument(help="New folder.")]


def ls(json: options.Json = False) -> None:
    """List the built-in experiments: the paper's tables and figures, and others.

    Shows what each one measures, and the number of cells per task.
    """
    from i2cl.experiments.library import BUILTIN, load_experiment

    rows = [
        {
            "name": experiment.name,
            "paper": experiment.paper,
            "cells_per_task": _cells_of(experiment, experiment.full),
        }
        | {"quick_cells_per_task": _cells_of(experiment, experiment.quick), "measures": experiment.measures}
        for experiment in map(load_experiment, BUILTIN)
    ]
    if json:
        console.print_json(rows)
    else:
        headings = {"cells_per_task": "cells per task", "quick_cells_per_task": "quick"}
        console.print_table("", [{headings.get(name, name): row[name] for name in row} for row in rows])


def _cells_of(experiment: "Experiment", scale: "Scale") -> int:
    """Return the number of cells of one task, not counting ``move`` rows."""
    from i2cl.experiments.grid import Cell

    one_task = experiment.model_copy(update={"tasks": "all"})
    cells = one_task.cells(Cell(model="", task=""), ["one"], scale)
    return sum(cell.study != "move" for cell in cells)


@options.expanded
def run(
    names: Annotated[str, Argument(help="Experiments separated by commas, 'all', or a TOML file.")],
    *,
    model: str = opt("reference", options.MODEL_HELP),
    store: Path | None = opt(None, "Folder for results; cells with results are not run again."),
    quick: bool = opt(False, "Use fewer seeds, tasks and queries.", "--quick"),
    tasks: str | None = opt(
        None, "Tasks separated by commas; default: the experiment's tasks, or the model's."
    ),
    seeds: int | None = opt(None, "Number of seeds; default: the experiment's.", min=1, max=10_000),
    limit: int | None = opt(
        None,
        "Maximum number of queries per task, drawn evenly over the labels; default: the experiment's.",
        min=1,
    ),
    workers: int | None = opt(None, "Number of processes; default: chosen by the model's size.", min=1),
    rows: Annotated[TaskOptions, ("data_dir",)],
    loading: Annotated[ModelOptions, ("device", "dtype", "device_map", "revision", "trust_remote_code")],
    json: options.Json = False,
) -> None:
    """Run the cells of experiments that a store does not have yet.

    Interrupt it at any time: the same command resumes. Exit code 1 if a cell failed.
    """
    load.libraries()
    from i2cl.experiments.grid import Cell
    from i2cl.experiments.runner import pending_cells, run_cells
    from i2cl.experiments.store import Store

    folder = store or Path("results") / (Path(model).name + ("-quick" if quick else ""))
    base = Cell(model=model, revision=loading.revision, dtype=loading.dtype, task="")
    only = load.split(tasks) if tasks is not None and tasks != "all" else None
    cells = _cells(names, base, only, load.task_names("all", model), quick, seeds, limit)
    for name, wording in {(cell.task, cell.wording) for cell in cells}:  # report missing tasks first
        test = Path(wording.test) if wording.test is not None else None
        load.task(name, replace(rows, template=wording.template, test=test))
    data_dir = str(rows.data_dir) if rows.data_dir else None
    source = partial(load.decoder, model, loading)
    with Store.writing(folder) as opened:
        missing = pending_cells(cells, opened)
        try:
            with console.progress(len(missing), "running") as bar:
                counts = run_cells(missing, opened, source, workers, data_dir, _show_progress(bar))
        except KeyboardInterrupt:
            if not opened.records:
                raise
            message = f"the store has {len(opened.records)} cells; run the same command to resume"
            raise typer.Abort(message) from None
        failures = [opened.records[cell.key] for cell in missing if not opened.done(cell.key)]
    kept = len({cell.key for cell in cells}) - len(missing)
    if json:
        by_status = {status: counts[status] for status in ("done", "failed", "skipped")}
        console.print_json({"store": str(folder), **by_status, "kept": kept})
    else:
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        summary = (
            f"{counts['done']} cells done, {counts['failed']} failed{skipped}, {kept} already in the store"
        )
        console.say(f"{summary}: {folder}")
        for record in failures:
            console.say(f"failed: {_name(record.cell)}: {record.error}")
        which = [] if names == "all" else ["--experiments", names]
        console.say(f"next: {shlex.join(['i2cl', 'report', str(folder), *which])}")
        for reason in {record.error for record in opened.records.values() if record.status == "skipped"}:
            console.note(f"skipped: {reason} (use a new store to try again)")
    if counts["failed"]:
        raise typer.Exit(1)


def _cells(
    names: str,
    base: "Cell",
    only: Sequence[str] | None,
    tasks: Sequence[str],
    quick: bool,
    seeds: int | None,
    limit: int | None,
) -> "list[Cell]":
    """Return all cells of the experiments."""
    from i2cl.experiments.library import ORDER, check_methods, load_experiment, restrict_tasks

    cells: list[Cell] = []
    chosen = [load_experiment(name) for name in (ORDER if names == "all" else load.split(names))]
    check_methods(chosen)
    given: dict[str, Any] = {"seeds": seeds, "limit": limit}
    changes = {name: value for name, value in given.items() if value is not None}
    if only:
        changes["tasks"] = None  # run all of the tasks that are named, even with --quick
    for experiment in restrict_tasks(chosen, only) if only else chosen:
        scale = experiment.quick if quick else experiment.full
        cells += experiment.cells(base, tasks, scale.model_copy(update=changes))
    return cells


def _show_progress(bar: console.Bar) -> "Callable[[Record], None]":
    failed = 0

    def on_record(record: "Record") -> None:
        nonlocal failed
        failed += record.status == "failed"
        bar.advance()
        bar.describe(_name(record.cell) + (f", {failed} failed" if failed else ""))

    return on_record


def _name(cell: "Cell") -> str:
    return f"{cell.task} {cell.method} seed {cell.seed}"


def pack(store: options.StoreFolder, out: NewFolder, json: options.Json = False) -> None:
    """Compress a store, to archive or share it.

    `i2cl report` reads packed stores; `i2cl experiment unpack` restores the plain files.
    """
    _rewrite(store, out, "pack", as_json=json)


def unpack(store: options.StoreFolder, out: NewFolder, json: options.Json = False) -> None:
    """Restore the plain files of a packed store.

    `i2cl experiment run` can then add results to it.
    """
    _rewrite(store, out, "unpack", as_json=json)


def _rewrite(store: Path, out: Path, how: Literal["pack", "unpack"], *, as_json: bool) -> None:
    load.require_store(store)
    from i2cl.experiments.store import Store

    opened = Store.open(store)
    (opened.pack if how == "pack" else opened.unpack)(out)
    count = len(opened.records)
    console.answer({"store": str(out), "cells": count}, f"{count} cells: {out}", as_json=as_json)


@options.expanded
def report(
    store: options.StoreFolder,
    names: str = opt("all", "Experiments or TOML files separated by commas, or 'all'.", "--experiments"),
    against: str | None = opt(None, "Reference row of the tests; default: the experiment's."),
    tasks: str | None = opt(None, "Tasks separated by commas; default: all."),
    out: Path | None = opt(None, "New folder; default: STORE/report.", "-o", "--out"),
    formats: str = opt("md,csv,html", "Output formats separated by commas."),
    json: options.Json = False,
) -> None:
    """Write tables and figures of a store, with confidence intervals and tests.

    For the paper's models, the paper's numbers are shown next to the measured ones.
    """
    load.require_store(store)
    from i2cl.experiments.library import ORDER, check_tasks, compare_with, load_experiment, restrict_tasks
    from i2cl.experiments.report.document import FORMATS, build, write
    from i2cl.experiments.store import Store

    wanted = load.split(formats)
    if not set(wanted) <= set(FORMATS):
        raise I2CLError(f"--formats {formats!r}: use one or more of {', '.join(FORMATS)}")
    opened = Store.open(store)
    chosen = [load_experiment(name) for name in (ORDER if names == "all" else load.split(names))]
    records = list(opened.records.values())
    if tasks is not None and tasks != "all":
        chosen = restrict_tasks(chosen, only := load.split(tasks))
        check_tasks(only, sorted({record.cell.task for record in records}), "no cell of this store")
        records = [record for record in records if record.cell.task in only]
        records = [
            record for record in records if record.cell.study != "move" or record.cell.sources[0] in only
        ]
    if against is not None:
        chosen = compare_with(chosen, against)
    rows = [row for experiment in chosen for row in experiment.rows]
    unused = sum(not any(row.holds(record.cell) for row in rows) for record in records)
    if names == "all" and unused:
        hint = "name the TOML files that ran them with --experiments"
        console.note(f"{unused:,} of {len(records):,} cells belong to no built-in experiment: {hint}")
    built = build(chosen, records, opened.vectors())
    written = [str(path) for path in write(built, out or store / "report", wanted)]
    console.answer(written, "\n".join(written), as_json=json)
