"""Files of texts: JSON Lines in, JSON Lines out in the same order, each line once whatever happens."""

import codecs
import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import IO, Any

import pydantic

from i2cl.errors import I2CLError, first_problem
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.task_store import TaskStore
from i2cl.models.scoring import require_texts
from i2cl.storage.journal import Journal

INPUT, OUTPUT = "input.jsonl", "output.jsonl"
CHUNK = 64  # lines that are asked, answered and written together; a kill loses at most those
LONGEST_LINE = 2**20  # bytes, which is more than any context holds
MOST_REFUSED = 1000  # lines that cannot be used, behind which no more are looked for


class Line(pydantic.BaseModel):
    """A line of the file that comes in."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    input: str
    model: str | None = None
    custom_id: str | int | None = None


def read_lines(
    body: IO[bytes], model: str | None, known: Callable[[str], Any], rows: IO[bytes]
) -> tuple[int, list[str]]:
    """Write the lines of a file, each with its task, to ``rows``; how many there are, and those tasks. One
    line is in memory at a time.

    ``model``: the task of lines that name none; ``known``: refuses the name of a task that is not here.
    Raises RefusalError: 422 naming every line that cannot be used, 404 on an unknown task.
    """
    count, names, refused = 0, set(), []
    for number, text in enumerate(iter(partial(body.readline, LONGEST_LINE + 1), b""), start=1):
        text = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text  # noqa: PLW2901
        if not text.strip():
            continue
        try:
            line, name = _line(text, model)
        except I2CLError as error:
            refused.append(f"line {number}: {str(error).removeprefix('text 1 ')}")
        else:
            if name not in names:
                try:
                    known(name)
                except RefusalError as error:
                    raise error.at(f"line {number}") from None
                names.add(name)
            count += 1
            row = {"line": number, **line.model_dump(), "model": name}
            rows.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if len(refused) == MOST_REFUSED or len(text) > LONGEST_LINE:
            break
    if refused:
        raise RefusalError(422, "bad_rows", refused[0], rows=refused)
    if not count:
        raise RefusalError(422, "bad_input", "the file has no lines: give it at least one")
    return count, sorted(names)


def _line(text: bytes, model: str | None) -> tuple[Line, str]:
    if len(text) > LONGEST_LINE:
        raise I2CLError(f"it is longer than {LONGEST_LINE} bytes: shorten it")
    try:
        line = Line.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise I2CLError(first_problem(error)) from None
    require_texts([line.input])
    if (name := line.model or model) is None:
        raise I2CLError("no task is named: write model into the line, or give ?model= to all")
    return line, name


def run(job: Job, batcher: Batcher, tasks: TaskStore) -> dict[str, Any]:
    """Do the job of a file: what its last event tells. Goes on behind the last chunk that is on the disk. A
    line without an answer has its reason in the place of a label. Raises FitStoppedError if it is cancelled.
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
    """Of each line: its label and probabilities, or why it has none."""
    answers: list[dict[str, Any]] = [{} for _ in chunk]
    rows, places = [], []
    for at, line in enumerate(chunk):
        try:
            rows += tasks.of_version(digests[line["model"]], [line["input"]])
            places.append(at)
        except I2CLError as error:
            answers[at] = RefusalError.of(error).body()
    scored = batcher.submit_slices(rows).done.result() if rows else ()
    for at, row, scores in zip(places, rows, scored, strict=True):
        if isinstance(scores, RefusalError):
            answers[at] = scores.body()
            continue
        labels, probs = row.task.questions.task.labels, scores.softmax(-1).tolist()
        answers[at] = {"digest": digests[chunk[at]["model"]], "label": labels[probs.index(max(probs))]}
        answers[at] |= {"labels": labels, "probs": probs}
    return answers
