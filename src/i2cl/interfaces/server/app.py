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
from starlette.routing import Match

from i2cl.errors import I2CLError
from i2cl.interfaces.server.guard import Access, Guard
from i2cl.interfaces.server.refusals import RefusalError, failed
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
    """The whole server as an ASGI program.

    ``service``: what answers; ``access``: who may ask; ``page``: whether there is a page for people at ``/``;
    ``origins``: sites whose pages may ask.
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
        responses={status: {"model": schemas.Problem} for status in REFUSED},
    )
    app.state.service = service
    _refusals(app, service)
    _answers(app, service)
    app.include_router(completions.router(service))
    app.include_router(management.router(service))
    _state(app, service)
    if page:
        for path, name in PAGE_FILES.items():
            app.add_api_route(path, partial(_file, PAGE / name), include_in_schema=False)
    guard: Any = Guard(app, access, partial(_limit, service), partial(_types, app), service.metrics)
    if origins:
        from starlette.middleware.cors import CORSMiddleware

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
        texts = [body.input] if isinstance(body.input, str) else body.input
        answer = await answer_request(service, request, body.model, texts, timeout)
        response.headers["X-Task-Digest"] = answer.entry.digest
        return schemas.Classification.of(body, answer.entry.labels, answer.probabilities, answer.tokens)

    @app.post("/models/{name:path}", summary="Classify texts, as Hugging Face's clients ask")
    async def models(
        name: str,
        body: schemas.Predict,
        request: Request,
        response: Response,
        timeout: schemas.Timeout = None,
    ) -> list[list[schemas.LabelScore]]:
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        answer = await answer_request(service, request, name, texts, timeout)
        response.headers["X-Task-Digest"] = answer.entry.digest
        most = (body.parameters and body.parameters.top_k) or len(answer.entry.labels)
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
        service.metrics.refusal(refusal.code)
        return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)

    async def bad(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, I2CLError)  # noqa: S101 - what it is registered for
        return told(RefusalError.of(error))

    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        problem = max(error.errors(), key=lambda one: len(one["loc"]))  # the text rather than the list of it
        parts = [str(part) for part in problem["loc"] if part not in {"body", "str"}]
        place = ".".join(part for part in parts if not part.startswith(("constrained-", "list[")))
        message = f"{place or 'the body'} cannot be used, {problem['msg'].removeprefix('Value error, ')}"
        cure = "see /openapi.json for what this address takes"
        return told(RefusalError(422, "bad_request", f"{message}: {cure}"))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)  # noqa: S101
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of one route of several
            path = request.url.path
            headers["Allow"] = ", ".join(name for name in METHODS if _takes(app, name, path))
        known = {404: ("not_found", "no such address"), 405: ("method", "no such method here")}
        code, what = known.get(error.status_code, ("bad_request", "it cannot be read"))
        message = f"{what}: /openapi.json lists addresses and what they take"
        return told(RefusalError(error.status_code, code, message, headers=headers))

    async def unexpected(_request: Request, error: Exception) -> JSONResponse:
        return told(failed(error))

    app.add_exception_handler(I2CLError, bad)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


async def _file(path: Path) -> FileResponse:
    return FileResponse(path)


def _limit(service: Service, method: str, path: str) -> int:
    if method == "PUT":
        return most_bytes(service.decoder)
    return MOST_FILE if path == "/v1/batches" else MOST_BODY


def _types(app: FastAPI, method: str, path: str) -> Sequence[str]:
    if method not in {"POST", "PUT"} or not _takes(app, method, path):
        return ()
    if method == "PUT":
        return ("application/x-tar",)
    if path == "/v1/batches":
        return ("application/jsonl", "application/x-ndjson")
    return ("application/json", "text/csv") if path == "/v1/tasks" else ("application/json",)


def _takes(app: FastAPI, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
