"""Batch files in JSON Lines. The output has one answer or error per input line, in the same order."""

import codecs
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import IO, Any

import pydantic

from i2cl.errors import I2CLError, first_problem
from i2cl.injections.pool import TaskQuery
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.task_store import Entry, TaskStore
from i2cl.models.scoring import TextError
from i2cl.storage.journal import Journal
from i2cl.tasks.formats import load_json
from i2cl.tasks.labels import is_blank, predicted_labels

INPUT, OUTPUT = "input.jsonl", "output.jsonl"
TASKS = "input.tasks"  # folder with a copy of each task, which may be replaced before the job has finished
CHUNK = 64  # lines classified and written together; a kill loses at most one chunk
MAX_LINE = 2**20  # bytes; longer than any model's context
MAX_ERRORS = 1000  # checking stops after this many malformed lines
MAX_JOB_BYTES = 2**30  # input of a job and upper bound of its answers, on the disk
BYTES_PER_ANSWER, BYTES_PER_PROBABILITY = 400, 25  # upper bounds of the JSON

# Characters that JSON does not escape although `str.splitlines` and httpx end a line there.
LINE_BREAKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}


class BatchLine(pydantic.BaseModel):
    """A line of the input."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    input: str
    model: str | None = None
    custom_id: str | int | None = None


def read_lines(
    body: IO[bytes], model: str | None, find: Callable[[str], Entry], rows: IO[bytes]
) -> tuple[int, list[str], int]:
    """Check the lines of a batch file and write each, with its task, to ``rows``.

    Reads one line at a time. A blank text does not fail the file: its line gets an error instead of an answer
    when the job runs.

    Args:
        body: the file.
        model: task of lines without a ``model``.
        find: returns a task by its name, or raises RefusalError.
        rows: file for the checked lines.

    Returns:
        The number of lines, the names of their tasks, and an upper bound of the job's bytes on the disk.

    Raises:
        RefusalError: 422 naming every malformed line, or if no line has a text; 404 for an unknown task; 413
            if the job would take more than `MAX_JOB_BYTES`.
    """
    count, size = 0, 0
    labels: dict[str, int] = {}  # number of labels of each task
    errors: list[str] = []
    blank: list[str] = []
    for number, text in _nonblank_lines(body):
        try:
            line, name = _parse_line(text, model)
            if name not in labels:
                labels[name] = len(find(name).labels)
        except RefusalError as error:
            raise error.at(f"line {number}") from None
        except I2CLError as error:
            errors.append(f"line {number}: {error}")
        else:
            count += 1
            if is_blank(line.input):
                blank.append(f"line {number}: the text is empty: remove the line or fill it in")
            row = {"line": number, **line.model_dump(), "model": name}
            written = rows.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            size += 2 * written + BYTES_PER_ANSWER + BYTES_PER_PROBABILITY * labels[name]
            if size > MAX_JOB_BYTES:
                limit = f"{MAX_JOB_BYTES / 1e9:.1f} GB"
                message = f"the file with its answers would exceed {limit} on line {number}"
                raise RefusalError(413, "file_too_long", message, "split it")
        if len(errors) == MAX_ERRORS:
            break
    if count == len(blank):
        errors += blank[:MAX_ERRORS]
    _raise_if_invalid(errors, count)
    return count, sorted(labels), size


def _raise_if_invalid(errors: list[str], count: int) -> None:
    if errors:
        raise RefusalError(422, "bad_rows", errors[0], rows=errors)
    if not count:
        raise RefusalError(422, "bad_input", "the file has no lines", "send at least one")


def _nonblank_lines(body: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, numbered from 1, up to the first that is too long."""
    for number, text in enumerate(iter(partial(body.readline, MAX_LINE + 1), b""), start=1):
        line = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
        if line.strip():
            yield number, line
        if len(line) > MAX_LINE:
            return


def _parse_line(text: bytes, model: str | None) -> tuple[BatchLine, str]:
    if len(text) > MAX_LINE:
        raise I2CLError(f"the line is longer than {MAX_LINE} bytes: shorten it")
    try:
        line = BatchLine.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise I2CLError(first_problem(error)) from None
    load_json(text)  # raises if a key is given twice
    if (name := line.model or model) is None:
        raise I2CLError("no task is named: add model to the line, or ?model= for all lines")
    return line, name


def run(job: Job, batcher: Batcher, tasks: TaskStore) -> dict[str, Any]:
    """Run a batch job from the last chunk on the disk, and return the fields of its last event.

    A line that cannot be scored gets an ``error`` instead of a label. The last event lists the labels of each
    task in the order of the probabilities; on every line they would multiply the size of the file. Raises
    FitStoppedError if the job is cancelled.
    """
    digests, rows, out = job.request["digests"], job.request["rows"], job.folder / OUTPUT
    encode = partial(tasks.queries_of_version, copies=job.folder / TASKS)
    with Journal.open(out, group=CHUNK) as journal, (job.folder / INPUT).open("rb") as lines:
        done = journal.kept
        with out.open("rb") as written:
            failures = sum("error" in json.loads(line) for line in written)
        deque(islice(lines, done), maxlen=0)
        while chunk := [json.loads(line) for line in islice(lines, CHUNK)]:
            job.raise_if_cancelled()
            answers = _answers(chunk, digests, batcher, encode)
            records = [
                {name: line[name] for name in ("line", "custom_id", "model")} | answer
                for line, answer in zip(chunk, answers, strict=True)
            ]
            texts = (
                json.dumps(record, ensure_ascii=False).translate(LINE_BREAKS) + "\n" for record in records
            )
            journal.append("".join(texts).encode())
            done += len(chunk)
            failures += sum("error" in record for record in records)
            job.publish_progress("rows", done=done, rows=rows, failed=failures)
    return {"rows": rows, "failed": failures, "labels": job.request["labels"]}


def _answers(
    chunk: Sequence[dict[str, Any]],
    digests: dict[str, str],
    batcher: Batcher,
    encode: Callable[[str, list[str]], list[TaskQuery]],
) -> list[dict[str, Any]]:
    """Return the label, or the labels of a multi-label task, and probabilities of each line, or its error."""
    answers: list[dict[str, Any]] = [{} for _ in chunk]
    rows, indices = [], []
    for index, line in enumerate(chunk):
        try:
            rows += encode(digests[line["model"]], [line["input"]])
            indices.append(index)
        except TextError as error:
            refusal = RefusalError(422, "bad_input", f"the text {error.problems[0]}", error.hint)
            answers[index] = refusal.body()
        except I2CLError as error:
            answers[index] = RefusalError.of(error).body()
    scored = batcher.submit_slices(rows).done.result() if rows else ()
    for index, row, scores in zip(indices, rows, scored, strict=True):
        if isinstance(scores, RefusalError):
            answers[index] = scores.body()
            continue
        head, labels = row.task.head, row.task.scorer.task.labels
        probs = head.probabilities(scores.log_probs).tolist()
        words = [labels[place] for place in predicted_labels(probs, head.thresholds)]
        answer = {"labels": words} if head.multi_label else {"label": words[0]}
        answers[index] = {"digest": digests[chunk[index]["model"]], **answer, "probs": probs}
    return answers


def job_request(entries: dict[str, Entry], rows: int, size: int) -> dict[str, Any]:
    """Return the request of a batch job; ``entries``: its tasks by name."""
    return {
        "rows": rows,
        "tasks": sorted(entries),
        "digests": {name: entry.digest for name, entry in entries.items()},
        "labels": {name: list(entry.labels) for name, entry in entries.items()},
        "bytes": size,
    }
