"""Files of texts: JSON Lines in, JSON Lines out in the same order, each line once whatever happens."""

import json
from collections.abc import Sequence
from typing import Any

import pydantic

from i2cl.errors import I2CLError, first_problem
from i2cl.faces.server.batcher import Batcher
from i2cl.faces.server.jobs import Job
from i2cl.faces.server.refusals import RefusalError
from i2cl.faces.server.tasks import TaskFolder
from i2cl.models.encoding import TooLongError
from i2cl.models.scoring import require_texts
from i2cl.storage.journal import Journal

INPUT, OUTPUT = "input.jsonl", "output.jsonl"

CHUNK = 64
"""Lines that are asked, answered and written together; a kill loses at most those."""


class Line(pydantic.BaseModel):
    """A line of the file that comes in."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    input: str
    model: str | None = None
    custom_id: str | int | None = None


def checked(body: bytes, model: str | None, tasks: TaskFolder) -> tuple[dict[str, Any], bytes]:
    """What the job of a file has to know, and its lines, each with its task.

    Versions are those of now: what a name stands for later changes nothing.

    Args:
        body: the file.
        model: the task of lines that name none.
        tasks: that the lines may name.

    Raises:
        RefusalError: 422 naming every line that cannot be used, 404 on an unknown task.
    """
    lines, refused = [], []
    for number, text in enumerate(body.splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = Line.model_validate_json(text)
            require_texts([line.input])
            _require_task(line.model or model)
        except pydantic.ValidationError as error:
            refused.append(f"line {number}: {first_problem(error)}")
        except I2CLError as error:
            refused.append(f"line {number}: {str(error).removeprefix('text 1 ')}")
        else:
            lines.append(line.model_copy(update={"model": line.model or model}))
    if refused:
        raise RefusalError(422, "bad_rows", refused[0], rows=refused[:1000])
    if not lines:
        raise RefusalError(422, "bad_input", "the file has no lines: give it at least one")
    names = sorted({line.model for line in lines if line.model is not None})
    digests = {name: tasks.entry(name).digest for name in names}
    told = {"rows": len(lines), "tasks": names, "digests": digests}
    return told, b"".join(line.model_dump_json().encode() + b"\n" for line in lines)


def _require_task(name: str | None) -> None:
    if name is None:
        raise I2CLError("no task is named: write model into the line, or give ?model= to all")


def answered(job: Job, batcher: Batcher, tasks: TaskFolder) -> dict[str, Any]:
    """Do the job of a file: what its last event tells. Goes on behind the last chunk that is on the disk.

    Raises:
        I2CLError: if a version of a task is gone.
        FitStoppedError: if it is cancelled.
    """
    lines = [json.loads(text) for text in (job.folder / INPUT).read_bytes().splitlines()]
    digests = job.told["digests"]
    with Journal.opened(job.folder / OUTPUT, group=CHUNK) as journal:
        for start in range(journal.kept, len(lines), CHUNK):
            job.require_wanted()
            chunk = lines[start : start + CHUNK]
            found = _answers(chunk, digests, batcher, tasks)
            told = [
                {"line": start + place, "custom_id": line["custom_id"], "model": line["model"], **answer}
                for place, (line, answer) in enumerate(zip(chunk, found, strict=True), start=1)
            ]
            journal.append(b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in told))
            job.show("rows", done=start + len(chunk), rows=len(lines))
    return {"rows": len(lines)}


def _answers(
    chunk: Sequence[dict[str, Any]], digests: dict[str, str], batcher: Batcher, tasks: TaskFolder
) -> list[dict[str, Any]]:
    """Of each line: its label and probabilities, or why it has none."""
    found: list[dict[str, Any]] = [{} for _ in chunk]
    rows, places = [], []
    for at, line in enumerate(chunk):
        try:
            rows += tasks.of_version(digests[line["model"]], [line["input"]])
            places.append(at)
        except TooLongError as error:
            found[at] = RefusalError.of(error).body()
    scored = batcher.submit_slices(rows).done.result() if rows else ()
    for at, row, scores in zip(places, rows, scored, strict=True):
        labels = row.task.questions.task.labels
        probs = scores.softmax(-1).tolist()
        found[at] = {
            "digest": digests[chunk[at]["model"]],
            "label": labels[probs.index(max(probs))],
            "labels": labels,
            "probs": probs,
        }
    return found
