"""`i2cl export`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from i2cl.errors import I2CLError, needs
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.export import Golden


@options.expanded
def export(
    artefact: options.Artefact,
    output: Annotated[Path, typer.Argument(help="Folder for the export, new or empty; or a new file.")],
    *,
    to: Annotated[
        Literal["hf", "peft", "gguf"],
        typer.Option(help="A plain transformers checkpoint, a PEFT adapter, or a file for llama.cpp."),
    ] = "hf",
    model: options.BaseName = None,
    force: options.Force = False,
    drop_prior: Annotated[
        bool,
        typer.Option(
            "--drop-prior", help="Leave out the label prior, which only hf can hold, and say what to add."
        ),
    ] = False,
    temperature: Annotated[
        Literal["fold"] | None,
        typer.Option(help="hf: divide the head by the injection's temperature; other text is flatter too."),
    ] = None,
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
    loading: Annotated[ModelOptions, ("device", "device_map", "revision")],
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Put a task into a checkpoint, an adapter or a GGUF file, for other programs.

    Golden values go with it: `i2cl verify` checks those programs with them.
    """
    load.libraries()
    from i2cl.core.injection import Injection
    from i2cl.export import export_gguf, export_hf, export_peft, make_golden
    from i2cl.export.folding import at_temperature
    from i2cl.injections.label_prior import without_label_prior

    own = _own_options(to, output, dtype, max_shard_size, tokenizer=tokenizer)
    injection = Injection.from_pretrained(artefact)
    folds, divided = temperature == "fold", injection.temperature
    if folds and to != "hf":
        raise I2CLError(
            f"--temperature fold is for --to hf, {to} leaves the head as it is: leave it out and divide "
            f"log-probabilities among the labels by {divided:g}"
        )
    own |= {"fold_temperature": True} if folds else {}
    prior = _prior(at_temperature(injection) if folds else injection)
    shown: dict[str, Any] = {"to": to, "golden": golden, "prior": prior, "json": json}
    shown |= {"temperature": divided, "folds": folds}
    if drop_prior:
        injection = replace(without_label_prior(injection), temperature=divided)
    name = model or injection.base.name
    loading = load.of_artefact(replace(loading, dtype="auto"), injection, model)
    load.quiet()
    if to == "peft":
        decoder = load.artefact_decoder(injection, model, loading)
        made = export_peft(decoder, injection, output, golden=golden, force=force, revision=loading.revision)
        what = f"{injection.task.name} as a {made.tuner} adapter of {name}"
        _show_export(output, injection.task.name, name, what, **shown)
        return
    write: Callable[..., None] = export_hf if to == "hf" else export_gguf

    def answers() -> "Golden":
        if to == "gguf":
            _note_what_verify_needs()
        decoder = load.artefact_decoder(injection, model, loading)
        return make_golden(decoder, injection, fold_temperature=folds)

    write(
        name,
        injection,
        output,
        golden=answers if golden else None,
        revision=loading.revision,
        force=force,
        **own,
    )
    what = f"{name} with {injection.task.name} in its weights"
    _show_export(output, injection.task.name, name, what, **shown)


def _say_temperature(temperature: float, *, folds: bool, to: str) -> None:
    """Say which temperature an export's probabilities are at, where that is a question."""
    if temperature == 1:
        return
    if folds:
        console.say(f"Its temperature {temperature:g} is in the head: all probabilities are those at it.")
        return
    cure = ", or export with --temperature fold" if to == "hf" else ""
    console.say(
        f"Probabilities of this export are those of temperature 1: divide log-probabilities among the "
        f"labels by {temperature:g}{cure}."
    )


def _prior(injection: "Injection") -> dict[str, float]:
    """The label prior's numbers by label, if there is one."""
    bias = injection.label_bias
    return {} if bias is None else dict(zip(injection.task.labels, bias, strict=True))


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


def _note_what_verify_needs() -> None:
    """Say now, and not after a long export, that the check of it takes one more package."""
    try:
        needs("`i2cl verify` of a GGUF file", "llama-cpp", "llama_cpp", instead="ask a server with --url")
    except I2CLError as lacking:
        console.note(str(lacking))


def sent_with(tokens: Mapping[str, float]) -> str:
    """A label prior as a field of a request to a server."""
    sent = ", ".join(f'"{token}": {value:.4f}' for token, value in tokens.items())
    return f'"logit_bias": {{{sent}}}'


def _show_export(
    output: Path,
    task: str,
    model: str,
    what: str,
    *,
    to: Literal["hf", "peft", "gguf"],
    golden: bool,
    prior: dict[str, float],
    temperature: float,
    folds: bool,
    json: bool,
) -> None:
    from i2cl.export import Golden

    known = Golden.from_export(output) if golden else None
    kept = known is not None and bool(known.label_bias)
    tokens = known.logit_bias(list(prior.values())) if known is not None else {}
    files = [output] if output.is_file() else output.glob("*.safetensors")
    sizes = [path.stat().st_size for path in files]
    if json:
        record = {"output": str(output), "task": task, "base_model": model, "golden": golden}
        record |= {"label_bias": prior, "prior_kept": kept} if prior else {}
        record |= {"logit_bias": tokens} if tokens else {}
        record |= {"temperature": temperature, "temperature_kept": folds} if temperature != 1 else {}
        record |= _as_json(known, output.name, to) if known is not None else {}
        console.print_json(record | {"files": len(sizes), "bytes": sum(sizes)})
        return
    size = f"{sum(sizes):,} bytes in {len(sizes)} file(s)"
    console.say(f"Saved {output}: {what}, {size}.")
    if kept:
        console.say("Its label prior is in generation_config.json (sequence_bias), which `generate` follows.")
    if prior:
        told = ", ".join(f"{label} {value:+.4f}" for label, value in prior.items())
        console.say(f"{'Elsewhere add' if kept else 'Add'} to each label's log-probability: {told}.")
    if prior and tokens:
        console.say(f"Servers take it with a request: {sent_with(tokens)}.")
    _say_temperature(temperature, folds=folds, to=to)
    if to == "gguf":
        console.say("It is for llama.cpp; transformers refuses it (gguf_file=), for which export --to hf.")
    if known is not None:
        _say_greedy(known, output.name, to)
        console.say(f"Next: i2cl verify {output}")


def _as_json(golden: "Golden", name: str, to: Literal["hf", "peft", "gguf"]) -> dict[str, Any]:
    """What greedy decoding says, and how programs are asked."""
    from i2cl.export.greedy.calls import calls_of

    right = golden.greedy or []
    record: dict[str, Any] = {"greedy": {"right": sum(right), "of": len(right)}, "forced": golden.forced}
    record["calls"] = {call.program: call.code for call in calls_of(golden, name, to)}
    if golden.forced:
        record["grammar"] = golden.grammar
    if golden.forced and not golden.sequences:  # vLLM's choice takes labels token by token
        record["structured_outputs"] = {"choice": golden.words}
    return record


def _say_greedy(golden: "Golden", name: str, to: Literal["hf", "peft", "gguf"]) -> None:
    from i2cl.export.greedy.calls import calls_of

    right = golden.greedy or []
    console.say(
        f"Plain greedy decoding answers {sum(right)} of {len(right)} prompts with the expected label."
    )
    if golden.forced:
        other = "fit again by the default method, which says it by itself"
        if golden.sequences:
            other = "fit labels that differ in their first token"
        if golden.compared and to != "gguf":
            console.say(f"transformers compares whole labels, by {golden.beams} beams.")
        console.say(f"Ask for a label as follows, or {other}.")
        for call in calls_of(golden, name, to):
            console.say(f"{call.program}:")
            console.say(call.code)
