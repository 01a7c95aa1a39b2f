"""Fits as jobs: requests are checked when they arrive, and run on the model thread between other requests."""

import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from i2cl.core.experts import LLM, TfidfExpert
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.draw import MAX_SHOTS, Draw, draw, draw_within_budget, up_to
from i2cl.experiments.evidence.fit_evaluation import FitObserver, FitRequest, plan_evaluation
from i2cl.experiments.fitting import fit_task, require_supported
from i2cl.injections.ensemble import EnsembleConfig
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.refusals import OPTION, RefusalError
from i2cl.interfaces.server.routes.schemas import FitOptions
from i2cl.interfaces.server.task_store import TaskStore
from i2cl.methods import Injector, make_injector
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Examples, Task, Template, load_task
from i2cl.tasks.files import RowError
from i2cl.tasks.survey import Survey
from i2cl.tasks.task import LABEL_SEPARATOR

MAX_SHOWN_CONTRADICTIONS = 5  # texts with several labels in the description of the rows
SNIPPET_CHARACTERS = 60  # of such a text
PROGRESS_SECONDS = 0.1  # minimum interval between progress events


class FitJob(FitOptions):
    """Request of a fit job; stored with the job."""

    file_names: dict[str, str] = Field(default_factory=dict)  # shown in errors, by names in the job's folder


class SharedDecoder(Decoder):
    """The server's model as a fit uses it: in short passes, with queued requests running between them.

    Attributes:
        job: the job of the fit.
        paused_seconds: time that queued requests took.
    """

    def __init__(self, batcher: Batcher, job: Job) -> None:
        vars(self).update(vars(batcher.pool.decoder), token_budget=batcher.slice)
        self.job = job
        self.paused_seconds = 0.0
        self._batcher = batcher

    def pause(self) -> None:
        """Run queued requests. Raises FitStoppedError if the job was cancelled, or during shutdown."""
        self.job.raise_if_cancelled()
        began = time.perf_counter()
        self._batcher.pause()
        self.paused_seconds += time.perf_counter() - began


def read_task(decoder: Decoder, tasks: TaskStore, request: FitJob, folder: Path) -> tuple[Task, Draw | None]:
    """Read the rows of a fit request and draw the demonstrations.

    Args:
        decoder: the server's model.
        tasks: the server's tasks.
        request: the options of the fit.
        folder: has the training rows, ``input.csv`` (or .tsv, .jsonl, .json), and optionally the test rows,
            ``input.test.csv``.

    Returns:
        The task with its rows, and its demonstrations, or None if their number depends on the model's speed.

    Raises:
        RefusalError: 422 if rows cannot be used, listing them; 413 if a text exceeds the context.
        I2CLError: if the labels, the template or the options are invalid.
    """
    try:
        task = _load_rows(request, folder)
    except RefusalError:
        raise
    except I2CLError as error:
        message = _with_file_names(error.message, request, folder)
        hint = error.hint and OPTION.sub("", error.hint)
        raise RefusalError(422, "bad_input", message, hint) from None
    task = replace(task, name=request.name, title=request.name)
    instruction = request.instruction or None
    task = task.with_prompt_options(decoder.tokenizer, chat=request.chat, instruction=instruction)
    method, ensemble = _method(request, tasks)
    require_supported(task, FitRequest(method, ensemble))
    llm_method = method if ensemble.uses_llm else None
    drawn = _draw(request, task, llm_method, shots=request.shots, keep_back=None)
    if ensemble.uses_llm:
        scorer = LabelScorer(decoder, task)
        for rows in (task.train, task.test):
            scorer.queries([example.text for example in rows], cut=False)
    return task, drawn


def check(decoder: Decoder, tasks: TaskStore, request: FitJob, folder: Path) -> dict[str, Any]:
    """Describe the rows of a fit request as JSON, with a few of the texts that have several labels. Raises as
    `read_task`.
    """
    task, drawn = read_task(decoder, tasks, request, folder)
    survey = Survey.from_task(task)
    contradictions = islice(survey.contradictions.items(), MAX_SHOWN_CONTRADICTIONS)
    demonstrations = drawn.demonstrations if drawn else up_to(task, MAX_SHOTS, request.seed)
    data = survey.record() | {
        "contradictions": [
            {"text": text[:SNIPPET_CHARACTERS], "labels": words} for text, words in contradictions
        ],
        "contradicting": len(survey.contradictions),
        "longest_tokens": max(map(len, decoder.encoder(list(survey.longest)))),
        "most_tokens": decoder.max_length,
    }
    rows = {"rows": len(task.train), "test_rows": len(task.test), "demonstrations": len(demonstrations)}
    return {"object": "check", "labels": list(task.labels), **rows, "data": data}


def run(job: Job, batcher: Batcher, tasks: TaskStore) -> dict[str, Any]:
    """Run a fit job, and return the fields of its last event.

    After a kill it starts again from the examples, with the same result. Raises I2CLError if the examples
    cannot be fitted, FitStoppedError if the job is cancelled or the server shuts down.
    """
    request = FitJob.model_validate(job.request)
    decoder = SharedDecoder(batcher, job)
    task, drawn = read_task(decoder, tasks, request, job.folder)
    method, ensemble = _method(request, tasks)
    observer = _JobObserver(job, decoder)

    def work() -> tuple[Injection, Examples]:
        if drawn is None:
            chosen = _draw_in_time(job.folder, request, decoder, task, method)
        else:
            chosen = drawn.timed(decoder, task, method) if ensemble.uses_llm else drawn
        demonstrations = chosen.demonstrations
        plan = plan_evaluation(task, demonstrations, request.evaluate, seed=request.seed)
        job.publish_progress(
            "drawn",
            demonstrations=len(demonstrations),
            seconds=chosen.seconds,
            evaluated_rows=len(plan.rows),
            split=plan.split,
            folds=plan.folds,
        )
        options = FitRequest(method, ensemble, request.seed)
        injection = fit_task(decoder, task, demonstrations, options, plan, observer, observer.clock)
        return (_without_timings(injection) if injection.evaluation else injection), demonstrations

    injection, demonstrations = batcher.run(work).result()
    entry = tasks.put(request.name, injection)
    return {
        "name": entry.name,
        "digest": entry.digest,
        "labels": list(entry.labels),
        "demonstrations": len(demonstrations),
        "history": list(injection.history),
        "evaluation": injection.evaluation or None,
        "tokens": _tokens_per_text(decoder, task, demonstrations) if ensemble.uses_llm else None,
    }


def _draw(
    request: FitJob, task: Task, method: Injector | None, *, shots: int | None, keep_back: int | None
) -> Draw | None:
    scored = bool(request.evaluate) and not task.test
    return draw(task, method, shots, request.seed, from_file=True, keep_back=keep_back, scored=scored)


def _draw_in_time(folder: Path, request: FitJob, decoder: Decoder, task: Task, method: Injector) -> Draw:
    """Draw as many demonstrations as can be fitted in time; after a restart, as many as before."""
    path = folder / "draw.json"
    if path.exists():
        same_draw = _draw(request, task, method, **json.loads(path.read_text(encoding="utf-8")))
        assert same_draw is not None  # noqa: S101 - None only without a number of shots
        return same_draw.timed(decoder, task, method)
    scored = bool(request.evaluate) and not task.test
    drawn = draw_within_budget(decoder, task, method, request.seed, keep_back=None, scored=scored)
    path.write_text(json.dumps({"shots": drawn.shots, "keep_back": drawn.keep_back}), encoding="utf-8")
    return drawn


def _load_rows(request: FitJob, folder: Path) -> Task:
    test_path = next(folder.glob("input.test.*"), None)
    train_path = next(path for path in folder.glob("input.*") if path != test_path)
    template = Template(request.template)
    if request.labels is not None:
        Task(request.name, tuple(request.labels), template)  # raises once here instead of once per row
    try:
        return load_task(
            train_path,
            template=template,
            labels=request.labels,
            text_column=request.text_column,
            label_column=request.label_column,
            label_separator=request.label_separator,
            label_columns=request.label_columns,
            test_path=test_path,
        )
    except RowError as error:
        rows = [_with_file_names(message, request, folder) for message in error.rows or (str(error),)]
        raise RefusalError(422, "bad_rows", rows[0], rows=rows) from None


def _with_file_names(message: str, request: FitJob, folder: Path) -> str:
    """Return an error about input files with the client's file names instead of the server's paths."""
    for file, name in request.file_names.items():
        message = message.replace(str(folder / file), name)
    return OPTION.sub("", message.replace(f"{folder}/", ""))


class _JobObserver(FitObserver):
    """Publishes the progress of a fit as events of its job."""

    def __init__(self, job: Job, decoder: SharedDecoder) -> None:
        self._job = job
        self._decoder = decoder
        self._last_step = 0.0

    def clock(self) -> float:
        """Return seconds of a clock that stops while requests run."""
        return time.perf_counter() - self._decoder.paused_seconds

    def step(self, done: int, total: int, loss: float) -> None:
        if done == total or time.monotonic() - self._last_step > PROGRESS_SECONDS:
            self._last_step = time.monotonic()
            self._job.publish_progress("step", step=done, steps=total, loss=loss)

    def stage(self, what: str, texts: int) -> None:  # noqa: ARG002 - a server only embeds texts
        self._job.publish_progress("embedding", texts=texts)

    def embedded(self, texts: float) -> None:  # noqa: ARG002
        self._decoder.pause()

    def scored(self, rows: float) -> None:  # noqa: ARG002
        self._decoder.pause()

    def fitted(self, injection: Injection, seconds: float) -> None:
        loss = injection.history[-1] if injection.history else None
        self._job.publish_progress("fitted", seconds=seconds, loss=loss)

    def evaluating(self, method: str) -> None:
        self._job.publish_progress("scoring", method=method)


def _without_timings(injection: Injection) -> Injection:
    """Drop the time per text from the evaluation: it was measured in short passes between other requests."""
    methods = {
        name: {key: value for key, value in score.items() if key != "milliseconds_per_query"}
        for name, score in injection.evaluation["methods"].items()
    }
    return injection.with_report(evaluation=injection.evaluation | {"methods": methods})


def _method(request: FitJob, tasks: TaskStore) -> tuple[Injector, EnsembleConfig]:
    """Return method and experts. Raises I2CLError on unknown options, or an encoder that is not enabled."""
    options: dict[str, Any] = dict(request.settings)
    if request.experts is not None:
        if "experts" in options:
            raise I2CLError("experts is given twice: leave it out of settings")
        options["experts"] = request.experts
    ensemble, settings = EnsembleConfig.take_from(options)
    if ensemble.encoder is not None:
        tasks.require_encoder(ensemble.encoder)
    elif tasks.encoders:
        ensemble = ensemble.model_copy(update={"encoder": tasks.encoders[0]})
    elif ensemble.experts is None:
        ensemble = ensemble.model_copy(update={"experts": (LLM, TfidfExpert.name)})
    ensemble.members()  # raises if an encoder is missing
    return make_injector(request.method, settings, request.recipe), ensemble


def _tokens_per_text(decoder: Decoder, task: Task, demonstrations: Examples) -> dict[str, int]:
    """Return the tokens read for a text of median length, by the task (or zero-shot) and by few-shot."""
    rows = task.test or task.train
    ids = sorted(LabelScorer(decoder, task).queries([row.text for row in rows]), key=len)[len(rows) // 2]
    shots = [
        (row.text, LABEL_SEPARATOR.join(task.labels[label] for label in row.ids)) for row in demonstrations
    ]
    prompt = decoder.encoder([task.template.prompt(shots, "")])[0]
    empty = decoder.encoder([task.template.query("")])[0]
    return {"task": len(ids), "few_shot": len(ids) + len(prompt) - len(empty)}
