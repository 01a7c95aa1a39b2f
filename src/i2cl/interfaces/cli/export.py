"""`i2cl export`."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument

from i2cl.errors import I2CLError, require_packages
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.export import Golden
    from i2cl.models.decoder import Decoder


@dataclass(frozen=True)
class FormatOptions:
    """Format of the export."""

    to: Literal["classifier", "causal-lm", "peft", "gguf", "hf"] = opt(
        "classifier",
        "classifier: a transformers text classifier, which takes raw texts and returns labels with "
        "probabilities; causal-lm: a language model whose next token is a label; peft: an adapter; gguf: a "
        "file for llama.cpp. (hf is the old name of causal-lm.)",
    )
    drop_prior: bool = opt(False, "Leave out the label prior.", "--drop-prior")
    golden: bool = opt(True, "Store golden answers for `i2cl verify`, which takes loading the model.")
    max_shard_size: str | None = opt(
        None, "classifier, causal-lm: maximum size of a file, such as 500MB; default: 5GB."
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = opt(
        None, "gguf: of the matrices; default: as in the base model."
    )
    tokenizer: bool = opt(True, "gguf: include the tokenizer; without it the file takes token ids only.")

    def arguments(self, output: Path) -> dict[str, Any]:
        """Return arguments for this format only. Raises I2CLError on options of another format."""
        if self.to == "hf":
            raise I2CLError("--to hf is now --to causal-lm; --to classifier, the default, needs no prompts")
        if self.to != "gguf" and (self.dtype is not None or not self.tokenizer):
            raise I2CLError("--dtype and --no-tokenizer are for GGUF: add --to gguf")
        if self.to in {"classifier", "causal-lm"}:
            return {"max_shard_size": self.max_shard_size or "5GB"}
        if self.max_shard_size is not None:
            raise I2CLError(f"--max-shard-size is not for --to {self.to}: leave it out")
        if self.to == "peft":
            return {}
        if output.suffix != ".gguf":
            raise I2CLError(f"{str(output)!r} is not the name of a GGUF file: end it with .gguf")
        import torch

        return {"dtype": getattr(torch, self.dtype) if self.dtype else None, "tokenizer": self.tokenizer}


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
    arguments = form.arguments(output)
    load.libraries()
    from i2cl.core.injection import Injection
    from i2cl.export import export_causal_lm, export_classifier, export_gguf, export_peft
    from i2cl.injections.label_prior import without_label_prior

    injection = Injection.from_pretrained(artefact)
    if form.drop_prior:
        injection = replace(without_label_prior(injection), temperature=injection.temperature)
    name, task = model or injection.base.name, injection.task.name
    loading = load.of_artefact(loading, injection, model)
    load.quiet()
    base = _BaseModel(injection, model, loading, form)
    arguments |= {"golden": base.golden if form.golden else None, "force": force}
    arguments["revision"] = loading.revision
    trailing = True
    with console.progress(None, f"exporting {task}"):
        if form.to == "classifier":
            trailing = export_classifier(base.source, injection, output, **arguments).trailing
            result = f"{task} as a text classifier on {name}"
        elif form.to == "peft":
            adapter = export_peft(base.load("checkpoint"), injection, output, **arguments)
            result = f"{task} as a {adapter.tuner} adapter of {name}"
        else:
            write: Callable[..., None] = export_gguf if form.to == "gguf" else export_causal_lm
            write(base.source, injection, output, **arguments)
            result = f"{name} with {task} in its weights"
    files = [output] if output.is_file() else output.glob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    if json:
        record = {"output": str(output), "to": form.to, "task": task, "base_model": name}
        console.print_json(record | {"golden": form.golden, "bytes": size})
        return
    console.say(f"Saved {output}: {result}, {size:,} bytes.")
    for line in _hints(output, form, trailing=trailing):
        console.say(line)


def _hints(output: Path, form: FormatOptions, *, trailing: bool) -> Iterator[str]:
    """Yield lines on what to do with an export."""
    if not trailing:
        yield "Remove whitespace at the end of texts: it is encoded differently than by i2cl."
    if form.to == "classifier":
        yield f'Use: pipeline("text-classification", "{output}")(["a text"])'
    elif form.to != "gguf":
        yield f"Use: as {output / 'README.md'} shows."
    elif form.tokenizer:
        yield "Use: as its metadata key i2cl.usage shows, in llama.cpp (transformers refuses it)."
    if form.golden:
        yield f"Next: i2cl verify {shlex.quote(str(output))}"


@dataclass
class _BaseModel:
    """The base model of an export, which is loaded at most once.

    Attributes:
        injection: fitted task.
        model: name of the base model, if it is not the injection's.
        loading: options.
        form: of the export.
        decoder: once it is loaded.
    """

    injection: "Injection"
    model: str | None
    loading: ModelOptions
    form: FormatOptions
    decoder: "Decoder | None" = None

    def load(self, dtype: Literal["checkpoint", "float32"]) -> "Decoder":
        if self.decoder is None:
            loading = replace(self.loading, dtype=dtype)
            self.decoder = load.artefact_decoder(self.injection, self.model, loading)
        return self.decoder

    @property
    def source(self) -> "Decoder | str":
        """The decoder for a GGUF file, which is slow to load; else the name: tensors are read from disk."""
        from i2cl.models.loading import is_gguf, resolve_name

        name = self.model or self.injection.base.name
        return self.load("float32") if self.form.golden and is_gguf(Path(resolve_name(name))) else name

    def golden(self) -> "Golden":
        from i2cl.export import make_golden

        if self.form.to == "gguf":  # tell the user before the export takes its time
            try:
                require_packages("`i2cl verify` of a GGUF file", "llama-cpp", "llama_cpp")
            except I2CLError as error:
                console.note(str(error))
        decoder = self.load("float32")
        with console.waiting("computing golden answers"):
            return make_golden(decoder, self.injection)
