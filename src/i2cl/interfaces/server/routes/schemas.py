"""Request and response bodies of `/openapi.json`. Unknown fields are an error, except in a chat."""

import secrets
import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from fastapi import Header
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from i2cl.interfaces.server.refusals import RefusalError
from i2cl.tasks.formats import ROW_SUFFIXES
from i2cl.tasks.labels import predicted_labels
from i2cl.tasks.task import LABEL_SEPARATOR
from i2cl.tasks.template import DEFAULT_TEMPLATE

Text = Annotated[str, Field(min_length=1)]
MAX_TEXTS = 2048  # per request; more are a 413, as in the vLLM plugin
MAX_TOP_LOGPROBS = 20  # OpenAI's limit
Texts = Annotated[list[Text], Field(min_length=1, json_schema_extra={"maxItems": MAX_TEXTS})]
Name = Annotated[str, Field(min_length=1, max_length=128, description="Name of a task.")]
ProjectName = Annotated[str, Field(min_length=1, max_length=128, description="Name of a labelling project.")]

JSON = "application/json"
MAX_JSON_BODY = 4 * 2**20  # bytes of a body of texts or examples

# JSON does not distinguish 5.0 from 5
Int = Annotated[
    int,
    BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value),
]

Timeout = Annotated[
    Annotated[float, Field(ge=1, le=3600)] | None,
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": 3600}),  # headers cannot be null
    Header(alias="X-Request-Timeout", description="Seconds within which the model has to start on it."),
]


def require_text_count(texts: Sequence[str], hint: str = "split them over several requests") -> None:
    """Raise RefusalError (413) for more texts than `MAX_TEXTS`."""
    if len(texts) > MAX_TEXTS:
        message = f"the request has {len(texts)} texts, but the limit is {MAX_TEXTS}"
        raise RefusalError(413, "too_many_texts", message, hint)


class Body(BaseModel):
    """Request body that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Classify(Body):
    """Texts to classify with a task."""

    model: Name
    input: Text | Texts
    min_confidence: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Below this probability the label is empty. It replaces the thresholds of a "
            "multi-label task.",
        ),
    ] = None


class Part(BaseModel):
    """One part of a message's content; only parts of type "text" are supported."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """A chat message."""

    role: str
    content: str | list[Part] | None = None


class Chat(Body):
    """A chat completion request; other fields of OpenAI's API are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: Name
    messages: Annotated[
        list[Message],
        Field(
            min_length=1,
            description="One user message with the text. "
            "System and developer messages are ignored: a task has its own prompt.",
        ),
    ]
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Int | None = None


LabelledText = Annotated[
    Any,  # validated row by row later, so that errors name every invalid row
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "label": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            },
            "description": "A row; text_column and label_column name other keys.",
        }
    ),
]


DataFormat = Literal["csv", "tsv", "jsonl", "json"]


class DataFile(Body):
    """A file of labelled rows, sent as text."""

    name: Annotated[str, Field(min_length=1, max_length=255, description="File name, shown in errors.")]
    content: Annotated[str, Field(min_length=1)]
    format: Annotated[
        DataFormat | None,
        Field(description="Default: by the ending of the name."),
    ] = None

    @property
    def suffix(self) -> str:
        """The file name suffix of the format, such as ``.csv``."""
        return f".{self.format}" if self.format else PurePath(self.name).suffix.lower()

    @model_validator(mode="after")
    def _require_format(self) -> "DataFile":
        if not self.name.isprintable():  # errors and logs quote it
            raise ValueError(f"file name {self.name!a} has control characters: rename it")
        if self.suffix in {".parquet", ".xlsx"}:
            raise ValueError(f"{self.suffix} files cannot be sent as text: save the file as CSV")
        if self.suffix not in ROW_SUFFIXES:
            known = ", ".join(get_args(DataFormat))
            raise ValueError(f"unknown file format {self.suffix!r}: set format to one of {known}")
        return self


def _kind_of_rows(value: object) -> str:
    return "file" if isinstance(value, dict | DataFile) else "rows"


Rows = Annotated[
    Annotated[list[LabelledText], Tag("rows")] | Annotated[DataFile, Tag("file")],
    Discriminator(_kind_of_rows),
]


class FitOptions(Body):
    """Options of a fit."""

    name: Name
    template: Annotated[str, Field(description="Such as 'Review: {text}\\nSentiment: {label}'.")] = (
        DEFAULT_TEMPLATE
    )
    labels: list[str] | None = None
    text_column: Annotated[str, Field(description="Column or key that holds the text.")] = "text"
    label_column: Annotated[
        str,
        Field(
            description="Column or key that holds the label, or a list of any number of labels (multi-label)."
        ),
    ] = "label"
    label_separator: Annotated[
        str | None, Field(description="What separates several labels in a cell, such as ';' (multi-label).")
    ] = None
    label_columns: Annotated[
        list[str], Field(description="Columns with 0 or 1, named after the labels (multi-label).")
    ] = Field(default_factory=list)
    instruction: str | None = None
    chat: bool = False
    shots: Annotated[Int, Field(ge=1, le=10_000)] | None = None
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    method: Literal["anchored", "i2cl"] | None = None
    experts: Annotated[
        list[Literal["llm", "states", "embeddings", "tfidf"]] | None,
        Field(description="Classifiers that are combined; default: all that are available."),
    ] = None
    recipe: Literal["paper", "released", "fast"] | None = None
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    evaluate: Annotated[Int, Field(ge=0, le=10_000, description="Maximum number of rows to score on.")] = 160
    check: Annotated[bool, Field(description="Only check and describe the rows.")] = False


class Fit(FitOptions):
    """Labelled examples and the options of the fit."""

    examples: Rows
    test: Annotated[Rows | None, Field(description="Rows to score on, with the same columns.")] = None


class NewProject(Body):
    """Texts to label, and the names of the labels."""

    name: Name
    labels: Annotated[list[str], Field(min_length=2, max_length=2048)]
    texts: Annotated[
        Annotated[list[str], Field(min_length=1), Tag("rows")] | Annotated[DataFile, Tag("file")],
        Discriminator(_kind_of_rows),
    ]
    text_column: Annotated[str, Field(description="Column of a file that holds the text.")] = "text"
    label_column: Annotated[
        str | None, Field(description="Column of a file that holds labels, which may be empty.")
    ] = None
    template: str = DEFAULT_TEMPLATE


LabellerId = Annotated[
    str, Field(min_length=1, max_length=64, description="Any id of the person: texts are leased to it.")
]


class Labeller(Body):
    """A person who labels the texts of a project."""

    project: ProjectName
    labeller: LabellerId


class NextTexts(Labeller):
    """Request for texts to label."""

    count: Annotated[Int, Field(ge=1, le=100)] = 10


class LabelAnswer(Labeller):
    """The label of a text."""

    text: Annotated[Int, Field(ge=0, lt=2**63, description="Id of the text.")]
    label: Annotated[str | None, Field(description="null skips the text.")]
    replaces: Annotated[
        str | None, Field(description="The label that the text has, to correct or confirm it.")
    ] = None


class Finish(Body):
    """The project to fit, and the name of the task, by default that of the project.

    Labels without a text are an error, or are left out of the task.
    """

    project: ProjectName
    name: Name | None = None
    omit_empty_labels: bool = False


class Feedback(Body):
    """The right label of a text that a task answered."""

    task: Name
    text: Text
    label: str
    labeller: LabellerId = "feedback"


class Usage(BaseModel):
    """Number of tokens."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int


class Classified(BaseModel):
    """The answer for one text."""

    index: int
    label: str  # in a multi-label task, all labels, separated by ";"
    labels: list[str]
    probs: list[float]
    num_classes: int


class Classification(BaseModel):
    """Answers in the order of the texts. ``labels`` gives the order of ``probs``.

    In a multi-label task, each label has its own probability, and a text has any number of labels.
    """

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    multi_label: bool
    labels: list[str]
    data: list[Classified]
    usage: Usage

    @classmethod
    def of(
        cls,
        body: Classify,
        labels: Sequence[str],
        probabilities: Sequence[Sequence[float]],
        tokens: Sequence[int],
        thresholds: Sequence[float] | None = None,
    ) -> "Classification":
        """Build the response from the probabilities and the number of tokens of each text.

        ``thresholds`` belong to a multi-label task; otherwise they are None.
        """
        data = []
        for index, probs in enumerate(probabilities):
            words = [labels[place] for place in predicted_labels(probs, thresholds, body.min_confidence)]
            label, count = LABEL_SEPARATOR.join(words), len(probs)
            data.append(
                Classified(index=index, label=label, labels=words, probs=list(probs), num_classes=count)
            )
        usage = Usage(prompt_tokens=sum(tokens), total_tokens=sum(tokens))
        return cls(
            id=f"classify-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=body.model,
            multi_label=thresholds is not None,
            labels=list(labels),
            data=data,
            usage=usage,
        )


class Problem(BaseModel):
    """An error."""

    error: dict[str, Any]
