"""Decisions: questions about one text, each answered by a task, or zero-shot by the base model.

A question is answered by the task of its name, or else by the task that the request names as its model. Its
options are labels of that task; the probabilities are renormalized over them. If neither name is a task, the
base model answers zero-shot: options are scored as label words after the text and the question. The prompt
lists no options, so their order has no influence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from i2cl.errors import I2CLError
from i2cl.injections.pool import LoadedTask, TaskQuery
from i2cl.interfaces.decisions import Decision, Question, choose_labels
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.service import Service, deadline_of
from i2cl.interfaces.server.task_store import Entry
from i2cl.tasks import Task, Template
from i2cl.tasks.labels import is_blank

ZERO_SHOT_TEMPLATE = Template("{text}\nAnswer: {label}")
ZERO_SHOT_TASKS = 256  # label sets whose tokens are cached


@dataclass(frozen=True)
class _Row:
    """An encoded question.

    Attributes:
        query: the text with the prompt of the task; questions for the same task share it.
        chosen: indices of the options among the labels of the task.
        task: the task; None for zero-shot.
    """

    query: TaskQuery
    chosen: Sequence[int]
    task: Entry | None


class DecisionMaker:
    """Answers questions with the tasks and the model of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._zero_shot_task = lru_cache(ZERO_SHOT_TASKS)(self._make_zero_shot_task)

    async def decide(
        self, model: str, text: str, questions: Sequence[Question], timeout: float | None = None
    ) -> tuple[list[Decision], int]:
        """Answer questions about a text, all of them in one request to the model.

        Args:
            model: name of the base model, or of the task for questions that are not named like a task.
            text: what the questions are about.
            questions: one or more.
            timeout: seconds within which the model has to start on them.

        Returns:
            The decisions in the order of the questions, and the number of tokens read.

        Raises:
            RefusalError: 400 if the text is empty, or a question does not fit its task; 404 for an unknown
                model; see also `Service.encode` and `Service.score`.
        """
        if is_blank(text):
            raise RefusalError(400, "bad_input", "the text is empty", "send the text to decide about")
        deadline = deadline_of(timeout)
        rows = await self._service.encode(lambda: self._encode(model, text, questions), deadline)
        queries = [*dict.fromkeys(row.query for row in rows)]
        scores = dict(zip(queries, await self._service.score(queries, deadline), strict=True))
        decisions = []
        for row in rows:
            labels, score = row.query.task.scorer.task.labels, scores[row.query]
            decisions.append(Decision.of(score.log_probs, score.label_mass, labels, row.chosen, row.task))
        return decisions, sum(len(query.ids) for query in queries)

    def _encode(self, model: str, text: str, questions: Sequence[Question]) -> list[_Row]:
        rows, encoded = [], {}
        for question in questions:
            name = self._task_name(question, model)
            if name is None:
                query, indices = self._zero_shot_query(question, text), range(len(question.options))
                rows.append(_Row(query, indices, None))
                continue
            if name not in encoded:
                entry, (query,) = self._service.tasks.queries(name, [text])
                query.task.scorer.task.require_single_label("a decision", "send it to /v1/classify")
                encoded[name] = entry, query
            entry, query = encoded[name]
            rows.append(_Row(query, choose_labels(question, entry), entry))
        return rows

    def _task_name(self, question: Question, model: str) -> str | None:
        """Return the name of the task that answers a question, None for the base model."""
        tasks = self._service.tasks
        if question.name and tasks.find(question.name) is not None:
            return question.name
        if model != self._service.base:
            return tasks.entry(model).name
        if self._service.learned_only:
            what = f"no task answers {question.param}"
            hint = "name the question after a task of GET /v1/models, or pass the task as model"
            raise RefusalError(400, "no_task", what, hint, param=question.param)
        return None

    def _zero_shot_query(self, question: Question, text: str) -> TaskQuery:
        described = [option for option in question.options if option.description]
        lines = sorted(f"{option.words[0]}: {option.description}" for option in described)
        prompt = "\n".join(part for part in (f"{text}\n", question.instructions, *lines) if part)
        try:
            task = self._zero_shot_task(tuple(option.words[0] for option in question.options))
            return task.queries([prompt], cut=False)[0]
        except I2CLError as error:
            refusal = RefusalError.of(error)
            refusal.param = question.param
            raise refusal from None

    def _make_zero_shot_task(self, labels: tuple[str, ...]) -> LoadedTask:
        return self._service.tasks.pool.plain(Task("zero-shot", labels, ZERO_SHOT_TEMPLATE))
