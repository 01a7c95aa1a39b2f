"""The paper's synthetic data set: three kinds of random strings, with labels that carry no meaning."""

import string
from collections.abc import Callable
from functools import partial
from random import Random

from i2cl.tasks.task import Example, Task
from i2cl.tasks.template import Template

NAME = "synthetic"
MIN_LENGTH, MAX_LENGTH = 5, 12  # characters


def synthetic_task(seed: int = 0, train_per_class: int = 100, test_per_class: int = 200) -> Task:
    """Generate the task: random letters (A), special characters (B) and digits (C); all texts are distinct.

    The paper specifies neither text lengths nor a template; 5 to 12 characters and the template here are our
    choice.

    Source: paper, appendix "Analysis on Synthetic Dataset".
    """
    rng = Random(seed)
    train: list[Example] = []
    test: list[Example] = []
    generators: list[Callable[[Random], str]] = [
        partial(_random_string, string.ascii_letters),
        partial(_random_string, string.punctuation),
        _random_number,
    ]
    for label, generate in enumerate(generators):
        texts = _distinct(generate, train_per_class + test_per_class, rng)
        train += [Example(text, label) for text in texts[:train_per_class]]
        test += [Example(text, label) for text in texts[train_per_class:]]
    rng.shuffle(train)
    rng.shuffle(test)
    return Task(
        name=NAME,
        labels=("A", "B", "C"),
        template=Template("Input: {text}\nLabel: {label}"),
        train=tuple(train),
        test=tuple(test),
        title="Synthetic",
        description="Random letters, special characters or digits, with labels that carry no meaning.",
        group="synthetic",
    )


def _distinct(generate: Callable[[Random], str], count: int, rng: Random) -> list[str]:
    # a dict keeps insertion order; the order of a set of strings differs between processes
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[generate(rng)] = None
    return list(texts)


def _random_string(alphabet: str, rng: Random) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(MIN_LENGTH, MAX_LENGTH)))


def _random_number(rng: Random) -> str:
    # no leading zero, so that every text is a number as people write it
    return rng.choice("123456789") + _random_string(string.digits, rng)[1:]
