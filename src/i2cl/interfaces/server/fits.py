"""A task out of labelled examples: checked when they come, fitted when it is their turn."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.draw import MAX_SHOTS, Draw, draw, fitting, up_to
from i2cl.experiments.evidence.fit_evaluation import EvaluationPlan, FitObserver, plan_evaluation
from i2cl.experiments.fitting import FitRequest, fit_task
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.task_store import TaskStore
from i2cl.methods import Injector, calibrating_method
from i2cl.methods.anchored import AnchoredWithEmbeddings
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions
from i2cl.tasks import Examples, Task, Template, load_task
from i2cl.tasks.labels import LabelLookup
from i2cl.tasks.rows import unusable_rows
from i2cl.tasks.survey import Survey

SEVERAL = 5  # texts with several labels that are shown
SNIPPET = 60  # characters of such a text
LOOK = 0.1  # seconds between two steps that are told of: a small model takes hundreds a second


class SharedDecoder(Decoder):
    """The server's model, as a fit has it: in short passes, with requests let in between them."""

    def __init__(self, batcher: Batcher, job: Job) -> None:
        whole = batcher.pool.decoder
        vars(self).update(vars(whole), token_budget=batcher.slice)
        self.job = job  # that it is used for
        self.elsewhere = 0.0  # seconds that went to requests meanwhile
        self._batcher = batcher

    def pause(self) -> None:
        """Answer requests that wait; end a fit that is not wanted any more."""
        self.job.raise_if_cancelled()
        began = time.perf_counter()
        self._batcher.pause()
        self.elsewhere += time.perf_counter() - began


def read_task(
    decoder: Decoder, tasks: TaskStore, request: Mapping[str, Any], folder: Path
) -> tuple[Task, Draw | None]:
    """Read the rows of a fit request and draw the demonstrations.

    Args:
        decoder: The server's model.
        tasks: The server's tasks.
        request: Fields of `i2cl.interfaces.server.routes.schemas.Fit`, and ``file_names``: the names that
            errors give the files of the folder.
        folder: Holds the training rows, ``input.csv`` (or .tsv, .jsonl, .json), and the test rows, if any,
            ``input.test.csv``.

    Returns:
        The task with its rows, and its demonstrations, or None if their number depends on the model's speed.

    Raises:
        RefusalError: 422 if rows cannot be used, listing them; 413 if a text exceeds the context.
        I2CLError: If the labels, the template or the options are invalid.
    """
    try:
        task = _read(request, folder)
    except RefusalError:
        raise
    except I2CLError as error:
        raise RefusalError(422, "bad_input", _public_message(str(error), request, folder)) from None
    task = replace(task, name=request["name"], title=request["name"])
    words = request.get("instruction") or None
    task = task.with_prompt_options(decoder.tokenizer, chat=bool(request.get("chat")), instruction=words)
    drawn = _draw(request, task, _method(request, tasks))
    questions = Questions(decoder, task)
    for rows in (task.train, task.test):
        questions.queries([example.text for example in rows], cut=False)
    return task, drawn


def most_demonstrations(task: Task, drawn: Draw | None, seed: int) -> int:
    """Maximum number of rows that the fit takes; see `i2cl.experiments.draw.fitting`."""
    return len(drawn.demonstrations if drawn else up_to(task, MAX_SHOTS, seed))


def _draw(request: Mapping[str, Any], task: Task, method: Injector) -> Draw | None:
    scored = bool(request["evaluate"]) and not task.test
    shots, seed = request.get("shots"), request["seed"]
    return draw(task, method, shots, seed, from_file=True, keep_back=None, scored=scored)


def survey_of(decoder: Decoder, task: Task) -> dict[str, Any]:
    """What the training rows are, for JSON; texts with several labels: the first few, shortened."""
    survey = Survey.from_task(task)
    several = survey.contradictions[:SEVERAL]
    return survey.record() | {
        "contradictions": [{"text": text[:SNIPPET], "labels": list(words)} for text, words in several],
        "contradicting": len(survey.contradictions),
        "longest_tokens": max(map(len, decoder.encoder(list(survey.longest)))),
        "most_tokens": decoder.max_length,
    }


def _read(request: Mapping[str, Any], folder: Path) -> Task:
    train_path, test_path = _input_paths(folder)
    template, labels = Template(request["template"]), request.get("labels")
    columns = {name: request.get(f"{name}_column") or name for name in ("text", "label")}
    if labels is not None:
        Task(request["name"], tuple(labels), template)  # raises once here instead of once per row
    lookup: Sequence[str] | LabelLookup | None = labels
    # the training file comes first: it says whether class ids start at 0 or 1
    for path in filter(None, (train_path, test_path)):
        refused, lookup = unusable_rows(path, lookup, columns["text"], columns["label"])
        if refused := [_public_message(message, request, folder) for message in refused]:
            raise RefusalError(422, "bad_rows", refused[0], rows=refused)
    return load_task(
        train_path,
        template=template,
        labels=labels,
        text_column=columns["text"],
        label_column=columns["label"],
        test_path=test_path,
    )


def _input_paths(folder: Path) -> tuple[Path, Path | None]:
    """Return the paths of the training rows and, if there is one, of the file of test rows."""
    test_path = next(folder.glob("input.test.*"), None)
    return next(path for path in folder.glob("input.*") if path != test_path), test_path


def _public_message(message: str, request: Mapping[str, Any], folder: Path) -> str:
    """Return an error about input files with the client's file names instead of the server's paths."""
    for file, name in request.get("file_names", {}).items():
        message = message.replace(str(folder / file), name)
    message = message.replace(f"{folder}/", "")
    message = re.sub(r"say which one holds the (\w+): .*", r"set \1_column to the one that holds it", message)
    return re.sub(r"(?<=_column) \(--\w+-column\)", "", message)  # options of the command line


def run(job: Job, batcher: Batcher, tasks: TaskStore) -> dict[str, Any]:
    """Do the job of a fit: what its last event tells. It begins anew after a kill and comes to the same
    vectors. Raises I2CLError on examples that cannot be fitted, such as scores that are not finite;
    FitStoppedError if it is cancelled, or the server stops.
    """
    request = job.request
    decoder = SharedDecoder(batcher, job)
    task, drawn = read_task(decoder, tasks, request, job.folder)
    method, seed = _method(request, tasks), request["seed"]
    observer = _JobObserver(job, decoder)

    def work() -> tuple[Injection, Examples]:
        chosen = drawn.timed(decoder, task, method) if drawn else _draw_in_time(job, decoder, task, method)
        demonstrations = chosen.demonstrations
        plan = plan_evaluation(task, demonstrations, request["evaluate"], seed=seed)
        job.publish_progress(
            "drawn", demonstrations=len(demonstrations), seconds=chosen.seconds, **_plan(plan)
        )
        injection = fit_task(
            decoder, task, demonstrations, FitRequest(method, seed), plan, observer, observer.clock
        )
        return (_untimed(injection) if injection.worth else injection), demonstrations

    injection, demonstrations = batcher.run(work).result()
    entry = tasks.put(request["name"], injection)
    record: dict[str, Any] = {"name": entry.name, "digest": entry.digest, "labels": list(entry.labels)}
    record |= {"demonstrations": len(demonstrations), "history": list(injection.history)}
    record |= {"worth": injection.worth or None, "tokens": _tokens(decoder, task, demonstrations)}
    return record


def _draw_in_time(job: Job, decoder: Decoder, task: Task, method: Injector) -> Draw:
    """Draw as many demonstrations as time allows; as many as before if the job was interrupted."""
    path, seed = job.folder / "draw.json", job.request["seed"]
    scored = bool(job.request["evaluate"]) and not task.test
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        again = draw(task, method, seed=seed, from_file=True, scored=scored, **before)
        assert again is not None  # noqa: S101 - as the number of shots is given
        return again.timed(decoder, task, method)
    drawn = fitting(decoder, task, method, seed, keep_back=None, scored=scored)
    path.write_text(json.dumps({"shots": drawn.shots, "keep_back": drawn.keep_back}), encoding="utf-8")
    return drawn


def _plan(plan: EvaluationPlan) -> dict[str, Any]:
    return {"evaluated_rows": len(plan.rows), "split": plan.split, "folds": plan.folds}


class _JobObserver(FitObserver):
    """Publishes the progress of a fit as events of its job."""

    def __init__(self, job: Job, decoder: SharedDecoder) -> None:
        self._job = job
        self._decoder = decoder
        self._shown = 0.0

    def clock(self) -> float:
        """Seconds that the fit itself took, without the requests that were answered meanwhile."""
        return time.perf_counter() - self._decoder.elsewhere

    def step(self, done: int, total: int, loss: float) -> None:
        if done == total or time.monotonic() - self._shown > LOOK:
            self._shown = time.monotonic()
            self._job.publish_progress("step", step=done, steps=total, loss=loss)

    def fitted(self, injection: Injection, seconds: float) -> None:
        loss = injection.history[-1] if injection.history else None
        self._job.publish_progress("fitted", seconds=seconds, loss=loss)

    def evaluating(self, method: str) -> None:
        self._job.publish_progress("scoring", method=method)


def _untimed(injection: Injection) -> Injection:
    """Without the time of a text: it was measured in short passes, with those of others in between."""
    methods = {
        name: {key: value for key, value in score.items() if key != "milliseconds_per_query"}
        for name, score in injection.worth["methods"].items()
    }
    return replace(injection, worth=injection.worth | {"methods": methods})


def _method(request: Mapping[str, Any], tasks: TaskStore) -> Injector:
    """What fits. Raises I2CLError on options that it has not, or an encoder that the server has not."""
    settings, recipe = request.get("settings") or {}, request.get("recipe")
    method = calibrating_method(request.get("method"), settings, recipe)
    if isinstance(method, AnchoredWithEmbeddings) and tasks.encoders and "encoder" not in settings:
        method = calibrating_method(method.name, {"encoder": tasks.encoders[0], **settings})
    if isinstance(method, AnchoredWithEmbeddings):
        tasks.require_encoder(method.embeddings.encoder)
    return method


def _tokens(decoder: Decoder, task: Task, demonstrations: Examples) -> dict[str, int]:
    """Tokens read for a text of middle length: by the task and by zero-shot, and by few-shot."""
    rows = task.test or task.train
    ids = sorted(Questions(decoder, task).queries([row.text for row in rows]), key=len)[len(rows) // 2]
    shown = [(row.text, task.labels[row.label]) for row in demonstrations]
    front = decoder.encoder([task.template.prompt(shown, "")])[0]
    empty = decoder.encoder([task.template.query("")])[0]
    return {"task": len(ids), "few_shot": len(ids) + len(front) - len(empty)}
