"""The names of all known tasks: the paper's nine, the synthetic one and the bundled reference model's."""

from importlib import resources

from i2cl.errors import I2CLError, did_you_mean
from i2cl.tasks import reference
from i2cl.tasks.schema import TaskSpec, parse_spec
from i2cl.tasks.synthetic import NAME as SYNTHETIC
from i2cl.tasks.synthetic import describe_synthetic
from i2cl.tasks.types import Task

PAPER_TASKS = ("sst2", "sst5", "mr", "subj", "trec", "agnews", "dbpedia", "hate_speech18", "emoc")


def paper_spec(name: str) -> TaskSpec:
    """The bundled TOML of one of the paper's tasks."""
    file = resources.files("i2cl.tasks") / "builtin" / f"{name}.toml"
    return parse_spec(file.read_bytes(), f"builtin/{name}.toml")


def reference_task(name: str) -> Task | None:
    """The reference model's task of that name with its rows, or None when there is none."""
    return reference.load(name) if name in reference.names() else None


def list_tasks() -> list[Task]:
    """Every known task without rows: the paper's nine, the synthetic one, then the reference model's."""
    paper = [paper_spec(name).to_task(group="paper") for name in PAPER_TASKS]
    return [*paper, describe_synthetic(), *reference.describe()]


def unknown_task(name: str) -> I2CLError:
    """The error for a name that no task has, with the closest ones."""
    hint = did_you_mean(name, (task.name for task in list_tasks()))
    return I2CLError(f"unknown task {name!r}: {hint}'i2cl ls tasks' lists them all")


__all__ = ["PAPER_TASKS", "SYNTHETIC", "list_tasks", "paper_spec", "reference_task", "unknown_task"]
