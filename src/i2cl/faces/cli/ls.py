"""`i2cl ls`."""

import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import typer

from i2cl.faces.cli import console, options


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
