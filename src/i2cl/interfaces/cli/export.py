"""`i2cl export`."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument

from i2cl.errors import I2CLError, needs
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt

if TYPE_CHECKING:
    from i2cl.export import Golden
    from i2cl.export.classifier import TemplateTokenizer


@dataclass(frozen=True)
class FormatOptions:
    """What is written."""

    to: Literal["classifier", "hf", "peft", "gguf"] = opt(
        "hf",
        "classifier: a transformers text classifier, which takes raw texts and returns labels with "
        "probabilities; hf: a language model that says the label; peft: an adapter; gguf: a file for "
        "llama.cpp.",
    )
    drop_prior: bool = opt(
        False, "Leave out the label prior, which only hf can hold, and say what to add.", "--drop-prior"
    )
    temperature: Literal["fold"] | None = opt(
        None, "hf: divide the head by the injection's temperature; other text is flatter too."
    )
    golden: bool = opt(True, "Store what `i2cl verify` compares with; loads the model.")
    max_shard_size: str | None = opt(None, "hf: size of a file, such as 500MB; default: 5GB.")
    dtype: Literal["float32", "float16", "bfloat16"] | None = opt(
        None, "gguf: of the matrices; default: as in the base model."
    )
    tokenizer: bool = opt(True, "gguf: carry the tokenizer; without it the file takes token ids alone.")

    def of_format(self, output: Path) -> dict[str, Any]:
        """Arguments of one format alone. Raises I2CLError on options of another."""
        if self.to != "gguf" and (self.dtype is not None or not self.tokenizer):
            raise I2CLError("--dtype and --no-tokenizer are for GGUF: add --to gguf")
        if self.to == "classifier":
            return {"max_shard_size": self.max_shard_size or "5GB"}
        if self.to == "hf":
            fold = self.temperature == "fold"
            return {"fold_temperature": fold, "max_shard_size": self.max_shard_size or "5GB"}
        if self.max_shard_size is not None:
            raise I2CLError("--max-shard-size is for checkpoints: leave it out, or export --to hf")
        if self.to == "peft":
            return {}
        if output.suffix != ".gguf":
            raise I2CLError(f"{str(output)!r} is no name of a GGUF file: end it with .gguf")
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
    """Put a task into a checkpoint, an adapter or a GGUF file, for other programs.

    Golden values go with it: `i2cl verify` checks those programs with them.
    """
    load.require_artefact(artefact)
    load.require_options(loading)
    chosen = form.of_format(output)
    load.libraries()
    from i2cl.core.injection import Injection
    from i2cl.export import export_classifier, export_gguf, export_hf, export_peft, make_golden
    from i2cl.export.folding import at_temperature
    from i2cl.injections.label_prior import without_label_prior

    injection = Injection.from_pretrained(artefact)
    folds, divided = form.temperature == "fold", injection.temperature
    if folds and form.to == "classifier":
        raise I2CLError("a classifier always has the temperature in its head: leave out --temperature fold")
    if folds and form.to != "hf":
        cure = f"leave it out and divide log-probabilities among the labels by {divided:g}"
        raise I2CLError(f"--temperature fold is for --to hf, {form.to} leaves the head as it is: {cure}")
    bias = (at_temperature(injection) if folds else injection).label_bias
    prior = {} if bias is None else dict(zip(injection.task.labels, bias, strict=True))
    if form.drop_prior:
        injection = replace(without_label_prior(injection), temperature=divided)
    name, task = model or injection.base.name, injection.task.name
    loading = load.of_artefact(replace(loading, dtype="checkpoint"), injection, model)
    load.quiet()

    def answers() -> "Golden":
        if form.to == "gguf":  # told now, and not after a long export
            what, instead = "`i2cl verify` of a GGUF file", "ask a server with --url"
            try:
                needs(what, "llama-cpp", "llama_cpp", instead=instead)
            except I2CLError as lacking:
                console.note(str(lacking))
        decoder = load.artefact_decoder(injection, model, loading)
        with console.waiting("computing golden values"):
            return make_golden(decoder, injection, fold_temperature=folds)

    with console.progress(None, f"exporting {task}"):
        if form.to == "classifier":
            load_decoder = partial(load.artefact_decoder, injection, model, loading)
            made = export_classifier(
                name,
                injection,
                output,
                decoder=load_decoder if form.golden else None,
                revision=loading.revision,
                force=force,
                **chosen,
            )
            record = {"output": str(output), "task": task, "base_model": name, "golden": form.golden}
            _show_classifier(output, task, name, made, record, json=json)
            return
        if form.to == "peft":
            decoder = load.artefact_decoder(injection, model, loading)
            given: dict[str, Any] = {"golden": form.golden, "force": force, "revision": loading.revision}
            what = f"{task} as a {export_peft(decoder, injection, output, **given).tuner} adapter of {name}"
        else:
            golden = answers if form.golden else None
            write: Callable[..., None] = export_hf if form.to == "hf" else export_gguf
            write(name, injection, output, golden=golden, revision=loading.revision, force=force, **chosen)
            what = f"{name} with {task} in its weights"
    record = {"output": str(output), "task": task, "base_model": name, "golden": form.golden}
    _show_export(output, what, record, form, prior, divided, json=json)


def _show_classifier(
    output: Path, task: str, name: str, made: "TemplateTokenizer", record: dict[str, Any], *, json: bool
) -> None:
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    if json:
        console.print_json(record | {"bytes": size})
        return
    console.say(f"Saved {output}: {task} as a text classifier on {name}, {size:,} bytes.")
    if not made.trailing:
        console.say("Remove whitespace at the end of texts: it is encoded differently than by i2cl.")
    console.say(f'Use: pipeline("text-classification", "{output}")(["a text"])')
    if record["golden"]:
        console.say(f"Next: i2cl verify {shlex.quote(str(output))}")


def sent_with(tokens: Mapping[str, float]) -> str:
    """A label prior as a field of a request to a server."""
    sent = ", ".join(f'"{token}": {value:.4f}' for token, value in tokens.items())
    return f'"logit_bias": {{{sent}}}'


def _show_export(
    output: Path,
    what: str,
    record: dict[str, Any],
    form: FormatOptions,
    prior: dict[str, float],
    temperature: float,
    *,
    json: bool,
) -> None:
    from i2cl.export import Golden
    from i2cl.export.calls import calls_of

    kind: Any = form.to
    known = Golden.from_export(output) if form.golden else None
    kept = known is not None and bool(known.label_bias)
    tokens = known.logit_bias(list(prior.values())) if known is not None else {}
    calls = {one.program: one.code for one in calls_of(known, output.name, kind)} if known else {}
    files = [output] if output.is_file() else output.glob("*.safetensors")
    sizes = [path.stat().st_size for path in files]
    if json:
        record |= {"label_bias": prior, "prior_kept": kept} if prior else {}
        record |= {"logit_bias": tokens} if tokens else {}
        folded = {"temperature": temperature, "temperature_kept": form.temperature == "fold"}
        record |= folded if temperature != 1 else {}
        record |= _as_json(known, calls) if known is not None else {}
        console.print_json(record | {"files": len(sizes), "bytes": sum(sizes)})
        return
    console.say(f"Saved {output}: {what}, {sum(sizes):,} bytes in {len(sizes)} file(s).")
    if kept:
        console.say("Its label prior is in generation_config.json (sequence_bias), which `generate` follows.")
    if prior:
        numbers = ", ".join(f"{label} {value:+.4f}" for label, value in prior.items())
        console.say(f"{'Elsewhere add' if kept else 'Add'} to each label's log-probability: {numbers}.")
    if prior and tokens:
        console.say(f"Servers take it with a request: {sent_with(tokens)}.")
    if temperature != 1 and form.temperature == "fold":
        console.say(f"Its temperature {temperature:g} is in the head: all probabilities are those at it.")
    elif temperature != 1:
        note = "Probabilities of this export are those of temperature 1: divide log-probabilities among"
        cure = ", or export with --temperature fold" if form.to == "hf" else ""
        console.say(f"{note} the labels by {temperature:g}{cure}.")
    if form.to == "gguf":
        console.say("It is for llama.cpp; transformers refuses it (gguf_file=), for which export --to hf.")
    if known is not None:
        following = f"Next: i2cl verify {shlex.quote(str(output))}"
        console.say("\n".join((*_about_greedy(known, form, calls), following)))


def _as_json(golden: "Golden", calls: Mapping[str, str]) -> dict[str, Any]:
    """What greedy decoding says, and how programs are asked."""
    right = golden.greedy
    record = {"greedy": {"right": sum(right), "of": len(right)}, "forced": golden.forced, "calls": calls}
    record |= {"grammar": golden.grammar} if golden.forced else {}
    if golden.forced and not golden.sequences:  # vLLM's choice takes labels token by token
        record["structured_outputs"] = {"choice": golden.words}
    return record


def _about_greedy(golden: "Golden", form: FormatOptions, calls: Mapping[str, str]) -> Iterator[str]:
    right = golden.greedy
    yield f"Plain greedy decoding answers {sum(right)} of {len(right)} prompts with {golden.said_as}."
    if golden.shortened:
        where = "the key i2cl.usage" if form.to == "gguf" else "README.md"
        yield f"An answer is one token, which stands for a label: {where} names each."
    if golden.forced:
        other = "fit again by the default method, which says it by itself"
        if golden.sequences or golden.artefact.get("scoring") == "words":
            other = "fit labels that differ in their first token"
        if golden.compared and form.to != "gguf":
            yield f"transformers compares whole labels, by {golden.beams} beams."
        yield f"Ask for a label as follows, or {other}."
        yield from (f"{program}:\n{code}" for program, code in calls.items())
