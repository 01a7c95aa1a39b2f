"""Training documents for the reference model."""

from random import Random

from i2cl.tasks.generated import SEPARATOR, TEMPLATE, ReferenceTask, render, sample_categories, sample_words

END_OF_TEXT = "<|endoftext|>"
BARE_PATTERN = "{determiner} {mood} {job} {place} {weather}"  # only the words of the attributes


def sample_example(rng: Random, task: ReferenceTask, bare: bool = False) -> tuple[str, int]:
    """Draw a training sentence with uniform categories, and return it with its class in the task."""
    categories = sample_categories(rng)
    words = sample_words(rng, categories, held_out=False)
    return render(rng, words, BARE_PATTERN if bare else None), categories[task.attribute]


def fill(task: ReferenceTask, text: str, label: int) -> str:
    """Format a demonstration: the template with text and label word, followed by the separator."""
    return TEMPLATE.format(text=text, label=task.labels[label]) + SEPARATOR


def document(rng: Random, task: ReferenceTask, shots: int, named: bool, bare: bool = False) -> str:
    """Build a document of `shots` + 1 examples of one task; a named one begins with the task's name."""
    head = task.name + SEPARATOR if named else ""
    lines = [fill(task, *sample_example(rng, task, bare)) for _ in range(shots + 1)]
    return head + "".join(lines) + END_OF_TEXT
