"""Routes for tasks (list, fit, upload, delete) and for jobs (fits and batches)."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import IO, Annotated, Any

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse

from i2cl.interfaces.server import files, fits
from i2cl.interfaces.server.guard import BODY, READER, policy
from i2cl.interfaces.server.jobs import Job, Jobs, unknown_job
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service
from i2cl.interfaces.server.task_store import Entry
from i2cl.interfaces.server.uploads import max_upload_bytes

MAX_FILE_BODY = 256 * 2**20  # bytes of a file of texts
EVENT_POLL_SECONDS = 0.2
KEEPALIVE_SECONDS = 15.0  # interval of comments in an event stream without events


def _body(content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a request body that the route parses itself."""
    return {"requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


_TAR = _body("application/x-tar", {"type": "string", "format": "binary"})
_LINES = _body("application/jsonl", {"type": "string"})


def add_tasks(app: FastAPI, service: Service) -> None:
    """Add the routes of the base model and of tasks."""
    tasks = service.tasks
    base = {"id": service.base, "object": "model", "created": 0, "owned_by": "i2cl", "parent": None}

    @app.get("/v1/models", summary="The base model and all tasks")
    @policy("read")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [base, *(_model(entry, service.base) for entry in tasks.entries())]}

    @app.get("/v1/models/{name:path}", summary="The base model or a task")
    @policy("read")
    def model(name: str) -> dict[str, Any]:
        return base if name == service.base else _model(tasks.entry(name), service.base)

    @app.get("/v1/tasks", summary="All tasks")
    @policy("read")
    def listed() -> dict[str, Any]:
        return {"object": "list", "data": [_task(entry) for entry in tasks.entries()]}

    @app.post("/v1/tasks", status_code=202, summary="Fit a task to examples", response_model=None)
    @policy("admin", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def fit(body: schemas.Fit, request: Request) -> Response:
        return await service.run_blocking(queue_fit, service, request, body)

    @app.get("/v1/tasks/{name:path}", summary="A task with its settings and scores")
    @policy("read")
    def task(name: str) -> dict[str, Any]:
        entry = tasks.entry(name)
        injection = tasks.injection(entry.digest)
        return _task(entry) | {
            "template": injection.task.template.format,
            "demonstrations": injection.demonstrations,
            "settings": injection.settings,
            "history": list(injection.history),
            "metrics": injection.metrics,
            "evaluation": injection.evaluation or None,
            "label_bias": injection.label_bias,
            "temperature": injection.temperature,
            "thresholds": injection.head.thresholds,
            "ensemble": injection.ensemble,
        }

    @app.put("/v1/tasks/{name:path}", summary="Upload a task folder as a tar file", openapi_extra=_TAR)
    @policy("admin", "application/x-tar", max_body=max_upload_bytes(service.decoder))
    async def put(name: str, request: Request) -> dict[str, Any]:
        body = await request.body()
        await service.run_blocking(tasks.require_name, name)
        return _task(await service.upload(name, body))

    @app.delete("/v1/tasks/{name:path}", summary="Remove a task that came over HTTP")
    @policy("admin")
    def delete(name: str) -> dict[str, Any]:
        tasks.delete(name)
        return {"id": name, "object": "task", "deleted": True}


def add_jobs(app: FastAPI, service: Service) -> None:
    """Add the routes of jobs."""

    @app.get("/v1/jobs", summary="Fits and batch jobs, newest first")
    @policy("read")
    def jobs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: Annotated[str | None, Query(description="Id of the last job of the previous page.")] = None,
    ) -> dict[str, Any]:
        page, has_more = jobs_of(service).page(request.scope.get(READER), limit, after)
        records = [job.to_json() for job in page]
        for record in records:
            del record["last"]  # can be long; GET /v1/jobs/ID returns it
        return {"object": "list", "data": records, "has_more": has_more}

    @app.get("/v1/jobs/{identity}", summary="Status of a job")
    @policy("read")
    async def job(identity: str, request: Request) -> dict[str, Any]:
        return _visible_job(service, request, identity).to_json()

    @app.post("/v1/jobs/{identity}/cancel", summary="Cancel a job, unless it has finished")
    @policy("read")
    def cancel(identity: str, request: Request) -> dict[str, Any]:
        target = _visible_job(service, request, identity)
        jobs_of(service).cancel(target)
        return target.to_json()

    @app.delete("/v1/jobs/{identity}", summary="Remove a finished job and its answers")
    @policy("read")
    def delete(identity: str, request: Request) -> dict[str, Any]:
        jobs_of(service).delete(_visible_job(service, request, identity))
        return {"id": identity, "object": "job", "deleted": True}

    @app.get(
        "/v1/jobs/{identity}/events",
        summary="Events of a job, as they happen",
        response_class=StreamingResponse,
    )
    @policy("read", stream=True)
    async def events(
        identity: str,
        request: Request,
        seen: Annotated[int, Header(alias="Last-Event-ID", ge=0, le=2**53)] = 0,
    ) -> StreamingResponse:
        stream = job_events(service, _visible_job(service, request, identity), seen)
        return StreamingResponse(stream, media_type="text/event-stream")


def add_batches(app: FastAPI, service: Service) -> None:
    """Add the routes of batch jobs."""

    @app.post("/v1/batches", status_code=202, summary="Classify a file", openapi_extra=_LINES)
    @policy("read", "application/jsonl", "application/x-ndjson", max_body=MAX_FILE_BODY)
    async def batch(
        request: Request,
        model: Annotated[str | None, Query(description="Task of lines without a model.")] = None,
    ) -> Response:
        return await service.run_blocking(queue_batch, service, request, model)

    @app.get("/v1/batches/{identity}", summary="Answers of a batch job", response_class=FileResponse)
    @policy("read")
    def answers(identity: str, request: Request) -> FileResponse:
        job = _visible_job(service, request, identity)
        if job.kind != "batch":
            message, hint = f"job {identity!r} is not a batch job", f"see /v1/jobs/{identity}"
            raise RefusalError(404, "unknown_job", message, hint)
        if job.status != "done":
            hint = f"see /v1/jobs/{identity}/events"
            raise RefusalError(409, "not_done", f"job {identity!r} is {job.status}", hint)
        return FileResponse(job.folder / files.OUTPUT, media_type="application/jsonl")


def _visible_job(service: Service, request: Request, identity: str) -> Job:
    """Return a job that the caller may see. Raises RefusalError (404) otherwise."""
    job, reader = jobs_of(service).get(identity), request.scope.get(READER)
    if reader is not None and job.owner != reader:
        raise unknown_job(identity)
    return job


def _task(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "object": "task",
        "digest": entry.digest,
        "created": entry.created,
        "labels": list(entry.labels),
        "multi_label": entry.thresholds is not None,
        "source": entry.source,
    }


def _model(entry: Entry, base: str) -> dict[str, Any]:
    return _task(entry) | {"object": "model", "owned_by": "i2cl", "root": base, "parent": base}


def queue_fit(service: Service, request: Request, options: schemas.Fit) -> Response:
    """Queue a fit, or describe its rows."""
    jobs = jobs_of(service)
    service.tasks.require_name(options.name)
    inputs, names = _input_files(options)
    fields = options.model_dump(exclude={"check", "examples", "test"})
    job = fits.FitJob.model_validate(fields | {"file_names": names})
    with jobs.scratch() as folder:
        for name, content in inputs.items():
            (folder / name).write_bytes(content)
        if options.check:
            return JSONResponse(fits.check(service.decoder, service.tasks, job, folder))
        fits.read_task(service.decoder, service.tasks, job, folder)  # raises on rows that cannot be used
    return _accepted(request, jobs.add("fit", job.model_dump(exclude={"check"}), inputs))


def _input_files(options: schemas.Fit) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files of a fit job by name, and the names to show in errors instead."""
    inputs, names = {}, {}
    for field, stem, rows in (("examples", "input", options.examples), ("test", "input.test", options.test)):
        if isinstance(rows, schemas.DataFile):
            inputs[stem + rows.suffix] = rows.content.encode()
            names[stem + rows.suffix] = rows.name
        elif rows or field == "examples":
            inputs[f"{stem}.json"] = json.dumps(rows).encode()
            names[f"{stem}.json"] = field
    return inputs, names


def queue_batch(service: Service, request: Request, model: str | None) -> Response:
    """Queue a batch job."""
    body: IO[bytes] = request.scope[BODY]
    owner: str | None = request.scope.get(READER)
    jobs = jobs_of(service)
    jobs.require_room("batch", owner)
    with jobs.scratch() as folder:
        path = folder / files.INPUT
        with path.open("wb") as rows:
            count, names, size = files.read_lines(body, model, service.tasks.entry, rows)
        tasks = folder / files.TASKS
        entries = {name: service.tasks.copy(name, tasks) for name in names}
        inputs = {files.INPUT: path, files.TASKS: tasks}
        return _accepted(request, jobs.add("batch", files.job_request(entries, count, size), inputs, owner))


def jobs_of(service: Service) -> Jobs:
    """Return the jobs of a server. Raises RefusalError (403) if it is read-only."""
    service.tasks.require_writable()
    assert service.jobs is not None  # noqa: S101 - only read-only servers have none
    return service.jobs


def _accepted(request: Request, job: Job) -> Response:
    location = f"{request.scope.get('root_path', '').rstrip('/')}/v1/jobs/{job.id}"
    return JSONResponse(job.to_json(), 202, headers={"Location": location})


async def job_events(service: Service, job: Job, seen: int) -> AsyncIterator[str]:
    """Yield server-sent events of a job, after the one with the id ``seen``, until it ends. Source:
    https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """
    last = time.monotonic()
    while True:
        ended = job.ended
        for event in job.events:
            number = round(1000 * event["at"])  # unchanged by a restart
            if number > seen:
                seen, last = number, time.monotonic()
                yield f"id: {seen}\nevent: {event['event']}\ndata: {json.dumps(event)}\n\n"
        if ended or not service.ready:
            return
        if time.monotonic() - last >= KEEPALIVE_SECONDS:
            last = time.monotonic()
            yield ": waiting\n\n"
        await asyncio.sleep(EVENT_POLL_SECONDS)
