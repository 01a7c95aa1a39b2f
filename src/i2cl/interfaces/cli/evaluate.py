"""`i2cl eval`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt

if TYPE_CHECKING:
    from i2cl.experiments.evaluation import NotRun
    from i2cl.experiments.records import Run


@options.expanded
def evaluate(
    model: options.Model,
    task: Annotated[
        str,
        Argument(
            help="Tasks with commas between, a file, or 'all': the reference model's own, else the paper's."
        ),
    ],
    *,
    method: str = opt(
        "zero_shot,few_shot,noise,i2cl,anchored",
        "Methods with commas between, or 'all' that MODEL can run.",
        rich_help_panel=options.METHOD,
    ),
    shots: int | None = opt(None, "Demonstrations per class; default: the task's own.", min=1),
    seeds: int = opt(1, "How many seeds, counted from --seed.", min=1, max=10_000),
    seed: options.Seed = 0,
    limit: int = opt(500, "Queries per task.", min=1),
    workers: int | None = opt(None, "Processes; default: one a core for a small model on a CPU.", min=1),
    recipe: options.Recipe = "paper",
    settings: options.Settings = None,
    rows: TaskOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Compare methods on tasks, with the same demonstrations and queries.

    In the table of confidence lower is better throughout.
    """
    load.require_options(loading, model, settings)
    names = load.task_names(task, model)
    local = {name: load.local_task(name, rows) for name in names}

    load.libraries()
    from i2cl.core.recipe import RECIPES
    from i2cl.experiments.evaluation import sweep
    from i2cl.methods import METHODS, make_methods

    methods = list(METHODS) if method == "all" else load.split(method)
    chosen = make_methods(methods, load.options(settings), RECIPES[recipe])
    tasks = [local[name] or load.task(name, rows) for name in names]
    for what, names in (("tasks", [one.name for one in tasks]), ("methods", [one.called for one in chosen])):
        if twice := [name for name in names if names.count(name) > 1]:
            raise I2CLError(f"two {what} are called {twice[0]!r}: leave one out, or ask for it by itself")
    source = partial(load.decoder, model, loading)
    span = range(seed, seed + seeds)
    lacking: list["NotRun"] = []

    def refused(one: "NotRun") -> None:
        lacking.append(one)
        bar.advance()

    with console.progress(len(tasks) * len(chosen) * seeds, "evaluating") as bar:
        given: Any = {"shots": shots, "limit": limit, "workers": workers, "skip": method == "all"}
        words = {"chat": rows.chat, "instruction": rows.instruction}
        given["word"] = lambda one, decoder: one.with_prompt_options(decoder.tokenizer, **words)
        runs = sweep(source, tasks, chosen, span, **given, watch=bar.run, refused=refused)
    title = f"{model}: mean ± standard deviation over {seeds} seed(s)"
    show(runs, title, sorted(lacking, key=lambda one: (one.task, one.method, one.seed)), as_json=json)


def show(
    runs: "Sequence[Run]", title: str, lacking: "Sequence[NotRun]" = (), *, as_json: bool, brief: bool = False
) -> None:
    """Tables of means over seeds (``brief``: no confidence) or every run as JSON, and what was not run."""
    from i2cl.experiments.confidence import NAMES
    from i2cl.experiments.evaluation import summarize

    if as_json:
        console.print_json([run.record() for run in runs] + [one.record() for one in lacking])
        return
    summaries = summarize(runs)
    rows: list[Mapping[str, object]] = [
        {"task": row.task, "method": row.method}
        | {"accuracy": f"{row.accuracy:.3f}" + (f" ± {row.accuracy_sd:.3f}" if row.seeds > 1 else "")}
        | {"fit s": f"{row.fit_seconds:.1f}", "ms/query": f"{row.milliseconds_per_query:.2f}"}
        | {"cached": row.cached_values}
        for row in summaries
    ]
    ran = {(row["task"], row["method"]) for row in rows}
    for task, method in dict.fromkeys((one.task, one.method) for one in lacking):
        if (task, method) not in ran:
            rows.append(dict.fromkeys(rows[0], "") | {"task": task, "method": method, "accuracy": "not run"})
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    console.print_table(title, sorted(rows, key=lambda row: tasks.index(row["task"])))
    if not brief and runs:
        trust = [
            {"task": one.task, "method": one.method}
            | {name: f"{getattr(one.confidence, name):.3f}" if one.confidence else "-" for name in NAMES}
            for one in summaries
        ]
        console.print_table("How far its probabilities can be trusted", trust)
    for task, method, why in dict.fromkeys((one.task, one.method, one.why) for one in lacking):
        seeds = [str(one.seed) for one in lacking if (one.task, one.method, one.why) == (task, method, why)]
        of = f" with seed {', '.join(seeds)}" if (task, method) in ran else ""
        console.say(f"{method} was not run on {task}{of}: {why}.")
