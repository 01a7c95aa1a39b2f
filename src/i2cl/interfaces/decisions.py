"""Decision APIs: OpenAI's ``/v1/decisions`` and vLLM's ``/v1/systemone``.

Request and response bodies, and which labels of a task stand for the options of a question. `i2cl serve` and
the vLLM plugin share this module; they differ in how they find tasks and compute probabilities.

Sources: the types of the package openai 3.57 (``resources/decisions.py``), and
``vllm/entrypoints/generate/structured_decisions`` of vLLM 0.32.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal, Protocol

from jaxtyping import Float
from pydantic import BaseModel, Field, StrictBool, StrictStr, model_validator
from torch import Tensor

from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes.schemas import Body, Int
from i2cl.tasks.text import normalize_word

DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
MAX_QUESTIONS, MAX_CHOICES = 400, 255  # OpenAI's limits
TRUE_WORDS, FALSE_WORDS = ("yes", "true", "1"), ("no", "false", "0")
BOOLEAN_LABELS = {True: ("true", "True", "yes", "Yes"), False: ("false", "False", "no", "No")}

Kind = Literal["predicate", "choice", "score"]


@dataclass(frozen=True)
class Option:
    """One option of a question.

    Attributes:
        value: as in the request.
        description: shown in zero-shot prompts.
    """

    value: str | bool
    description: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Label words that stand for it. A task may use any of them; zero-shot scores the first."""
        return (self.value,) if isinstance(self.value, str) else BOOLEAN_LABELS[self.value]


@dataclass(frozen=True)
class Question:
    """A question of either API.

    Attributes:
        kind: a predicate has the options "yes" and "no", in this order; a score has ordered levels.
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


class AnsweringTask(Protocol):
    """A task that can answer questions."""

    @property
    def name(self) -> str:
        """Name under which it is loaded."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label words, in the order of the task's scores."""

    @property
    def digest(self) -> str:
        """Version of the task."""


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
    task: AnsweringTask | None
    label_mass: float | None

    @classmethod
    def of(
        cls,
        log_probs: Float[Tensor, " labels"],
        labels: Sequence[str],
        chosen: Sequence[int],
        task: AnsweringTask | None,
        label_mass: float | None,
    ) -> "Decision":
        """Renormalize the log-probabilities of a task over the labels at ``chosen``, one per option."""
        probabilities = log_probs[list(chosen)].softmax(-1).tolist()
        return cls(probabilities, tuple(labels[index] for index in chosen), task, label_mass)

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


def choose_labels(question: Question, task: AnsweringTask) -> list[int]:
    """Return the index of the label of ``task`` that stands for each option.

    Raises:
        RefusalError: 400, code "unknown_option", if an option is not a label of the task.
    """
    if question.kind == "predicate":
        return _true_and_false(question, task)
    chosen = [_label_index(option, task.labels) for option in question.options]
    if question.kind == "score" and None in chosen:
        chosen = [*_numeric_labels(question, task)]
    indices = []
    for option, index in zip(question.options, chosen, strict=True):
        if index is None:
            message = f"task {task.name!r} has no label {option.words[0]!r} ({_listed(task.labels)})"
            raise _unknown_option(question, message, "use its labels, or give the question another name")
        indices.append(index)
    if len({*indices}) < len(indices):
        raise _unknown_option(question, f"two options are the same label of task {task.name!r}", "remove one")
    return indices


def _unknown_option(question: Question, message: str, hint: str) -> RefusalError:
    return RefusalError(400, "unknown_option", f"{question.param}: {message}", hint, param=question.param)


def _label_index(option: Option, labels: Sequence[str]) -> int | None:
    """Return the index of the label that stands for an option."""
    words = [normalize_word(word) for word in option.words]
    return next((labels.index(word) for word in words if word in labels), None)


def _numeric_labels(question: Question, task: AnsweringTask) -> list[int | None]:
    """Return the labels for levels with other names: labels that are numbers, in ascending order."""
    try:
        ascending = sorted(range(len(task.labels)), key=lambda index: float(task.labels[index]))
    except ValueError:
        return [_label_index(option, task.labels) for option in question.options]
    if len(ascending) != len(question.options):
        message = f"task {task.name!r} has {len(ascending)} levels ({_listed(task.labels)})"
        hint = f"send {len(ascending)} levels, or levels that are its labels"
        raise _unknown_option(question, message, hint)
    return [*ascending]


def _true_and_false(question: Question, task: AnsweringTask) -> list[int]:
    """Return the indices of the labels for true and false.

    A description or the instructions may name the label; otherwise one label is a word such as "yes" or "no",
    the other label with "not" in front, or the name of the question or task.
    """
    labels = task.labels
    if len(labels) != 2:
        message = f"task {task.name!r} has {len(labels)} labels, but a predicate needs two"
        raise _unknown_option(question, message, "ask a choice")
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
    message = f"unclear which label of task {task.name!r} means true ({_listed(labels)})"
    raise _unknown_option(question, message, "make the instructions one of the labels, or ask a choice")


def _listed(labels: Sequence[str], limit: int = 10) -> str:
    """Return the first labels for an error message."""
    more = f", and {len(labels) - limit} more" if len(labels) > limit else ""
    return "labels: " + ", ".join(map(repr, labels[:limit])) + more


ModelName = Annotated[str, Field(min_length=1, description="The base model, or a task.")]


class InputText(Body):
    """Text in a message."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputJSON(Body):
    """JSON in a message, rendered as text."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


class InputImage(BaseModel):
    """An image. Images are not supported."""

    type: Literal["input_image"]


Part = Annotated[InputText | InputJSON | InputImage, Field(discriminator="type")]
Parts = str | list[Part]


class InputMessage(Body):
    """A message with a part of the text."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Parts

    @model_validator(mode="before")
    @classmethod
    def _require_message(cls, value: Any) -> Any:
        kind = value.get("type", "message") if isinstance(value, dict) else "message"
        if kind != "message":
            raise ValueError(f"input of type {kind!r} is not supported: send text")
        return value


class PredicateQuestion(Body):
    """How likely a statement is true. Needs a task with two labels, or none for zero-shot."""

    type: Literal["predicate"]
    instructions: Parts
    name: str | None = None


class Choice(Body):
    """One option."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(Body):
    """Which of several options fits."""

    type: Literal["choice"]
    instructions: Parts
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_CHOICES)]
    name: str | None = None


class Level(Body):
    """One level of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(Body):
    """Where the text lies on a scale of ordered levels."""

    type: Literal["score"]
    instructions: Parts
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_CHOICES)]
    name: str | None = None


AnyQuestion = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class Diagnostics(BaseModel):
    """How a question was answered.

    Attributes:
        answered_by: a task, the base model zero-shot, or (in the vLLM plugin) vLLM's own route.
        label_mass: probability of all labels together among everything that could follow the prompt; null
            for labels that are scored by their words.
        task: name of the task.
        digest: version of the task.
        expected_value: expected value of labels that are numbers, for scores.
    """

    answered_by: Literal["task", "zero_shot", "vllm"]
    label_mass: float | None = None
    task: str | None = None
    digest: str | None = None
    expected_value: float | None = None

    @classmethod
    def of(cls, question: Question, decision: Decision) -> "Diagnostics":
        """Describe a decision."""
        task = decision.task
        return cls(
            answered_by="zero_shot" if task is None else "task",
            label_mass=decision.label_mass,
            task=task and task.name,
            digest=task and task.digest,
            expected_value=decision.expected_value if question.kind == "score" else None,
        )


class DecisionResponse(BaseModel):
    """Answers in the order of the questions; ``diagnostics`` is an extension."""

    model: str
    answers: list[dict[str, Any]]
    usage: dict[str, Any]
    diagnostics: list[Diagnostics]


class DecisionRequest(Body):
    """OpenAI's request. Cache options and the safety identifier have no effect."""

    model: ModelName
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    questions: Annotated[list[AnyQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None

    def parse(self) -> tuple[str, list[Question]]:
        """Return the text and the questions. Raises RefusalError (400) for images and for invalid options."""
        if isinstance(self.input, list) and (other := {one.role for one in self.input} - {"user"}):
            problem = f"input messages with role {min(other)!r} are not supported"
            raise RefusalError(400, "unsupported", problem, "send the text in user messages", param="input")
        messages = [self.input] if isinstance(self.input, str) else [one.content for one in self.input]
        text = "\n\n".join(_parts_text(parts, "input") for parts in messages)
        return text, [_question(asked, f"questions[{i}]") for i, asked in enumerate(self.questions)]

    def answer(self, question: Question, decision: Decision) -> dict[str, Any]:
        """Return an answer in OpenAI's shape."""
        answer: dict[str, Any] = {"type": question.kind, "name": question.name or None}
        if question.kind == "predicate":
            return answer | {"probability": decision.probabilities[0]}
        values = [option.value for option in question.options]
        pairs = zip(values, decision.probabilities, strict=True)
        if question.kind == "choice":
            return answer | {
                "choice": values[decision.best],
                "confidence": decision.confidence,
                "probabilities": [{"value": value, "probability": p} for value, p in pairs],
            }
        return answer | {
            "score": decision.expected_index,
            "confidence": decision.confidence,
            "probabilities": [
                {"value": index, "label": label, "probability": p} for index, (label, p) in enumerate(pairs)
            ],
        }

    def respond(
        self,
        model: str,
        questions: Sequence[Question],  # noqa: ARG002 - answers are in their order
        answers: Sequence[dict[str, Any]],
        diagnostics: Sequence[Diagnostics],
        input_tokens: int,
        output_tokens: int = 0,
    ) -> DecisionResponse:
        """Build the response from one answer and one description per question."""
        return DecisionResponse(
            model=model,
            answers=[*answers],
            usage={
                "input_tokens": input_tokens,
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": input_tokens + output_tokens,
            },
            diagnostics=[*diagnostics],
        )


class SystemoneResponse(BaseModel):
    """Answers and diagnostics by question."""

    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: dict[str, int]
    diagnostics: dict[str, Diagnostics]


class QuestionSpec(Body):
    """A question of vLLM's API. ``criteria`` depends on the type."""

    type: Literal["choice", "noul", "score"]
    instructions: Any = ""
    criteria: Any = None


class SystemoneRequest(Body):
    """vLLM's request. ``cache_salt`` and ``priority`` have no effect."""

    model: ModelName | None = None
    state: Annotated[Any, Field(description="The text, or JSON that is rendered as text.")]
    questions: Annotated[dict[str, QuestionSpec], Field(min_length=1, max_length=MAX_QUESTIONS)]
    instructions: Annotated[
        str | None, Field(description="Context in front of zero-shot questions; tasks ignore it.")
    ] = None
    images: list[str] | None = None
    audio: list[str] | None = None
    videos: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Int = 0
    request_id: str | None = None

    def parse(self) -> tuple[str, list[Question]]:
        """Return the text and the questions. Raises RefusalError (400) for media and for invalid criteria."""
        for field in ("images", "audio", "videos", "chat_template_kwargs"):
            if getattr(self, field):
                message = f"{field} is not supported"
                raise RefusalError(400, "unsupported", message, "leave it out", param=field)
        questions = [
            _systemone_question(name, spec, self.instructions) for name, spec in self.questions.items()
        ]
        return _text_of(self.state), questions

    def answer(self, question: Question, decision: Decision) -> dict[str, Any]:
        """Return an answer in vLLM's shape."""
        names = [option.words[0] for option in question.options]
        probabilities = dict(zip(names, decision.probabilities, strict=True))
        answer = {"confidence": decision.confidence, "probabilities": probabilities}
        if question.kind == "predicate":
            return {"type": "noul", "noul": decision.probabilities[0], **answer}
        if question.kind == "choice":
            return {"type": "choice", "choice": names[decision.best], **answer}
        return {
            "type": "score",
            "score": decision.expected_index,
            "legend": {str(index): name for index, name in enumerate(names)},
            "confidence": decision.confidence,
            "probabilities": {str(index): p for index, p in enumerate(decision.probabilities)},
        }

    def respond(
        self,
        model: str,
        questions: Sequence[Question],
        answers: Sequence[dict[str, Any]],
        diagnostics: Sequence[Diagnostics],
        input_tokens: int,
        output_tokens: int = 0,
    ) -> SystemoneResponse:
        """Build the response from one answer and one description per question."""
        names = [question.name for question in questions]
        return SystemoneResponse(
            id=f"decision-{self.request_id or secrets.token_hex(12)}",
            created=int(time.time()),
            model=model,
            answers=dict(zip(names, answers, strict=True)),
            usage={"input_tokens": input_tokens, "output_tokens": output_tokens},
            diagnostics=dict(zip(names, diagnostics, strict=True)),
        )


def error_response(path: str, refusal: RefusalError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in the shape of the route's API; both answer 400 instead of 422."""
    status = 400 if refusal.status == 422 and path in {DECISIONS, SYSTEMONE} else refusal.status
    body: dict[str, Any] = refusal.body()
    if path == SYSTEMONE:
        try:
            phrase = HTTPStatus(status).phrase.title().replace(" ", "").removesuffix("Error")
        except ValueError:
            phrase = "Request"
        error = {"message": str(refusal), "type": f"{phrase}Error", "param": refusal.param, "code": status}
        body = {"error": error}
    return status, body


def _parts_text(parts: Parts, param: str) -> str:
    if isinstance(parts, str):
        return parts
    texts = []
    for part in parts:
        if isinstance(part, InputImage):
            raise RefusalError(400, "unsupported", "images are not supported", "send text", param=param)
        texts.append(part.text if isinstance(part, InputText) else _text_of(part.data))
    return "\n".join(texts)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _question(asked: PredicateQuestion | ChoiceQuestion | ScoreQuestion, param: str) -> Question:
    options: tuple[Option, ...] = (Option("yes"), Option("no"))
    if isinstance(asked, ChoiceQuestion):
        options = tuple(Option(choice.value, choice.description or "") for choice in asked.choices)
    elif isinstance(asked, ScoreQuestion):
        options = tuple(Option(level.label, level.description or "") for level in asked.levels)
    _require_unique(options, param)
    return Question(asked.type, asked.name or "", options, _parts_text(asked.instructions, param), param)


def _require_unique(options: Sequence[Option], param: str) -> None:
    if len({option.words for option in options}) < len(options):
        message = f"{param}: an option is given twice"
        raise RefusalError(400, "bad_request", message, "remove one", param=param)


def _systemone_question(name: str, spec: QuestionSpec, context: str | None) -> Question:
    param = f"questions.{name}"
    if not name:
        message = "a question has an empty name"
        raise RefusalError(400, "bad_request", message, "give it a name", param="questions")
    options = _systemone_options(spec, param)
    if len(options) > MAX_CHOICES:
        message = f"{param} has {len(options)} options, but the limit is {MAX_CHOICES}"
        raise RefusalError(400, "bad_request", message, "send fewer", param=param)
    _require_unique(options, param)
    instructions = "" if spec.instructions is None else _text_of(spec.instructions)
    kind: Kind = "predicate" if spec.type == "noul" else spec.type
    return Question(kind, name, options, f"{context}\n{instructions}" if context else instructions, param)


def _systemone_options(spec: QuestionSpec, param: str) -> tuple[Option, ...]:
    criteria = spec.criteria
    if spec.type == "choice":
        if isinstance(criteria, dict) and criteria:
            return tuple(_described_option(name, about) for name, about in criteria.items())
        expected = "an object of option names, each with a description or null"
    elif spec.type == "noul":
        criteria = {} if criteria is None else criteria
        if isinstance(criteria, dict) and criteria.keys() <= {"true", "false"}:
            return _described_option("yes", criteria.get("true")), _described_option(
                "no", criteria.get("false")
            )
        expected = "null, or an object with true and false"
    else:
        if isinstance(criteria, list) and len(criteria) >= 2:
            return tuple(Option(_text_of(level)) for level in criteria)
        expected = "a list of at least two levels"
    message = f"{param}.criteria of type {spec.type} is invalid"
    raise RefusalError(400, "bad_request", message, f"send {expected}", param=f"{param}.criteria")


def _described_option(value: str, about: Any) -> Option:
    return Option(value, "" if about is None else _text_of(about))
