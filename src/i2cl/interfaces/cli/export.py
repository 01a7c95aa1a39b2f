"""`i2cl export`, `i2cl verify` and `i2cl push`: a fitted task for other programs and people."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from i2cl.errors import I2CLError, require_packages
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt
from i2cl.storage.atomic import require_new_file, require_writable

if TYPE_CHECKING:
    from i2cl.export import Verification

GGUF = ".gguf"  # suffix of the files

# Description of an export, by its format.
RESULTS = {
    "classifier": "{task} as a text classifier on {model}",
    "causal-lm": "{model} with {task} in its weights",
    "peft": "{task} as a LoRA adapter of {model}",
    "gguf": "{model} with {task} in its weights",
}


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
    dtype: Literal["float32", "float16", "bfloat16"] | None = opt(
        None, "Dtype of the weights, except for peft; default: as in the base model."
    )

    def arguments(self, output: Path) -> dict[str, Any]:
        """Return arguments for this format only. Raises I2CLError on options of another format."""
        arguments: dict[str, Any] = {}
        if self.dtype is not None:
            if self.to == "peft":
                raise I2CLError("--dtype is not for --to peft: leave it out")
            import torch

            arguments["dtype"] = getattr(torch, self.dtype)
        if self.to == "gguf" and output.suffix != GGUF:
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
    if form.to == "gguf":
        require_new_file(output)
    else:
        require_writable(output, frozenset())
    load.libraries()
    from i2cl.core.injection import Injection
    from i2cl.export import EXPORTERS, require_holdable
    from i2cl.injections.label_prior import without_label_prior
    from i2cl.storage.card import describe_llm_alone

    injection = Injection.from_pretrained(artefact)
    injection.require_llm()
    if form.drop_prior:
        injection = without_label_prior(injection).with_head(temperature=injection.temperature)
    require_holdable(injection, form.to)
    name, task = model or injection.base.name, injection.task.name
    loading = replace(loading, dtype="checkpoint")
    if form.to == "gguf" and form.golden:
        try:  # tell the user before the export takes its time
            require_packages("`i2cl verify` of a GGUF file", "llama-cpp", "xllamacpp")
        except I2CLError as error:
            console.note(str(error))
    decoder = load.artefact_decoder(injection, model, loading)
    with console.progress(None, f"exporting {task}"):
        notes = EXPORTERS[form.to](decoder, injection, output, **arguments) or ()
    files = [output] if output.is_file() else output.glob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    if json:
        record: dict[str, Any] = {"output": str(output), "to": form.to, "task": task, "base_model": name}
        record["experts"] = ["llm"]
        console.print_json(record | {"golden": form.golden, "bytes": size})
        return
    console.say(f"Saved {output}: {RESULTS[form.to].format(task=task, model=name)}, {size:,} bytes.")
    alone = describe_llm_alone(injection.description())
    for line in (*filter(None, [alone and f"It holds {alone}."]), *notes, *_hints(output, form)):
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
    is_gguf = folder.suffix == GGUF and folder.is_file()
    if is_gguf and url is None:
        _require_llama_cpp(model, loading.device)
    load.quiet()
    from i2cl.export import Golden, verify as verify_folder, verify_gguf, verify_server

    if url is not None:
        golden = Golden.from_export(folder)
        outcome = verify_server(golden, url, model=model_name, task=task, tolerance=tolerance)
    elif is_gguf:
        outcome = verify_gguf(folder, tolerance=tolerance)
    else:
        outcome = verify_folder(folder, model=model, device=loading.device, tolerance=tolerance)
    _show_verification(outcome, json=json)
    if not outcome.passed:
        raise typer.Exit(1)


def _require_llama_cpp(model: str | None, device: str | None) -> None:
    """Check before PyTorch is imported that llama.cpp can check a GGUF file. Raises I2CLError."""
    if model is not None:
        raise I2CLError("a GGUF file is a whole model: leave out --model, which is for PEFT adapters")
    if device not in {None, "cpu"}:
        raise I2CLError("a GGUF file is checked on the CPU: leave out --device")
    require_packages("`i2cl verify` of a GGUF file", "llama-cpp", "xllamacpp")


def _show_verification(outcome: "Verification", *, json: bool) -> None:
    count = len(outcome.labels)
    correct = sum(expected == answered for expected, answered in outcome.labels)
    record: dict[str, Any] = {"passed": outcome.passed, "worst": outcome.worst}
    record |= {"tolerance": outcome.tolerance, "retokenized": outcome.retokenized}
    text = (
        f"{'Passed' if outcome.passed else 'Failed'}: {correct} of {count} labels agree, largest difference "
        f"of a probability {outcome.worst:.1e} (tolerance {outcome.tolerance:.0e})."
    )
    if outcome.retokenized:
        example = outcome.retokenized[0].splitlines()[0]
        text += (
            f"\nIts tokenizer gives {len(outcome.retokenized)} prompts other token ids, such as {example!r}."
        )
    console.answer(record | {"labels": {"right": correct, "of": count}}, text, as_json=json)


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
