"""`i2cl export`."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument

from i2cl.errors import I2CLError, needs
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt


@dataclass(frozen=True)
class FormatOptions:
    """Format of the export."""

    to: Literal["classifier", "causal-lm", "peft", "gguf"] = opt(
        "classifier",
        "classifier: a transformers text classifier, which takes raw texts and returns labels with "
        "probabilities; causal-lm: a language model whose next token is a label; peft: an adapter; gguf: a "
        "file for llama.cpp.",
    )
    drop_prior: bool = opt(False, "Leave out the label prior.", "--drop-prior")
    golden: bool = opt(True, "Store golden answers for `i2cl verify`, which are computed in float32.")
    max_shard_size: str | None = opt(
        None, "classifier, causal-lm: maximum size of a file, such as 500MB; default: 5GB."
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = opt(
        None, "Dtype of the weights, except for peft; default: as in the base model."
    )

    def arguments(self, output: Path) -> dict[str, Any]:
        """Return arguments for this format only. Raises I2CLError on options of another format."""
        arguments: dict[str, Any] = {}
        if self.max_shard_size is not None:
            if self.to not in {"classifier", "causal-lm"}:
                raise I2CLError(f"--max-shard-size is not for --to {self.to}: leave it out")
            arguments["max_shard_size"] = self.max_shard_size
        if self.dtype is not None:
            if self.to == "peft":
                raise I2CLError("--dtype is not for --to peft: leave it out")
            import torch

            arguments["dtype"] = getattr(torch, self.dtype)
        if self.to == "gguf" and output.suffix != ".gguf":
            raise I2CLError(f"{str(output)!r} is not the name of a GGUF file: end it with .gguf")
        return arguments


@options.expanded
def export(
    artefact: options.Artefact,
    output: Annotated[Path, Argument(help="Folder for the export, new or empty; or a new file.")],
    *,
    model: options.BaseName = None,
    force: options.Force = False,
    form: FormatOptions,
    loading: Annotated[ModelOptions, ("device", "device_map", "revision")],
    json: options.Json = False,
) -> None:
    """Export a task for other programs: a text classifier, a language model, an adapter or a GGUF file.

    `i2cl verify` checks the export, and servers that run it.
    """
    load.require_artefact(artefact)
    load.require_options(loading)
    arguments = form.arguments(output) | {"golden": form.golden, "force": force}
    load.libraries()
    from i2cl import export as formats
    from i2cl.core.injection import Injection
    from i2cl.injections.label_prior import without_label_prior

    injection = Injection.from_pretrained(artefact)
    if form.drop_prior:
        injection = replace(without_label_prior(injection), temperature=injection.temperature)
    name, task = model or injection.base.name, injection.task.name
    loading = replace(load.of_artefact(loading, injection, model), dtype="checkpoint")
    if form.to == "gguf" and form.golden:
        try:  # tell the user before the export takes its time
            needs("`i2cl verify` of a GGUF file", "llama-cpp", "xllamacpp")
        except I2CLError as error:
            console.note(str(error))
    decoder = load.artefact_decoder(injection, model, loading)
    notes: Sequence[str] = ()
    with console.progress(None, f"exporting {task}"):
        if form.to == "classifier":
            notes = formats.export_classifier(decoder, injection, output, **arguments)
            result = f"{task} as a text classifier on {name}"
        elif form.to == "peft":
            formats.export_peft(decoder, injection, output, **arguments)
            result = f"{task} as a LoRA adapter of {name}"
        elif form.to == "gguf":
            formats.export_gguf(decoder, injection, output, **arguments)
            result = f"{name} with {task} in its weights"
        else:
            formats.export_causal_lm(decoder, injection, output, **arguments)
            result = f"{name} with {task} in its weights"
    files = [output] if output.is_file() else output.glob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    if json:
        record = {"output": str(output), "to": form.to, "task": task, "base_model": name}
        console.print_json(record | {"golden": form.golden, "bytes": size})
        return
    console.say(f"Saved {output}: {result}, {size:,} bytes.")
    for line in (*notes, *_hints(output, form)):
        console.say(line)


def _hints(output: Path, form: FormatOptions) -> Iterator[str]:
    """Yield lines on what to do with an export."""
    if form.to == "classifier":
        yield f'Use: pipeline("text-classification", "{output}")(["a text"])'
    elif form.to == "gguf":
        yield "Use: as its metadata key i2cl.usage shows, in llama.cpp (transformers refuses it)."
    else:
        yield f"Use: as {output / 'README.md'} shows."
    if form.golden:
        yield f"Next: i2cl verify {shlex.quote(str(output))}"
