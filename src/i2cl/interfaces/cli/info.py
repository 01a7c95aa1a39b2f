"""`i2cl ls`, `i2cl check` and `i2cl cache`: what is built in, supported and stored."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions
from i2cl.storage import model_cache


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
        console.say(f"    needs {row['needs']}")
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

    rows: list[Mapping[str, Any]] = []
    for name, method in METHODS.items():
        options = {}
        for option, words in method.options().items():
            default, *others = words.split("|")
            options[option] = {"default": default, "choices": [default, *others] if others else []}
        rows.append({"name": name, "what": method.summary, "needs": method.needs, "options": options})
    return rows


@options.expanded
def check(
    model: options.Model,
    *,
    loading: Annotated[ModelOptions, ("device", "dtype", "revision", "trust_remote_code")],
    json: options.Json = False,
) -> None:
    """Check that i2cl supports a model.

    Exit code 1 unless every block adds exactly its attention and MLP outputs to the residual stream.
    """
    load.require_model(model)
    decoder = load.decoder(model, loading)
    identity = decoder.residual_identity
    if math.isnan(identity.worst):
        decoder.require_identity()  # raises an error that names what overflows
    record: dict[str, Any] = {"model": model, "model_type": decoder.model.config.model_type}
    record |= {"layers": decoder.layers, "d_model": decoder.d_model, "context": decoder.max_length}
    record |= {"attention": decoder.architecture.attention, "mlp": decoder.architecture.mlp}
    record |= {"worst_error": identity.worst, "passed": identity.passed}
    console.answer(record, "\n".join(f"{name:12} {value}" for name, value in record.items()), as_json=json)
    if not identity.passed:
        raise typer.Exit(1)


def cache(
    clear: Annotated[bool, Option("--clear", help="Delete the converted models.")] = False,
    json: options.Json = False,
) -> None:
    """List the converted GGUF models in the cache, or delete them.

    A GGUF file is converted once, when it is first loaded. The folder is in I2CL_CACHE, if that is set.
    """
    folder = model_cache.cache_folder()
    if clear:
        count = model_cache.clear()
        text = f"Deleted {_models(count)} from {folder}."
        console.answer({"folder": str(folder), "deleted": count}, text, as_json=json)
        return
    entries = model_cache.list_entries()
    if json:
        records = [asdict(entry) | {"folder": str(entry.folder)} for entry in entries]
        console.print_json({"folder": str(folder), "models": records})
        return
    if entries:
        rows = [
            {"GGUF file": Path(entry.source).name, "dtype": entry.dtype, "MB": round(entry.bytes / 1e6)}
            for entry in entries
        ]
        console.print_table("", rows)
    console.say(f"{_models(len(entries))} in {folder}.")


def _models(count: int) -> str:
    return "1 converted model" if count == 1 else f"{count} converted models"
