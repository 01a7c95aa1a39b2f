"""`i2cl eval`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from i2cl.faces.cli import console, load, options
from i2cl.faces.cli.options import ModelOptions, TaskOptions

if TYPE_CHECKING:
    from i2cl.experiments.records import Run
    from i2cl.methods import Method
    from i2cl.tasks import Task

DEFAULT_METHODS = "zero_shot,few_shot,i2cl,noise"


@options.expanded
def evaluate(
    model: options.Model,
    task: Annotated[
        str,
        typer.Argument(
            help="Tasks with commas between, a file, or 'all': the model's bundled tasks, else the paper's."
        ),
    ],
    *,
    method: Annotated[str, typer.Option(help="Methods with commas between, or 'all'.")] = DEFAULT_METHODS,
    shots: options.Shots = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted from --seed.")] = 1,
    seed: options.Seed = 0,
    limit: options.Limit = 500,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; default: one a core for a small model on a CPU."),
    ] = None,
    recipe: options.Recipe = "paper",
    settings: options.Settings = None,
    rows: TaskOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Measure methods on tasks over seeds: accuracy, macro-F1, seconds and cached values."""
    from i2cl.methods import METHODS

    methods = list(METHODS) if method == "all" else load.split(method)
    chosen = load.methods(methods, settings, recipe)
    runs = measured(
        model,
        loading,
        load.tasks(task, model, rows),
        chosen,
        seeds=range(seed, seed + seeds),
        shots=shots,
        limit=limit,
        workers=workers,
    )
    show(runs, f"{model}: mean ± standard deviation over {seeds} seed(s)", as_json=json)


def measured(
    model: str,
    loading: ModelOptions,
    tasks: "Sequence[Task]",
    methods: "Sequence[Method]",
    *,
    seeds: Sequence[int],
    shots: int | None,
    limit: int,
    workers: int | None,
) -> "list[Run]":
    """Runs of every task, method and seed, in that order, made behind one progress bar."""
    from i2cl.experiments.sweep import sweep

    with console.progress(len(tasks) * len(methods) * len(seeds), "evaluating") as bar:

        def watch(run: "Run") -> None:
            bar.advance()
            bar.describe(f"{run.task} {run.method} seed {run.seed}: {run.accuracy:.2f}")

        source = partial(load.decoder, model, loading)
        return sweep(source, tasks, methods, seeds, shots=shots, limit=limit, workers=workers, watch=watch)


def show(runs: "Sequence[Run]", title: str, *, as_json: bool) -> None:
    """A table of the means over seeds, or every run as JSON."""
    from i2cl.experiments.evaluation import summarize

    if as_json:
        console.print_json([run.record() for run in runs])
        return
    rows: list[Mapping[str, object]] = [
        {
            "task": row.task,
            "method": row.method,
            "accuracy": f"{row.accuracy:.3f}" + (f" ± {row.accuracy_sd:.3f}" if row.seeds > 1 else ""),
            "fit s": f"{row.fit_seconds:.1f}",
            "ms/query": f"{row.milliseconds_per_query:.2f}",
            "cached": row.cached_values,
        }
        for row in summarize(runs)
    ]
    console.print_table(title, rows)
