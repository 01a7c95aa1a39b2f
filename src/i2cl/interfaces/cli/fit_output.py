"""What `i2cl fit` and `i2cl update` print: the rows of a file, the saved fit and its evaluation."""

import math
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from i2cl.interfaces.cli import console

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.experiments.draw import Draw
    from i2cl.experiments.evidence.fit_evaluation import EvaluationPlan
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task
    from i2cl.tasks.survey import Survey

GUESSING = 0.99  # a loss above this fraction of log(labels) is no better than guessing
MAX_CONTRADICTIONS = 5  # texts with several labels that are printed
MAX_SNIPPET = 50  # characters of such a text
MAX_CODES = 4  # label codes in a suggested --labels


def show_fit(
    injection: "Injection", method: str, output: Path, seconds: float, plan: "EvaluationPlan"
) -> None:
    """Print a saved fit, its evaluation, and the next command."""
    from i2cl.core.injection import LABEL_PRIOR
    from i2cl.storage.card import describe_prior, describe_weights

    labels, history, count = injection.task.labels, injection.history, injection.context.demonstrations
    summary = f"loss {history[0]:.3f} -> {history[-1]:.3f}" if history else "not calibrated"
    experts = " and ".join(injection.ensemble.names[1:]) if injection.ensemble else ""
    what = f"{injection.task.name} by {method}{f' with {experts}' if experts else ''}, {count} demonstrations"
    console.say(f"Saved {output}: {what}, {summary}, {seconds:.1f} s.")
    guess = math.inf if injection.task.multi_label else GUESSING * math.log(len(labels))
    if history and method.startswith("anchored") and history[-1] > guess:
        console.note("the loss is no better than guessing: give more rows, or use another model")
    if LABEL_PRIOR in injection.settings:
        console.say(f"Label prior: {describe_prior(labels, injection.settings[LABEL_PRIOR])}")
    threshold = ""
    if injection.evaluation:
        threshold = _show_evaluation(injection)
    else:
        if plan.reason:
            console.say(f"Not evaluated: {plan.reason}, or give rows with --test FILE.")
        if injection.ensemble or injection.temperature != 1:
            weights = describe_weights(injection.description())
            console.say(f"Calibration: {weights} (typical of such fits, not measured).")
    console.say(f"Next: i2cl predict {shlex.quote(str(output))} FILE{threshold}")


def fit_record(
    injection: "Injection", method: str, output: Path, seconds: float, model: str, rows: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what ``i2cl fit --json`` prints."""
    from i2cl.methods.injecting import injection_cost

    history = injection.history
    return {
        "output": str(output),
        "model": model,
        "method": method,
        "task": injection.task.name,
        "labels": list(injection.task.labels),
        "demonstrations": injection.context.demonstrations,
        "rows": rows,
        "first_loss": history[0] if history else None,
        "last_loss": history[-1] if history else None,
        "fit_seconds": seconds,
        "cached_values": injection_cost(injection).cached_values,
        "coefficients": injection.coefficients.numel(),
        "label_bias": injection.label_bias,
        "temperature": injection.temperature,
        "metrics": injection.metrics,
        "ensemble": injection.ensemble.description() if injection.ensemble else None,
        "evaluation": injection.evaluation or None,
    }


def _show_evaluation(injection: "Injection") -> str:
    """Print an evaluation. Return the option with its confidence threshold, if it has one, for `predict`."""
    from i2cl.storage.card import confidence_notes, score_notes, score_table

    evaluation = injection.evaluation
    heading, rows = score_table(evaluation)
    console.say(f"\n{heading}")
    console.print_table("", rows)
    for note in score_notes(evaluation):
        console.say(note)
    console.say(f"\nVerdict: {evaluation['verdict']}.")
    if evaluation["advice"]:
        console.say(f"Advice: {evaluation['advice']}.")
    for note in confidence_notes(injection.description()):
        console.say(note)
    threshold = evaluation.get("selection", {}).get("threshold")
    return "" if threshold is None else f" --min-confidence {threshold:.6g}"


def surveyed(
    task: "Task", decoder: "Decoder", draw: "Draw", plan: "EvaluationPlan"
) -> tuple[dict[str, Any], str]:
    """Describe the training rows, the draw and the evaluation: as a record, and as lines of text."""
    from i2cl.tasks.survey import Survey

    survey = Survey.from_task(task)
    kept_back = len(plan.rows) if plan.split == "train" else 0
    tokens = max(map(len, decoder.tokenizer(list(survey.longest))["input_ids"]))
    record = survey.record() | {"longest_tokens": tokens, "used": len(draw.demonstrations)}
    record |= {"shots": draw.shots, "kept_back": kept_back, "estimated_seconds": draw.seconds}
    window = f" (context: {decoder.max_length:,})" if decoder.max_length else ""
    distinct = "" if survey.distinct == survey.rows else f", {survey.distinct:,} of them distinct"
    first = f"Rows: {survey.rows:,}{distinct}; the longest text has {tokens:,} tokens{window}."
    return record, "\n".join(
        (
            first,
            *_label_lines(survey),
            _usage_line(draw, kept_back, max(0, plan.folds - 1) if draw.refits else 0),
            "",
        )
    )


def _label_lines(survey: "Survey") -> Iterator[str]:
    counts = ", ".join(f"{word} {count:,}" for word, count in survey.labels.items())
    yield f"Labels: {counts}" + (f"; {survey.unlabelled:,} rows without one." if survey.unlabelled else ".")
    if survey.separator:
        separator = shlex.quote(survey.separator)
        yield f"! Some labels look like several: separate them with --label-separator {separator}."
    for word, other in survey.typos.items():
        rows = f"{survey.labels[word]} row{'s' * (survey.labels[word] != 1)}"
        yield f"! {word!r} has {rows}: did you mean {other!r}? They are treated as different labels."
    for text, words in islice(survey.contradictions.items(), MAX_CONTRADICTIONS):
        snippet = text if len(text) <= MAX_SNIPPET else f"{text[:MAX_SNIPPET]}..."
        yield f"! {snippet!r} is labelled {' and '.join(words)}: keep one label."
    if len(survey.contradictions) > MAX_CONTRADICTIONS:
        yield f"! {len(survey.contradictions) - MAX_CONTRADICTIONS} more texts have several labels."
    if survey.codes:
        codes = list(survey.labels)[:MAX_CODES]
        pairs = ",".join(f"NAME={code}" for code in codes) + ",..." * (len(survey.labels) > len(codes))
        yield f"! The labels are {survey.codes}: name them for the model with --labels '{pairs}'."


def _usage_line(draw: "Draw", kept_back: int, refits: int) -> str:
    used = len(draw.demonstrations)
    line = f"All {used:,} rows used" if used == draw.rows else f"{used:,} of {draw.rows:,} rows used"
    if kept_back:
        line += f", {kept_back} held out to evaluate on"
    if draw.seconds is not None:
        line += f": {about(draw.seconds)}"
        line += f", then {about(refits * draw.seconds)} for cross-validation" if refits else ""
    if draw.more is None:
        return f"{line}."
    shots, rows, seconds = draw.more
    what = "all" if rows == draw.rows else f"{rows:,}"
    return f"{line}; --shots {shots} uses {what}, {about(seconds)}."


def about(seconds: float | None) -> str:
    """Format an estimated time."""
    return f"about {console.duration(seconds or 0.0)}"
