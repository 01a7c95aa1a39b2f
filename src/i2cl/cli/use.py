"""`i2cl fit` and `i2cl predict`."""

import time
from pathlib import Path
from typing import Annotated, cast

import typer

from i2cl.cli import console, load, options
from i2cl.streams import TextFormat, chunks, read_texts, write_predictions, written


def fit(
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
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Turn a task's labelled examples into a calibrated injection and save it."""
    from i2cl.calibration import calibrate
    from i2cl.context import extract
    from i2cl.files import require_writable
    from i2cl.injection import FILES
    from i2cl.methods.i2cl import I2CL

    require_writable(output, FILES)
    method = cast("I2CL", load.methods([I2CL.name], settings, recipe)[0])
    loaded = load.task(task, load.TaskOptions(data_dir, template, labels, text_column, label_column))
    demonstrations = loaded.sample(shots, seed)
    decoder = load.decoder(model, load.ModelOptions(device, dtype, device_map, revision, trust_remote_code))
    started = time.perf_counter()
    with console.progress(max(1, method.calibration.epochs), "calibrating") as bar:
        context = extract(decoder, loaded, demonstrations, method.extraction, seed=seed)
        injection = calibrate(
            decoder, loaded, demonstrations, context, method.calibration, seed=seed, progress=bar.epoch
        )
    seconds = time.perf_counter() - started
    if console.FIRST:
        injection.save_pretrained(output)
    first, last = (injection.history[0], injection.history[-1]) if injection.history else (None, None)
    record = {
        "output": str(output),
        "model": model,
        "task": loaded.name,
        "labels": list(loaded.labels),
        "demonstrations": len(demonstrations),
        "first_loss": first,
        "last_loss": last,
        "fit_seconds": seconds,
        "cached_values": context.values.numel(),
        "coefficients": injection.coefficients.numel(),
    }
    if json:
        console.print_json(record)
        return
    told = f"loss {first:.3f} -> {last:.3f}" if first is not None else "not calibrated"
    console.say(
        f"Saved {output}: {loaded.name}, {len(demonstrations)} demonstrations, {told}, {seconds:.1f} s."
    )
    console.say(f"Next: i2cl predict {output} FILE")


def predict(
    artefact: Annotated[str, typer.Argument(help="Folder made by `i2cl fit`, or a hub id.")],
    source: Annotated[str, typer.Argument(help="Texts one a line, or CSV, TSV, JSONL; - reads stdin.")] = "-",
    model: Annotated[str | None, typer.Option(help="Base model; default: the one it was made on.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of stdout.")
    ] = None,
    text_format: Annotated[
        TextFormat | None, typer.Option("--format", help="Default: by the file's ending, else lines.")
    ] = None,
    text_column: options.TextColumn = "text",
    force: Annotated[bool, typer.Option("--force", help="Accept another model of the same shape.")] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Rows scored at a time.")] = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Classify any number of texts: the label and every label's probability, one line each."""
    from i2cl.injection import Injection

    injection = Injection.from_pretrained(artefact)
    found = load.ModelOptions(
        device, dtype, device_map, revision or (None if model else injection.base.revision), trust_remote_code
    )
    decoder = load.base_decoder(injection.base.name, found) if model is None else load.decoder(model, found)
    injection.require_base(decoder, force=force)
    texts = read_texts(source, text_format, text_column)
    with written(output) as handle:
        for number, rows in enumerate(chunks(texts, chunk)):
            probabilities = injection.scores(decoder, rows).softmax(-1).tolist()
            write_predictions(handle, injection.task.labels, probabilities, as_json=json, header=number == 0)
