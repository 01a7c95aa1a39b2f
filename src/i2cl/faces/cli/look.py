"""`i2cl check` and `i2cl ls`."""

import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import typer

from i2cl.errors import I2CLError
from i2cl.faces.cli import console, load, options


def check(
    model: options.Model,
    layers: Annotated[str | None, typer.Option(help="Path of the blocks in the base model.")] = None,
    attention: Annotated[str | None, typer.Option(help="Path of the attention writer in a block.")] = None,
    mlp: Annotated[str | None, typer.Option(help="Path of the MLP writer in a block.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Check that a model's blocks add exactly what its residual writers put out; exit code 1 if not."""
    from i2cl.models.architectures import Architecture

    given = None
    if layers or attention or mlp:
        if not (layers and attention and mlp):
            raise I2CLError("--layers, --attention and --mlp belong together: give all three")
        given = Architecture(model_type="custom", layers=layers, attention=attention, mlp=mlp)
    found = load.ModelOptions(device, dtype, None, revision, trust_remote_code)
    decoder = load.decoder(model, found, given)
    identity = decoder.identity
    record = {
        "model": model,
        "model_type": decoder.model.config.model_type,
        "layers": decoder.layers,
        "d_model": decoder.d_model,
        "context": decoder.max_length,
        "attention": decoder.architecture.attention,
        "mlp": decoder.architecture.mlp,
        "worst_error": identity.worst,
        "passed": identity.passed,
    }
    if json:
        console.print_json(record)
    else:
        for name, value in record.items():
            console.say(f"{name:12} {value}")
    if not identity.passed:
        raise typer.Exit(1)


def ls(
    what: Annotated[Literal["tasks", "architectures", "methods"], typer.Argument(help="What to list.")],
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """List known tasks, model types or methods."""
    listings: dict[str, Callable[[], list[Mapping[str, object]]]] = {
        "tasks": _tasks,
        "architectures": _architectures,
        "methods": _methods,
    }
    rows = listings[what]()
    if json:
        console.print_json(rows)
        return
    if what != "methods":
        console.print_table("", rows)
        return
    listed: dict[object, object] = {}
    for row in rows:
        console.say(f"{row['name']}: {row['what']}")
        console.say(
            f"    needs {row['needs']}; caches {row['cached']}; row of the paper: {row['row of the paper']}"
        )
        if row["options"] in listed:
            console.say(f"    --set as for {listed[row['options']]}")
        elif row["options"]:
            listed[row["options"]] = row["name"]
            console.say(
                textwrap.fill(
                    f"--set {row['options']}", 100, initial_indent="    ", subsequent_indent="          "
                )
            )


def _tasks() -> list[Mapping[str, object]]:
    from i2cl.tasks import list_tasks

    return [
        {
            "name": task.name,
            "group": task.group,
            "shots": task.shots,
            "labels": ", ".join(task.labels),
            "what": task.description or task.title,
        }
        for task in list_tasks()
    ]


def _architectures() -> list[Mapping[str, object]]:
    from i2cl.models.architectures import ARCHITECTURES

    return [
        {"model_type": name, "layers": row.layers, "attention": row.attention, "mlp": row.mlp}
        for name, row in ARCHITECTURES.items()
    ]


def _methods() -> list[Mapping[str, object]]:
    from i2cl.methods import METHODS

    return [
        {
            "name": name,
            "what": method.summary,
            "needs": method.needs,
            "cached": method.formula,
            "row of the paper": method.row,
            "options": " ".join(f"{option}={value}" for option, value in method.options().items()),
        }
        for name, method in METHODS.items()
    ]
