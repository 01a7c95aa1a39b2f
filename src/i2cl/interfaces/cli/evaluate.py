"""`i2cl eval`: compare methods on tasks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt

if TYPE_CHECKING:
    from i2cl.experiments.evaluation import NotRun
    from i2cl.experiments.records import Run
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task


@options.expanded
def evaluate(
    model: options.Model,
    task: Annotated[
        str,
        Argument(
            help="Tasks separated by commas, a file, or 'all' (the paper's, or the reference model's own)."
        ),
    ],
    *,
    method: str = opt(
        "zero_shot,few_shot,noise,i2cl,anchored",
        "Methods separated by commas, or 'all'.",
        rich_help_panel=options.METHOD,
    ),
    shots: int | None = opt(None, "Demonstrations per class; default: the task's own.", min=1),
    seeds: int = opt(1, "Number of seeds, starting at --seed.", min=1, max=10_000),
    seed: options.Seed = 0,
    limit: int = opt(500, "Maximum number of queries per task, drawn evenly over the labels.", min=1),
    workers: int | None = opt(
        None, "Number of processes; default: one per core for a small model on a CPU, else 1.", min=1
    ),
    recipe: options.Recipe = "paper",
    settings: options.Settings = None,
    rows: TaskOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Compare methods on tasks, with the same demonstrations and queries.

    In the calibration table, lower is better in every column.
    """
    load.require_options(loading, model, settings)
    names = load.task_names(task, model)
    local = {name: load.local_task(name, rows) for name in names}

    load.libraries()
    from i2cl.experiments.evaluation import sweep
    from i2cl.methods import METHODS, make_methods

    methods = list(METHODS) if method == "all" else load.split(method)
    chosen = make_methods(methods, load.parse_settings(settings), recipe)
    tasks = [local[name] or load.task(name, rows) for name in names]
    _require_distinct("tasks", [loaded.name for loaded in tasks])
    _require_distinct("methods", [one.full_name for one in chosen])
    failures: list["NotRun"] = []

    def add_failure(failure: "NotRun") -> None:
        failures.append(failure)
        bar.advance()

    def reword(task: "Task", decoder: "Decoder") -> "Task":
        return task.with_prompt_options(decoder.tokenizer, chat=rows.chat, instruction=rows.instruction)

    with console.progress(len(tasks) * len(chosen) * seeds, "evaluating") as bar:
        runs = sweep(
            partial(load.decoder, model, loading),
            tasks,
            chosen,
            range(seed, seed + seeds),
            shots=shots,
            limit=limit,
            workers=workers,
            reword=reword,
            on_run=bar.run,
            on_failure=add_failure,
        )
    title = f"{model}: mean ± standard deviation over {seeds} seed(s)"
    failures.sort(key=lambda one: (one.task, one.method, one.seed))
    if json:
        console.print_json([run.record() for run in runs] + [one.record() for one in failures])
    else:
        _show(runs, title, failures)


def _require_distinct(what: str, names: Sequence[str]) -> None:
    """Raise I2CLError if a name is used twice."""
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise I2CLError(f"two {what} are named {duplicates[0]!r}: remove one, or run it separately")


def _show(runs: "Sequence[Run]", title: str, failures: "Sequence[NotRun]") -> None:
    """Print tables of means over seeds, and what was not run."""
    from i2cl.experiments.confidence import NAMES
    from i2cl.experiments.evaluation import summarize

    summaries = summarize(runs)
    rows: list[Mapping[str, object]] = [
        {"task": row.task, "method": row.method}
        | {"accuracy": f"{row.accuracy:.3f}" + (f" ± {row.accuracy_sd:.3f}" if row.seeds > 1 else "")}
        | {"fit s": f"{row.fit_seconds:.1f}", "ms/query": f"{row.milliseconds_per_query:.2f}"}
        | {"cached": row.cached_values}
        for row in summaries
    ]
    ran = {(row["task"], row["method"]) for row in rows}
    for task, method in dict.fromkeys((one.task, one.method) for one in failures):
        if (task, method) not in ran:
            rows.append(dict.fromkeys(rows[0], "") | {"task": task, "method": method, "accuracy": "not run"})
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    console.print_table(title, sorted(rows, key=lambda row: tasks.index(row["task"])))
    if runs:
        metrics = [
            {"task": one.task, "method": one.method}
            | {name: f"{getattr(one.confidence, name):.3f}" if one.confidence else "-" for name in NAMES}
            for one in summaries
        ]
        console.print_table("Calibration of the probabilities", metrics)
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for one in failures:
        seeds.setdefault((one.task, one.method, one.reason), []).append(str(one.seed))
    for (task, method, reason), numbers in seeds.items():
        with_seeds = f" with seed {', '.join(numbers)}" if (task, method) in ran else ""
        console.say(f"{method} was not run on {task}{with_seeds}: {reason}.")
