"""`i2cl export` and `i2cl verify`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from i2cl.errors import I2CLError
from i2cl.faces.cli import console, load, options

if TYPE_CHECKING:
    from i2cl.export import Verification


def export(
    artefact: Annotated[str, typer.Argument(help="Folder made by `i2cl fit`, or a hub id.")],
    output: Annotated[Path, typer.Argument(help="Folder for the export, new or empty; or a new file.")],
    to: Annotated[
        Literal["hf", "peft", "gguf"],
        typer.Option(help="A plain transformers checkpoint, a PEFT adapter, or a file for llama.cpp."),
    ] = "hf",
    model: Annotated[str | None, typer.Option(help="Base model; default: the one it was made on.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Accept another model of the same shape.")] = False,
    golden: Annotated[
        bool, typer.Option(help="Store what `i2cl verify` compares with; loads the model.")
    ] = True,
    max_shard_size: Annotated[
        str | None, typer.Option(help="hf: size of a file, such as 500MB; default: 5GB.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="gguf: of the matrices; default: as in the base model."),
    ] = None,
    tokenizer: Annotated[
        bool, typer.Option(help="gguf: carry the tokenizer; without it the file takes token ids alone.")
    ] = True,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Turn an injection into a checkpoint or an adapter that needs neither hooks nor this package."""
    from i2cl.core.injection import Injection
    from i2cl.export import export_gguf, export_hf, export_peft, make_golden

    own = _own_options(to, output, dtype, max_shard_size, tokenizer=tokenizer)
    injection = Injection.from_pretrained(artefact)
    name = model or injection.base.name
    revision = revision or (None if model else injection.base.revision)
    found = load.ModelOptions(device, "auto", device_map, revision)
    load.quiet()
    if to == "peft":
        decoder = load.decoder(name, found) if model else load.base_decoder(name, found)
        made = export_peft(decoder, injection, output, golden=golden, force=force, revision=revision)
        what = f"{injection.task.name} as a {made.tuner} adapter of {name}"
        _show_export(output, injection.task.name, name, what, golden=golden, json=json)
        return
    write: Callable[..., None] = export_hf if to == "hf" else export_gguf
    write(
        name,
        injection,
        output,
        golden=(lambda: make_golden(load.base_decoder(name, found), injection)) if golden else None,
        revision=revision,
        force=force,
        **own,
    )
    what = f"{name} with {injection.task.name} in its weights"
    _show_export(output, injection.task.name, name, what, golden=golden, json=json)


def _own_options(
    to: str, output: Path, dtype: str | None, max_shard_size: str | None, *, tokenizer: bool
) -> dict[str, Any]:
    """The options of one format alone."""
    if to != "gguf":
        if dtype is not None or not tokenizer:
            raise I2CLError("--dtype and --no-tokenizer are for GGUF: add --to gguf")
        if to == "hf":
            return {"max_shard_size": max_shard_size or "5GB"}
    if max_shard_size is not None:
        raise I2CLError("--max-shard-size is for checkpoints: leave it out, or export --to hf")
    if to == "peft":
        return {}
    import torch

    if output.suffix != ".gguf":
        raise I2CLError(f"{str(output)!r} is no name of a GGUF file: end it with .gguf")
    return {"dtype": getattr(torch, dtype) if dtype else None, "tokenizer": tokenizer}


def _show_export(output: Path, task: str, model: str, what: str, *, golden: bool, json: bool) -> None:
    files = [output] if output.is_file() else output.glob("*.safetensors")
    sizes = [path.stat().st_size for path in files]
    if json:
        record = {"output": str(output), "task": task, "base_model": model, "golden": golden}
        console.print_json(record | {"files": len(sizes), "bytes": sum(sizes)})
        return
    size = f"{sum(sizes):,} bytes in {len(sizes)} file(s)"
    console.say(f"Saved {output}: {what}, {size}.")
    if golden:
        console.say(f"Next: i2cl verify {output}")


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder or GGUF file made by `i2cl export`.")],
    url: Annotated[
        str | None, typer.Option(help="Ask this completions server and not transformers or llama.cpp.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What the server calls the model; default: the first it lists.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=1, help="Tokens to ask the server about; default: 20.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest relative difference; default: by dtype.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Base model of a PEFT adapter; default: the one it was made on.")
    ] = None,
    device: options.Device = None,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Check that an export, or a server that runs it, answers as the injected model; exit code 1 if not."""
    load.quiet()
    if url is None:
        if model_name is not None or logprobs is not None:
            raise I2CLError("--model-name and --logprobs are for a server: add --url")
        outcome = _run_here(folder, model, device, tolerance)
    else:
        if model is not None or device is not None:
            raise I2CLError("--model and --device are for a check without a server: leave out --url")
        outcome = _asked(folder, url, model_name, logprobs or 20, tolerance)
    _show(outcome, json=json)
    if not outcome.passed:
        raise typer.Exit(1)


def _run_here(folder: Path, model: str | None, device: str | None, tolerance: float | None) -> "Verification":
    from i2cl.export import verify as verified
    from i2cl.export import verify_gguf
    from i2cl.export.gguf_fields import is_gguf

    if not is_gguf(folder):
        return verified(folder, model=model, device=device, tolerance=tolerance)
    if model is not None:
        raise I2CLError("a GGUF file is a whole model: leave out --model, which is for PEFT adapters")
    if device not in {None, "cpu"}:
        raise I2CLError("a GGUF file is checked on the CPU: leave --device out, or ask a server (--url)")
    return verify_gguf(folder, tolerance=tolerance)


def _asked(
    folder: Path, url: str, model_name: str | None, logprobs: int, tolerance: float | None
) -> "Verification":
    from i2cl.export import Golden, ask_server
    from i2cl.export.server import TOLERANCE
    from i2cl.export.verify import judged

    golden = Golden.from_export(folder)
    answers = ask_server(golden, url, model=model_name, logprobs=logprobs)
    return judged(golden, answers, max(TOLERANCE, golden.tolerance) if tolerance is None else tolerance)


def _show(outcome: "Verification", *, json: bool) -> None:
    if json:
        record = {
            "passed": outcome.passed,
            "worst": outcome.worst,
            "tolerance": outcome.tolerance,
            "dropped": outcome.dropped,
            "retokenized": outcome.retokenized,
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
    if outcome.retokenized:
        first = outcome.retokenized[0].splitlines()[0]
        console.say(
            f"Its tokenizer encodes {len(outcome.retokenized)} of these prompts otherwise, such as "
            f"{first!r}: send token ids."
        )
