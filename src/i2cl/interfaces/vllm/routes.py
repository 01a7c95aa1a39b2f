"""HTTP routes: ``/v1/i2cl/classify``, and ``/v1/i2cl/tasks`` for admins.

All paths begin with ``/v1/``, because vLLM's ``--api-key`` protects only those.
"""

import asyncio
import hmac
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from i2cl.core.artefact import DESCRIPTION
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes.schemas import Classification, Classify, require_text_count
from i2cl.interfaces.vllm.engine import ASLEEP, DROP, LOAD
from i2cl.interfaces.vllm.frontend import TASKS, Answer, Served, parameters
from i2cl.interfaces.vllm.prompts import Edge, EngineLimits, InterruptedRequestError, Prompt, PromptLimiter
from i2cl.models.batching import Ids
from i2cl.models.encoding import TooLongError

# Environment variable: folder of artefacts to load at start-up, each named by its subfolder.
TASKS_FOLDER_ENV = "I2CL_VLLM_TASKS"

# Environment variable: key for loading, dropping and listing tasks. If unset, these routes answer 403.
ADMIN_KEY_ENV = "I2CL_VLLM_ADMIN_KEY"


class LoadRequest(BaseModel):
    """Body of ``POST /v1/i2cl/tasks``: a task name, and a folder on the server or a hub id."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    artefact: str


class Routes:
    """Endpoint plugin of vLLM (group ``vllm.endpoint_plugins``)."""

    name = "i2cl"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes. A request is cancelled if its client disconnects."""
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        from i2cl.interfaces.vllm.plugin import install_in_server

        install_in_server()
        router, admin = APIRouter(prefix="/v1/i2cl"), [Depends(_only_admin)]
        router.add_api_route("/classify", with_cancellation(classify), methods=["POST"], response_model=None)
        router.add_api_route("/tasks", list_tasks, methods=["GET"], dependencies=admin)
        router.add_api_route("/tasks", load, methods=["POST"], dependencies=admin)
        router.add_api_route("/tasks/{name:path}", drop, methods=["DELETE"], dependencies=admin)
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, _args: Any) -> None:
        """Load the tasks of I2CL_VLLM_TASKS. An I2CLError stops the server."""
        state.i2cl_engine, state.i2cl_lock = engine_client, asyncio.Lock()
        state.i2cl_limiter = PromptLimiter(EngineLimits.of(engine_client.vllm_config))
        folder = os.environ.get(TASKS_FOLDER_ENV)
        if folder is None:
            return
        folders = sorted(path.parent for path in Path(folder).glob(f"*/{DESCRIPTION}"))
        if not folders:
            raise I2CLError(f"{TASKS_FOLDER_ENV}={folder!r} contains no artefacts: save one in a subfolder")
        for path in folders:
            await _load(state, path.name, str(path))


def _only_admin(authorization: Annotated[str, Header()] = "") -> None:
    key = os.environ.get(ADMIN_KEY_ENV)
    if not key:
        raise HTTPException(403, f"managing tasks is disabled: set {ADMIN_KEY_ENV} when starting the server")
    if not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
        raise HTTPException(403, "this key may not load, drop or list tasks: send the admin key")


async def classify(body: Classify, raw_request: Request, response: Response) -> Classification | JSONResponse:
    """Classify texts: label (empty below ``min_confidence``) and probabilities of all labels.

    The whole request is answered by the version of the task that is loaded when it begins.
    """
    served = _named(body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    try:
        require_text_count(texts)
        with TASKS.in_use(served):
            queries = await run_in_threadpool(partial(served.questions.queries, texts, cut=False))
            answers = await _answers(raw_request.app.state, served, queries)
    except (TooLongError, RefusalError) as error:
        refusal = RefusalError.of(error)
        return JSONResponse(refusal.body(), refusal.status)
    except InterruptedRequestError as error:
        refusal = RefusalError(503, "interrupted", str(error), headers={"Retry-After": "5"})
        return JSONResponse(refusal.body(), refusal.status, refusal.headers)
    except I2CLError as error:
        raise HTTPException(400, str(error)) from None
    response.headers["X-I2CL-Digest"] = served.version
    probabilities = [one.scores.softmax(-1).tolist() for one in answers]
    return Classification.of(body, served.questions.task.labels, probabilities, list(map(len, queries)))


async def list_tasks() -> dict[str, Any]:
    """List the loaded tasks."""
    return {"object": "list", "data": [_described(one) for one in TASKS.served.values()]}


async def load(body: LoadRequest, request: Request) -> dict[str, Any]:
    """Load a task, or replace the task of the same name."""
    try:
        return _described(await _load(request.app.state, body.name, body.artefact))
    except I2CLError as error:
        raise HTTPException(503 if ASLEEP in str(error) else 400, str(error)) from None


async def drop(name: str, request: Request) -> dict[str, Any]:
    """Drop a task. Running requests finish with it."""
    state = request.app.state
    async with state.i2cl_lock:
        _named(name)
        TASKS.remove(name)
        await _drop_unused(state)
    return {"name": name, "object": "task", "deleted": True}


def _named(name: str) -> Served:
    try:
        return TASKS.get(name)
    except I2CLError as error:
        raise HTTPException(404, str(error)) from None


def _described(served: Served) -> dict[str, Any]:
    labels = list(served.questions.task.labels)
    return {"name": served.name, "object": "task", "digest": served.version, "labels": labels}


async def _load(state: Any, name: str, artefact: str) -> Served:
    engine = state.i2cl_engine
    async with state.i2cl_lock:
        injection = await run_in_threadpool(Injection.from_pretrained, artefact)
        config, tokenizer = engine.model_config, engine.get_tokenizer()
        served: Served = await run_in_threadpool(
            TASKS.prepare, name, injection, config, tokenizer, force=False
        )
        await _drop_unused(state)
        try:
            await engine.collective_rpc(LOAD, args=(served.packed.rows, served.packed.scales))
        except Exception as error:  # noqa: BLE001 - vLLM raises untyped errors with the core's message
            raise I2CLError(str(error).rpartition("failed: ")[2]) from None
        TASKS.add(served)
        await _drop_unused(state)
    return served


async def _drop_unused(state: Any) -> None:
    """Drop unused edits in the engine. Edits in use are dropped on a later call."""
    for digest in TASKS.pop_unused():
        await state.i2cl_engine.collective_rpc(DROP, args=(digest,))


async def _answers(state: Any, served: Served, queries: Sequence[Ids]) -> list[Answer]:
    edges: list[dict[Edge, float]] = [{} for _ in queries]

    async def ask(row: int, part: Prompt) -> None:
        prompt, name = {"prompt_token_ids": list(part.ids)}, f"i2cl-{uuid4().hex}"
        async for output in state.i2cl_engine.generate(prompt, parameters(served, part), name):
            last = output
        edges[row] |= part.edges(last)

    def release(size: int, _task: asyncio.Task[None]) -> None:  # runs even if cancelled before the start
        state.i2cl_limiter.leave(size)

    try:
        async with asyncio.TaskGroup() as group:  # cancels all prompts if one fails
            for row, query in enumerate(queries):
                for part in served.label_prompts.prompts(query, state.i2cl_limiter.limits):
                    size = len(part.ids)
                    await state.i2cl_limiter.enter(size)
                    group.create_task(ask(row, part)).add_done_callback(partial(release, size))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [served.answer(values) for values in edges]
