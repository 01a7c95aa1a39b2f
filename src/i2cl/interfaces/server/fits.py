"""A task out of labelled examples: checked when they come, fitted when it is their turn."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from i2cl.core.anchored import require_few
from i2cl.core.edits import LinearEdit, NoisyEdit, RowsEdit
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.evidence.baselines import labelled_rows, refitting, with_folds, with_worth
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.task_store import TaskStore
from i2cl.methods import Injector, calibrating_method
from i2cl.methods.anchored import Anchored, AnchoredWithEmbeddings
from i2cl.methods.calibrated.folds import unmeasurable
from i2cl.models.batching import Batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.scoring import Questions
from i2cl.tasks import Example, Task, Template, load_task
from i2cl.tasks.labels import LabelLookup
from i2cl.tasks.rows import refused_rows
from i2cl.tasks.survey import Survey
from i2cl.tasks.task import group_by_label

SHOTS = 5  # demonstrations a class where nobody says how many and each class has as many
SEVERAL = 5  # texts with several labels that are shown
SNIPPET = 60  # characters of such a text
LOOK = 0.1  # seconds between two steps that are told of: a small model takes hundreds a second


class SharedDecoder(Decoder):
    """The server's model, as a fit has it: in short passes, with requests let in between them."""

    def __init__(self, batcher: Batcher, job: Job) -> None:
        whole = batcher.pool.decoder
        vars(self).update(vars(whole), token_budget=batcher.slice)
        self.job = job  # that it is used for
        self.seen: Edit | None = None  # what was injected last
        self.elsewhere = 0.0  # seconds that went to requests meanwhile
        self._batcher = batcher

    def pause(self) -> None:
        """Answer requests that wait; end a fit that is not wanted any more."""
        self.job.raise_if_cancelled()
        began = time.perf_counter()
        self._batcher.pause()
        self.elsewhere += time.perf_counter() - began

    def forward(self, batch: Batch, *, edit: Edit | None = None, **options: Any) -> torch.Tensor:
        """See `Decoder.forward`."""
        self.seen = edit
        return super().forward(batch, edit=edit, **options)


def read_task(
    decoder: Decoder, tasks: TaskStore, request: Mapping[str, Any], folder: Path
) -> tuple[Task, tuple[Example, ...]]:
    """A task with its rows, and its demonstrations, if it can be fitted.

    ``request``: fields of a request for a fit, see `i2cl.interfaces.server.routes.schemas.Fit`; ``folder``:
    holds ``input.json`` or ``input.csv``, and ``input.test.json`` where there are test rows. Raises
    RefusalError: 422 naming every row that cannot be used, 413 on a text that exceeds the context; I2CLError
    on labels, a template or options that cannot be used.
    """
    try:
        task = _read(request, folder)
    except RefusalError:
        raise
    except I2CLError as error:
        raise RefusalError(422, "bad_input", _short(str(error), folder)) from None
    task = replace(task, name=request["name"], title=request["name"])
    words = request.get("instruction") or None
    task = task.worded(decoder.tokenizer, chat=bool(request.get("chat")), instruction=words)
    fewest = min(map(len, group_by_label(task.train, len(task.labels))))
    demonstrations = task.sample(request.get("shots") or max(1, min(SHOTS, fewest)), request["seed"])
    if isinstance(_method(request, tasks), Anchored):
        require_few(demonstrations)
    questions = Questions(decoder, task)
    for rows in (task.train, task.test):
        questions.queries([example.text for example in rows], cut=False)
    return task, demonstrations


def survey_of(decoder: Decoder, task: Task) -> dict[str, Any]:
    """What the training rows are, for JSON; texts with several labels: the first few, shortened."""
    survey = Survey.of(task)
    several = survey.contradictions[:SEVERAL]
    return survey.record() | {
        "contradictions": [{"text": text[:SNIPPET], "labels": list(words)} for text, words in several],
        "contradicting": len(survey.contradictions),
        "longest_tokens": max(map(len, decoder.encoder(list(survey.longest)))),
        "most_tokens": decoder.max_length,
    }


def _read(request: Mapping[str, Any], folder: Path) -> Task:
    path, *tests = (
        folder / name for name in ("input.json", "input.csv", "input.test.json") if (folder / name).is_file()
    )
    shape, labels = Template(request["template"]), request.get("labels")
    if labels is not None:
        Task(request["name"], tuple(labels), shape)  # what is wrong with these is not told of each row
    meant: Sequence[str] | LabelLookup | None = labels
    for file in (path, *tests):  # the first says whether ids begin at 0 or 1
        refused, meant = refused_rows(file, meant)
        if refused := [_short(why, folder) for why in refused]:
            raise RefusalError(422, "bad_rows", refused[0], rows=refused)
    return load_task(path, template=shape, labels=labels, test_path=tests[0] if tests else None)


def run(job: Job, batcher: Batcher, tasks: TaskStore) -> dict[str, Any]:
    """Do the job of a fit: what its last event tells. It begins anew after a kill and comes to the same
    vectors. Raises I2CLError on examples that cannot be fitted, such as scores that are not finite;
    FitStoppedError if it is cancelled, or the server stops.
    """
    request = job.request
    decoder = SharedDecoder(batcher, job)
    task, demonstrations = read_task(decoder, tasks, request, job.folder)

    def work() -> Injection:
        started = time.perf_counter()
        method, shown = _method(request, tasks), 0.0

        def step(done: int, of: int, loss: float) -> None:
            nonlocal shown
            if done == of or time.monotonic() - shown > LOOK:
                shown = time.monotonic()
                job.publish_progress("step", step=done, steps=of, loss=loss, **map_of(decoder.seen))

        injection = method.injection(decoder, task, demonstrations, request["seed"], step)
        seconds = time.perf_counter() - started - decoder.elsewhere
        job.publish_progress(
            "fitted", seconds=seconds, loss=injection.history[-1] if injection.history else None
        )
        queries = labelled_rows(task, demonstrations, request["evaluate"])
        watched: Any = {
            "seconds": seconds,
            "watch": lambda name: job.publish_progress("scoring", method=name),
        }
        watched["method"] = method
        if queries:
            return _untimed(with_worth(injection, decoder, task, demonstrations, queries, **watched))
        if request["evaluate"] and not unmeasurable(task, demonstrations, seed=request["seed"]):
            make = partial(refitting(method, injection), decoder, task, seed=request["seed"])
            return _untimed(with_folds(injection, decoder, task, demonstrations, make, **watched))
        return injection

    injection: Injection = batcher.run(work).result()
    entry = tasks.put(request["name"], injection)
    record: dict[str, Any] = {"name": entry.name, "digest": entry.digest, "labels": list(entry.labels)}
    record |= {"demonstrations": len(demonstrations), "history": list(injection.history)}
    record |= {"worth": injection.worth or None, "tokens": _tokens(decoder, task, demonstrations)}
    return record | map_of(injection.edit())


def _untimed(injection: Injection) -> Injection:
    """Without the time of a text: it was measured in short passes, with those of others in between."""
    methods = {
        name: {key: value for key, value in score.items() if key != "milliseconds_per_query"}
        for name, score in injection.worth["methods"].items()
    }
    return replace(injection, worth=injection.worth | {"methods": methods})


def map_of(edit: Edit | None) -> dict[str, Any]:
    """Coefficients [layer][writer][lambda, beta] and the size of lambda v [layer][writer], for JSON, of what
    a pass injects; of several rows' own ones, the first.
    """
    if isinstance(edit, NoisyEdit):
        edit = edit.injection
    if isinstance(edit, LinearEdit):
        pairs = edit.coefficients.detach()
        scaled = pairs[..., :1] * edit.values.to(pairs.device)
    elif isinstance(edit, RowsEdit):
        scaled, keep = edit.scaled[0].detach(), edit.keep[0].detach()
        pairs = torch.stack([torch.ones_like(keep), keep], dim=-1)
    else:
        return {}
    arrays = {"coefficients": pairs, "sizes": scaled.square().mean(-1).sqrt()}
    return {name: (values.double() * 1e5).round().div(1e5).tolist() for name, values in arrays.items()}


def _method(request: Mapping[str, Any], tasks: TaskStore) -> Injector:
    """What fits. Raises I2CLError on options that it has not, or an encoder that the server has not."""
    settings, recipe = request.get("settings") or {}, request.get("recipe")
    method = calibrating_method(request.get("method"), settings, recipe)
    if isinstance(method, AnchoredWithEmbeddings) and tasks.encoders and "encoder" not in settings:
        method = calibrating_method(method.name, {"encoder": tasks.encoders[0], **settings})
    if isinstance(method, AnchoredWithEmbeddings):
        tasks.require_encoder(method.embeddings.encoder)
    return method


def _tokens(decoder: Decoder, task: Task, demonstrations: tuple[Example, ...]) -> dict[str, int]:
    """Tokens read for a text of middle length: by the task and by zero-shot, and by few-shot."""
    rows = task.test or task.train
    ids = sorted(Questions(decoder, task).queries([row.text for row in rows]), key=len)[len(rows) // 2]
    shown = [(row.text, task.labels[row.label]) for row in demonstrations]
    front = decoder.encoder([task.template.prompt(shown, "")])[0]
    empty = decoder.encoder([task.template.query("")])[0]
    return {"task": len(ids), "few_shot": len(ids) + len(front) - len(empty)}


def _short(message: str, folder: Path) -> str:
    """Without the server's own folders and the options of its functions."""
    shortened = message.replace(f"{folder}/", "")
    return re.sub(r"say which one holds .*", "name the columns text and label", shortened)
