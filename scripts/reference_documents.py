"""Training documents out of the corpus of the reference model."""

from random import Random

from i2cl.tasks.corpus import SEPARATOR, TEMPLATE, ReferenceTask, render, sample_categories, sample_words

END_OF_TEXT = "<|endoftext|>"
BARE_PATTERN = "{determiner} {mood} {job} {place} {weather}"  # no words but the attributes'


def sample_example(rng: Random, task: ReferenceTask, bare: bool = False) -> tuple[str, int]:
    """One training sentence with uniformly drawn categories, and its class in the task."""
    categories = sample_categories(rng)
    words = sample_words(rng, categories, held_out=False)
    return render(rng, words, BARE_PATTERN if bare else None), categories[task.attribute]


def fill(task: ReferenceTask, text: str, label: int) -> str:
    """A demonstration of the task: the template with its text and label word, and the separator after it."""
    return TEMPLATE.format(text=text, label=task.labels[label]) + SEPARATOR


def document(rng: Random, task: ReferenceTask, shots: int, named: bool, bare: bool = False) -> str:
    """`shots` + 1 training examples of one task; a named document opens with a line that names the task."""
    head = task.name + SEPARATOR if named else ""
    lines = [fill(task, *sample_example(rng, task, bare)) for _ in range(shots + 1)]
    return head + "".join(lines) + END_OF_TEXT
