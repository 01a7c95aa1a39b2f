"""`i2cl demo` and `i2cl eval`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from i2cl.faces.cli import console, load, options

if TYPE_CHECKING:
    from i2cl.experiments.records import Run

DEMO_METHODS = ("zero_shot", "few_shot_uncached", "few_shot", "i2cl")
DEFAULT_METHODS = "zero_shot,few_shot,i2cl,noise"


def demo(limit: options.Limit = 100, seed: options.Seed = 0, json: options.Json = False) -> None:
    """Show the bundled model gain three tasks: zero-shot, few-shot and I2CL side by side, offline."""
    from i2cl.methods import make_methods
    from i2cl.tasks.reference import DEMO_TASKS

    tasks = load.tasks(",".join(DEMO_TASKS), "reference", load.TaskOptions())
    if not json:
        console.say(
            f"{tasks[0].shots} labelled examples per class, {limit} queries per task, in word combinations "
            "that the bundled model never saw. Takes about a minute.\n"
        )
    runs = load.run_all(
        "reference",
        load.ModelOptions(device="cpu"),
        tasks,
        make_methods(DEMO_METHODS),
        seeds=[seed],
        shots=None,
        limit=limit,
        workers=1,
    )
    _show(runs, "", as_json=json)
    if not json:
        console.say(
            "\nI2CL answers at zero-shot cost: no demonstration is read at query time, "
            "and no key-value cache is kept."
        )


def evaluate(
    model: options.Model,
    task: Annotated[
        str,
        typer.Argument(
            help="Tasks with commas between, a file, or 'all': the model's bundled tasks, else the paper's."
        ),
    ],
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
    data_dir: options.DataDir = None,
    template: options.FormatString = None,
    labels: options.Labels = None,
    text_column: options.TextColumn = "text",
    label_column: options.LabelColumn = "label",
    test: options.TestFile = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    offload_folder: options.OffloadFolder = None,
    quantization: options.Quantization = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Measure methods on tasks over seeds: accuracy, macro-F1, seconds and cached values."""
    from i2cl.methods import METHODS

    methods = list(METHODS) if method == "all" else load.split(method)
    chosen = load.methods(methods, settings, recipe)
    own = load.TaskOptions(data_dir, template, labels, text_column, label_column, test)
    tasks = load.tasks(task, model, own)
    runs = load.run_all(
        model,
        load.ModelOptions(
            device, dtype, device_map, revision, trust_remote_code, offload_folder, quantization
        ),
        tasks,
        chosen,
        seeds=range(seed, seed + seeds),
        shots=shots,
        limit=limit,
        workers=workers,
    )
    _show(runs, f"{model}: mean ± standard deviation over {seeds} seed(s)", as_json=json)


def _show(runs: "Sequence[Run]", title: str, *, as_json: bool) -> None:
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
