"""`i2cl fit`, and the command line that a model card repeats."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from i2cl.faces.cli import console, load, options
from i2cl.faces.cli.options import ModelOptions, TaskOptions
from i2cl.storage.atomic import public_name, require_writable

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.methods.i2cl import I2CL
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Example, Task

_NAMES = ("model", "task")
"""Arguments that may be paths beside those that always are."""


@options.expanded
def fit(
    context: typer.Context,
    model: options.Model,
    task: options.TaskName,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the artefact.")],
    *,
    shots: options.Shots = None,
    seed: options.Seed = 0,
    recipe: options.Recipe = "paper",
    settings: options.Settings = None,
    rows: TaskOptions,
    evaluate: Annotated[
        int | None, typer.Option(min=1, help="Also score so many test rows, for the model card.")
    ] = None,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Turn a task's labelled examples into a calibrated injection and save it."""
    from i2cl.core.artefact import own_files

    require_writable(output, own_files(output))
    method = cast("I2CL", load.methods(["i2cl"], settings, recipe)[0])
    loaded = load.task(task, rows)
    demonstrations = loaded.sample(shots, seed)
    queries = loaded.queries(evaluate) if evaluate else ()
    decoder = load.decoder(model, loading)
    started = time.perf_counter()
    injection = _fitted(method, decoder, loaded, demonstrations, seed)
    seconds = time.perf_counter() - started
    if queries:
        injection = _measured(injection, decoder, queries)
    command = command_line(context, shots=shots or loaded.shots, seed=seed)
    injection = replace(injection, command=command)
    if console.FIRST:
        injection.save_pretrained(output)
    _show_fit(injection, output, model, seconds, json=json)


def _fitted(
    method: "I2CL",
    decoder: "Decoder",
    task: "Task",
    demonstrations: "Sequence[Example]",
    seed: int,
) -> "Injection":
    from i2cl.core.calibration import calibrate
    from i2cl.core.context import extract

    with console.progress(max(1, method.calibration.rounds), "calibrating") as bar:
        context = extract(decoder, task, demonstrations, method.extraction, seed=seed)
        return calibrate(
            decoder, task, demonstrations, context, method.calibration, seed=seed, progress=bar.epoch
        )


def _measured(injection: "Injection", decoder: "Decoder", queries: "Sequence[Example]") -> "Injection":
    from i2cl.experiments.evaluation import with_metrics

    with console.progress(len(queries), "scoring") as bar:
        return with_metrics(injection, decoder, queries, progress=bar.advance)


def _show_fit(injection: "Injection", output: Path, model: str, seconds: float, *, json: bool) -> None:
    history, count = injection.history, injection.context.demonstrations
    first, last = (history[0], history[-1]) if history else (None, None)
    if json:
        record = {
            "output": str(output),
            "model": model,
            "task": injection.task.name,
            "labels": list(injection.task.labels),
            "demonstrations": count,
            "first_loss": first,
            "last_loss": last,
            "fit_seconds": seconds,
            "cached_values": injection.context.values.numel(),
            "coefficients": injection.coefficients.numel(),
            "metrics": injection.metrics,
        }
        console.print_json(record)
        return
    told = f"loss {first:.3f} -> {last:.3f}" if first is not None else "not calibrated"
    if injection.metrics:
        told += f", accuracy {injection.metrics['accuracy']:.3f} on {injection.metrics['n']} test rows"
    console.say(f"Saved {output}: {injection.task.name}, {count} demonstrations, {told}, {seconds:.1f} s.")
    console.say(f"Next: i2cl predict {output} FILE")


def command_line(context: typer.Context, **resolved: object) -> str:
    """The command that was given, to be given again by others.

    Paths keep their last part. What only says how to print is left out.

    Args:
        context: of the command that runs.
        resolved: values of options that are named in any case, typed or not.
    """
    words, named = context.command_path.split(), []
    for parameter in context.command.params:
        name = str(parameter.name)
        value = resolved.get(name, context.params.get(name))
        source = context.get_parameter_source(name)
        typed = source is not None and source.name != "DEFAULT"
        if name == "json" or value is None or not (typed or name in resolved):
            continue
        told = [_public(name, one) for one in (value if isinstance(value, list | tuple) else [value])]
        if parameter.param_type_name == "argument":
            words += told
        elif isinstance(value, bool):
            named.append(parameter.opts[0])
        else:
            named += [word for one in told for word in (parameter.opts[0], one)]
    return shlex.join([*words, *named])


def _public(name: str, value: object) -> str:
    path = isinstance(value, Path) or name in _NAMES
    return public_name(str(value)) if path else str(value)
