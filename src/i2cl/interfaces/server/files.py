"""Batch files: JSON Lines in, JSON Lines out in the same order, exactly one answer or error per line."""

import codecs
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import IO, Any

import pydantic

from i2cl.errors import I2CLError, first_problem
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.task_store import TaskStore
from i2cl.storage.journal import Journal
from i2cl.tasks.formats import load_json, repeated_key
from i2cl.tasks.text import is_blank

INPUT, OUTPUT = "input.jsonl", "output.jsonl"
CHUNK = 64  # lines classified and written together; a kill loses at most one chunk
LONGEST_LINE = 2**20  # bytes: more than any context holds
MOST_REFUSED = 1000  # malformed lines after which the rest is not checked


class Line(pydantic.BaseModel):
    """A line of the file that comes in."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    input: str
    model: str | None = None
    custom_id: str | int | None = None


def read_lines(
    body: IO[bytes], model: str | None, known: Callable[[str], Any], rows: IO[bytes]
) -> tuple[int, list[str]]:
    """Check the lines of a batch file and write each, with its task, to ``rows``. One line is in memory at a
    time.

    A blank text does not fail the file: its line gets an error instead of an answer when the job runs.

    Args:
        body: the file.
        model: task of the lines that name none.
        known: raises RefusalError for an unknown task.
        rows: written to.

    Returns:
        The number of lines, and the names of their tasks.

    Raises:
        RefusalError: 422 naming every malformed line, or if no line has a text; 404 on an unknown task.
    """
    count = 0
    names: set[str] = set()
    refused: list[str] = []
    blank: list[str] = []
    for number, text in _filled_lines(body):
        try:
            line, name = _line(text, model)
            if name not in names:
                known(name)
                names.add(name)
        except RefusalError as error:
            raise error.at(f"line {number}") from None
        except I2CLError as error:
            refused.append(f"line {number}: {error}")
        else:
            count += 1
            if is_blank(line.input):
                blank.append(f"line {number}: the text is empty: remove the line or fill it in")
            row = {"line": number, **line.model_dump(), "model": name}
            rows.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if len(refused) == MOST_REFUSED:
            break
    if count == len(blank):
        refused += blank[:MOST_REFUSED]
    _raise_if_refused(refused, count)
    return count, sorted(names)


def _raise_if_refused(refused: list[str], count: int) -> None:
    if refused:
        raise RefusalError(422, "bad_rows", refused[0], rows=refused)
    if not count:
        raise RefusalError(422, "bad_input", "the file has no lines: give it at least one")


def _filled_lines(body: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, numbered from 1, up to the first that is too long."""
    for number, text in enumerate(iter(partial(body.readline, LONGEST_LINE + 1), b""), start=1):
        line = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
        if line.strip():
            yield number, line
        if len(line) > LONGEST_LINE:
            return


def _line(text: bytes, model: str | None) -> tuple[Line, str]:
    if len(text) > LONGEST_LINE:
        raise I2CLError(f"it is longer than {LONGEST_LINE} bytes: shorten it")
    try:
        line = Line.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise I2CLError(first_problem(error)) from None
    if (key := repeated_key(load_json(text))) is not None:
        raise I2CLError(f"the key {key!r} is given twice: remove one")
    if (name := line.model or model) is None:
        raise I2CLError("no task is named: write model into the line, or give ?model= to all")
    return line, name


def run(job: Job, batcher: Batcher, tasks: TaskStore) -> dict[str, Any]:
    """Run the job of a batch file, resuming after the last chunk on the disk.

    A line that cannot be classified gets an ``error`` instead of a label.

    Returns:
        The content of the job's last event: the number of rows, and of those that failed.

    Raises:
        FitStoppedError: if the job is cancelled.
    """
    digests, rows, out = job.request["digests"], job.request["rows"], job.folder / OUTPUT
    with Journal.opened(out, group=CHUNK) as journal, (job.folder / INPUT).open("rb") as lines:
        done = journal.kept
        with out.open("rb") as written:
            failures = sum("error" in json.loads(line) for line in written)
        deque(islice(lines, done), maxlen=0)
        while chunk := [json.loads(line) for line in islice(lines, CHUNK)]:
            job.require_wanted()
            answers = _answers(chunk, digests, batcher, tasks)
            records = [
                {name: line[name] for name in ("line", "custom_id", "model")} | answer
                for line, answer in zip(chunk, answers, strict=True)
            ]
            journal.append(b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in records))
            done += len(chunk)
            failures += sum("error" in one for one in records)
            job.show("rows", done=done, rows=rows, failed=failures)
    return {"rows": rows, "failed": failures}


def _answers(
    chunk: Sequence[dict[str, Any]], digests: dict[str, str], batcher: Batcher, tasks: TaskStore
) -> list[dict[str, Any]]:
    """Return for each line its label and probabilities, or its error."""
    answers: list[dict[str, Any]] = [{} for _ in chunk]
    rows, places = [], []
    for at, line in enumerate(chunk):
        try:
            rows += tasks.of_version(digests[line["model"]], [line["input"]])
            places.append(at)
        except I2CLError as error:
            refusal = RefusalError.of(error)
            message = str(refusal).replace("text 1 ", "the text ", 1)
            answers[at] = RefusalError(refusal.status, refusal.code, message).body()
    scored = batcher.submit_slices(rows).done.result() if rows else ()
    for at, row, scores in zip(places, rows, scored, strict=True):
        if isinstance(scores, RefusalError):
            answers[at] = scores.body()
            continue
        labels, probs = row.task.questions.task.labels, scores.softmax(-1).tolist()
        answers[at] = {"digest": digests[chunk[at]["model"]], "label": labels[probs.index(max(probs))]}
        answers[at] |= {"labels": labels, "probs": probs}
    return answers
