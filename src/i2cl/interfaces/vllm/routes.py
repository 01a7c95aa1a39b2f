"""HTTP routes: ``/v1/i2cl/classify``, the decision APIs, and ``/v1/i2cl/tasks`` for admins.

All paths begin with ``/v1/``, because vLLM's ``--api-key`` protects only those.
"""

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.interfaces.decisions import (
    DECISIONS,
    SYSTEMONE,
    Decision,
    DecisionRequest,
    Diagnostics,
    Question,
    Result,
    SystemoneRequest,
    choose_labels,
    error_response,
    result_of,
)
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes.schemas import Classification, Classify, require_text_count
from i2cl.interfaces.vllm.engine import ASLEEP, DROP, LOAD
from i2cl.interfaces.vllm.frontend import TASKS, Answer, Edge, Prompt, ServedTask
from i2cl.interfaces.vllm.support import NAME
from i2cl.models.batching import Ids
from i2cl.storage.layout import DESCRIPTION

# Environment variable: folder of artefacts to load at start-up, each named by its subfolder.
TASKS_FOLDER_ENV = "I2CL_VLLM_TASKS"

# Environment variable: key for loading, dropping and listing tasks. If unset, these routes answer 403.
ADMIN_KEY_ENV = "I2CL_VLLM_ADMIN_KEY"

BATCH_FRACTION = 4  # the routes may fill at most one BATCH_FRACTION-th of vLLM's batch

Handler = Callable[[Request], Awaitable[Response]]
BY_VLLM: Diagnostics = {
    "answered_by": "vllm",
    "label_mass": None,
    "task": None,
    "digest": None,
    "expected_value": None,
}


class LoadRequest(BaseModel):
    """Body of ``POST /v1/i2cl/tasks``: a task name, and a folder on the server or a hub id."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    artefact: str


class Routes:
    """Endpoint plugin of vLLM (group ``vllm.endpoint_plugins``)."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes. They replace vLLM's own routes of the same path."""
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        from i2cl.interfaces.vllm.plugin import install_in_server

        install_in_server()
        app.add_exception_handler(I2CLError, _error_response)
        add, admin = partial(app.router.add_api_route, response_model=None), [Depends(_only_admin)]
        add("/v1/i2cl/classify", with_cancellation(classify), methods=["POST"])
        for path, api in ((DECISIONS, DecisionRequest), (SYSTEMONE, SystemoneRequest)):
            add(path, partial(decide, api, _own_route(app, path)), methods=["POST"], name=api.__name__)
        add("/v1/i2cl/tasks", list_tasks, methods=["GET"], dependencies=admin)
        add("/v1/i2cl/tasks", load, methods=["POST"], dependencies=admin)
        add("/v1/i2cl/tasks/{name:path}", drop, methods=["DELETE"], dependencies=admin)

    async def init_state(self, engine_client: Any, state: Any, _args: Any) -> None:
        """Load the tasks of I2CL_VLLM_TASKS. An I2CLError stops the server."""
        state.i2cl_engine, state.i2cl_lock = engine_client, asyncio.Lock()
        scheduler = engine_client.vllm_config.scheduler_config
        state.i2cl_limiter = PromptLimiter(
            max(1, scheduler.max_num_seqs // BATCH_FRACTION),
            max(1, scheduler.max_num_batched_tokens // BATCH_FRACTION),
        )
        folder = os.environ.get(TASKS_FOLDER_ENV)
        if folder is None:
            return
        folders = sorted(path.parent for path in Path(folder).glob(f"*/{DESCRIPTION}"))
        if not folders:
            raise I2CLError(f"{TASKS_FOLDER_ENV}={folder!r} contains no artefacts: save one in a subfolder")
        for path in folders:
            await _load(state, path.name, str(path))


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    """Answer an I2CLError in the error format of the route. Invalid input is a 400, as in all of vLLM."""
    refusal = RefusalError.of(error)
    status, body = error_response(request.url.path, refusal)
    return JSONResponse(body, 400 if status == 422 else status, headers=refusal.headers)


def _only_admin(authorization: Annotated[str, Header()] = "") -> None:
    key = os.environ.get(ADMIN_KEY_ENV)
    if not key:
        hint = f"set {ADMIN_KEY_ENV} when starting the server"
        raise RefusalError(403, "forbidden", "managing tasks is disabled", hint)
    if not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
        message = "this key may not load, drop or list tasks"
        raise RefusalError(403, "forbidden", message, "send the admin key")


async def classify(body: Classify, raw_request: Request, response: Response) -> Classification:
    """Classify texts: label (empty below ``min_confidence``) and probabilities of all labels.

    The whole request is answered by the version of the task that is loaded when it begins.
    """
    task = TASKS.get(body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    require_text_count(texts)
    queries = await run_in_threadpool(partial(task.scorer.queries, texts, cut=False))
    answers = await _answers([(task, query) for query in queries], raw_request)
    response.headers["X-I2CL-Digest"] = task.digest
    probabilities = [answer.log_probs.softmax(-1).tolist() for answer in answers]
    return Classification.of(body, task.labels, probabilities, list(map(len, queries)))


def _own_route(app: FastAPI, path: str) -> Handler | None:
    """Return the handler of vLLM's own route of a path, which the plugin's route will replace."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path == path]
    return routes[0].get_route_handler() if routes else None


async def decide(
    api: type[DecisionRequest] | type[SystemoneRequest],
    own_route: Handler | None,
    body: dict[str, Any],
    raw_request: Request,
) -> Response:
    """Answer questions with the tasks of their names, or with the task that the request names.

    A request names a task as its ``model`` or in ``vllm_xargs``. If it names none, vLLM's own route answers
    the questions whose name is not a task, and those with options that are not labels of their task.

    Args:
        api: model of the body.
        own_route: vLLM's own route of the same path, None if this version has none.
        body: the body.
        raw_request: the request.

    Raises:
        RefusalError: 400 if a question can be answered neither by a task nor by vLLM.
        RequestValidationError: if the body of a request with a task is invalid.
    """
    if not _names_task(body):
        return await _ask_vllm(own_route, raw_request, body)
    xargs = body.pop("vllm_xargs", None)
    try:
        parsed = api.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    in_xargs = isinstance(xargs, dict) and NAME in xargs
    default = TASKS.get(xargs[NAME]) if in_xargs else TASKS.by_name.get(parsed.model or "")
    text, questions = parsed.parse()
    chosen: dict[int, tuple[Question, ServedTask, list[int]]] = {}  # by place of the question
    for place, question in enumerate(questions):
        if (task := TASKS.by_name.get(question.name, default)) is not None:
            try:
                chosen[place] = question, task, choose_labels(question, task)
            except RefusalError:
                if default is not None or own_route is None:
                    raise
    results: dict[int, Result] = {}
    usage = {"input_tokens": 0, "output_tokens": 0}
    if others := [place for place in range(len(questions)) if place not in chosen]:
        items = [*(body["questions"].items() if isinstance(body["questions"], dict) else body["questions"])]
        remaining = type(body["questions"])(items[place] for place in others)
        reply = await _ask_vllm(own_route, raw_request, body | {"questions": remaining})
        if reply.status_code != 200:
            return reply
        vllm_response = json.loads(bytes(reply.body))
        answers = vllm_response["answers"]
        answers = answers.values() if isinstance(answers, dict) else answers
        results = {place: (answer, BY_VLLM) for place, answer in zip(others, answers, strict=True)}
        usage = vllm_response["usage"]
    by_tasks, tokens = await _ask_tasks(text, [*chosen.values()], raw_request)
    results |= zip(chosen, by_tasks, strict=True)
    response = parsed.respond(
        parsed.model or raw_request.app.state.i2cl_engine.model_config.served_model_name,
        [results[place] for place in range(len(questions))],
        usage["input_tokens"] + tokens,
        usage["output_tokens"],
    )
    return JSONResponse(response)


async def _ask_tasks(
    text: str, chosen: Sequence[tuple[Question, ServedTask, list[int]]], raw_request: Request
) -> tuple[list[Result], int]:
    """Answer each question with its task. Each task reads the text once.

    Args:
        text: what the questions are about.
        chosen: questions, each with its task and the indices of the labels for its options.
        raw_request: the request; no more work is done once its client disconnects.

    Returns:
        The results in the order of the questions, and the number of tokens read.
    """
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation

    tasks = {task.name: task for _, task, _ in chosen}
    rows = await run_in_threadpool(
        lambda: [(task, task.scorer.queries([text], cut=False)[0]) for task in tasks.values()]
    )
    answers = await with_cancellation(_answers)(rows=rows, raw_request=raw_request)
    by_task = dict(zip(tasks, answers, strict=True))
    results = []
    for question, task, labels in chosen:
        answer = by_task[task.name]
        decision = Decision.of(answer.log_probs, answer.label_mass, task.labels, labels, task)
        results.append(result_of(question, decision))
    return results, sum(len(query) for _, query in rows)


def _names_task(body: dict[str, Any]) -> bool:
    """Return whether a request names a loaded task, or any task in ``vllm_xargs``."""
    questions, xargs = body.get("questions"), body.get("vllm_xargs")
    if isinstance(questions, list):
        questions = [question.get("name") for question in questions if isinstance(question, dict)]
    names = [body.get("model"), *(questions if isinstance(questions, list | dict) else ())]
    in_xargs = isinstance(xargs, dict) and NAME in xargs
    return in_xargs or any(isinstance(name, str) and name in TASKS.by_name for name in names)


async def _ask_vllm(own_route: Handler | None, raw_request: Request, body: dict[str, Any]) -> Response:
    """Return the response of vLLM's own route. Raises RefusalError (400) if it does not serve this model."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await raw_request.receive()

    response = None
    if own_route is not None:
        with suppress(NotImplementedError):  # raised by vLLM 0.32; 0.33 answers 501
            response = await own_route(Request(raw_request.scope, receive))
    if response is None or response.status_code == 501:
        loaded = ", ".join(sorted(TASKS.by_name)[:10]) or "none"
        message = f"no task answers these questions (loaded: {loaded}), and vLLM cannot with this model"
        hint = "name each question after a task, or send a task as model"
        raise RefusalError(400, "no_task", message, hint, param="questions")
    return response


async def list_tasks() -> dict[str, Any]:
    """List the loaded tasks."""
    return {"object": "list", "data": [_described(task) for task in TASKS.by_name.values()]}


async def load(body: LoadRequest, request: Request) -> dict[str, Any]:
    """Load a task, or replace the task of the same name."""
    return _described(await _load(request.app.state, body.name, body.artefact))


async def drop(name: str, request: Request) -> dict[str, Any]:
    """Drop a task. Running requests finish with it."""
    state = request.app.state
    async with state.i2cl_lock:
        await _drop_edits(state, TASKS.remove(name))
    return {"name": name, "object": "task", "deleted": True}


def _described(task: ServedTask) -> dict[str, Any]:
    return {"name": task.name, "object": "task", "digest": task.digest, "labels": list(task.labels)}


async def _load(state: Any, name: str, artefact: str) -> ServedTask:
    engine = state.i2cl_engine
    async with state.i2cl_lock:
        injection = await run_in_threadpool(Injection.from_pretrained, artefact)
        prepare = partial(TASKS.prepare, name, injection, force=False)
        task = await run_in_threadpool(prepare, engine.model_config, engine.get_tokenizer())
        try:
            await engine.collective_rpc(LOAD, args=(task.edit.rows, task.edit.scales))
        except Exception as error:  # noqa: BLE001 - vLLM raises untyped errors with the core's message
            message = str(error).rpartition("failed: ")[2]
            if ASLEEP in message:
                raise RefusalError(503, "asleep", message) from None
            raise I2CLError(message) from None
        await _drop_edits(state, TASKS.add(task))
    return task


async def _drop_edits(state: Any, digests: Sequence[str]) -> None:
    for digest in digests:
        await state.i2cl_engine.collective_rpc(DROP, args=(digest,))


async def _answers(rows: Sequence[tuple[ServedTask, Ids]], raw_request: Request) -> list[Answer]:
    """Answer queries of tasks together, as far as the limiter allows."""
    state = raw_request.app.state
    edges: list[dict[Edge, float]] = [{} for _ in rows]

    async def score(row: int, prompt: Prompt) -> None:
        parameters, request_id = rows[row][0].parameters(prompt), f"i2cl-{uuid4().hex}"
        async for output in state.i2cl_engine.generate(
            {"prompt_token_ids": list(prompt.ids)}, parameters, request_id
        ):
            last = output
        edges[row] |= prompt.edges(last)

    def release(size: int, _task: asyncio.Task[None]) -> None:  # runs even if cancelled before the start
        state.i2cl_limiter.leave(size)

    try:
        async with asyncio.TaskGroup() as group:  # cancels all prompts if one fails
            for row, (task, query) in enumerate(rows):
                for prompt in task.prompts(query):
                    size = len(prompt.ids)
                    await state.i2cl_limiter.enter(size)
                    group.create_task(score(row, prompt)).add_done_callback(partial(release, size))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.answer(values) for (task, _), values in zip(rows, edges, strict=True)]


class PromptLimiter:
    """Limits the prompts that the routes have in the engine, first come, first served.

    Requests that enter one prompt at a time take turns. A prompt above the token limit runs alone.

    Args:
        prompts: maximum number of prompts.
        tokens: maximum total number of their tokens.
    """

    def __init__(self, prompts: int, tokens: int) -> None:
        self._max_prompts, self._max_tokens = prompts, tokens
        self._prompts = self._tokens = 0
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    async def enter(self, tokens: int) -> None:
        """Wait until a prompt with this number of tokens fits."""
        async with self._turn:
            while self._prompts and not (
                self._prompts < self._max_prompts and self._tokens + tokens <= self._max_tokens
            ):
                self._left.clear()
                await self._left.wait()
            self._prompts += 1
            self._tokens += tokens

    def leave(self, tokens: int) -> None:
        """Release the capacity of a finished prompt."""
        self._prompts -= 1
        self._tokens -= tokens
        self._left.set()
