"""Tasks: what is asked, in which words, with which rows."""

from i2cl.tasks.loaders import PAPER_TASKS, list_tasks, load_task
from i2cl.tasks.task import Example, Examples, Task, Template

__all__ = ["PAPER_TASKS", "Example", "Examples", "Task", "Template", "list_tasks", "load_task"]
