"""Decision APIs: OpenAI's ``/v1/decisions`` and vLLM's ``/v1/systemone``.

Sources: the types of the package openai 3.57 (``resources/decisions.py``), and
``vllm/entrypoints/generate/structured_decisions`` of vLLM 0.32.
"""

import json
import secrets
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, StrictBool, StrictStr, model_validator

from i2cl.interfaces.server.decisions import Decision, DecisionMaker, Option, Question
from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service, disconnection

DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
MAX_QUESTIONS, MAX_CHOICES = 400, 255  # OpenAI's limits
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


Part = Annotated[InputText | InputJSON | InputImage, Field(discriminator="type")]
Parts = str | list[Part]


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


class PredicateQuestion(schemas.Body):
    """How likely a statement is true. Needs a task with two labels, or none for zero-shot."""

    type: Literal["predicate"]
    instructions: Parts
    name: str | None = None


class Choice(schemas.Body):
    """One option."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(schemas.Body):
    """Which of several options fits."""

    type: Literal["choice"]
    instructions: Parts
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_CHOICES)]
    name: str | None = None


class Level(schemas.Body):
    """One level of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(schemas.Body):
    """Where the text lies on a scale of ordered levels."""

    type: Literal["score"]
    instructions: Parts
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_CHOICES)]
    name: str | None = None


class DecisionRequest(schemas.Body):
    """OpenAI's request. Cache options and the safety identifier have no effect."""

    model: ModelName
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    questions: Annotated[
        list[Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")],],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class Diagnostics(BaseModel):
    """How a question was answered.

    Attributes:
        answered_by: whether a task or the base model answered.
        label_mass: probability of all labels together among everything that could follow the prompt; null
            for labels that are scored by their words.
        task: name of the task.
        digest: version of the task.
        expected_value: expected value of labels that are numbers, for scores.
    """

    answered_by: Literal["task", "zero_shot"]
    label_mass: float | None
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


class QuestionSpec(schemas.Body):
    """A question of vLLM's API. ``criteria`` depends on the type."""

    type: Literal["choice", "noul", "score"]
    instructions: Any = ""
    criteria: Any = None


class SystemoneRequest(schemas.Body):
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
    priority: schemas.Int = 0
    request_id: str | None = None


class SystemoneResponse(BaseModel):
    """Answers and diagnostics by question."""

    id: str
    object: Literal["structured_decision"] = "structured_decision"
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
    async def decisions(body: DecisionRequest, request: Request, timeout: schemas.Timeout = None) -> Response:
        questions = [_question(asked, f"questions[{i}]") for i, asked in enumerate(body.questions)]
        text = _input_text(body.input)
        answers, tokens = await maker.decide(
            body.model, text, questions, timeout=timeout, disconnected=disconnection(request)
        )
        each = [*zip(questions, answers, strict=True)]
        response = DecisionResponse(
            model=body.model,
            answers=[
                _answer(asked, question, decision)
                for asked, (question, decision) in zip(body.questions, each, strict=True)
            ],
            usage={
                "input_tokens": tokens,
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens,
            },
            diagnostics=[Diagnostics.of(question, decision) for question, decision in each],
        )
        return _json_response(response)

    @app.post(
        SYSTEMONE,
        summary="Answer questions about a text, for clients of vLLM's decisions API",
        response_model=SystemoneResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def systemone(
        body: SystemoneRequest, request: Request, timeout: schemas.Timeout = None
    ) -> Response:
        _require_text_only(body)
        questions = [_systemone_question(name, spec, body) for name, spec in body.questions.items()]
        model = body.model or service.base
        answers, tokens = await maker.decide(
            model, _text_of(body.state), questions, timeout=timeout, disconnected=disconnection(request)
        )
        each = [*zip(questions, answers, strict=True)]
        response = SystemoneResponse(
            id=f"decision-{body.request_id or secrets.token_hex(12)}",
            created=int(time.time()),
            model=model,
            answers={question.name: _systemone_answer(question, decision) for question, decision in each},
            usage={"input_tokens": tokens, "output_tokens": 0},
            diagnostics={question.name: Diagnostics.of(question, decision) for question, decision in each},
        )
        return _json_response(response)


def _json_response(response: BaseModel) -> Response:
    """Serialize a response once; FastAPI would also validate it again."""
    return Response(response.model_dump_json(), media_type=schemas.JSON)


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
    if any(isinstance(part, InputImage) for part in parts):
        raise RefusalError(400, "unsupported", "images are not supported", "send text", param=param)
    return "\n".join(
        part.text if isinstance(part, InputText) else _text_of(part.data)
        for part in parts
        if not isinstance(part, InputImage)
    )


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _question(asked: PredicateQuestion | ChoiceQuestion | ScoreQuestion, param: str) -> Question:
    options: tuple[Option, ...] = (Option(("yes",)), Option(("no",)))
    if isinstance(asked, ChoiceQuestion):
        options = tuple(_choice_option(choice) for choice in asked.choices)
        values = [(type(choice.value), choice.value) for choice in asked.choices]
        _require_unique(values, param)
    elif isinstance(asked, ScoreQuestion):
        options = tuple(Option((level.label,), level.description or "") for level in asked.levels)
        _require_unique([level.label for level in asked.levels], param)
    instructions = _parts_text(asked.instructions, param)
    return Question(asked.type, asked.name or "", options, instructions, param)


def _choice_option(choice: Choice) -> Option:
    words = (choice.value,) if isinstance(choice.value, str) else BOOLEAN_WORDS[choice.value]
    return Option(words, choice.description or "")


def _require_unique(values: Sequence[Any], param: str) -> None:
    if len({*values}) < len(values):
        message = f"{param}: an option is given twice"
        raise RefusalError(400, "bad_request", message, "remove one", param=param)


def _answer(
    asked: PredicateQuestion | ChoiceQuestion | ScoreQuestion, question: Question, decision: Decision
) -> dict[str, Any]:
    """Return an answer in OpenAI's shape."""
    answer: dict[str, Any] = {"type": asked.type, "name": asked.name}
    if isinstance(asked, PredicateQuestion):
        return answer | {"probability": decision.probabilities[0]}
    if isinstance(asked, ChoiceQuestion):
        values = [choice.value for choice in asked.choices]
        pairs = zip(values, decision.probabilities, strict=True)
        return answer | {
            "choice": values[decision.best],
            "confidence": decision.confidence,
            "probabilities": [{"value": value, "probability": p} for value, p in pairs],
        }
    levels = zip(question.options, decision.probabilities, strict=True)
    return answer | {
        "score": decision.expected_index,
        "confidence": decision.confidence,
        "probabilities": [
            {"value": index, "label": level.words[0], "probability": p}
            for index, (level, p) in enumerate(levels)
        ],
    }


def _require_text_only(body: SystemoneRequest) -> None:
    for field in ("images", "audio", "videos", "chat_template_kwargs"):
        if getattr(body, field):
            raise RefusalError(400, "unsupported", f"{field} is not supported", "leave it out", param=field)


def _systemone_question(name: str, spec: QuestionSpec, body: SystemoneRequest) -> Question:
    param = f"questions.{name}"
    if not name:
        message = "a question has an empty name"
        raise RefusalError(400, "bad_request", message, "give it a name", param="questions")
    instructions = "" if spec.instructions is None else _text_of(spec.instructions)
    context = f"{body.instructions}\n" if body.instructions else ""
    kind: Literal["predicate", "choice", "score"] = "predicate" if spec.type == "noul" else spec.type
    options = _systemone_options(spec, param)
    if len(options) > MAX_CHOICES:
        message = f"{param} has {len(options)} options, but the limit is {MAX_CHOICES}"
        raise RefusalError(400, "bad_request", message, "send fewer", param=param)
    _require_unique([option.words for option in options], param)
    return Question(kind, name, options, context + instructions, param)


def _systemone_options(spec: QuestionSpec, param: str) -> tuple[Option, ...]:
    criteria = spec.criteria
    if spec.type == "choice":
        if isinstance(criteria, dict) and criteria:
            return tuple(
                Option((name,), "" if about is None else _text_of(about)) for name, about in criteria.items()
            )
        expected = "an object of option names, each with a description or null"
    elif spec.type == "noul":
        if criteria is None or (isinstance(criteria, dict) and criteria.keys() <= {"true", "false"}):
            descriptions = {
                key: _text_of(about) for key, about in (criteria or {}).items() if about is not None
            }
            return (
                Option(("yes",), descriptions.get("true", "")),
                Option(("no",), descriptions.get("false", "")),
            )
        expected = "null, or an object with true and false"
    else:
        if isinstance(criteria, list) and len(criteria) >= 2:
            return tuple(Option((_text_of(level),)) for level in criteria)
        expected = "a list of at least two levels"
    message = f"{param}.criteria of type {spec.type} is invalid"
    raise RefusalError(400, "bad_request", message, f"send {expected}", param=f"{param}.criteria")


def _systemone_answer(question: Question, decision: Decision) -> dict[str, Any]:
    """Return an answer in vLLM's shape."""
    names = [option.words[0] for option in question.options]
    probabilities = dict(zip(names, decision.probabilities, strict=True))
    answer = {"confidence": decision.confidence, "probabilities": probabilities}
    if question.kind == "predicate":
        return {"type": "noul", "noul": decision.probabilities[0], **answer}
    if question.kind == "choice":
        return {"type": "choice", "choice": names[decision.best], **answer}
    by_index = {str(index): p for index, p in enumerate(decision.probabilities)}
    legend = {str(index): name for index, name in enumerate(names)}
    return {
        "type": "score",
        "score": decision.expected_index,
        "legend": legend,
        "confidence": decision.confidence,
        "probabilities": by_index,
    }
