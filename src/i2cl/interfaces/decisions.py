"""The decision APIs, OpenAI's ``/v1/decisions`` and vLLM's ``/v1/systemone``: their bodies, and which labels
of a task match the options of a question.

`i2cl serve` and the vLLM plugin share this module; they differ in how they find tasks and compute
probabilities. Sources: the types of the package openai 3.57 (``resources/decisions.py``), and
``vllm/entrypoints/generate/structured_decisions`` of vLLM 0.32.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal, Protocol

from jaxtyping import Float
from pydantic import BaseModel, Field, StrictBool, StrictStr, model_validator
from torch import Tensor
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes.schemas import Body, Int
from i2cl.tasks.labels import normalize_word

TRUE_WORDS, FALSE_WORDS = ("yes", "true", "1"), ("no", "false", "0")
DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
MAX_QUESTIONS, MAX_CHOICES = 400, 255  # OpenAI's limits
BOOLEAN_WORDS = {True: ("true", "True", "yes", "Yes"), False: ("false", "False", "no", "No")}
Kind = Literal["predicate", "choice", "score"]
KINDS: dict[str, Kind] = {"noul": "predicate", "choice": "choice", "score": "score"}
ModelName = Annotated[str, Field(min_length=1, description="The base model, or a task.")]


@dataclass(frozen=True)
class Option:
    """One option of a question.

    Attributes:
        words: label words for it. A task may use any of them; zero-shot scores the first.
        description: shown in zero-shot prompts.
    """

    words: tuple[str, ...]
    description: str = ""


@dataclass(frozen=True)
class Question:
    """A question of either API. Raises RefusalError (400) if an option is given twice.

    Attributes:
        kind: a predicate has the options true and false, in this order; a score has ordered levels.
        name: name of the question, empty if it has none.
        options: what to choose from.
        instructions: the question itself. Tasks have their own prompt and ignore it.
        param: its place in the request, for errors.
        answer: returns the answer for a decision, in the shape of the API.
    """

    kind: Kind
    name: str
    options: tuple[Option, ...]
    instructions: str
    param: str
    answer: "Callable[[Decision], dict[str, Any]]"

    def __post_init__(self) -> None:
        if len({option.words for option in self.options}) < len(self.options):
            message = f"{self.param}: an option is given twice"
            raise RefusalError(400, "bad_request", message, "remove one", param=self.param)


class _Task(Protocol):
    """A task that answers questions, with its labels in the order of probabilities and its version."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def digest(self) -> str: ...


@dataclass(frozen=True)
class Decision:
    """Answer to a question.

    Attributes:
        probabilities: of the options, in their order.
        labels: label words of the options.
        task: the task that answered; None for zero-shot.
        label_mass: see `i2cl.injections.pool.RowScores`.
    """

    probabilities: list[float]
    labels: tuple[str, ...]
    task: _Task | None
    label_mass: float | None

    @classmethod
    def of(
        cls,
        log_probs: Float[Tensor, " labels"],
        label_mass: float | None,
        labels: Sequence[str],
        indices: Sequence[int],
        task: _Task | None,
    ) -> "Decision":
        """Renormalize log-probabilities of labels over those at ``indices``, one per option."""
        probabilities = log_probs[list(indices)].softmax(-1).tolist()
        return cls(probabilities, tuple(labels[index] for index in indices), task, label_mass)

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
        if (values := _as_numbers(self.labels)) is None:
            return None
        return sum(value * p for value, p in zip(values, self.probabilities, strict=True))


def choose_labels(question: Question, task: _Task) -> list[int]:
    """Return the label index of each option. Raises RefusalError (400) if an option is not a label.

    Levels with other names than the labels stand for labels that are numbers, in ascending order.
    """
    if question.kind == "predicate":
        return _true_and_false_labels(question, task)
    labels, count = task.labels, len(task.labels)
    matches = [_label_index(option, labels) for option in question.options]
    if question.kind == "score" and None in matches and (numbers := _as_numbers(labels)) is not None:
        if len(matches) != count:
            hint = f"send {count} levels, or levels that are its labels"
            raise _unknown_option(
                question, f"task {task.name!r} has {count} levels ({_listed(labels)})", hint
            )
        return sorted(range(count), key=numbers.__getitem__)
    if None in matches:
        missing = question.options[matches.index(None)].words[0]
        hint = "use its labels, or another question name to ask the base model"
        problem = f"task {task.name!r} has no label {missing!r} ({_listed(labels)})"
        raise _unknown_option(question, problem, hint)
    indices = [index for index in matches if index is not None]
    if len({*indices}) < len(indices):
        problem = f"two options are the same label of task {task.name!r}"
        raise _unknown_option(question, problem, "remove one")
    return indices


def _unknown_option(question: Question, problem: str, hint: str) -> RefusalError:
    message = f"{question.param}: {problem}"
    return RefusalError(400, "unknown_option", message, hint, param=question.param)


def _label_index(option: Option, labels: Sequence[str]) -> int | None:
    """Return the index of the label that matches an option."""
    words = [normalize_word(word) for word in option.words]
    return next((labels.index(word) for word in words if word in labels), None)


def _as_numbers(labels: Sequence[str]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def _true_and_false_labels(question: Question, task: _Task) -> list[int]:
    """Return the indices of the labels for true and false.

    A description or the instructions may name the label; otherwise one label is a word such as "yes" or "no",
    the other label with "not" in front, or the name of the question or task.
    """
    labels = task.labels
    if len(labels) != 2:
        problem = f"task {task.name!r} has {len(labels)} labels, but a predicate needs two"
        raise _unknown_option(question, problem, "ask a choice")
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
    problem = f"unclear which label of task {task.name!r} means true ({_listed(labels)})"
    raise _unknown_option(question, problem, "make the instructions one of the labels, or ask a choice")


def _listed(labels: Sequence[str], limit: int = 10) -> str:
    """Return the first labels for an error message."""
    more = f", and {len(labels) - limit} more" if len(labels) > limit else ""
    return "labels: " + ", ".join(map(repr, labels[:limit])) + more


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


Parts = str | list[Annotated[InputText | InputJSON | InputImage, Field(discriminator="type")]]


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


class _DecisionQuestion(Body):
    instructions: Parts
    name: str | None = None
    type: str


class PredicateQuestion(_DecisionQuestion):
    """How likely a statement is true. Needs a task with two labels, or none for zero-shot."""

    type: Literal["predicate"]

    def options(self) -> tuple[Option, ...]:
        """Return the options true and false."""
        return Option(("yes",)), Option(("no",))

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in OpenAI's shape."""
        return {"type": self.type, "name": self.name, "probability": decision.probabilities[0]}


class Choice(Body):
    """One option."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(_DecisionQuestion):
    """Which of several options fits."""

    type: Literal["choice"]
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_CHOICES)]

    def options(self) -> tuple[Option, ...]:
        """Return the options; a boolean has several words."""
        return tuple(
            Option(
                (choice.value,) if isinstance(choice.value, str) else BOOLEAN_WORDS[choice.value],
                choice.description or "",
            )
            for choice in self.choices
        )

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in OpenAI's shape."""
        pairs = zip(self.choices, decision.probabilities, strict=True)
        return {
            "type": self.type,
            "name": self.name,
            "choice": self.choices[decision.best].value,
            "confidence": decision.confidence,
            "probabilities": [{"value": choice.value, "probability": p} for choice, p in pairs],
        }


class Level(Body):
    """One level of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(_DecisionQuestion):
    """Where the text lies on a scale of ordered levels."""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_CHOICES)]

    def options(self) -> tuple[Option, ...]:
        """Return the levels."""
        return tuple(Option((level.label,), level.description or "") for level in self.levels)

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in OpenAI's shape."""
        pairs = zip(self.levels, decision.probabilities, strict=True)
        return {
            "type": self.type,
            "name": self.name,
            "score": decision.expected_index,
            "confidence": decision.confidence,
            "probabilities": [
                {"value": index, "label": level.label, "probability": p}
                for index, (level, p) in enumerate(pairs)
            ],
        }


class Diagnostics(TypedDict):
    """How a question was answered: by a task, by the base model zero-shot, or by vLLM's own route."""

    answered_by: Literal["task", "zero_shot", "vllm"]
    # Probability of all labels together among everything that could follow the prompt; null for labels that
    # are scored by their words.
    label_mass: float | None
    task: str | None  # name of the task
    digest: str | None  # version of the task
    expected_value: float | None  # expected value of labels that are numbers, for scores


Result = tuple[dict[str, Any], Diagnostics]
"""Answer of a question, and how it was found."""


def result_of(question: Question, decision: Decision) -> Result:
    """Return the answer of a question, and how it was found."""
    task = decision.task
    return question.answer(decision), {
        "answered_by": "zero_shot" if task is None else "task",
        "label_mass": decision.label_mass,
        "task": None if task is None else task.name,
        "digest": None if task is None else task.digest,
        "expected_value": decision.expected_value if question.kind == "score" else None,
    }


class DecisionRequest(Body):
    """OpenAI's request. Cache options and the safety identifier have no effect."""

    model: ModelName
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    questions: Annotated[
        list[Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None

    def parse(self) -> tuple[str, list[Question]]:
        """Return the text and the questions. Raises RefusalError (400) for images and for other roles."""
        messages = [self.input] if isinstance(self.input, str) else []
        for message in self.input if isinstance(self.input, list) else ():
            if message.role != "user":
                problem = f"input messages with role {message.role!r} are not supported"
                hint = "send the text in user messages"
                raise RefusalError(400, "unsupported", problem, hint, param="input")
            messages.append(_parts_text(message.content, "input"))
        questions = []
        for index, item in enumerate(self.questions):
            param = f"questions[{index}]"
            instructions = _parts_text(item.instructions, param)
            name, options = item.name or "", item.options()
            questions.append(Question(item.type, name, options, instructions, param, item.answer))
        return "\n\n".join(messages), questions

    def respond(
        self, model: str, results: Sequence[Result], input_tokens: int, output_tokens: int = 0
    ) -> "DecisionResponse":
        """Build the response from the result of each question."""
        answers, diagnostics = zip(*results, strict=True)
        return {
            "model": model,
            "answers": [*answers],
            "usage": {
                "input_tokens": input_tokens,
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": input_tokens + output_tokens,
            },
            "diagnostics": [*diagnostics],
        }


class _StateQuestion(Body):
    instructions: Any = ""


class NoulQuestion(_StateQuestion):
    """How likely a statement is true. Needs a task with two labels, or none for zero-shot."""

    type: Literal["noul"]
    criteria: Annotated[
        dict[Literal["true", "false"], Any] | None, Field(description="Descriptions of both answers.")
    ] = None

    def options(self) -> tuple[Option, ...]:
        """Return the options true and false."""
        described = {key: text_of(about) for key, about in (self.criteria or {}).items()}
        return Option(("yes",), described.get("true", "")), Option(("no",), described.get("false", ""))

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in vLLM's shape."""
        yes, no = decision.probabilities
        answer = {"type": "noul", "noul": yes, "confidence": decision.confidence}
        return answer | {"probabilities": {"yes": yes, "no": no}}


class StateChoiceQuestion(_StateQuestion):
    """Which of several options fits."""

    type: Literal["choice"]
    criteria: Annotated[
        dict[str, Any],
        Field(min_length=1, max_length=MAX_CHOICES, description="A description, or null, of each option."),
    ]

    def options(self) -> tuple[Option, ...]:
        """Return the options with their descriptions."""
        return tuple(Option((name,), text_of(about)) for name, about in self.criteria.items())

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in vLLM's shape."""
        names = [*self.criteria]
        answer = {"type": "choice", "choice": names[decision.best], "confidence": decision.confidence}
        return answer | {"probabilities": dict(zip(names, decision.probabilities, strict=True))}


class StateScoreQuestion(_StateQuestion):
    """Where the text lies on a scale of ordered levels."""

    type: Literal["score"]
    criteria: Annotated[list[Any], Field(min_length=2, max_length=MAX_CHOICES, description="The levels.")]

    def options(self) -> tuple[Option, ...]:
        """Return the levels."""
        return tuple(Option((text_of(level),)) for level in self.criteria)

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in vLLM's shape."""
        return {
            "type": "score",
            "score": decision.expected_index,
            "legend": {str(index): text_of(level) for index, level in enumerate(self.criteria)},
            "confidence": decision.confidence,
            "probabilities": {str(index): p for index, p in enumerate(decision.probabilities)},
        }


class SystemoneRequest(Body):
    """vLLM's request. ``cache_salt`` and ``priority`` have no effect."""

    model: ModelName | None = None
    state: Annotated[Any, Field(description="The text, or JSON that is rendered as text.")]
    questions: Annotated[
        dict[
            Annotated[str, Field(min_length=1)],
            Annotated[NoulQuestion | StateChoiceQuestion | StateScoreQuestion, Field(discriminator="type")],
        ],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]
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
        """Return the text and the questions. Raises RefusalError (400) for media and chat options."""
        for field in ("images", "audio", "videos", "chat_template_kwargs"):
            if getattr(self, field):
                message = f"{field} is not supported"
                raise RefusalError(400, "unsupported", message, "leave it out", param=field)
        context = f"{self.instructions}\n" if self.instructions else ""
        questions = []
        for name, item in self.questions.items():
            instructions, param = context + text_of(item.instructions), f"questions.{name}"
            kind, options = KINDS[item.type], item.options()
            questions.append(Question(kind, name, options, instructions, param, item.answer))
        return text_of(self.state), questions

    def respond(
        self, model: str, results: Sequence[Result], input_tokens: int, output_tokens: int = 0
    ) -> "SystemoneResponse":
        """Build the response from the result of each question."""
        answers, diagnostics = zip(*results, strict=True)
        return {
            "id": f"decision-{self.request_id or secrets.token_hex(12)}",
            "object": "structured_decision",
            "created": int(time.time()),
            "model": model,
            "answers": dict(zip(self.questions, answers, strict=True)),
            "usage": {"input_tokens": input_tokens, "output_tokens": output_tokens},
            "diagnostics": dict(zip(self.questions, diagnostics, strict=True)),
        }


class DecisionResponse(TypedDict):
    """Answers in the order of the questions; ``diagnostics`` is an extension."""

    model: str
    answers: list[dict[str, Any]]
    usage: dict[str, Any]
    diagnostics: list[Diagnostics]


class SystemoneResponse(TypedDict):
    """Answers and diagnostics by question."""

    id: str
    object: Literal["structured_decision"]
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: dict[str, int]
    diagnostics: dict[str, Diagnostics]


def error_response(path: str, refusal: RefusalError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in the shape of the route's API; both answer 400 instead of 422."""
    status = 400 if refusal.status == 422 and path in {DECISIONS, SYSTEMONE} else refusal.status
    if path != SYSTEMONE:
        return status, refusal.body()
    phrase = "Request" if status == 499 else HTTPStatus(status).phrase.title().replace(" ", "")
    kind = f"{phrase.removesuffix('Error')}Error"
    return status, {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": status}}


def _parts_text(parts: Parts, param: str) -> str:
    if isinstance(parts, str):
        return parts
    texts = []
    for part in parts:
        if isinstance(part, InputImage):
            raise RefusalError(400, "unsupported", "images are not supported", "send text", param=param)
        texts.append(part.text if isinstance(part, InputText) else text_of(part.data))
    return "\n".join(texts)


def text_of(value: Any) -> str:
    """Return a text unchanged, null as an empty text, and other JSON as text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
