"""Classification tasks: label words, prompt template and labelled examples."""

from i2cl.tasks.loaders import PAPER_TASKS, list_tasks, load_task
from i2cl.tasks.task import Example, Examples, Task
from i2cl.tasks.template import Template

__all__ = ["PAPER_TASKS", "Example", "Examples", "Task", "Template", "list_tasks", "load_task"]
