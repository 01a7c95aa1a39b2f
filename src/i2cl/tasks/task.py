"""What a task is: examples, label words, a template and two splits."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from i2cl.errors import I2CLError, require_whole
from i2cl.tasks.template import Template
from i2cl.tasks.text import is_blank, normalize_word

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Example", "Examples", "Task", "Template"]


@dataclass(frozen=True, slots=True)
class Example:
    """One text with its class id.

    Attributes:
        text: the text.
        label: index into the task's label words.
        weight: factor of this example's loss in a fit, above 0.
    """

    text: str
    label: int
    weight: float = 1.0


Examples = Sequence[Example]  # rows, or demonstrations, in their order


def group_by_label(rows: Examples, classes: int) -> list[list[Example]]:
    """Rows of each class id 0..classes-1, in their order."""
    groups: list[list[Example]] = [[] for _ in range(classes)]
    for row in rows:
        groups[row.label].append(row)
    return groups


def even_quotas(sizes: Sequence[int], total: int, rng: Random) -> list[int]:
    """Rows to take from groups of these sizes: `total` in all (or every row), as equal as the sizes allow.
    What does not divide evenly goes to randomly chosen groups, one row each.
    """
    levels = range(max(sizes, default=0) + 1)  # rows that every group gives, as far as it has them
    level = bisect_right(levels, total, key=lambda level: sum(min(size, level) for size in sizes)) - 1
    quotas = [min(size, level) for size in sizes]
    larger = [index for index, size in enumerate(sizes) if size > level]
    for index in rng.sample(larger, min(total, sum(sizes)) - sum(quotas)):
        quotas[index] += 1
    return quotas


def sample_per_class(groups: Sequence[Examples], quotas: Sequence[int], rng: Random) -> tuple[Example, ...]:
    """`quotas[c]` different rows of every class c, in shuffled order."""
    chosen = [row for group, quota in zip(groups, quotas, strict=True) for row in rng.sample(group, quota)]
    rng.shuffle(chosen)
    return tuple(chosen)


@dataclass(frozen=True)
class Task:
    """A text classification task.
    `labels[i]` is the word the model is asked to produce for class id i. `shots` is the default number of
    demonstrations per class (paper, section "Experiments": five, one for DBPedia). `group` says where the
    task comes from: "paper", "benchmark", "bundled", "synthetic", "reference" or "user". `instruction` says
    in a sentence what is to be done: a chat opens with it, a plain template only where it is asked to. Name
    and label words are kept in Unicode NFC. Raises I2CLError for label words or examples that do not fit
    together.
    """

    name: str
    labels: tuple[str, ...]
    template: Template
    train: tuple[Example, ...] = ()
    test: tuple[Example, ...] = ()
    shots: int = 5
    title: str = ""
    description: str = ""
    group: str = "user"
    instruction: str = ""

    def __post_init__(self) -> None:
        labels = tuple(map(normalize_word, self.labels))
        vars(self).update(name=normalize_word(self.name), labels=labels)  # the dataclass is frozen
        shape = self.template
        for text in (self.name, self.title, self.description, self.instruction, *self.labels):
            require_whole(text, "the task's name, label word or description")
        for text in (shape.format, shape.separator, shape.opening):
            require_whole(text, "the task's template")
        _check_labels(self.name, self.labels)
        _check_shots(self.name, self.shots)
        for split, rows in (("train", self.train), ("test", self.test)):
            for number, example in enumerate(rows, start=1):
                if not 0 <= example.label < len(self.labels):
                    raise I2CLError(
                        f"task {self.name!r}, {split} row {number}: label {example.label} is not one of 0 to "
                        f"{len(self.labels) - 1} ({_words(self.labels)}): correct the row or add a label word"
                    )

    def sample(self, shots: int | None = None, seed: int = 0) -> tuple[Example, ...]:
        """Class-balanced demonstrations: `shots` per class (default: the task's own), in a seeded order.
        Raises I2CLError when the training split is empty, holds one class only, or lacks rows of a class.
        Source: paper, section "Experiments" (five random examples per class).
        """
        count = self.shots if shots is None else shots
        _check_shots(self.name, count)
        groups = group_by_label(self._rows("train"), len(self.labels))
        filled = [word for word, group in zip(self.labels, groups, strict=True) if group]
        if len(filled) == 1:
            raise I2CLError(
                f"task {self.name!r}: every training example is {filled[0]!r} but demonstrations need each "
                f"of {_words(self.labels)}: add rows of the other classes"
            )
        for word, group in zip(self.labels, groups, strict=True):
            if len(group) < count:
                raise I2CLError(
                    f"task {self.name!r}: class {word!r} has {len(group)} training examples but {count} "
                    f"shots were asked: {'ask for fewer shots or ' if group else ''}add rows of that class"
                )
        return sample_per_class(groups, [count] * len(groups), Random(seed))

    def queries(self, limit: int | None = None, seed: int = 0) -> tuple[Example, ...]:
        """Up to `limit` test rows, as equal in number per class as the split allows (None: all of them).
        Raises I2CLError when there are no test rows. Source: the released protocol evaluates on 500 rows.
        """
        rows = self._rows("test")
        if limit is not None and limit < 1:
            raise I2CLError(f"task {self.name!r}: {limit} queries were asked: ask for at least 1")
        if limit is None or limit >= len(rows):
            return rows
        rng = Random(f"queries {seed}")
        groups = group_by_label(rows, len(self.labels))
        return sample_per_class(groups, even_quotas([len(group) for group in groups], limit, rng), rng)

    def held_out(self, n: int, demonstrations: Examples, seed: int = 0) -> tuple[Example, ...]:
        """`n` training examples whose texts are not among the demonstrations, as balanced as the rows allow.
        For methods that tune on a hold-out (paper, appendix "Implementation of Baseline Methods": 32 for task
        vectors). Raises I2CLError when fewer than `n` such rows remain.
        """
        used = {example.text for example in demonstrations}
        free = [example for example in self._rows("train") if example.text not in used]
        if not 1 <= n <= len(free):
            raise I2CLError(
                f"task {self.name!r}: {len(free)} training examples remain besides the demonstrations but a "
                f"hold-out of {n} was asked: ask for 1 to {len(free)} or add training rows"
            )
        rng = Random(f"held out {seed}")
        groups = group_by_label(free, len(self.labels))
        return sample_per_class(groups, even_quotas([len(group) for group in groups], n, rng), rng)

    def unlabelled(self, n: int, demonstrations: Examples, seed: int = 0) -> tuple[str, ...]:
        """Up to `n` training texts that are not among the demonstrations, as frequent by class as they come.
        Their labels are looked at by nobody. Raises I2CLError when there are no training rows.
        """
        used = {example.text for example in demonstrations}
        free = [example.text for example in self._rows("train") if example.text not in used]
        return tuple(Random(f"unlabelled {seed}").sample(free, min(n, len(free))))

    def skewed(self, times: int, limit: int | None = None, seed: int = 0) -> "Task":
        """The same task where classes with an odd id are rarer: for what takes equal frequencies for granted.
        Of their training rows one in `times` is kept. Test rows: about `limit` in all, of every class with an
        even id `times` as many as of one with an odd id, or fewer where it has not as many; None: as training
        rows.
        """
        weights = [1 if label % 2 else times for label in range(len(self.labels))]
        train, test = (group_by_label(rows, len(weights)) for rows in (self.train, self.test))
        quotas = [
            [len(group) * weight // times for group, weight in zip(groups, weights, strict=True)]
            for groups in (train, test)
        ]
        if limit is not None:
            each = zip(test, weights, strict=True)
            quotas[1] = [min(len(group), limit * weight // sum(weights)) for group, weight in each]
        rng = Random(f"skewed {seed}")
        kept = [sample_per_class(groups, of, rng) for groups, of in zip((train, test), quotas, strict=True)]
        return replace(self, train=kept[0], test=kept[1])

    def chat(self, tokenizer: "PreTrainedTokenizerBase", instruction: str | None = None) -> "Task":
        """The same task in the tokenizer's chat template (`Template.chat`), after its instruction or another.
        Raises I2CLError if the tokenizer has no chat template that can be used.
        """
        words = self.instruction if instruction is None else instruction
        return replace(self, template=Template.chat(tokenizer, words))

    def instructed(self, instruction: str | None = None) -> "Task":
        """The same task with its instruction, or another, before everything else."""
        words = self.instruction if instruction is None else instruction
        return replace(self, template=self.template.instructed(words))

    def worded(self, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, instruction: str | None) -> "Task":
        """The same task as a `chat`, which may raise; else `instructed`, if an instruction is given."""
        if chat:
            return self.chat(tokenizer, instruction)
        return self if instruction is None else self.instructed(instruction)

    def without_data(self) -> "Task":
        """The same task with empty splits."""
        return replace(self, train=(), test=())

    def to_dict(self) -> dict[str, object]:
        """A JSON-able description without the rows; `from_dict` reads it back."""
        words = {"opening": self.template.opening, "instruction": self.instruction}
        return {
            "name": self.name,
            "labels": list(self.labels),
            "template": self.template.format,
            "separator": self.template.separator,
            "shots": self.shots,
            "title": self.title,
            "description": self.description,
            "group": self.group,
        } | {name: text for name, text in words.items() if text}  # else as before there were these

    @classmethod
    def from_dict(cls, description: Mapping[str, object]) -> "Task":
        """The task without rows that `to_dict` described; keys it does not know are ignored.
        Raises I2CLError naming the key that is missing or of the wrong type.
        """
        labels = description.get("labels")
        if not isinstance(labels, list | tuple) or not all(isinstance(word, str) for word in labels):
            raise I2CLError(f"task description: 'labels' must be a list of words, not {labels!r}")
        shots = description.get("shots", 5)
        if not isinstance(shots, int):
            raise I2CLError(f"task description: 'shots' must be a whole number, not {shots!r}")
        text = partial(_string, description)
        return cls(
            name=text("name"),
            labels=tuple(labels),
            template=Template(text("template"), text("separator", "\n"), text("opening", "")),
            shots=shots,
            title=text("title", ""),
            description=text("description", ""),
            group=text("group", "user"),
            instruction=text("instruction", ""),
        )

    def _rows(self, split: str) -> tuple[Example, ...]:
        rows = self.train if split == "train" else self.test
        if not rows:
            cure = "give --test FILE" if split == "test" else "load the task with load_task"
            raise I2CLError(f"task {self.name!r} has no {split} examples: {cure}")
        return rows


def _string(description: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = description.get(key, default)
    if not isinstance(value, str):
        raise I2CLError(f"task description: {key!r} must be a string, not {value!r}")
    return value


def _check_labels(name: str, labels: tuple[str, ...]) -> None:
    for word in labels:
        if is_blank(word) or word != word.strip():
            cure = "leave no space around a label word; the space before a label belongs in the template"
            raise I2CLError(f"task {name!r}: label word {word!r} is empty or padded: {cure}")
    if repeated := sorted(word for word, count in Counter(labels).items() if count > 1):
        cure = "give each class its own word"
        raise I2CLError(f"task {name!r}: label word {repeated[0]!r} is given twice: {cure}")
    if len(labels) < 2:
        raise I2CLError(f"task {name!r} has {len(labels)} label word(s), {_words(labels)}: give at least two")


def _check_shots(name: str, shots: int) -> None:
    if shots < 1:
        raise I2CLError(f"task {name!r}: {shots} shots per class were asked: ask for at least 1")


def _words(labels: Sequence[str]) -> str:
    return ", ".join(labels) or "none"
