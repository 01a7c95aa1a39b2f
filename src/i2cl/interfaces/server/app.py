"""The HTTP application: routes as /openapi.json describes them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import Scope

from i2cl.errors import I2CLError
from i2cl.interfaces.decisions import error_response
from i2cl.interfaces.server.client import DIGEST_HEADER
from i2cl.interfaces.server.guard import Access, Guard, GuardedRoute, policy
from i2cl.interfaces.server.refusals import RefusalError, model_failed, stopping
from i2cl.interfaces.server.routes import completions, decisions, labelling, management, schemas
from i2cl.interfaces.server.service import Service, off_loop
from i2cl.version import __version__

PAGE = Path(__file__).with_name("page")
PAGE_FILES = {"/": "index.html", "/labelling": "labelling.html"}
PAGE_FILES |= {f"/{name}": name for name in ("page.css", "common.js", "page.js", "labelling.js")}
PAGE_FILES |= {"/example.csv": "example.csv"}
METHODS = ("DELETE", "GET", "POST", "PUT")
ERROR_STATUSES = (400, 401, 403, 404, 408, 409, 413, 415, 421, 422, 429, 500, 503, 504, 507)
# A reference, since FastAPI would compile a model for each route and status, most of the time of `make_app`.
PROBLEM = {"$ref": f"#/components/schemas/{schemas.Problem.__name__}"}


def make_app(service: Service, access: Access, *, page: bool = True, origins: Sequence[str] = ()) -> Any:
    """Make the server's ASGI application.

    To mount it under a prefix of another application, call `Service.close` when that application ends:
    Starlette does not run the lifespan of mounted applications.

    Args:
        service: the model with its tasks and jobs.
        access: accepted tokens and host names.
        page: whether to serve the web page at ``/``.
        origins: allowed CORS origins.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="i2cl serve",
        version=__version__,
        description="One model, many calibrated tasks.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={status: {"content": {schemas.JSON: {"schema": PROBLEM}}} for status in ERROR_STATUSES},
    )
    app.router.route_class = GuardedRoute
    _add_error_handlers(app, service)
    _add_classification(app, service)
    completions.add_chat(app, service)
    decisions.add_decisions(app, service)
    management.add_tasks(app, service)
    management.add_jobs(app, service)
    management.add_batches(app, service)
    labelling.add_projects(app, service)
    labelling.add_labelling(app, service)
    _add_health(app, service)
    if page:
        for path, name in PAGE_FILES.items():
            app.add_api_route(path, policy(None)(partial(_file, PAGE / name)), include_in_schema=False)
    guard: Any = Guard(app, access, service.metrics)
    app.state.guard = guard
    if origins:
        guard = CORSMiddleware(
            guard,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id", "X-Request-Timeout"],
            expose_headers=[DIGEST_HEADER, "X-Request-Id", "Retry-After", "Location"],
        )
    return guard


def _add_classification(app: FastAPI, service: Service) -> None:
    """Add the route that classifies. Large answers are serialized on a worker thread."""

    @app.post(
        "/v1/classify",
        summary="Classify texts",
        response_model=schemas.Classification,
        responses={500: {"model": schemas.Problem}},  # adds the model to the components
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def classify(body: schemas.Classify, timeout: schemas.Timeout = None) -> Response:
        texts = [body.input] if isinstance(body.input, str) else body.input
        answer = await service.classify(body.model, texts, timeout)
        entry, chances = answer.entry, answer.probabilities

        def serialize() -> str:
            reply = schemas.Classification.of(body, entry.labels, chances, answer.tokens, entry.thresholds)
            return reply.model_dump_json()

        content = await off_loop(len(chances) * len(entry.labels), serialize)
        return Response(content, media_type=schemas.JSON, headers={DIGEST_HEADER: entry.digest})


def _add_health(app: FastAPI, service: Service) -> None:
    """Add the routes for operators."""

    @app.get("/health", summary="Same as /healthz")
    @app.get("/healthz", summary="Whether the process and its model thread are alive")
    @policy(None)
    async def healthz() -> dict[str, str]:
        if not service.batcher.alive:
            raise model_failed() if service.batcher.failure else stopping()
        return {"status": "alive"}

    @app.get("/readyz", summary="Whether requests are accepted")
    @policy(None)
    async def readyz() -> dict[str, str]:
        if not service.ready:
            raise model_failed() if service.batcher.failure else stopping()
        return {"status": "ready"}

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    @policy("read")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Answer every error with JSON, see `i2cl.interfaces.decisions.error_response`."""

    def respond(request: Request, refusal: RefusalError) -> JSONResponse:
        service.metrics.refusals.labels(refusal.code).inc()
        path = getattr(request.scope.get("route"), "path", "")
        status, body = error_response(path, refusal)
        return JSONResponse(body, status, headers=refusal.headers)

    @app.exception_handler(I2CLError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return respond(request, RefusalError.of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # report the innermost error of a union; of "text or list of texts", that of the list
        problem = max(error.errors(), key=lambda item: (len(item["loc"]), item["type"] != "string_type"))
        parts = [str(part) for part in problem["loc"] if part not in {"body", "str", "rows", "file"}]
        place = ".".join(part for part in parts if not part.startswith(("constrained-", "list[")))
        message = f"{place or 'the body'} is invalid, {problem['msg'].removeprefix('Value error, ')}"
        if problem["type"] == "missing":
            message = f"{place} is missing" if place else "the body is empty"
        if problem["type"] == "json_invalid":
            message = f"the body is not valid JSON ({problem['ctx']['error']}, character {place})"
            place = ""  # a position in the body, not a field
        if problem["type"] == "extra_forbidden":
            message = f"{place!r} is not supported"
        hint = "see the fields in /openapi.json"
        return respond(request, RefusalError(422, "bad_request", message, hint, param=place or None))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette lists the methods of the first matching route only
            headers["Allow"] = ", ".join(name for name in METHODS if _accepts(app, name, request.scope))
        known = {404: ("not_found", "not found"), 405: ("method", "method not allowed")}
        code, message = known.get(error.status_code, ("bad_request", "the request is invalid"))
        hint = "see the paths and methods in /openapi.json"
        if error.status_code == 400 and isinstance(error.__cause__, UnicodeDecodeError):
            message, hint = "the body is not valid UTF-8", "encode it as UTF-8"
        return respond(request, RefusalError(error.status_code, code, message, hint, headers=headers))


async def _file(path: Path) -> FileResponse:
    return FileResponse(path)


def _accepts(app: FastAPI, method: str, scope: Scope) -> bool:
    """Return whether a route accepts a method at the path of a request."""
    candidate = {name: scope[name] for name in ("type", "path", "root_path") if name in scope}
    candidate["method"] = method
    return any(route.matches(candidate)[0] is Match.FULL for route in app.routes)
