"""The reference model's tasks, their rows made from fixed seeds on loading."""

from functools import cache

from i2cl.tasks.corpus import SEPARATOR, TASKS, TEMPLATE, ReferenceTask, examples
from i2cl.tasks.task import Example, Task, Template

GROUP = "reference"
TRAIN_ROWS = 2000
TEST_ROWS = 1000
TRAIN_SEED = 1
TEST_SEED = 2

DEMO_TASKS = ("mood-colour-1", "job-letter-2", "place-colour-2")
"""What `i2cl demo` shows: three attributes, both sets of label words."""


def describe() -> list[Task]:
    """The reference model's tasks without rows."""
    return [_task(spec) for spec in TASKS]


@cache
def load(name: str) -> Task | None:
    """One of them with its rows, or None. The test split has only word combinations kept out of training."""
    spec = next((spec for spec in TASKS if spec.name == name), None)
    if spec is None:
        return None
    splits = (("train", TRAIN_ROWS, TRAIN_SEED), ("test", TEST_ROWS, TEST_SEED))
    return _task(spec, *(tuple(Example(*row) for row in examples(spec, *split)) for split in splits))


def _task(spec: ReferenceTask, train: tuple[Example, ...] = (), test: tuple[Example, ...] = ()) -> Task:
    return Task(
        name=spec.name,
        labels=spec.labels,
        template=Template(TEMPLATE, SEPARATOR),
        train=train,
        test=test,
        description=spec.description,
        group=GROUP,
    )
