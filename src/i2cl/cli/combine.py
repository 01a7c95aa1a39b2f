"""`i2cl combine`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from i2cl.cli import console, load, options
from i2cl.cli.share import command_line
from i2cl.errors import I2CLError


def combine(
    context: typer.Context,
    artefacts: Annotated[list[str], typer.Argument(help="Folders made by `i2cl fit`, or hub ids.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the artefact.")],
    weights: Annotated[
        str | None, typer.Option(help="One number each, commas between; default: their mean.")
    ] = None,
    task_from: Annotated[
        str | None, typer.Option(help="Artefact whose label words and template answer, where they differ.")
    ] = None,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Add up what several injections change, each times its weight, as one injection."""
    from i2cl import composition
    from i2cl.artefact import own_files
    from i2cl.files import require_writable
    from i2cl.injection import Injection

    numbers = _numbers(weights) if weights is not None else None
    require_writable(output, own_files(output))
    injections = [Injection.from_pretrained(artefact) for artefact in artefacts]
    task = Injection.from_pretrained(task_from).task if task_from else None
    combined = replace(composition.combine(injections, numbers, task=task), command=command_line(context))
    combined.save_pretrained(output)
    parts = combined.settings["combined"]
    if json:
        record = {"output": str(output), "task": combined.task.name, "labels": list(combined.task.labels)}
        console.print_json(record | {"combined": parts})
        return
    told = ", ".join(f"{part['weight']:g} x {part['task']}" for part in parts)
    console.say(f"Saved {output}: {told}; answers as {combined.task.name}.")
    console.say(f"Next: i2cl predict {output} FILE")


def _numbers(weights: str) -> list[float]:
    try:
        return [float(part) for part in load.split(weights)]
    except ValueError:
        raise I2CLError(f"--weights {weights!r} are not numbers: write them like --weights 0.5,0.5") from None
