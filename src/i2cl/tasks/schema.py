"""Schema of task TOML files, both the built-in ones and the user's."""

import io
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from i2cl.errors import I2CLError, did_you_mean, first_problem
from i2cl.tasks.files import decode_lines, open_binary
from i2cl.tasks.task import TaskDescription

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


class TaskSpec(TaskDescription):
    """A task TOML: the task without rows, and one table with the source of its rows."""

    model_config = ConfigDict(extra="forbid")

    name: NonEmptyString
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


def read_spec(path: Path, group: str = "user") -> TaskSpec:
    """Read a task TOML. Raises I2CLError naming the file and the field.

    Args:
        path: the file.
        group: see `Task`.
    """
    with open_binary(path) as file:
        return parse_spec(file.read(), str(path), group)


def parse_spec(data: bytes, source: str, group: str = "user") -> TaskSpec:
    """Parse a task TOML. ``source`` names it in error messages."""
    fields = parse_toml(data, source)
    try:
        return TaskSpec.model_validate({"title": fields.get("name", ""), "group": group} | fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["type"] != "extra_forbidden":
            raise I2CLError(f"{source}: {first_problem(error)}") from error
        *tables, field = map(str, problem["loc"])
        models: dict[str, type[BaseModel]] = {"hub": HubSource, "files": FilesSource}
        known = list(models.get("".join(tables), TaskSpec).model_fields)
        name, hint = ".".join((*tables, field)), did_you_mean(field, known)
        raise I2CLError(
            f"{source}: unknown field {name!r}: {hint}remove it or use one of {', '.join(known)}"
        ) from error


def parse_toml(data: bytes, source: str) -> dict[str, Any]:
    """Parse a TOML file. Raises I2CLError, with ``source`` in the message, if it is not valid."""
    text = "".join(decode_lines(io.BytesIO(data), source))
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # includes too many digits and too deep nesting
        raise I2CLError(f"{source} is not valid TOML: {error}: correct it") from error
