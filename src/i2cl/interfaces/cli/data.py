"""What `i2cl fit` says of the rows of a file of one's own before it fits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from i2cl.interfaces.cli import console

if TYPE_CHECKING:
    from i2cl.experiments.draw import Draw
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task

SHOWN = 5  # texts with several labels that are shown
SNIPPET = 50  # characters of such a text


class Block:
    """A survey of rows, as text and as a record."""

    def __init__(self, task: "Task", decoder: "Decoder", draw: "Draw", queries: Sequence[Any]) -> None:
        """Survey a task's training rows, of which a draw takes some; queries are rows to score on."""
        from i2cl.tasks.survey import Survey

        self._survey, self._draw = Survey.of(task), draw
        self._kept_back = 0 if task.test else len(queries)
        self._tokens = max(map(len, decoder.tokenizer(list(self._survey.longest))["input_ids"]))
        self._window = decoder.max_length

    def record(self) -> dict[str, Any]:
        """For JSON."""
        draw, survey = self._draw, self._survey.record()
        used = {"used": len(draw.demonstrations), "shots": draw.shots, "kept_back": self._kept_back}
        return survey | {"longest_tokens": self._tokens} | used | {"estimated_seconds": draw.seconds}

    def show(self) -> None:
        """On stdout, lines no wider than the terminal."""
        survey = self._survey
        window = f" of the {self._window:,} that the model takes" if self._window else ""
        distinct = "" if survey.distinct == survey.rows else f", {survey.distinct:,} of them distinct"
        console.wrap(
            f"Rows: {survey.rows:,}{distinct}; the longest text has {self._tokens:,} tokens{window}."
        )
        console.wrap(f"Labels: {', '.join(f'{word} {count:,}' for word, count in survey.labels.items())}.")
        for word, other in survey.slips:
            rows = f"{survey.labels[word]} row{'s' * (survey.labels[word] != 1)}"
            console.wrap(f"! {word!r} has {rows}: did you mean {other!r}? Each is a label of its own.")
        several = survey.contradictions
        for text, words in several[:SHOWN]:
            shown = text if len(text) <= SNIPPET else f"{text[:SNIPPET]}..."
            console.wrap(f"! {shown!r} is labelled {' and '.join(words)}: keep one.")
        if len(several) > SHOWN:
            console.wrap(f"! {len(several) - SHOWN} more texts have several labels.")
        if survey.numbered:
            console.wrap("! The labels are numbers: --labels 'poor,...' says what they mean, in their order.")
        console.wrap(self._use())
        console.say("")

    def _use(self) -> str:
        draw = self._draw
        used = len(draw.demonstrations)
        line = f"All {used:,} rows used" if used == draw.rows else f"{used:,} of {draw.rows:,} rows used"
        if self._kept_back:
            line += f", {self._kept_back} others to score on"
        if draw.seconds is not None:
            line += f": {_about(draw.seconds)}"
        if draw.more is None:
            return f"{line}."
        shots, rows, seconds = draw.more
        what = "all" if rows == draw.rows else f"{rows:,}"
        return f"{line}; --shots {shots} uses {what}, {_about(seconds)}."


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:,.0f} minutes"
