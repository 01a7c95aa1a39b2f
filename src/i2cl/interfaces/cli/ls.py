"""`i2cl ls`."""

import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from typer import Argument

from i2cl.interfaces.cli import console, options


def ls(
    what: Annotated[Literal["tasks", "architectures", "methods"], Argument(help="What to list.")],
    json: options.Json = False,
) -> None:
    """List the built-in tasks, the supported model types (architectures) or the methods.

    Methods are listed with the options that --set NAME=VALUE sets.
    """
    rows = {"tasks": _tasks, "architectures": _architectures, "methods": _methods}[what]()
    if json:
        console.print_json(rows)
    elif what == "methods":
        _show_methods(rows)
    else:
        joined = [{**row, "labels": ", ".join(row["labels"])} if "labels" in row else row for row in rows]
        console.print_table("", joined)


def _show_methods(rows: list[Mapping[str, Any]]) -> None:
    listed: dict[str, str] = {}
    for row in rows:
        console.say(f"{row['name']}: {row['what']}")
        console.say(f"    needs {row['needs']}; caches {row['cached']}; row in the paper: {row['paper_row']}")
        options = " ".join(
            f"{name}={'|'.join(option['choices']) or option['default']}"
            for name, option in row["options"].items()
        )
        if options in listed:
            console.say(f"    --set: same options as {listed[options]}")
        elif options:
            listed[options] = row["name"]
            console.say(textwrap.fill(f"    --set {options}", 100, subsequent_indent=" " * 10))


def _tasks() -> list[Mapping[str, Any]]:
    from i2cl.tasks import list_tasks

    return [
        {"name": task.name, "group": task.group, "shots": task.shots, "labels": list(task.labels)}
        | {"what": task.description or task.title}
        for task in list_tasks()
    ]


def _architectures() -> list[Mapping[str, Any]]:
    from i2cl.models.architectures import ARCHITECTURES

    return [
        {"model_type": name, "layers": row.layers, "attention": row.attention, "mlp": row.mlp}
        for name, row in ARCHITECTURES.items()
    ]


def _methods() -> list[Mapping[str, Any]]:
    from i2cl.methods import METHODS

    return [
        {"name": name, "what": method.summary, "needs": method.needs, "cached": method.formula}
        | {
            "paper_row": method.paper_row,
            "options": {
                option: {"default": words.split("|")[0], "choices": words.split("|") if "|" in words else []}
                for option, words in method.options().items()
            },
        }
        for name, method in METHODS.items()
    ]
