"""`i2cl push`, and the command line that a model card repeats."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from i2cl.faces.cli import console, load, options
from i2cl.storage.atomic import public_name

_NAMES = ("model", "task")
"""Arguments that may be paths beside those that always are."""


def push(
    artefact: Annotated[Path, typer.Argument(help="Folder made by `i2cl fit`.")],
    repository: Annotated[str, typer.Argument(help="Such as user/name; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Of a repository that is made now.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    branch: Annotated[str | None, typer.Option(help="Made if it is not there; default: main.")] = None,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Upload an injection and its model card to the Hugging Face hub."""
    from i2cl.core.injection import Injection
    from i2cl.errors import I2CLError

    if not artefact.is_dir():
        raise I2CLError(f"{str(artefact)!r} is no folder: make one with `i2cl fit MODEL TASK -o FOLDER`")
    load.quiet()
    injection = Injection.from_pretrained(artefact)
    address = injection.push_to_hub(repository, private=private, commit_message=message, revision=branch)
    if json:
        console.print_json({"repository": repository, "commit": address})
        return
    console.say(f"Pushed {artefact} to {repository}: {address}")
    console.say(f"Next: i2cl predict {repository} FILE")


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
