"""The names of all known tasks: the paper's, those bundled with rows, synthetic and the reference model's."""

from pathlib import Path

from i2cl.errors import I2CLError, did_you_mean
from i2cl.tasks import reference
from i2cl.tasks.schema import TaskSpec, read_spec
from i2cl.tasks.synthetic import describe_synthetic
from i2cl.tasks.task import Task

BUILTIN = Path(__file__).parent / "builtin"

PAPER_TASKS = ("sst2", "sst5", "mr", "subj", "trec", "agnews", "dbpedia", "hate_speech18", "emoc")

BENCHMARK_TASKS = ("banking77",)  # tasks of the hub that the paper has not: those with many labels

BUNDLED_TASKS = tuple(
    sorted({file.stem for file in BUILTIN.glob("*.toml")} - {*PAPER_TASKS, *BENCHMARK_TASKS})
)
"""Tasks whose rows ship with the package: each a TOML with a `[files]` table in `builtin`, and its rows."""


GROUPS = {"paper": PAPER_TASKS, "benchmark": BENCHMARK_TASKS, "bundled": BUNDLED_TASKS}
"""Names of the tasks that have a TOML here, by where they come from."""


def builtin_spec(name: str) -> TaskSpec:
    """The TOML of a task by name, wherever its rows lie."""
    return read_spec(BUILTIN / f"{name}.toml")


def list_tasks() -> list[Task]:
    """Every known task without rows: the paper's, others of the hub, bundled ones, then made ones."""
    named = [builtin_spec(name).to_task(group=group) for group, names in GROUPS.items() for name in names]
    return [*named, describe_synthetic(), *reference.describe()]


def unknown_task(name: str) -> I2CLError:
    """The error for a name that no task has, with the closest ones."""
    hint = did_you_mean(name, (task.name for task in list_tasks()))
    return I2CLError(f"unknown task {name!r}: {hint}'i2cl ls tasks' lists them all")
