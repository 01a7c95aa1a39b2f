"""`i2cl export` and `i2cl verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from i2cl.cli import console, load, options
from i2cl.errors import I2CLError

if TYPE_CHECKING:
    from i2cl.export import Verification


def export(
    artefact: Annotated[str, typer.Argument(help="Folder made by `i2cl fit`, or a hub id.")],
    output: Annotated[Path, typer.Argument(help="Folder for the checkpoint: new or empty.")],
    to: Annotated[Literal["hf"], typer.Option(help="hf: a plain transformers checkpoint.")] = "hf",
    model: Annotated[str | None, typer.Option(help="Base model; default: the one it was made on.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Accept another model of the same shape.")] = False,
    golden: Annotated[
        bool, typer.Option(help="Store what `i2cl verify` compares with; loads the model.")
    ] = True,
    max_shard_size: Annotated[str, typer.Option(help="Size of a file, such as 500MB.")] = "5GB",
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Fold an injection into its model's weights: a checkpoint that needs neither hooks nor this package."""
    from i2cl.export import export_hf, make_golden
    from i2cl.injection import Injection

    injection = Injection.from_pretrained(artefact)
    name = model or injection.base.name
    revision = revision or (None if model else injection.base.revision)
    found = load.ModelOptions(device, "auto", device_map, revision)
    load.quiet()
    export_hf(
        name,
        injection,
        output,
        golden=(lambda: make_golden(load.base_decoder(name, found), injection)) if golden else None,
        revision=revision,
        force=force,
        max_shard_size=max_shard_size,
    )
    _show_export(output, injection.task.name, name, golden=golden, json=json)


def _show_export(output: Path, task: str, model: str, *, golden: bool, json: bool) -> None:
    sizes = [path.stat().st_size for path in output.glob("*.safetensors")]
    if json:
        record = {"output": str(output), "task": task, "base_model": model, "golden": golden}
        console.print_json(record | {"files": len(sizes), "bytes": sum(sizes)})
        return
    size = f"{sum(sizes):,} bytes in {len(sizes)} file(s)"
    console.say(f"Saved {output}: {model} with {task} in its weights, {size}.")
    if golden:
        console.say(f"Next: i2cl verify {output}")


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder made by `i2cl export`.")],
    url: Annotated[str | None, typer.Option(help="Ask this completions server and not transformers.")] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What the server calls the model; default: the first it lists.")
    ] = None,
    logprobs: Annotated[int, typer.Option(min=1, help="Tokens to ask the server about.")] = 20,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest relative difference; default: by dtype.")
    ] = None,
    device: options.Device = None,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Check that an export, or a server that runs it, answers as the injected model; exit code 1 if not."""
    from i2cl.export import Golden, ask_server
    from i2cl.export import verify as verified
    from i2cl.export.server import TOLERANCE
    from i2cl.export.verify import judged

    if url is None:
        if model_name is not None:
            raise I2CLError("--model-name is for a server: add --url")
        load.quiet()
        outcome = verified(folder, device=device, tolerance=tolerance)
    else:
        golden = Golden.from_export(folder)
        answers = ask_server(golden, url, model=model_name, logprobs=logprobs)
        outcome = judged(
            golden, answers, max(TOLERANCE, golden.tolerance) if tolerance is None else tolerance
        )
    _show(outcome, json=json)
    if not outcome.passed:
        raise typer.Exit(1)


def _show(outcome: "Verification", *, json: bool) -> None:
    if json:
        record = {
            "passed": outcome.passed,
            "worst": outcome.worst,
            "tolerance": outcome.tolerance,
            "dropped": outcome.dropped,
            "prompts": outcome.rows(),
        }
        console.print_json(record)
        return
    console.print_table("", outcome.rows())
    word = "holds" if outcome.passed else "does not hold"
    told = f"largest relative difference {outcome.worst:.1e}, tolerance {outcome.tolerance:.1e}"
    console.say(f"The export {word}: {told}.")
    if outcome.dropped:
        console.say(f"{outcome.dropped[0].upper()}{outcome.dropped[1:]}.")
