"""Request and response bodies of the decision APIs: OpenAI's ``/v1/decisions``, vLLM's ``/v1/systemone``.

Sources: the types of the package openai 3.57 (``resources/decisions.py``), and
``vllm/entrypoints/generate/structured_decisions`` of vLLM 0.32.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr, model_validator
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from i2cl.interfaces.decisions import Decision, Kind, Option, Question
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes.schemas import Body, Int

DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
MAX_QUESTIONS, MAX_CHOICES = 400, 255  # OpenAI's limits
BOOLEAN_WORDS = {True: ("true", "True", "yes", "Yes"), False: ("false", "False", "no", "No")}
KINDS: dict[str, Kind] = {"noul": "predicate", "choice": "choice", "score": "score"}
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

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in OpenAI's shape."""
        return {"type": self.type, "name": self.name, **self._answer(decision)}

    def _answer(self, decision: Decision) -> dict[str, Any]:
        raise NotImplementedError


class PredicateQuestion(_DecisionQuestion):
    """How likely a statement is true. Needs a task with two labels, or none for zero-shot."""

    type: Literal["predicate"]

    def options(self) -> tuple[Option, ...]:
        """Return the options true and false."""
        return Option(("yes",)), Option(("no",))

    def _answer(self, decision: Decision) -> dict[str, Any]:
        return {"probability": decision.probabilities[0]}


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

    def _answer(self, decision: Decision) -> dict[str, Any]:
        pairs = zip(self.choices, decision.probabilities, strict=True)
        return {
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

    def _answer(self, decision: Decision) -> dict[str, Any]:
        pairs = zip(self.levels, decision.probabilities, strict=True)
        return {
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
        for index, asked in enumerate(self.questions):
            param = f"questions[{index}]"
            instructions = _parts_text(asked.instructions, param)
            questions.append(
                _question(asked.type, asked.name or "", asked.options(), instructions, param, asked.answer)
            )
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
        probabilities = {"yes": yes, "no": no}
        return {
            "type": "noul",
            "noul": yes,
            "confidence": decision.confidence,
            "probabilities": probabilities,
        }


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
        probabilities = dict(zip(names, decision.probabilities, strict=True))
        return {
            "type": "choice",
            "choice": names[decision.best],
            "confidence": decision.confidence,
            "probabilities": probabilities,
        }


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
        for name, asked in self.questions.items():
            instructions, param = context + text_of(asked.instructions), f"questions.{name}"
            questions.append(
                _question(KINDS[asked.type], name, asked.options(), instructions, param, asked.answer)
            )
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


def _question(
    kind: Kind,
    name: str,
    options: tuple[Option, ...],
    instructions: str,
    param: str,
    answer: Callable[[Decision], dict[str, Any]],
) -> Question:
    if len({option.words for option in options}) < len(options):
        message = f"{param}: an option is given twice"
        raise RefusalError(400, "bad_request", message, "remove one", param=param)
    return Question(kind, name, options, instructions, param, answer)


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
