"""Decisions: questions about one text, each answered by a task, or zero-shot by the base model.

A question is answered by the task of its name, or else by the task that the request names as its model. Its
options are labels of that task; the probabilities are renormalized over them. If neither name is a task, the
base model answers zero-shot: options are scored as label words after the text and the question. The prompt
lists no options, so their order has no influence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from i2cl.errors import I2CLError
from i2cl.injections.pool import LoadedTask, RowScores, TaskQuery
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.service import Service, deadline_of
from i2cl.interfaces.server.task_store import Entry
from i2cl.tasks import Task, Template
from i2cl.tasks.labels import is_blank, normalize_word

TRUE_WORDS, FALSE_WORDS = ("yes", "true", "1"), ("no", "false", "0")
ZERO_SHOT_TEMPLATE = Template("{text}\nAnswer: {label}")
ZERO_SHOT_TASKS = 256  # label sets whose tokens are cached

Kind = Literal["predicate", "choice", "score"]


@dataclass(frozen=True)
class Option:
    """One option of a question.

    Attributes:
        words: label words that stand for it. A task may use any of them; zero-shot scores the first.
        description: shown in zero-shot prompts.
    """

    words: tuple[str, ...]
    description: str = ""


@dataclass(frozen=True)
class Question:
    """A question of either API.

    Attributes:
        kind: a predicate has the options true and false, in this order; a score has ordered levels.
        name: name of the question, empty if it has none.
        options: what to choose from.
        instructions: the question itself. Tasks have their own prompt and ignore it.
        param: its place in the request, for errors.
    """

    kind: Kind
    name: str
    options: tuple[Option, ...]
    instructions: str
    param: str


@dataclass(frozen=True)
class Decision:
    """Answer to a question.

    Attributes:
        probabilities: of the options, in their order.
        labels: label words that stand for the options.
        task: the task that answered; None for zero-shot.
        label_mass: see `i2cl.injections.pool.RowScores`.
    """

    probabilities: list[float]
    labels: tuple[str, ...]
    task: Entry | None
    label_mass: float | None

    @property
    def best(self) -> int:
        """Index of the most probable option."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """Probability of the most probable option."""
        return self.probabilities[self.best]

    @property
    def expected_index(self) -> float:
        """Expected index of the option, the score of ordered levels."""
        return sum(index * probability for index, probability in enumerate(self.probabilities))

    @property
    def expected_value(self) -> float | None:
        """Expected value of labels that are numbers, None for others."""
        try:
            values = [float(label) for label in self.labels]
        except ValueError:
            return None
        return sum(value * p for value, p in zip(values, self.probabilities, strict=True))


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
            model: name of the base model, or of the task for questions whose name is no task.
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
        decisions = [
            _decision(question, row, scores[row.query]) for question, row in zip(questions, rows, strict=True)
        ]
        return decisions, sum(len(query.ids) for query in queries)

    def _encode(self, model: str, text: str, questions: Sequence[Question]) -> list[_Row]:
        rows, encoded = [], {}
        for question in questions:
            _require_distinct(question)
            name = self._task_name(question, model)
            if name is None:
                query, indices = self._zero_shot_query(question, text), range(len(question.options))
                rows.append(_Row(query, indices, None))
                continue
            if name not in encoded:
                entry, (query,) = self._service.tasks.queries(name, [text])
                encoded[name] = entry, query
            entry, query = encoded[name]
            rows.append(_Row(query, _choose(question, entry), entry))
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


def _require_distinct(question: Question) -> None:
    if len({option.words for option in question.options}) < len(question.options):
        message = f"{question.param}: an option is given twice"
        raise RefusalError(400, "bad_request", message, "remove one", param=question.param)


def _decision(question: Question, row: _Row, scores: RowScores) -> Decision:
    probabilities = scores.log_probs[list(row.chosen)].softmax(-1).tolist()
    if row.task is None:
        labels = tuple(option.words[0] for option in question.options)
    else:
        labels = tuple(row.task.labels[index] for index in row.chosen)
    return Decision(probabilities, labels, row.task, scores.label_mass)


def _choose(question: Question, task: Entry) -> list[int]:
    """Return the label index of each option. Raises RefusalError (400) if an option is not a label."""
    if question.kind == "predicate":
        return _true_and_false(question, task)
    chosen = [_index(option, task.labels) for option in question.options]
    if question.kind == "score" and None in chosen:
        chosen = [*_numbers(question, task)]
    missing = [
        option.words[0] for option, index in zip(question.options, chosen, strict=True) if index is None
    ]
    if missing:
        message = f"{question.param}: task {task.name!r} has no label {missing[0]!r} ({_listed(task.labels)})"
        hint = "use its labels, or another question name to ask the base model"
        raise RefusalError(400, "unknown_option", message, hint, param=question.param)
    indices = [index for index in chosen if index is not None]
    if len({*indices}) < len(indices):
        message = f"{question.param}: two options are the same label of task {task.name!r}"
        raise RefusalError(400, "unknown_option", message, "remove one", param=question.param)
    return indices


def _index(option: Option, labels: Sequence[str]) -> int | None:
    """Return the index of the label that stands for an option."""
    words = [normalize_word(word) for word in option.words]
    return next((labels.index(word) for word in words if word in labels), None)


def _numbers(question: Question, task: Entry) -> list[int | None]:
    """Return the labels for levels with other names: labels that are numbers, in ascending order."""
    try:
        ascending = sorted(range(len(task.labels)), key=lambda index: float(task.labels[index]))
    except ValueError:
        return [_index(option, task.labels) for option in question.options]
    if len(ascending) != len(question.options):
        message = f"{question.param}: task {task.name!r} has {len(ascending)} levels ({_listed(task.labels)})"
        hint = f"send {len(ascending)} levels, or levels that are its labels"
        raise RefusalError(400, "unknown_option", message, hint, param=question.param)
    return [*ascending]


def _true_and_false(question: Question, task: Entry) -> list[int]:
    """Return the indices of the labels for true and false.

    A description or the instructions may name the label; otherwise one label is a word such as "yes" or "no",
    the other label with "not" in front, or the name of the question or task.
    """
    labels = task.labels
    if len(labels) != 2:
        message = f"{question.param}: task {task.name!r} has {len(labels)} labels, but a predicate needs two"
        raise RefusalError(400, "unknown_option", message, "ask a choice", param=question.param)
    true, false = question.options
    for index, label in enumerate(labels):
        other = labels[1 - index]
        if label in (true.description, question.instructions) or other == false.description:
            return [index, 1 - index]
    for index, label in enumerate(labels):
        word, opposite = label.casefold(), labels[1 - index].casefold()
        if (
            word in TRUE_WORDS
            or opposite in FALSE_WORDS
            or opposite in {f"not {word}", f"non-{word}", f"no {word}"}
            or word in {question.name.casefold(), task.name.casefold()}
        ):
            return [index, 1 - index]
    message = f"{question.param}: unclear which label of task {task.name!r} means true ({_listed(labels)})"
    hint = "make the instructions one of the labels, or ask a choice"
    raise RefusalError(400, "unknown_option", message, hint, param=question.param)


def _listed(labels: Sequence[str], limit: int = 10) -> str:
    """Return the first labels for an error message."""
    more = f", and {len(labels) - limit} more" if len(labels) > limit else ""
    return "labels: " + ", ".join(map(repr, labels[:limit])) + more
