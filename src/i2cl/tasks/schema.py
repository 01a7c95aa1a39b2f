"""Schema of task TOML files, both the built-in ones and the user's."""

import io
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from i2cl.errors import I2CLError, did_you_mean
from i2cl.tasks.files import decode_lines, open_binary
from i2cl.tasks.task import Example, Task
from i2cl.tasks.template import Template

NonEmptyString = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class HubSource(_Table):
    """The `[hub]` table: a data set on the Hugging Face hub.

    Attributes:
        dataset: id of the data set, or a local folder.
        config: configuration of the data set.
        revision: branch, tag or commit.
        train: name of the training split.
        test: name of the test split; either this or `test_fraction` is required.
        test_fraction: fraction of the distinct training texts to use as test split, between 0 and 1, for data
            sets without one.
        split_seed: seed of the samples for `test_fraction` and `max_per_class`.
        text: name of the text column.
        label: name of the label column.
        keep_labels: label ids of the data set in the order of the task's label words; rows with other ids are
            dropped. Default: ids are used unchanged.
        max_per_class: maximum rows per class in each split; larger classes are sampled.
    """

    dataset: NonEmptyString
    config: NonEmptyString | None = None
    revision: NonEmptyString | None = None
    train: NonEmptyString = "train"
    test: NonEmptyString | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    split_seed: int = 0
    text: NonEmptyString = "text"
    label: NonEmptyString = "label"
    keep_labels: list[int] | None = None
    max_per_class: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_test_source(self) -> Self:
        if (self.test is None) == (self.test_fraction is None):
            raise I2CLError(
                "give either test (a split name) or test_fraction (a fraction of the train split)"
            )
        return self


class FilesSource(_Table):
    """The `[files]` table: paths of row files relative to the TOML, and their columns."""

    train: NonEmptyString
    test: NonEmptyString | None = None
    text: NonEmptyString = "text"
    label: NonEmptyString = "label"


class TaskSpec(_Table):
    """A task TOML: the task without rows, and one table with the source of its rows."""

    name: NonEmptyString
    title: str = ""
    description: str = ""
    labels: list[str]
    template: str
    separator: str = "\n"
    shots: int = 5
    instruction: str = ""
    hub: HubSource | None = None
    files: FilesSource | None = None

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if (self.hub is None) == (self.files is None):
            raise I2CLError("give exactly one of the tables [hub] and [files]")
        self.to_task()
        kept = self.hub.keep_labels if self.hub else None
        if kept is not None and not len(set(kept)) == len(kept) == len(self.labels):
            raise I2CLError(
                f"hub.keep_labels must contain {len(self.labels)} different ids, one per label, not {kept}"
            )
        return self

    def to_task(
        self, train: tuple[Example, ...] = (), test: tuple[Example, ...] = (), group: str = "user"
    ) -> Task:
        """Return the task with the given rows. Raises I2CLError if labels, template or rows are invalid."""
        return Task(
            name=self.name,
            labels=tuple(self.labels),
            template=Template(self.template, self.separator),
            train=train,
            test=test,
            shots=self.shots,
            title=self.title or self.name,
            description=self.description,
            group=group,
            instruction=self.instruction,
        )


def read_spec(path: Path) -> TaskSpec:
    """Read a task TOML. Raises I2CLError naming the file and the field."""
    with open_binary(path) as file:
        return parse_spec(file.read(), str(path))


def parse_spec(data: bytes, source: str) -> TaskSpec:
    """Parse a task TOML. ``source`` names it in error messages."""
    fields = parse_toml(data, source)
    try:
        return TaskSpec.model_validate(fields)
    except ValidationError as error:
        raise I2CLError(f"{source}: {_error_message(error.errors(include_url=False)[0])}") from error


def parse_toml(data: bytes, source: str) -> dict[str, Any]:
    """Parse a TOML file. Raises I2CLError, with ``source`` in the message, if it is not valid."""
    text = "".join(decode_lines(io.BytesIO(data), source))
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # includes too many digits and too deep nesting
        raise I2CLError(f"{source} is not valid TOML: {error}: correct it") from error


def _error_message(detail: ErrorDetails) -> str:
    name = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        tables: dict[int | str, type[BaseModel]] = {"hub": HubSource, "files": FilesSource}
        table = tables.get(detail["loc"][0], TaskSpec) if len(detail["loc"]) > 1 else TaskSpec
        known = list(table.model_fields)
        hint = did_you_mean(str(detail["loc"][-1]), known)
        return f"unknown field {name!r}: {hint}remove it or use one of {', '.join(known)}"
    if detail["type"] == "missing":
        return f"field {name!r} is missing: add it"
    if detail["type"] == "model_type":
        return f"{name!r} is {detail['input']!r}: write it as a table [{name}]"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"table [{name}]: {message}" if name else message
    return f"field {name!r} is {detail['input']!r}: {message[:1].lower()}{message[1:]}"
