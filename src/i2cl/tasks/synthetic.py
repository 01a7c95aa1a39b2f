"""The paper's synthetic data set: three kinds of random text with labels that carry no meaning."""

import string
from collections.abc import Callable
from functools import partial
from random import Random

from i2cl.tasks.task import Example, Task
from i2cl.tasks.template import Template

NAME = "synthetic"
MIN_LENGTH, MAX_LENGTH = 5, 12


def synthetic_task(seed: int = 0, train_per_class: int = 100, test_per_class: int = 200) -> Task:
    """Random strings (A), random special characters (B), random numerical values (C); no text occurs twice.
    Texts have 5 to 12 characters; the paper gives neither lengths nor a template, so both are ours. Source:
    paper, appendix "Analysis on Synthetic Dataset".
    """
    rng = Random(seed)
    train: list[Example] = []
    test: list[Example] = []
    alphabets = string.ascii_letters, string.punctuation
    kinds: list[Callable[[Random], str]] = [*(partial(_characters, one) for one in alphabets), _number]
    for label, generate in enumerate(kinds):
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
    # A dict keeps the order of drawing; the order of a set of strings changes between processes.
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[generate(rng)] = None
    return list(texts)


def _characters(alphabet: str, rng: Random) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(MIN_LENGTH, MAX_LENGTH)))


def _number(rng: Random) -> str:
    # No leading zero, so that every text is the usual spelling of a number.
    return rng.choice("123456789") + _characters(string.digits, rng)[1:]
