"""`i2cl push`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options


def push(
    artefact: Annotated[Path, Argument(help="Folder made by `i2cl fit`.")],
    repository: Annotated[str, Argument(help="Such as user/name; created if it does not exist.")],
    private: Annotated[bool, Option("--private", help="Create the repository as a private one.")] = False,
    message: Annotated[str | None, Option(help="Commit message.")] = None,
    branch: Annotated[str | None, Option(help="Created if it does not exist; default: main.")] = None,
    json: options.Json = False,
) -> None:
    """Upload a task and its model card to the Hugging Face hub.

    Creates the repository if needed. The texts of the demonstrations are not uploaded.
    """
    if not artefact.is_dir():
        raise I2CLError(f"{str(artefact)!r} is not a folder: create one with `i2cl fit MODEL TASK -o FOLDER`")
    load.require_artefact(str(artefact))
    from i2cl.core.injection import Injection

    load.quiet()
    injection = Injection.from_pretrained(artefact)
    address = injection.push_to_hub(repository, private=private, commit_message=message, revision=branch)
    done = f"Pushed {artefact} to {repository}: {address}\nNext: i2cl predict {repository} FILE"
    console.answer({"repository": repository, "commit": address}, done, as_json=json)
