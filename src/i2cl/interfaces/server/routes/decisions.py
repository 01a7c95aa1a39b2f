"""Routes of the decision APIs: questions about one text, each answered by a task, or by the base model.

A question is answered by the task of its name, or else by the task that the request names as its model. Its
options are labels of that task; the probabilities are renormalized over them. If neither name is a task, the
base model answers zero-shot: options are scored as label words after the text and the question. The prompt
lists no options, so their order has no influence.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from fastapi import FastAPI, Response

from i2cl.errors import I2CLError
from i2cl.injections.pool import LoadedTask, TaskQuery
from i2cl.interfaces.decisions import (
    DECISIONS,
    SYSTEMONE,
    Decision,
    DecisionRequest,
    DecisionResponse,
    Question,
    SystemoneRequest,
    SystemoneResponse,
    choose_labels,
    result_of,
)
from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service, deadline_of
from i2cl.interfaces.server.task_store import Entry
from i2cl.tasks import Task, Template
from i2cl.tasks.labels import is_blank

ZERO_SHOT_TEMPLATE = Template("{text}\nAnswer: {label}")
ZERO_SHOT_TASKS = 256  # label sets whose tokens are cached
MakeTask = Callable[[tuple[str, ...]], LoadedTask]  # from label words


class EncodedQuestion(NamedTuple):
    """A question with the query that answers it.

    Attributes:
        query: text and prompt; questions for the same task share it.
        labels: index of the label of each option.
        task: the task; None for zero-shot.
    """

    query: TaskQuery
    labels: Sequence[int]
    task: Entry | None


def add_decisions(app: FastAPI, service: Service) -> None:
    """Add the routes of both APIs."""

    @lru_cache(ZERO_SHOT_TASKS)
    def make_task(labels: tuple[str, ...]) -> LoadedTask:
        return service.tasks.pool.plain(Task("zero-shot", labels, ZERO_SHOT_TEMPLATE))

    async def answer(body: DecisionRequest | SystemoneRequest, timeout: float | None) -> Response:
        text, questions = body.parse()
        if is_blank(text):
            raise RefusalError(400, "bad_input", "the text is empty", "send the text to decide about")
        model, deadline = body.model or service.base, deadline_of(timeout)
        encoded = await service.encode(partial(_encode, service, make_task, model, text, questions), deadline)
        queries = [*dict.fromkeys(question.query for question in encoded)]
        scores = dict(zip(queries, await service.score(queries, deadline), strict=True))
        results = []
        for question, (query, indices, task) in zip(questions, encoded, strict=True):
            labels, score = query.task.scorer.task.labels, scores[query]
            decision = Decision.of(score.log_probs, score.label_mass, labels, indices, task)
            results.append(result_of(question, decision))
        response = body.respond(model, results, sum(len(query.ids) for query in queries))
        return Response(json.dumps(response), media_type=schemas.JSON)

    @app.post(
        DECISIONS,
        summary="Answer questions about a text, for clients of OpenAI's decisions API",
        response_model=DecisionResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def decisions(body: DecisionRequest, timeout: schemas.Timeout = None) -> Response:
        return await answer(body, timeout)

    @app.post(
        SYSTEMONE,
        summary="Answer questions about a text, for clients of vLLM's decisions API",
        response_model=SystemoneResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def systemone(body: SystemoneRequest, timeout: schemas.Timeout = None) -> Response:
        return await answer(body, timeout)


def _encode(
    service: Service, make_task: MakeTask, model: str, text: str, questions: Sequence[Question]
) -> list[EncodedQuestion]:
    """Encode the text for each question. Raises RefusalError: 400 if a question does not fit its task, 404
    for an unknown model; see also `TaskStore.queries`.
    """
    encoded: list[EncodedQuestion] = []
    by_task: dict[str, tuple[Entry, TaskQuery]] = {}
    for question in questions:
        name = _task_name(service, question, model)
        if name is None:
            query = _zero_shot_query(make_task, question, text)
            encoded.append(EncodedQuestion(query, range(len(question.options)), None))
            continue
        if name not in by_task:
            entry, (query,) = service.tasks.queries(name, [text])
            query.task.scorer.task.require_single_label("a decision", "send it to /v1/classify")
            by_task[name] = entry, query
        entry, query = by_task[name]
        encoded.append(EncodedQuestion(query, choose_labels(question, entry), entry))
    return encoded


def _task_name(service: Service, question: Question, model: str) -> str | None:
    """Return the name of the task that answers a question, None for the base model."""
    if question.name and service.tasks.find(question.name) is not None:
        return question.name
    if model != service.base:
        return service.tasks.entry(model).name
    if service.learned_only:
        hint = "name the question after a task of GET /v1/models, or pass the task as model"
        raise RefusalError(400, "no_task", f"no task answers {question.param}", hint, param=question.param)
    return None


def _zero_shot_query(make_task: MakeTask, question: Question, text: str) -> TaskQuery:
    described = [option for option in question.options if option.description]
    lines = sorted(f"{option.words[0]}: {option.description}" for option in described)
    prompt = "\n".join(part for part in (f"{text}\n", question.instructions, *lines) if part)
    try:
        task = make_task(tuple(option.words[0] for option in question.options))
        return task.queries([prompt], cut=False)[0]
    except I2CLError as error:
        refusal = RefusalError.of(error)
        refusal.param = question.param
        raise refusal from None
