"""`i2cl push`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options


def push(
    artefact: Annotated[Path, Argument(help="Folder made by `i2cl fit`.")],
    repository: Annotated[str, Argument(help="Such as user/name; made if it is not there.")],
    private: Annotated[bool, Option("--private", help="Of a repository that is made now.")] = False,
    message: Annotated[str | None, Option(help="Of the commit.")] = None,
    branch: Annotated[str | None, Option(help="Made if it is not there; default: main.")] = None,
    json: options.Json = False,
) -> None:
    """Upload a task and its model card to the Hugging Face hub.

    The repository is made if need be; the demonstrations' texts stay here.
    """
    if not artefact.is_dir():
        raise I2CLError(f"{str(artefact)!r} is no folder: make one with `i2cl fit MODEL TASK -o FOLDER`")
    load.require_artefact(str(artefact))
    from i2cl.core.injection import Injection

    load.quiet()
    injection = Injection.from_pretrained(artefact)
    address = injection.push_to_hub(repository, private=private, commit_message=message, revision=branch)
    done = f"Pushed {artefact} to {repository}: {address}\nNext: i2cl predict {repository} FILE"
    console.answer({"repository": repository, "commit": address}, done, as_json=json)
