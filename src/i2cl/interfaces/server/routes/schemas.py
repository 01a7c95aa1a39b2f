"""Bodies of requests and answers, as /openapi.json describes them. What is not here is refused."""

from typing import Annotated, Any, Literal

from fastapi import Header
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

Text = Annotated[str, Field(min_length=1)]
MOST_TEXTS = 2048
"""Of a request; more are a 413 that says so, as in the vLLM plugin."""

Texts = Annotated[list[Text], Field(min_length=1, json_schema_extra={"maxItems": MOST_TEXTS})]
Name = Annotated[str, Field(min_length=1, max_length=128, description="Of a task.")]

Int = Annotated[
    int,
    BeforeValidator(
        lambda value: int(value) if isinstance(value, float) and value.is_integer() else value,
    ),
]
"""JSON has one kind of number: 5.0 is as whole as 5."""

Timeout = Annotated[
    Annotated[float, Field(ge=1, le=3600)] | None,
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": 3600}),  # a header is there or not, never null
    Header(alias="X-Request-Timeout", description="Seconds before which the request has to begin."),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Classify(_Body):
    """Texts for a task."""

    model: Name
    input: Text | Texts
    min_confidence: Annotated[
        float | None, Field(gt=0, le=1, description="The label is empty where its probability is below.")
    ] = None


class Parameters(_Body):
    """What Hugging Face's clients may ask for."""

    function_to_apply: Literal["softmax"] | None = None
    top_k: Annotated[Int, Field(ge=1)] | None = None


class Predict(_Body):
    """Texts, as Hugging Face's clients and text-embeddings-inference send them."""

    inputs: Text | Texts
    model: Name | None = None
    parameters: Parameters | None = None


class Ignored(_Body):
    """Fields of OpenAI's that change nothing in an answer that is one of a task's labels."""

    temperature: float | int | None = None
    top_p: float | int | None = None
    seed: Int | None = None
    user: str | None = None
    presence_penalty: float | int | None = None
    frequency_penalty: float | int | None = None
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    n: Int | None = None


class Completion(Ignored):
    """A text whose label is asked for as a completion."""

    model: Name
    prompt: Text | Texts
    logprobs: Annotated[Int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None


class Part(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None


class Chat(Ignored):
    """A text whose label is asked for as the answer in a chat."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


LabelledText = Annotated[
    Any,  # what is wrong with a row is told with its number, and not by a schema
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "label": {"type": "string"}},
            "required": ["text", "label"],
        }
    ),
]


class FitOptions(_Body):
    """How examples become a task."""

    name: Name
    template: Annotated[str, Field(description="Such as 'Review: {text}\\nSentiment: {label}'.")]
    labels: list[str] | None = None
    instruction: str | None = None
    chat: bool = False
    shots: Annotated[Int, Field(ge=1, le=10_000)] | None = None
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    method: Literal["anchored", "i2cl"] | None = None
    recipe: Literal["paper", "released", "fast"] | None = None
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    evaluate: Annotated[Int, Field(ge=0, le=10_000, description="Rows to score on at most.")] = 160
    check: Annotated[bool, Field(description="Say what the rows are; do not fit.")] = False


class Fit(FitOptions):
    """Labelled examples, and how they become a task."""

    examples: Annotated[list[LabelledText], Field(min_length=1)]
    test: list[LabelledText] | None = None


class Usage(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int


class Classified(BaseModel):
    """The answer for one text."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(BaseModel):
    """Answers in the order of the texts; ``labels`` is the order of ``probs``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    labels: list[str]
    data: list[Classified]
    usage: Usage


class LabelScore(BaseModel):
    """A label and its probability."""

    label: str
    score: float


class Problem(BaseModel):
    """Why a request was not done."""

    error: dict[str, Any]
