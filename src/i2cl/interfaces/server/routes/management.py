"""Routes that list, make and remove tasks, queue fits and files, and tell of jobs."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import IO, Annotated, Any

import pydantic
from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse

from i2cl.errors import first_problem
from i2cl.interfaces.server import files, fits
from i2cl.interfaces.server.guard import BODY, READER, policy
from i2cl.interfaces.server.jobs import Job, Jobs, unknown_job
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service
from i2cl.interfaces.server.task_store import Entry, require_name
from i2cl.interfaces.server.uploads import most_bytes

MAX_FILE_BODY = 256 * 2**20  # bytes of a file of texts
EVENT_POLL_SECONDS = 0.2
KEEPALIVE_SECONDS = 15.0  # an event stream without events sends a comment this often


def _body(schemas_of: Mapping[str, Any]) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in schemas_of.items()}
    return {"requestBody": {"required": True, "content": content}}


_TEXT = {"type": "string"}
_BODIES = _body({"application/json": schemas.Fit.model_json_schema(), "text/csv": _TEXT})
_TAR = _body({"application/x-tar": _TEXT | {"format": "binary"}})
_LINES = _body({"application/jsonl": _TEXT})


def add_tasks(app: FastAPI, service: Service) -> None:
    """Routes of the base model and tasks."""
    tasks = service.tasks
    base = {"id": service.base, "object": "model", "created": 0, "owned_by": "i2cl", "parent": None}

    @app.get("/v1/models", summary="The base model and every task")
    @policy("read")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [base, *(_model(entry, service.base) for entry in tasks.entries())]}

    @app.get("/v1/models/{name:path}", summary="One of them")
    @policy("read")
    def model(name: str) -> dict[str, Any]:
        return base if name == service.base else _model(tasks.entry(name), service.base)

    @app.get("/v1/tasks", summary="Every task")
    @policy("read")
    def listed() -> dict[str, Any]:
        return {"object": "list", "data": [_task(entry) for entry in tasks.entries()]}

    @app.post("/v1/tasks", status_code=202, summary="Fit a task to examples", openapi_extra=_BODIES)
    @policy("admin", schemas.JSON, "text/csv", max_body=schemas.MAX_JSON_BODY)
    async def fit(request: Request) -> Response:
        body = await request.body()
        return await service.parsed(queue_fit, service, request, body)

    @app.get("/v1/tasks/{name:path}", summary="A task, its settings and figures")
    @policy("read")
    def task(name: str) -> dict[str, Any]:
        entry = tasks.entry(name)
        injection = tasks.injection(entry.digest)
        template, count = injection.task.template.format, injection.context.demonstrations
        record = _task(entry) | {"template": template, "demonstrations": count}
        record |= {"settings": injection.settings, "history": list(injection.history)}
        record |= {"metrics": injection.metrics, "worth": injection.worth or None}
        record |= {"label_bias": injection.label_bias, "temperature": injection.temperature}
        record |= {"encoder": None if (bias := injection.encoder_bias) is None else bias.encoder}
        return record | fits.map_of(injection.edit())

    @app.put("/v1/tasks/{name:path}", summary="Upload an artefact's folder", openapi_extra=_TAR)
    @policy("admin", "application/x-tar", max_body=most_bytes(service.decoder))
    async def put(name: str, request: Request) -> dict[str, Any]:
        body = await request.body()
        tasks.require_writable()
        _require_name(service, name)
        return _task(await service.upload(name, body))

    @app.delete("/v1/tasks/{name:path}", summary="Remove a task")
    @policy("admin")
    def delete(name: str) -> dict[str, Any]:
        tasks.delete(name)
        return {"id": name, "object": "task", "deleted": True}


def add_jobs(app: FastAPI, service: Service) -> None:
    """Routes of fits and files."""

    @app.get("/v1/jobs", summary="Fits and files, the newest first")
    @policy("read")
    async def jobs(request: Request) -> dict[str, Any]:
        records = [job.described() for job in jobs_of(service).all() if _sees(request, job)]
        for one in records:
            del one["last"]  # of a fit it holds a map of the whole model
        return {"object": "list", "data": records}

    @app.get("/v1/jobs/{identity}", summary="Where a job stands")
    @policy("read")
    async def job(identity: str, request: Request) -> dict[str, Any]:
        return _own(service, request, identity).described()

    @app.delete("/v1/jobs/{identity}", summary="Cancel a job, or remove one that has ended")
    @policy("read")
    def cancel(identity: str, request: Request) -> dict[str, Any]:
        target = _own(service, request, identity)
        jobs_of(service).cancel(target)
        return target.described()

    @app.get("/v1/jobs/{identity}/events", summary="What happens to a job", response_class=StreamingResponse)
    @policy("read", stream=True)
    async def events(
        identity: str,
        request: Request,
        seen: Annotated[int, Header(alias="Last-Event-ID", ge=0, le=2**53)] = 0,
    ) -> StreamingResponse:
        stream = job_events(service, _own(service, request, identity), seen)
        return StreamingResponse(stream, media_type="text/event-stream")

    @app.post("/v1/batches", status_code=202, summary="Classify a file", openapi_extra=_LINES)
    @policy("read", "application/jsonl", "application/x-ndjson", max_body=MAX_FILE_BODY)
    async def batch(
        request: Request,
        model: Annotated[str | None, Query(description="Task of lines that name none.")] = None,
    ) -> Response:
        return await service.parsed(queue_batch, service, request, model)

    @app.get("/v1/batches/{identity}", summary="The answers for a file", response_class=FileResponse)
    @policy("read")
    def answers(identity: str, request: Request) -> FileResponse:
        job = _own(service, request, identity)
        if job.kind != "batch":
            raise RefusalError(404, "unknown_job", f"job {identity!r} is no file: GET /v1/jobs/{identity}")
        if job.status != "done":
            message = f"job {identity!r} is {job.status}: see /v1/jobs/{identity}/events"
            raise RefusalError(409, "not_done", message)
        return FileResponse(job.folder / files.OUTPUT, media_type="application/jsonl")


def _sees(request: Request, job: Job) -> bool:
    reader = request.scope.get(READER)
    return reader is None or job.owner == reader


def _own(service: Service, request: Request, identity: str) -> Job:
    """A job, for those who may see it."""
    job = jobs_of(service).get(identity)
    if not _sees(request, job):
        raise unknown_job(identity)
    return job


def _task(entry: Entry) -> dict[str, Any]:
    known = {"id": entry.name, "object": "task", "digest": entry.digest, "created": entry.created}
    return known | {"labels": list(entry.labels)}


def _model(entry: Entry, base: str) -> dict[str, Any]:
    return _task(entry) | {"object": "model", "owned_by": "i2cl", "root": base, "parent": base}


def queue_fit(service: Service, request: Request, body: bytes) -> Response:
    """Queue a fit of the rows in a body, JSON or CSV, or say what they are."""
    jobs = jobs_of(service)
    if request.headers["content-type"].lower().startswith("text/csv"):
        query: dict[str, Any] = dict(request.query_params)
        if "labels" in query:
            query["labels"] = [label.strip() for label in query["labels"].split(",")]
        if isinstance(query.get("template"), str):
            query["template"] = query["template"].replace("\\n", "\n")
        options = _valid(schemas.FitOptions, query, strict=False)  # all of a query is text
        inputs = {"input.csv": body}
    else:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            message = f"the body is no JSON ({type(error).__name__}): correct it"
            raise RefusalError(422, "bad_request", message) from None
        options = _valid(schemas.Fit, given)
        inputs = {"input.json": json.dumps(given["examples"]).encode()}
        if options.test:
            inputs["input.test.json"] = json.dumps(given["test"]).encode()
    _require_name(service, options.name)
    fields = options.model_dump(exclude={"check", "examples", "test"})
    with jobs.scratch() as folder:
        for name, content in inputs.items():
            (folder / name).write_bytes(content)
        task, demonstrations = fits.read_task(service.decoder, service.tasks, fields, folder)
    if options.check:
        rows = {"rows": len(task.train), "test_rows": len(task.test), "demonstrations": len(demonstrations)}
        data = fits.survey_of(service.decoder, task)
        return JSONResponse({"object": "check", "labels": list(task.labels), **rows, "data": data})
    return _accepted(request, jobs.add("fit", fields, inputs))


def queue_batch(service: Service, request: Request, model: str | None) -> Response:
    """Queue a file of texts."""
    body: IO[bytes] = request.scope[BODY]
    owner: str | None = request.scope.get(READER)
    jobs = jobs_of(service)
    jobs.require_room("batch", owner)
    with jobs.scratch() as folder:
        path = folder / files.INPUT
        with path.open("wb") as rows:
            count, names = files.read_lines(body, model, service.tasks.entry, rows)
        with service.tasks.kept(names) as digests:
            description = {"rows": count, "tasks": names, "digests": digests}
            return _accepted(request, jobs.add("batch", description, {files.INPUT: path}, owner))


def jobs_of(service: Service) -> Jobs:
    """The jobs of a server that writes; a 403 of one that does not."""
    service.tasks.require_writable()
    assert service.jobs is not None  # noqa: S101 - as whatever writes has them
    return service.jobs


def _require_name(service: Service, name: str) -> None:
    require_name(name)
    if name == service.base:
        raise RefusalError(422, "bad_name", f"{name!r} is the base model's name: choose another")


def _accepted(request: Request, job: Job) -> Response:
    location = f"{request.scope.get('root_path', '').rstrip('/')}/v1/jobs/{job.id}"
    return JSONResponse(job.described(), 202, headers={"Location": location})


def _valid(kind: type[Any], given: Any, *, strict: bool = True) -> Any:
    try:
        return kind.model_validate(given, strict=strict)
    except pydantic.ValidationError as error:
        message = f"{first_problem(error)}: see /openapi.json for what this address takes"
        raise RefusalError(422, "bad_request", message.encode(errors="backslashreplace").decode()) from None


async def job_events(service: Service, job: Job, seen: int) -> AsyncIterator[str]:
    """Server-sent events of a job behind the one that was ``seen``, until it ends. Source:
    https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """
    last = time.monotonic()
    while True:
        ended = job.ended
        for event in job.events:
            number = round(1000 * event["at"])  # which a start of the server anew does not change
            if number > seen:
                seen, last = number, time.monotonic()
                yield f"id: {seen}\nevent: {event['event']}\ndata: {json.dumps(event)}\n\n"
        if ended or not service.ready:
            return
        if time.monotonic() - last >= KEEPALIVE_SECONDS:
            last = time.monotonic()
            yield ": waiting\n\n"
        await asyncio.sleep(EVENT_POLL_SECONDS)
