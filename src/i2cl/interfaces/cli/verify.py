"""`i2cl verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt

if TYPE_CHECKING:
    from i2cl.export import Verification


@options.expanded
def verify(
    folder: Annotated[Path, Argument(help="Folder or GGUF file made by `i2cl export`.")],
    *,
    url: str | None = opt(None, "Check a vLLM server that classifies, instead of transformers."),
    model_name: str | None = opt(None, "The server's name of the model; default: the first it lists."),
    task: str | None = opt(None, "Name of the task on a server with the vLLM plugin."),
    tolerance: float | None = opt(None, "Maximum difference of a probability; default: by dtype.", min=0),
    model: str | None = opt(None, "Base model of a PEFT adapter; default: the one it was made on."),
    loading: Annotated[ModelOptions, ("device",)],
    json: options.Json = False,
) -> None:
    """Check that an export, or a server that runs it, gives the answers of the injected model.

    The exit code is 1 if it does not.
    """
    if not folder.exists():
        raise I2CLError(f"{str(folder)!r} does not exist: give a folder or a GGUF file made by `i2cl export`")
    if url is None and not (model_name is None and task is None):
        raise I2CLError("--model-name and --task are for a server: add --url")
    if url is not None and not (model is None and loading.device is None):
        raise I2CLError("--model and --device are for a check without a server: leave out --url")
    load.quiet()
    from i2cl.export import Golden, verify_server

    if url is not None:
        golden = Golden.from_export(folder)
        outcome = verify_server(golden, url, model=model_name, task=task, tolerance=tolerance)
    else:
        outcome = _run_here(folder, model, loading.device, tolerance)
    _show(outcome, json=json)
    if not outcome.passed:
        raise typer.Exit(1)


def _run_here(folder: Path, model: str | None, device: str | None, tolerance: float | None) -> "Verification":
    from i2cl.export import verify as verify_folder, verify_gguf
    from i2cl.models.loading import is_gguf

    if not is_gguf(folder):
        return verify_folder(folder, model=model, device=device, tolerance=tolerance)
    if model is not None:
        raise I2CLError("a GGUF file is a whole model: leave out --model, which is for PEFT adapters")
    if device not in {None, "cpu"}:
        raise I2CLError("a GGUF file is checked on the CPU: leave out --device")
    return verify_gguf(folder, tolerance=tolerance)


def _show(outcome: "Verification", *, json: bool) -> None:
    count, right = len(outcome.labels), sum(expected == found for expected, found in outcome.labels)
    if json:
        names = ("passed", "worst", "tolerance", "retokenized")
        record = {name: getattr(outcome, name) for name in names}
        console.print_json(record | {"labels": {"right": right, "of": count}})
        return
    console.say(
        f"{'Passed' if outcome.passed else 'Failed'}: {right} of {count} labels agree, largest difference of "
        f"a probability {outcome.worst:.1e} (tolerance {outcome.tolerance:.0e})."
    )
    if outcome.retokenized:
        example = outcome.retokenized[0].splitlines()[0]
        console.say(
            f"Its tokenizer gives {len(outcome.retokenized)} prompts other token ids, such as {example!r}."
        )
