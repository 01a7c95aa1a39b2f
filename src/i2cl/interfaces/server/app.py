"""The server's routes, as /openapi.json describes them."""

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

from i2cl.errors import I2CLError
from i2cl.interfaces.server.guard import Access, Guard
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import completions, management, schemas
from i2cl.interfaces.server.service import Service, answer_request
from i2cl.interfaces.server.uploads import most_bytes
from i2cl.version import __version__

PAGE = Path(__file__).with_name("page")
PAGE_FILES = {"/": "index.html", **{f"/{name}": name for name in ("page.css", "page.js", "example.csv")}}
MOST_BODY = 4 * 2**20  # bytes of a body of texts, or of examples
MOST_FILE = 256 * 2**20  # bytes of a file of texts
METHODS = ("DELETE", "GET", "POST", "PUT")
REFUSED = (400, 401, 403, 404, 408, 409, 413, 415, 421, 422, 429, 500, 503, 504, 507)


def make_app(service: Service, access: Access, *, page: bool = True, origins: Sequence[str] = ()) -> Any:
    """The server as an ASGI program; ``page``: with one for people at ``/``; ``origins``: whose may ask."""

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
        responses={status: {"model": schemas.Problem} for status in REFUSED},
    )
    _refusals(app, service)
    _answers(app, service)
    completions.add_chat(app, service)
    management.add_tasks(app, service)
    management.add_jobs(app, service)
    _state(app, service)
    if page:
        for path, name in PAGE_FILES.items():
            app.add_api_route(path, partial(_file, PAGE / name), include_in_schema=False)
    guard: Any = Guard(app, access, partial(_bodies, app, service), service.metrics)
    if origins:
        guard = CORSMiddleware(
            guard,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Timeout"],
            expose_headers=["X-Task-Digest", "Retry-After", "Location"],
        )
    return guard


def _answers(app: FastAPI, service: Service) -> None:
    """Routes that classify."""

    @app.post("/v1/classify", summary="Classify texts")
    async def classify(
        body: schemas.Classify, request: Request, response: Response, timeout: schemas.Timeout = None
    ) -> schemas.Classification:
        answer = await answer_request(service, request, response, body.model, body.input, timeout)
        return schemas.Classification.of(body, answer.entry.labels, answer.probabilities, answer.tokens)

    @app.post("/models/{name:path}", summary="Classify texts, as Hugging Face's clients ask")
    async def models(
        name: str,
        body: schemas.Predict,
        request: Request,
        response: Response,
        timeout: schemas.Timeout = None,
    ) -> list[list[schemas.LabelScore]]:
        answer = await answer_request(service, request, response, name, body.inputs, timeout)
        most = body.parameters.top_k if body.parameters else None
        return [
            [
                schemas.LabelScore(label=label, score=score)
                for score, label in sorted(zip(probs, answer.entry.labels, strict=True), reverse=True)[:most]
            ]
            for probs in answer.probabilities
        ]


def _state(app: FastAPI, service: Service) -> None:
    """Routes for those who look after the server."""

    @app.get("/healthz", summary="Whether the process lives")
    async def healthz() -> dict[str, str]:
        if not service.batcher.alive:
            raise RefusalError(503, "stopping", "the model's thread has ended: start the server again")
        return {"status": "alive"}

    @app.get("/readyz", summary="Whether it takes requests")
    async def readyz() -> dict[str, str]:
        if not service.ready:
            raise RefusalError(503, "stopping", "this server stops: ask another one")
        return {"status": "ready"}

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _refusals(app: FastAPI, service: Service) -> None:
    """What is not done, as JSON with a code and a cure."""

    def told(refusal: RefusalError) -> JSONResponse:
        service.metrics.refusals.labels(refusal.code).inc()
        return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)

    @app.exception_handler(I2CLError)
    @app.exception_handler(Exception)
    async def failed(_request: Request, error: Exception) -> JSONResponse:
        return told(RefusalError.of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        # the text rather than the list of it, and the list rather than a text in its place
        problem = max(error.errors(), key=lambda one: (len(one["loc"]), one["type"] != "string_type"))
        parts = [str(part) for part in problem["loc"] if part not in {"body", "str"}]
        place = ".".join(part for part in parts if not part.startswith(("constrained-", "list[")))
        message = f"{place or 'the body'} cannot be used, {problem['msg'].removeprefix('Value error, ')}"
        if problem["type"] == "json_invalid":
            message = f"the body is not JSON ({problem['ctx']['error']}, character {place})"
        cure = "see /openapi.json for what this address takes"
        return told(RefusalError(422, "bad_request", f"{message}: {cure}"))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of one route of several
            path = request.url.path
            headers["Allow"] = ", ".join(name for name in METHODS if _takes(app, name, path))
        known = {404: ("not_found", "no such address"), 405: ("method", "no such method here")}
        code, what = known.get(error.status_code, ("bad_request", "it cannot be read"))
        message = f"{what}: /openapi.json lists addresses and what they take"
        return told(RefusalError(error.status_code, code, message, headers=headers))


async def _file(path: Path) -> FileResponse:
    return FileResponse(path)


def _bodies(app: FastAPI, service: Service, method: str, path: str) -> tuple[Sequence[str], int]:
    if method not in {"POST", "PUT"} or not _takes(app, method, path):
        return (), 0
    if method == "PUT":
        return ("application/x-tar",), most_bytes(service.decoder)
    if path == "/v1/batches":
        return ("application/jsonl", "application/x-ndjson"), MOST_FILE
    return (("application/json", "text/csv") if path == "/v1/tasks" else ("application/json",)), MOST_BODY


def _takes(app: FastAPI, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
