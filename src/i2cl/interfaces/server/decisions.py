"""Decisions: questions about one text, each answered by a task, or zero-shot by the base model.

A question is answered by the task of its name, or else by the task that the request names as its model. Its
options are labels of that task; the probabilities are renormalized over them. If neither name is a task, the
base model answers zero-shot: options are scored as label words after the text and the question. The prompt
lists no options, so their order has no influence.
"""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from i2cl.errors import I2CLError
from i2cl.injections.pool import InjectionPool, LoadedTask, TaskQuery
from i2cl.interfaces.decisions import Decision, Question, choose_labels
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.service import Disconnected, Service, client_gone, deadline_of
from i2cl.interfaces.server.task_store import Entry
from i2cl.tasks import Task, Template
from i2cl.tasks.text import is_blank

ZERO_SHOT_TEMPLATE = Template("{text}\nAnswer: {label}")
ZERO_SHOT_TASKS = 256  # label sets whose tokens are cached


class DecisionMaker:
    """Answers questions with the tasks and the model of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._zero_shot = lru_cache(ZERO_SHOT_TASKS)(_ZeroShot(service.tasks.pool))

    async def decide(
        self,
        model: str,
        text: str,
        questions: Sequence[Question],
        *,
        timeout: float | None = None,
        disconnected: Disconnected | None = None,
    ) -> tuple[list[Decision], int]:
        """Answer questions about a text, all of them in one request to the model.

        Args:
            model: name of the base model, or of the task for questions whose name is no task.
            text: what the questions are about.
            questions: one or more.
            timeout: seconds within which the model has to start on them.
            disconnected: returns when the client has disconnected.

        Returns:
            The decisions in the order of the questions, and the number of tokens read.

        Raises:
            RefusalError: 400 if the text is empty, or a question does not fit its task; 404 for an unknown
                model; see also `Service.queries` and `Service.score`.
        """
        if is_blank(text):
            raise RefusalError(400, "bad_input", "the text is empty", "send the text to decide about")
        deadline = deadline_of(timeout)
        self._service.batcher.require_room()
        # on a worker thread: looking up a new task folder reads it
        names = await asyncio.to_thread(lambda: [self._task_of(question, model) for question in questions])
        rows: dict[tuple[str | None, str], TaskQuery] = {}  # by task; zero-shot: by question
        entries: dict[str, Entry] = {}
        chosen: list[Sequence[int]] = []  # places of the options among the labels
        for question, name in zip(questions, names, strict=True):
            if name is None:
                rows[None, question.param] = await asyncio.to_thread(self._zero_shot_row, question, text)
                chosen.append(range(len(question.options)))
                continue
            if name not in entries:
                entries[name], (rows[name, ""],) = await self._service.queries(name, [text])
            chosen.append(choose_labels(question, entries[name]))
        scores = await self._service.score([*rows.values()], deadline, disconnected)
        if scores is None:
            raise client_gone()
        scored = dict(zip(rows, scores, strict=True))
        decisions = []
        for question, name, indices in zip(questions, names, chosen, strict=True):
            key = (None, question.param) if name is None else (name, "")
            labels, task = rows[key].task.scorer.task.labels, None if name is None else entries[name]
            score = scored[key]
            decisions.append(Decision.of(score.log_probs, labels, indices, task, score.label_mass))
        return decisions, sum(len(row.ids) for row in rows.values())

    def _task_of(self, question: Question, model: str) -> str | None:
        """Return the name of the task that answers a question, None for the base model."""
        tasks = self._service.tasks
        if question.name:
            try:
                return tasks.entry(question.name).name
            except RefusalError as error:
                if error.status != 404:
                    raise
        if model != self._service.base:
            return tasks.entry(model).name
        if self._service.learned_only:
            what = f"no task answers {question.param}"
            hint = "name the question after a task of GET /v1/models, or pass the task as model"
            raise RefusalError(400, "no_task", what, hint, param=question.param)
        return None

    def _zero_shot_row(self, question: Question, text: str) -> TaskQuery:
        labels = tuple(option.words[0] for option in question.options)
        described = [option for option in question.options if option.description]
        lines = sorted(f"{option.words[0]}: {option.description}" for option in described)
        prompt = "\n".join(part for part in (f"{text}\n", question.instructions, *lines) if part)
        try:
            return self._zero_shot(labels).queries([prompt], cut=False)[0]
        except I2CLError as error:
            refusal = RefusalError.of(error)
            raise RefusalError(
                400 if refusal.status == 422 else refusal.status,
                refusal.code,
                refusal.message,
                refusal.hint,
                param=question.param,
            ) from None


class _ZeroShot:
    """Prepares sets of labels for zero-shot scoring."""

    def __init__(self, pool: InjectionPool) -> None:
        self._pool = pool

    def __call__(self, labels: tuple[str, ...]) -> LoadedTask:
        return self._pool.plain(Task("zero-shot", labels, ZERO_SHOT_TEMPLATE))
