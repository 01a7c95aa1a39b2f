"""Routes of the server: ``/v1/i2cl/classify``, and ``/v1/i2cl/tasks`` for who has the admin's key.

They stand below ``/v1/``, since vLLM's ``--api-key`` guards nothing else.
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
from i2cl.interfaces.vllm.prompts import Edge, InterruptedRequestError, Prompt, Reach, Share
from i2cl.models.batching import Ids
from i2cl.models.encoding import TooLongError

# Environment variable: a folder of artefacts that are loaded at the start, each by its folder's name.
FOLDER = "I2CL_VLLM_TASKS"

# Environment variable: the key that loads, drops and lists tasks. Without it nobody can over HTTP.
ADMIN = "I2CL_VLLM_ADMIN_KEY"


class LoadRequest(BaseModel):
    """An artefact on the server's machine, or on the hub, and the name that requests call it by."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    artefact: str


class Routes:
    """What vLLM's group ``vllm.endpoint_plugins`` asks for."""

    name = "i2cl"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; what a client no longer waits for is not done."""
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        from i2cl.interfaces.vllm.plugin import install_in_server

        install_in_server()
        router, admin = APIRouter(prefix="/v1/i2cl"), [Depends(_only_admin)]
        router.add_api_route("/classify", with_cancellation(classify), methods=["POST"], response_model=None)
        router.add_api_route("/tasks", listed, methods=["GET"], dependencies=admin)
        router.add_api_route("/tasks", load, methods=["POST"], dependencies=admin)
        router.add_api_route("/tasks/{name:path}", drop, methods=["DELETE"], dependencies=admin)
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, _args: Any) -> None:
        """Load the tasks of the folder in the environment. Raises I2CLError, which ends the start."""
        state.i2cl_engine, state.i2cl_lock = engine_client, asyncio.Lock()
        state.i2cl_share = Share(Reach.of(engine_client.vllm_config))
        folder = os.environ.get(FOLDER)
        if folder is None:
            return
        folders = sorted(path.parent for path in Path(folder).glob(f"*/{DESCRIPTION}"))
        if not folders:
            raise I2CLError(f"{FOLDER}={folder!r} holds no folder with an injection: name one that does")
        for path in folders:
            await _load(state, path.name, str(path))


def _only_admin(authorization: Annotated[str, Header()] = "") -> None:
    key = os.environ.get(ADMIN)
    if not key:
        raise HTTPException(403, f"tasks are fixed: start the server with {ADMIN} to load and drop them")
    if not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
        raise HTTPException(403, "this key may not load, drop or list tasks: send the admin's")


async def classify(body: Classify, raw_request: Request, response: Response) -> Classification | JSONResponse:
    """The most probable label of each text, or none below ``min_confidence``, and all probabilities.

    All of it is answered by the version of the task that is there when it begins.
    """
    served = _named(body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    try:
        require_text_count(texts)
        with TASKS.held(served):
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


async def listed() -> dict[str, Any]:
    """Every loaded task."""
    return {"object": "list", "data": [_described(one) for one in TASKS.served.values()]}


async def load(body: LoadRequest, request: Request) -> dict[str, Any]:
    """Load an artefact, or replace the one of that name."""
    try:
        return _described(await _load(request.app.state, body.name, body.artefact))
    except I2CLError as error:
        raise HTTPException(503 if ASLEEP in str(error) else 400, str(error)) from None


async def drop(name: str, request: Request) -> dict[str, Any]:
    """Let no more requests name a task; those that run end as they began."""
    state = request.app.state
    async with state.i2cl_lock:
        _named(name)
        TASKS.remove(name)
        await _forget(state)
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
        await _forget(state)
        try:
            await engine.collective_rpc(LOAD, args=(served.packed.rows, served.packed.scales))
        except Exception as error:  # noqa: BLE001 - vLLM's clients raise plain ones, with the core's words
            raise I2CLError(str(error).rpartition("failed: ")[2]) from None
        TASKS.add(served)
        await _forget(state)
    return served


async def _forget(state: Any) -> None:
    """Drop what nobody needs; what a running request still needs is dropped after a later change."""
    for digest in TASKS.unneeded():
        await state.i2cl_engine.collective_rpc(DROP, args=(digest,))


async def _answers(state: Any, served: Served, queries: Sequence[Ids]) -> list[Answer]:
    edges: list[dict[Edge, float]] = [{} for _ in queries]

    async def ask(row: int, part: Prompt) -> None:
        prompt, name = {"prompt_token_ids": list(part.ids)}, f"i2cl-{uuid4().hex}"
        async for output in state.i2cl_engine.generate(prompt, parameters(served, part), name):
            last = output
        edges[row] |= part.edges(last)

    def left(size: int, _task: asyncio.Task[None]) -> None:  # also of a task that was ended before it began
        state.i2cl_share.leave(size)

    try:
        async with asyncio.TaskGroup() as group:  # which ends all of them with the first that fails
            for row, query in enumerate(queries):
                for part in served.label_prompts.prompts(query, state.i2cl_share.reach):
                    size = len(part.ids)
                    await state.i2cl_share.enter(size)
                    group.create_task(ask(row, part)).add_done_callback(partial(left, size))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [served.answer(values) for values in edges]
