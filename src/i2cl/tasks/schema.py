"""The shape of a task TOML: the bundled ones and a user's own follow the same schema."""

import io
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from i2cl.errors import I2CLError, did_you_mean
from i2cl.tasks.files import decoded, opened
from i2cl.tasks.task import Example, Task
from i2cl.tasks.template import Template

Filled = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class HubSource(_Table):
    """The `[hub]` table: where the rows lie on the Hugging Face hub.
    `keep_labels` lists the label ids of the source that are used, in the order of the task's label words;
    rows with another id are dropped. Without it the ids are used as they are. `test_fraction` (between 0 and
    1) replaces `test` where the source has no test split: that share of the distinct texts, drawn with
    `split_seed`, becomes one. `max_per_class` caps each split at a seeded sample of that many rows per class.
    """

    dataset: Filled
    config: Filled | None = None
    revision: Filled | None = None
    train: Filled = "train"
    test: Filled | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    split_seed: int = 0
    text: Filled = "text"
    label: Filled = "label"
    keep_labels: list[int] | None = None
    max_per_class: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_test_source(self) -> Self:
        if (self.test is None) == (self.test_fraction is None):
            raise I2CLError("give either test (a split name) or test_fraction (a share of the train split)")
        return self


class FilesSource(_Table):
    """The `[files]` table: files of rows, relative to the TOML, and their columns."""

    train: Filled
    test: Filled | None = None
    text: Filled = "text"
    label: Filled = "label"


class TaskSpec(_Table):
    """A whole task TOML: the task without rows, and one table that says where the rows are."""

    name: Filled
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
    def _coherent(self) -> Self:
        if (self.hub is None) == (self.files is None):
            raise I2CLError("give exactly one of the tables [hub] and [files]")
        self.to_task()
        kept = self.hub.keep_labels if self.hub else None
        if kept is not None and not len(set(kept)) == len(kept) == len(self.labels):
            needed = f"{len(self.labels)} different ids, one per label"
            raise I2CLError(f"hub.keep_labels must hold {needed}, not {kept}")
        return self

    def to_task(
        self, train: tuple[Example, ...] = (), test: tuple[Example, ...] = (), group: str = "user"
    ) -> Task:
        """The task with the given rows. Raises I2CLError when the parts do not fit together."""
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
    """The task TOML at `path`. Raises I2CLError naming the file and the field, in one line."""
    with opened(path) as file:
        return parse_spec(file.read(), str(path))


def parse_spec(data: bytes, source: str) -> TaskSpec:
    """The task TOML in `data`; `source` names it in errors."""
    fields = parse_toml(data, source)
    try:
        return TaskSpec.model_validate(fields)
    except ValidationError as error:
        raise I2CLError(f"{source}: {_explain(error.errors(include_url=False)[0])}") from error


def parse_toml(data: bytes, source: str) -> dict[str, Any]:
    """What a TOML holds. Raises I2CLError naming its `source`, in one line."""
    text = "".join(decoded(io.BytesIO(data), source))
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number too long, or tables nested too deep
        raise I2CLError(f"{source} is not valid TOML: {error}: correct it") from error


def _explain(detail: ErrorDetails) -> str:
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
