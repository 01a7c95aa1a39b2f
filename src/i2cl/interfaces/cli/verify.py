"""`i2cl verify`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.export import sent_with
from i2cl.interfaces.cli.options import ModelOptions, opt

if TYPE_CHECKING:
    from i2cl.export import Verification

SHOWN = 6  # prompts in the table, at most


@options.expanded
def verify(
    folder: Annotated[Path, Argument(help="Folder or GGUF file made by `i2cl export`.")],
    *,
    url: str | None = opt(None, "Ask this completions server and not transformers or llama.cpp."),
    model_name: str | None = opt(None, "What the server calls the model; default: the first it lists."),
    task: str | None = opt(None, "Task of a server with the vLLM plugin to answer under."),
    logprobs: int | None = opt(None, "Tokens to ask the server about; default: 20.", min=1),
    tolerance: float | None = opt(None, "Largest relative difference; default: by dtype.", min=0),
    model: str | None = opt(None, "Base model of a PEFT adapter; default: the one it was made on."),
    loading: Annotated[ModelOptions, ("device",)],
    json: options.Json = False,
) -> None:
    """Check that an export, or a server that runs it, answers as it should.

    It names what differs, such as a dropped bias; then the exit code is 1.
    """
    if not folder.exists():
        raise I2CLError(f"{str(folder)!r} does not exist: give a folder or a GGUF file made by `i2cl export`")
    if url is None and not (model_name is None and logprobs is None and task is None):
        raise I2CLError("--model-name, --task and --logprobs are for a server: add --url")
    if url is not None and not (model is None and loading.device is None):
        raise I2CLError("--model and --device are for a check without a server: leave out --url")
    load.quiet()
    tokens: dict[str, float] = {}
    if url is None:
        if _verified_classifier(folder, loading.device, tolerance, json=json):
            return
        outcome = _run_here(folder, model, loading.device, tolerance)
    else:
        from i2cl.export import Golden, ask_server
        from i2cl.export.server import TOLERANCE
        from i2cl.export.verify import compare

        golden = Golden.from_export(folder)
        answers = ask_server(golden, url, model=model_name, task=task, logprobs=logprobs or 20)
        outcome = compare(
            golden, answers, max(TOLERANCE, golden.tolerance) if tolerance is None else tolerance
        )
        tokens = golden.logit_bias(golden.label_bias)
    _show(outcome, tokens, json=json)
    if not outcome.passed:
        raise typer.Exit(1)


def _verified_classifier(folder: Path, device: str | None, tolerance: float | None, *, json: bool) -> bool:
    """Check an exported text classifier; False if the folder is none. Exits with 1 if it does not hold."""
    from i2cl.export import is_classifier, verify_classifier

    if not is_classifier(folder):
        return False
    outcome = verify_classifier(folder, device=device, tolerance=tolerance)
    right = sum(expected == found for expected, found in outcome.labels)
    count, same = len(outcome.labels), len(outcome.labels) - len(outcome.retokenized)
    if json:
        record = {"passed": outcome.passed, "worst": outcome.worst, "tolerance": outcome.tolerance}
        console.print_json(record | {"labels": {"right": right, "of": count}, "same_tokens": same})
    else:
        holds = "holds" if outcome.passed else "does not hold"
        console.say(
            f"The classifier {holds}: {right} of {count} labels, {same} of {count} with the same tokens, "
            f"largest difference of a probability {outcome.worst:.1e} (tolerance {outcome.tolerance:.0e})."
        )
    if not outcome.passed:
        raise typer.Exit(1)
    return True


def _run_here(folder: Path, model: str | None, device: str | None, tolerance: float | None) -> "Verification":
    from i2cl.export import verify as verified, verify_gguf
    from i2cl.models.loading import is_gguf

    if not is_gguf(folder):
        return verified(folder, model=model, device=device, tolerance=tolerance)
    if model is not None:
        raise I2CLError("a GGUF file is a whole model: leave out --model, which is for PEFT adapters")
    if device not in {None, "cpu"}:
        raise I2CLError("a GGUF file is checked on the CPU: leave --device out, or ask a server (--url)")
    return verify_gguf(folder, tolerance=tolerance)


def _show(outcome: "Verification", tokens: Mapping[str, float], *, json: bool) -> None:
    """What was found; ``tokens`` is the label prior as a server has to be sent it."""
    if json:
        names = ("passed", "worst", "tolerance", "dropped", "retokenized", "unchecked")
        record: dict[str, Any] = {name: getattr(outcome, name) for name in names}
        record["greedy"] = {"right": sum(outcome.greedy), "of": len(outcome.greedy)}
        record["prompts"] = outcome.rows()
        console.print_json(record | ({"logit_bias": tokens} if tokens else {}))
        return
    rows = outcome.rows()
    rows.sort(key=lambda row: {row["found"], row["greedy"]} <= {row["expected"], "-"})  # wrong ones first
    console.print_table("", rows[:SHOWN])
    if len(rows) > SHOWN:
        console.say(f"{SHOWN} of {len(rows)} prompts are shown, --json has all.")
    numbers = f"largest relative difference {outcome.worst:.1e}, tolerance {outcome.tolerance:.1e}"
    console.say(f"The export {'holds' if outcome.passed else 'does not hold'}: {numbers}.")
    if tokens and outcome.golden.label_bias:
        console.say(f"Labels are named with the label prior, which the server adds with {sent_with(tokens)}.")
    _say_greedy(outcome)
    for problem in filter(None, (outcome.unchecked, outcome.dropped)):
        console.say(f"{problem[0].upper()}{problem[1:]}.")
    if outcome.retokenized:
        first = outcome.retokenized[0].splitlines()[0]
        console.say(
            f"Its tokenizer encodes {len(outcome.retokenized)} of these prompts otherwise, such as "
            f"{first!r}: send token ids."
        )


def _say_greedy(outcome: "Verification") -> None:
    """How many prompts greedy decoding answers with the expected label, and what to do if too few."""
    golden = outcome.golden
    how = "Greedy decoding, made to say a label," if golden.forced else "Plain greedy decoding"
    if outcome.searched:
        how = f"A search over whole labels ({golden.beams} beams)"
    if outcome.compared:
        how = "The most probable whole label"
    right, count = sum(outcome.greedy), len(outcome.greedy)
    console.say(f"{how} answers {right} of {count} prompts with {golden.said_as}.")
    if outcome.says_labels or outcome.worst > outcome.tolerance:  # other values say other labels
        return
    if golden.forced and golden.sequences:
        cure = "compare log-probabilities of whole labels, or fit labels that differ in their first token"
    elif golden.forced:
        cure = "ask as the export's README.md or `i2cl.usage` says, without penalties"
    else:
        cure = "decode at temperature 0 without penalties, or export it again"
    console.say(f"That is too few: {cure}.")
