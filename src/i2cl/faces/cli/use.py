"""`i2cl fit` and `i2cl predict`."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from i2cl.errors import I2CLError
from i2cl.faces.cli import console, load, options
from i2cl.faces.cli.share import command_line
from i2cl.faces.stream.outputs import Output, header_line, source_state, written
from i2cl.tasks.rows import RowFormat
from i2cl.version import __version__

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.faces.stream.prediction import ScoredStream, Scorer
    from i2cl.methods.i2cl import I2CL
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Example, Task


def fit(
    context: typer.Context,
    model: options.Model,
    task: options.TaskName,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the artefact.")],
    shots: options.Shots = None,
    seed: options.Seed = 0,
    recipe: options.Recipe = "paper",
    settings: options.Settings = None,
    data_dir: options.DataDir = None,
    template: options.FormatString = None,
    labels: options.Labels = None,
    text_column: options.TextColumn = "text",
    label_column: options.LabelColumn = "label",
    test: options.TestFile = None,
    evaluate: Annotated[
        int | None, typer.Option(min=1, help="Also score so many test rows, for the model card.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    offload_folder: options.OffloadFolder = None,
    quantization: options.Quantization = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Turn a task's labelled examples into a calibrated injection and save it."""
    from i2cl.core.artefact import own_files
    from i2cl.storage.atomic import require_writable

    require_writable(output, own_files(output))
    method = cast("I2CL", load.methods(["i2cl"], settings, recipe)[0])
    own = load.TaskOptions(data_dir, template, labels, text_column, label_column, test)
    loaded = load.task(task, own)
    demonstrations = loaded.sample(shots, seed)
    queries = loaded.queries(evaluate) if evaluate else ()
    decoder = load.decoder(
        model,
        load.ModelOptions(
            device, dtype, device_map, revision, trust_remote_code, offload_folder, quantization
        ),
    )
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


def predict(
    artefact: Annotated[str, typer.Argument(help="Folder made by `i2cl fit`, or a hub id.")],
    source: Annotated[
        str, typer.Argument(help="Texts one a line, or CSV, TSV, JSONL, JSON; - reads stdin.")
    ] = "-",
    model: Annotated[str | None, typer.Option(help="Base model; default: the one it was made on.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here, and not to stdout.")
    ] = None,
    text_format: Annotated[
        RowFormat | None, typer.Option("--format", help="Default: by the file's ending, else lines.")
    ] = None,
    text_column: options.TextColumn = "text",
    force: Annotated[bool, typer.Option("--force", help="Accept another model of the same shape.")] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Rows scored at a time.")] = 512,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what a killed run left.")] = False,
    executor: options.Executor = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Actors on Ray; default: one a GPU, or a core without any.")
    ] = None,
    address: options.Address = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    offload_folder: options.OffloadFolder = None,
    quantization: options.Quantization = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Classify any number of texts: the label and every label's probability, one line each.

    With -o, a run that was killed goes on where it was when the same command is given again.
    """
    from i2cl.core.injection import Injection
    from i2cl.faces.stream.prediction import Texts, digest, predict_here, predict_on_ray

    if executor == "local" and (workers or address):
        raise I2CLError("--workers and --address are for a cluster: add --executor ray")
    if executor == "ray" and source == "-":
        raise I2CLError("--executor ray reads the texts on the cluster and not from stdin: give a file")
    injection = Injection.from_pretrained(artefact)
    found = load.ModelOptions(
        device,
        dtype,
        device_map,
        revision or (None if model else injection.base.revision),
        trust_remote_code,
        offload_folder,
        quantization,
    )
    texts = Texts(source, text_format, text_column, chunk)
    settings = {
        "i2cl": __version__,
        "artefact": digest(injection),
        "model": [model, found.revision],
        "dtype": dtype,
        "quantization": quantization,
        "source": source_state(source),
        "format": text_format,
        "text_column": text_column,
        "json": json,
        "chunk": chunk,
    }
    load_scorer = partial(_scorer, injection, model, found, force=force, as_json=json)
    header = header_line(injection.task.labels, as_json=json)
    again = {"resumes": Path(source).is_file(), "restart": restart}
    with written(output, header, settings, chunk=chunk, **again) as out:
        if out.kept:
            console.note(f"{out.kept} rows of an earlier run are kept")
        texts = replace(texts, skip=out.kept)
        if executor == "ray":
            scored = predict_on_ray(load_scorer, texts, address, workers)
        else:
            scored = predict_here(load_scorer, texts)
        _write(scored, out, shown=output is not None)


def _write(scored: "ScoredStream", out: Output, *, shown: bool) -> None:
    """Write what comes, with a bar unless it goes to stdout.

    Raises:
        typer.Abort: on Ctrl-C after rows that are kept, saying so.
    """
    try:
        with closing(scored), console.progress(None, "predicting, rows", shown=shown) as bar:
            bar.advance(out.rows)
            for lines, rows in scored:
                out.write(lines, rows)
                bar.advance(rows)
    except KeyboardInterrupt:
        if not (out.resumes and out.rows):
            raise
        raise typer.Abort(f"{out.rows} rows are kept: the same command goes on with them") from None


def _scorer(
    injection: "Injection", model: str | None, found: load.ModelOptions, *, force: bool, as_json: bool
) -> "Scorer":
    """Load the model and see that the injection belongs to it."""
    from i2cl.faces.stream.prediction import Scorer

    decoder = load.base_decoder(injection.base.name, found) if model is None else load.decoder(model, found)
    injection.require_base(decoder, force=force)
    return Scorer(injection, decoder, as_json)
