"""Bodies of fits and of files: read, checked, and queued as jobs."""

import json
from typing import IO, Any

import pydantic
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from i2cl.errors import first_problem
from i2cl.interfaces.server import files, fits
from i2cl.interfaces.server.jobs import Job, Jobs
from i2cl.interfaces.server.refusals import RefusalError, read_only
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service
from i2cl.interfaces.server.task_store import require_name


def fit(service: Service, request: Request, body: bytes) -> Response:
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
        given = _parsed(body)
        fit = _valid(schemas.Fit, given)
        options = schemas.FitOptions(**fit.model_dump(exclude={"examples", "test"}))
        inputs = {"input.json": json.dumps(given["examples"]).encode()}
        if fit.test:
            inputs["input.test.json"] = json.dumps(given["test"]).encode()
    require_name(options.name)
    require_other_name(service, options.name)
    fields = options.model_dump(exclude={"check"})
    with jobs.scratch() as folder:
        for name, content in inputs.items():
            (folder / name).write_bytes(content)
        task, demonstrations = fits.read_task(service.decoder, fields, folder)
    if options.check:
        rows = {"rows": len(task.train), "test_rows": len(task.test), "demonstrations": len(demonstrations)}
        data = fits.survey_of(service.decoder, task)
        return JSONResponse({"object": "check", "labels": list(task.labels), **rows, "data": data})
    return _accepted(jobs.add("fit", fields, inputs))


def batch(service: Service, body: IO[bytes], model: str | None, owner: str | None) -> Response:
    """Queue a file of texts."""
    jobs = jobs_of(service)
    jobs.require_room("batch", owner)
    with jobs.scratch() as folder:
        path = folder / files.INPUT
        with path.open("wb") as rows:
            count, names = files.read_lines(body, model, service.tasks.entry, rows)
        with service.tasks.kept(names) as digests:
            description = {"rows": count, "tasks": names, "digests": digests}
            return _accepted(jobs.add("batch", description, {files.INPUT: path}, owner))


def jobs_of(service: Service) -> Jobs:
    """The jobs of a server that writes; a 403 of one that does not."""
    if service.jobs is None:
        raise read_only()
    return service.jobs


def require_other_name(service: Service, name: str) -> None:
    """Refuse (422) the name of the base model."""
    if name == service.base:
        raise RefusalError(422, "bad_name", f"{name!r} is the base model's name: choose another")


def _accepted(job: Job) -> Response:
    return JSONResponse(job.described(), 202, headers={"Location": f"/v1/jobs/{job.id}"})


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"the body is no JSON ({type(error).__name__}): correct it"
        raise RefusalError(422, "bad_request", message) from None


def _valid(kind: type[Any], given: Any, *, strict: bool = True) -> Any:
    try:
        return kind.model_validate(given, strict=strict)
    except pydantic.ValidationError as error:
        message = f"{first_problem(error)}: see /openapi.json for what this address takes"
        raise RefusalError(422, "bad_request", message.encode(errors="backslashreplace").decode()) from None
