"""Summary of a labelled file, which `i2cl fit` prints before it fits."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from i2cl.interfaces.cli import console

if TYPE_CHECKING:
    from i2cl.experiments.draw import Draw
    from i2cl.experiments.evidence.fit_evaluation import EvaluationPlan
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task
    from i2cl.tasks.survey import Survey

MAX_CONTRADICTIONS = 5  # texts with several labels that are printed
MAX_SNIPPET = 50  # characters of such a text
MAX_CODES = 4  # label codes in a suggested --labels


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
        (first, *_label_lines(survey), _usage_line(draw, kept_back, max(0, plan.folds - 1)), "")
    )


def _label_lines(survey: "Survey") -> Iterator[str]:
    yield f"Labels: {', '.join(f'{word} {count:,}' for word, count in survey.labels.items())}."
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
