"""Questions of the decision APIs, and which labels of a task match the options of a question.

`i2cl serve` and the vLLM plugin share this module and `i2cl.interfaces.decision_bodies`; they differ in how
they find tasks and compute probabilities.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxtyping import Float
from torch import Tensor

from i2cl.interfaces.server.refusals import RefusalError
from i2cl.tasks.labels import normalize_word

TRUE_WORDS, FALSE_WORDS = ("yes", "true", "1"), ("no", "false", "0")
Kind = Literal["predicate", "choice", "score"]


@dataclass(frozen=True)
class Option:
    """One option of a question.

    Attributes:
        words: label words for it. A task may use any of them; zero-shot scores the first.
        description: shown in zero-shot prompts.
    """

    words: tuple[str, ...]
    description: str = ""


@dataclass(frozen=True)
class Question:
    """A question of either API.

    Attributes:
        kind: a predicate has the options true and false, in this order; a score has ordered levels.
        name: name of the question, empty if it has none.
        options: what to choose from.
        instructions: the question itself. Tasks have their own prompt and ignore it.
        param: its place in the request, for errors.
        answer: returns the answer for a decision, in the shape of the API.
    """

    kind: Kind
    name: str
    options: tuple[Option, ...]
    instructions: str
    param: str
    answer: "Callable[[Decision], dict[str, Any]]"


class AnsweringTask(Protocol):
    """A task that answers questions."""

    @property
    def name(self) -> str:
        """Name of the task."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label words, in the order of probabilities."""

    @property
    def digest(self) -> str:
        """Version of the task."""


@dataclass(frozen=True)
class Decision:
    """Answer to a question.

    Attributes:
        probabilities: of the options, in their order.
        labels: label words of the options.
        task: the task that answered; None for zero-shot.
        label_mass: see `i2cl.injections.pool.RowScores`.
    """

    probabilities: list[float]
    labels: tuple[str, ...]
    task: AnsweringTask | None
    label_mass: float | None

    @classmethod
    def of(
        cls,
        log_probs: Float[Tensor, " labels"],
        label_mass: float | None,
        labels: Sequence[str],
        indices: Sequence[int],
        task: AnsweringTask | None,
    ) -> "Decision":
        """Renormalize log-probabilities of labels over those at ``indices``, one per option."""
        probabilities = log_probs[list(indices)].softmax(-1).tolist()
        return cls(probabilities, tuple(labels[index] for index in indices), task, label_mass)

    @property
    def best(self) -> int:
        """Index of the most probable option."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """Probability of the most probable option."""
        return self.probabilities[self.best]

    @property
    def expected_index(self) -> float:
        """Expected index of the option, the score of ordered levels."""
        return sum(index * probability for index, probability in enumerate(self.probabilities))

    @property
    def expected_value(self) -> float | None:
        """Expected value of labels that are numbers, None for others."""
        try:
            values = [float(label) for label in self.labels]
        except ValueError:
            return None
        return sum(value * p for value, p in zip(values, self.probabilities, strict=True))


def choose_labels(question: Question, task: AnsweringTask) -> list[int]:
    """Return the label index of each option. Raises RefusalError (400) if an option is not a label."""
    if question.kind == "predicate":
        return _true_and_false(question, task)
    chosen = [_label_index(option, task.labels) for option in question.options]
    if question.kind == "score" and None in chosen:
        chosen = [*_numeric_labels(question, task)]
    missing = [
        option.words[0] for option, index in zip(question.options, chosen, strict=True) if index is None
    ]
    if missing:
        message = f"{question.param}: task {task.name!r} has no label {missing[0]!r} ({_listed(task.labels)})"
        hint = "use its labels, or another question name to ask the base model"
        raise RefusalError(400, "unknown_option", message, hint, param=question.param)
    indices = [index for index in chosen if index is not None]
    if len({*indices}) < len(indices):
        message = f"{question.param}: two options are the same label of task {task.name!r}"
        raise RefusalError(400, "unknown_option", message, "remove one", param=question.param)
    return indices


def _label_index(option: Option, labels: Sequence[str]) -> int | None:
    """Return the index of the label that matches an option."""
    words = [normalize_word(word) for word in option.words]
    return next((labels.index(word) for word in words if word in labels), None)


def _numeric_labels(question: Question, task: AnsweringTask) -> list[int | None]:
    """Return the labels for levels with other names: labels that are numbers, in ascending order."""
    try:
        ascending = sorted(range(len(task.labels)), key=lambda index: float(task.labels[index]))
    except ValueError:
        return [_label_index(option, task.labels) for option in question.options]
    if len(ascending) != len(question.options):
        message = f"{question.param}: task {task.name!r} has {len(ascending)} levels ({_listed(task.labels)})"
        hint = f"send {len(ascending)} levels, or levels that are its labels"
        raise RefusalError(400, "unknown_option", message, hint, param=question.param)
    return [*ascending]


def _true_and_false(question: Question, task: AnsweringTask) -> list[int]:
    """Return the indices of the labels for true and false.

    A description or the instructions may name the label; otherwise one label is a word such as "yes" or "no",
    the other label with "not" in front, or the name of the question or task.
    """
    labels = task.labels
    if len(labels) != 2:
        message = f"{question.param}: task {task.name!r} has {len(labels)} labels, but a predicate needs two"
        raise RefusalError(400, "unknown_option", message, "ask a choice", param=question.param)
    true, false = question.options
    for index, label in enumerate(labels):
        other = labels[1 - index]
        if label in (true.description, question.instructions) or other == false.description:
            return [index, 1 - index]
    for index, label in enumerate(labels):
        word, opposite = label.casefold(), labels[1 - index].casefold()
        if (
            word in TRUE_WORDS
            or opposite in FALSE_WORDS
            or opposite in {f"not {word}", f"non-{word}", f"no {word}"}
            or word in {question.name.casefold(), task.name.casefold()}
        ):
            return [index, 1 - index]
    message = f"{question.param}: unclear which label of task {task.name!r} means true ({_listed(labels)})"
    hint = "make the instructions one of the labels, or ask a choice"
    raise RefusalError(400, "unknown_option", message, hint, param=question.param)


def _listed(labels: Sequence[str], limit: int = 10) -> str:
    """Return the first labels for an error message."""
    more = f", and {len(labels) - limit} more" if len(labels) > limit else ""
    return "labels: " + ", ".join(map(repr, labels[:limit])) + more
