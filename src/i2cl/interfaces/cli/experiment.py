"""`i2cl experiment ls|run|pack|unpack`."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument

from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt

if TYPE_CHECKING:
    from i2cl.experiments.grid import Cell, Experiment, Scale
    from i2cl.experiments.records import Record

app = typer.Typer(
    help="Tables and figures of the paper, or your own grids: list, run, pack.", no_args_is_help=True
)

NewFolder = Annotated[Path, Argument(help="New folder.")]


def ls(json: options.Json = False) -> None:
    """List the experiments: tables and figures of the paper, and our own.

    Each says what it measures, and how many cells one task takes.
    """
    from i2cl.experiments.library import BROUGHT, load_experiment

    rows = [
        {"name": one.name, "paper": one.paper, "cells_per_task": _cells_of(one, one.full)}
        | {"quick_cells_per_task": _cells_of(one, one.quick), "measures": one.measures}
        for one in map(load_experiment, BROUGHT)
    ]
    if json:
        console.print_json(rows)
    else:
        shown = {"cells_per_task": "cells a task", "quick_cells_per_task": "quick"}
        console.print_table("", [{shown.get(name, name): row[name] for name in row} for row in rows])


def _cells_of(experiment: "Experiment", scale: "Scale") -> int:
    """How many cells one task takes, the matrix of moves aside."""
    from i2cl.experiments.grid import Cell

    one_task = experiment.model_copy(update={"tasks": "all"})
    cells = one_task.cells(Cell(model="", task=""), ["one"], scale)
    return sum(cell.study != "move" for cell in cells)


@options.expanded
def run(
    names: Annotated[str, Argument(help="Experiments with commas between, 'all', or a TOML file.")],
    *,
    model: str = opt("reference", options.MODEL_HELP),
    store: Path | None = opt(None, "Folder for results; what is there is not run again."),
    quick: bool = opt(False, "Fewer seeds, tasks and queries.", "--quick"),
    tasks: str | None = opt(
        None, "Tasks with commas between; default: the grid's own, or those of the model."
    ),
    seeds: int | None = opt(None, "How many seeds, instead of the grid's.", min=1, max=10_000),
    limit: int | None = opt(None, "Queries per task, instead of the grid's.", min=1),
    workers: int | None = opt(None, "Processes; default: by the model's size.", min=1),
    rows: Annotated[TaskOptions, ("data_dir",)],
    loading: Annotated[ModelOptions, ("device", "dtype", "device_map", "revision", "trust_remote_code")],
    json: options.Json = False,
) -> None:
    """Run the cells of experiments that a store lacks.

    Stop it and start it again at will; exit code 1 if any cell failed.
    """
    load.libraries()
    from i2cl.experiments.grid import Cell
    from i2cl.experiments.runner import pending, run_groups
    from i2cl.experiments.store import Store

    folder = store or Path("results") / (Path(model).name + ("-quick" if quick else ""))
    base = Cell(model=model, revision=loading.revision, dtype=loading.dtype, task="")
    only = load.split(tasks) if tasks is not None and tasks != "all" else None
    cells, timed = _cells(names, base, only, load.task_names("all", model), quick, seeds, limit)
    for name, wording in {(cell.task, cell.wording) for cell in cells}:  # what is lacking is told at once
        test = Path(wording.test) if wording.test is not None else None
        load.task(name, replace(rows, template=wording.template, test=test))
    data_dir = str(rows.data_dir) if rows.data_dir else None
    source = partial(load.decoder, model, loading)
    with Store.writing(folder) if console.FIRST else Store.following(folder) as opened:
        waiting = pending(cells, opened, timed)
        lacking = [cell for group in waiting for cell in group.lacking]
        try:
            with console.progress(len(lacking), "running") as bar:
                tally = run_groups(waiting, opened, source, workers, data_dir, _watch(bar))
        except KeyboardInterrupt:
            if not opened.records:
                raise
            message = f"{len(opened.records)} cells are kept: the same command goes on with them"
            raise typer.Abort(message) from None
        failures = [opened.records[cell.key] for cell in lacking if not opened.done(cell.key)]
    kept = len({cell.key for cell in cells}) - len(lacking)
    if json:
        counts = {status: tally[status] for status in ("done", "failed", "skipped")}
        console.print_json({"store": str(folder), **counts, "kept": kept})
    else:
        skipped = f", {tally['skipped']} skipped" if tally["skipped"] else ""
        summary = f"{tally['done']} cells done, {tally['failed']} failed{skipped}, {kept} kept from before"
        console.say(f"{summary}: {folder}")
        for one in failures:
            console.say(f"failed: {_named(one.cell)}: {one.error}")
        which = [] if names == "all" else ["--experiments", names]
        console.say(f"next: {shlex.join(['i2cl', 'report', str(folder), *which])}")
        for reason in {one.error for one in opened.records.values() if one.status == "skipped"}:
            console.note(f"skipped: {reason} (a new store tries it again)")
    if tally["failed"]:
        raise typer.Exit(1)


def _cells(
    names: str,
    base: "Cell",
    only: Sequence[str] | None,
    tasks: Sequence[str],
    quick: bool,
    seeds: int | None,
    limit: int | None,
) -> "tuple[list[Cell], set[str]]":
    """All cells of the experiments, and the keys of those that are timed."""
    from i2cl.experiments.library import ORDER, limited, load_experiment, require_methods

    cells: list[Cell] = []
    timed: set[str] = set()
    chosen = [load_experiment(name) for name in (ORDER if names == "all" else load.split(names))]
    require_methods(chosen)
    changes = {name: value for name, value in {"seeds": seeds, "limit": limit}.items() if value is not None}
    named: dict[str, Any] = {"tasks": None} if only else {}  # who names tasks wants them all
    for one in limited(chosen, only) if only else chosen:
        scale = one.quick if quick else one.full
        of_grid = list(one.cells(base, tasks, scale.model_copy(update=named | changes)))
        cells += of_grid
        timed |= {cell.key for cell in of_grid if one.timed}
    return cells, timed


def _watch(bar: console.Bar) -> "Callable[[Record], None]":
    failed = 0

    def watch(record: "Record") -> None:
        nonlocal failed
        failed += record.status == "failed"
        bar.advance()
        bar.describe(_named(record.cell) + (f", {failed} failed" if failed else ""))

    return watch


def _named(cell: "Cell") -> str:
    return f"{cell.task} {cell.method} seed {cell.seed}"


def pack(store: options.StoreFolder, out: NewFolder, json: options.Json = False) -> None:
    """Write a store as gzipped lines and a safetensors file, to keep and to share.

    `i2cl report` reads it; `i2cl experiment unpack` turns it back.
    """
    _rewrite(store, out, "pack", as_json=json)


def unpack(store: options.StoreFolder, out: NewFolder, json: options.Json = False) -> None:
    """Turn a packed store back into a folder of plain files.

    `experiment run` can then add to it.
    """
    _rewrite(store, out, "unpack", as_json=json)


def _rewrite(store: Path, out: Path, how: Literal["pack", "unpack"], *, as_json: bool) -> None:
    from i2cl.experiments.store import Store

    opened = Store.open(store)
    (opened.pack if how == "pack" else opened.unpack)(out)
    count = len(opened.records)
    console.answer({"store": str(out), "cells": count}, f"{count} cells: {out}", as_json=as_json)
