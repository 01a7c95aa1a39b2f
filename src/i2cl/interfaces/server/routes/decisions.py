"""Decision APIs: OpenAI's ``/v1/decisions`` and vLLM's ``/v1/systemone``.

Sources: the types of the package openai 3.57 (``resources/decisions.py``), and
``vllm/entrypoints/generate/structured_decisions`` of vLLM 0.32.
"""

import json
import secrets
import time
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field, StrictBool, StrictStr, model_validator
from typing_extensions import TypedDict  # that of typing has no field types for pydantic before Python 3.12

from i2cl.interfaces.server.decisions import Decision, DecisionMaker, Kind, Option, Question
from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service

DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
MAX_QUESTIONS, MAX_CHOICES = 400, 255  # OpenAI's limits
YES_AND_NO = (Option(("yes",)), Option(("no",)))
KINDS: dict[str, Kind] = {"noul": "predicate", "choice": "choice", "score": "score"}
BOOLEAN_WORDS = {True: ("true", "True", "yes", "Yes"), False: ("false", "False", "no", "No")}

ModelName = Annotated[str, Field(min_length=1, description="The base model, or a task.")]


class InputText(schemas.Body):
    """Text in a message."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputJSON(schemas.Body):
    """JSON in a message, rendered as text."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


class InputImage(BaseModel):
    """An image. Images are not supported."""

    type: Literal["input_image"]


Parts = str | list[Annotated[InputText | InputJSON | InputImage, Field(discriminator="type")]]


class InputMessage(schemas.Body):
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


class _DecisionQuestion(schemas.Body):
    instructions: Parts
    name: str | None = None


class PredicateQuestion(_DecisionQuestion):
    """How likely a statement is true. Needs a task with two labels, or none for zero-shot."""

    type: Literal["predicate"]

    def options(self) -> tuple[Option, ...]:
        """Return the options true and false."""
        return YES_AND_NO

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in OpenAI's shape, without type and name."""
        return {"probability": decision.probabilities[0]}


class Choice(schemas.Body):
    """One option."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(_DecisionQuestion):
    """Which of several options fits."""

    type: Literal["choice"]
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_CHOICES)]

    def options(self) -> tuple[Option, ...]:
        """Return the options; a boolean stands for several words."""
        return tuple(
            Option(
                (choice.value,) if isinstance(choice.value, str) else BOOLEAN_WORDS[choice.value],
                choice.description or "",
            )
            for choice in self.choices
        )

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in OpenAI's shape, without type and name."""
        pairs = zip(self.choices, decision.probabilities, strict=True)
        return {
            "choice": self.choices[decision.best].value,
            "confidence": decision.confidence,
            "probabilities": [{"value": choice.value, "probability": p} for choice, p in pairs],
        }


class Level(schemas.Body):
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
        """Return the answer in OpenAI's shape, without type and name."""
        pairs = zip(self.levels, decision.probabilities, strict=True)
        return {
            "score": decision.expected_index,
            "confidence": decision.confidence,
            "probabilities": [
                {"value": index, "label": level.label, "probability": p}
                for index, (level, p) in enumerate(pairs)
            ],
        }


class DecisionRequest(schemas.Body):
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


class _StateQuestion(schemas.Body):
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
        """Return the answer in vLLM's shape, without the confidence."""
        yes, no = decision.probabilities
        return {"type": "noul", "noul": yes, "probabilities": {"yes": yes, "no": no}}


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
        """Return the answer in vLLM's shape, without the confidence."""
        names = [*self.criteria]
        probabilities = dict(zip(names, decision.probabilities, strict=True))
        return {"type": "choice", "choice": names[decision.best], "probabilities": probabilities}


class StateScoreQuestion(_StateQuestion):
    """Where the text lies on a scale of ordered levels."""

    type: Literal["score"]
    criteria: Annotated[list[Any], Field(min_length=2, max_length=MAX_CHOICES, description="The levels.")]

    def options(self) -> tuple[Option, ...]:
        """Return the levels."""
        return tuple(Option((text_of(level),)) for level in self.criteria)

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer in vLLM's shape, without the confidence."""
        return {
            "type": "score",
            "score": decision.expected_index,
            "legend": {str(index): text_of(level) for index, level in enumerate(self.criteria)},
            "probabilities": {str(index): p for index, p in enumerate(decision.probabilities)},
        }


class SystemoneRequest(schemas.Body):
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
    priority: schemas.Int = 0
    request_id: str | None = None


class Diagnostics(TypedDict):
    """How a question was answered."""

    answered_by: Literal["task", "zero_shot"]
    # Probability of all labels together among everything that could follow the prompt; null for labels that
    # are scored by their words.
    label_mass: float | None
    task: str | None  # name of the task
    digest: str | None  # version of the task
    expected_value: float | None  # expected value of labels that are numbers, for scores


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


def add_decisions(app: FastAPI, service: Service) -> None:
    """Add the routes of both APIs."""
    maker = DecisionMaker(service)

    @app.post(
        DECISIONS,
        summary="Answer questions about a text, for clients of OpenAI's decisions API",
        response_model=DecisionResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def decisions(body: DecisionRequest, timeout: schemas.Timeout = None) -> Response:
        questions = []
        for index, asked in enumerate(body.questions):
            param = f"questions[{index}]"
            instructions = _parts_text(asked.instructions, param)
            questions.append(Question(asked.type, asked.name or "", asked.options(), instructions, param))
        answers, tokens = await maker.decide(body.model, _input_text(body.input), questions, timeout)
        response: DecisionResponse = {
            "model": body.model,
            "answers": [
                {"type": asked.type, "name": asked.name, **asked.answer(decision)}
                for asked, decision in zip(body.questions, answers, strict=True)
            ],
            "usage": {
                "input_tokens": tokens,
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens,
            },
            "diagnostics": [*map(_diagnostics, questions, answers)],
        }
        return Response(json.dumps(response), media_type=schemas.JSON)

    @app.post(
        SYSTEMONE,
        summary="Answer questions about a text, for clients of vLLM's decisions API",
        response_model=SystemoneResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def systemone(body: SystemoneRequest, timeout: schemas.Timeout = None) -> Response:
        _require_text_only(body)
        context = f"{body.instructions}\n" if body.instructions else ""
        questions = []
        for name, asked in body.questions.items():
            kind = KINDS[asked.type]
            instructions = context + text_of(asked.instructions)
            questions.append(Question(kind, name, asked.options(), instructions, f"questions.{name}"))
        model = body.model or service.base
        answers, tokens = await maker.decide(model, text_of(body.state), questions, timeout)
        response: SystemoneResponse = {
            "id": f"decision-{body.request_id or secrets.token_hex(12)}",
            "object": "structured_decision",
            "created": int(time.time()),
            "model": model,
            "answers": {
                name: asked.answer(decision) | {"confidence": decision.confidence}
                for (name, asked), decision in zip(body.questions.items(), answers, strict=True)
            },
            "usage": {"input_tokens": tokens, "output_tokens": 0},
            "diagnostics": dict(zip(body.questions, map(_diagnostics, questions, answers), strict=True)),
        }
        return Response(json.dumps(response), media_type=schemas.JSON)


def _diagnostics(question: Question, decision: Decision) -> Diagnostics:
    task = decision.task
    return {
        "answered_by": "zero_shot" if task is None else "task",
        "label_mass": decision.label_mass,
        "task": None if task is None else task.name,
        "digest": None if task is None else task.digest,
        "expected_value": decision.expected_value if question.kind == "score" else None,
    }


def error_response(path: str, refusal: RefusalError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in the shape of the route's API; both answer 400 instead of 422."""
    status = 400 if refusal.status == 422 and path in {DECISIONS, SYSTEMONE} else refusal.status
    if path != SYSTEMONE:
        return status, refusal.body()
    phrase = "Request" if status == 499 else HTTPStatus(status).phrase.title().replace(" ", "")
    kind = f"{phrase.removesuffix('Error')}Error"
    return status, {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": status}}


def _input_text(value: str | list[InputMessage]) -> str:
    """Return the text of the input: user messages are joined by blank lines."""
    if isinstance(value, str):
        return value
    for message in value:
        if message.role != "user":
            problem = f"input messages with role {message.role!r} are not supported"
            raise RefusalError(400, "unsupported", problem, "send the text in user messages", param="input")
    return "\n\n".join(_parts_text(message.content, "input") for message in value)


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


def _require_text_only(body: SystemoneRequest) -> None:
    for field in ("images", "audio", "videos", "chat_template_kwargs"):
        if getattr(body, field):
            raise RefusalError(400, "unsupported", f"{field} is not supported", "leave it out", param=field)
