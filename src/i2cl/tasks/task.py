"""The `Task` and `Example` classes, and class-balanced sampling of rows."""

import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from i2cl.errors import I2CLError, first_problem, require_type, require_utf8
from i2cl.tasks.labels import is_blank, name_labels, normalize_word
from i2cl.tasks.template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LABEL_SEPARATOR = ";"  # between the labels of a text in the files of multi-label tasks


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled text.

    Attributes:
        text: the text.
        label: class id, an index into the task's label words; -1 for a row of a multi-label task.
        weight: weight of the example's loss in a fit; positive.
        labels: class ids of a row of a multi-label task, ascending: none, some or all; None for a row with
            one ``label``.

    Raises:
        I2CLError: if the text is not a string, the label not a whole number, or the weight not positive and
            finite.
    """

    text: str
    label: int
    weight: float = 1.0
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise I2CLError(
                f"the text of an example is {self.text!r:.60}, not a string: correct or remove it"
            )
        try:  # a NumPy or torch integer becomes an int, so that equal examples have equal hashes
            object.__setattr__(self, "label", operator.index(self.label))
        except TypeError:
            hint = "give its index in the label words"
            raise I2CLError(
                f"the label of an example is {self.label!r:.60}, not a class id: {hint}"
            ) from None
        if not 0 < self.weight < math.inf:  # also False for NaN
            raise I2CLError(f"the weight of an example is {self.weight}: give a positive, finite number")

    @classmethod
    def multi_label(cls, text: str, labels: Iterable[int], weight: float = 1.0) -> "Example":
        """Return a row of a multi-label task."""
        return cls(text, -1, weight, tuple(sorted(set(labels))))

    @property
    def ids(self) -> tuple[int, ...]:
        """All class ids of the row."""
        return (self.label,) if self.labels is None else self.labels


Examples = Sequence[Example]


def group_by_label(rows: Examples, classes: int) -> list[list[Example]]:
    """Return the rows of each class id from 0 to ``classes - 1``, in their order.

    Rows of a multi-label task are in the group of each of their labels.
    """
    groups: list[list[Example]] = [[] for _ in range(classes)]
    for row in rows:
        for label in row.ids:
            groups[label].append(row)
    return groups


def even_quotas(sizes: Sequence[int], total: int, rng: Random) -> list[int]:
    """Return how many rows to take from each group, as equal as the group sizes allow.

    The quotas sum to ``total``, or to the number of rows if there are fewer. A remainder goes to randomly
    chosen groups, one row each.

    Args:
        sizes: number of rows in each group.
        total: number of rows to take.
        rng: chooses the groups that get the remainder.
    """
    limits = range(max(sizes, default=0) + 1)  # candidates for the maximum number of rows per group
    limit = bisect_right(limits, total, key=lambda limit: sum(min(size, limit) for size in sizes)) - 1
    quotas = [min(size, limit) for size in sizes]
    larger = [index for index, size in enumerate(sizes) if size > limit]
    for index in rng.sample(larger, min(total, sum(sizes)) - sum(quotas)):
        quotas[index] += 1
    return quotas


def sample_per_class(groups: Sequence[Examples], quotas: Sequence[int], rng: Random) -> tuple[Example, ...]:
    """Draw ``quotas[c]`` different rows from every group c, and shuffle them."""
    rows = [row for group, quota in zip(groups, quotas, strict=True) for row in rng.sample(group, quota)]
    rng.shuffle(rows)
    return tuple(rows)


def sample_evenly(rows: Examples, classes: int, n: int, rng: Random) -> tuple[Example, ...]:
    """Draw ``n`` different rows, or all if there are fewer, as class-balanced as the rows allow.

    Rows of a multi-label task are drawn at random.
    """
    if any(row.labels is not None for row in rows):
        return tuple(rng.sample(list(rows), min(n, len(rows))))
    groups = group_by_label(rows, classes)
    return sample_per_class(groups, even_quotas([len(group) for group in groups], n, rng), rng)


def sample_multi_label(rows: Examples, classes: int, shots: int, rng: Random) -> tuple[Example, ...]:
    """Draw rows until every label has ``shots`` of them, or all that it has, and shuffle them.

    Labels are filled from the rarest to the most frequent one, so that rows drawn for a rare label count for
    its other labels too. Rows without any label count as one more class. If all drawn rows have some label,
    ``shots`` rows without it are added.
    """
    groups: list[list[int]] = [[] for _ in range(classes + 1)]
    for number in rng.sample(range(len(rows)), len(rows)):
        for label in rows[number].ids or (classes,):
            groups[label].append(number)
    drawn_numbers: dict[int, None] = {}
    for group in sorted(groups, key=len):
        missing = shots - sum(number in drawn_numbers for number in group)
        fresh = [number for number in group if number not in drawn_numbers]
        drawn_numbers |= dict.fromkeys(fresh[: max(0, missing)])
    for label in range(classes):
        if all(label in rows[number].ids for number in drawn_numbers):
            others = [number for number, row in enumerate(rows) if label not in row.ids]
            drawn_numbers |= dict.fromkeys(rng.sample(others, min(shots, len(others))))
    drawn = [rows[number] for number in drawn_numbers]
    rng.shuffle(drawn)
    return tuple(drawn)


@dataclass(frozen=True)
class Task:
    """A text classification task.

    Name and label words are normalized to Unicode NFC.

    Attributes:
        name: name of the task.
        labels: label words; ``labels[i]`` is the model's expected output for class id i.
        template: prompt format.
        train: training rows.
        test: test rows.
        shots: default number of demonstrations per class (paper, section "Experiments": five, one for
            DBPedia).
        title: name for people.
        description: one sentence on what the task classifies.
        group: where the task comes from: "paper", "benchmark", "bundled", "synthetic", "reference" or "user".
        instruction: one sentence that tells the model what to do. Used by `chat` and `with_instruction`; not
            part of the plain template.
        multi_label: whether a text has any number of the labels, each with its own probability, instead of
            exactly one.

    Raises:
        I2CLError: if label words are one string, not strings, empty or repeated, ``template`` is not a
            `Template`, a row is not an `Example` or has a class id without a label word, or rows with one and
            with any number of labels are mixed.
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
    multi_label: bool = False

    def __post_init__(self) -> None:
        given: object = self.labels
        words = tuple(self.labels)
        if isinstance(given, str) or not all(isinstance(word, str) for word in words):
            raise I2CLError(f"labels of task {self.name!r} are {given!r:.60}: give a list of words")
        template: object = self.template
        if not isinstance(template, Template):
            kind = type(template).__name__
            raise I2CLError(f"template of task {self.name!r} is a {kind}: pass Template(...)")
        labels = tuple(map(normalize_word, words))
        splits = {"train": tuple(self.train), "test": tuple(self.test)}
        vars(self).update(splits, name=normalize_word(self.name), labels=labels)  # the dataclass is frozen
        for text in (self.name, self.title, self.description, self.instruction, *self.labels):
            require_utf8(text, "the task's name, label word or description")
        for text in (self.template.format, self.template.separator, self.template.opening):
            require_utf8(text, "the task's template")
        _check_labels(self.name, self.labels)
        _check_shots(self.name, self.shots)
        if self.multi_label and (joined := [word for word in self.labels if LABEL_SEPARATOR in word]):
            raise I2CLError(
                f"task {self.name!r}: label word {joined[0]!r} contains {LABEL_SEPARATOR!r}, which separates "
                "the labels of a text: rename it"
            )
        for split, rows in splits.items():
            for number, example in enumerate(rows, start=1):
                row = f"task {self.name!r}, {split} row {number}"
                require_type(row, example, Example, "give Example(text, label)")
                if (example.labels is not None) is not self.multi_label:
                    given = "one label" if example.labels is None else "a list of labels"
                    hint = "use Example.multi_label" if self.multi_label else "set multi_label=True"
                    raise I2CLError(f"{row} has {given}, but multi_label is {self.multi_label}: {hint}")
                unknown = [label for label in example.ids if not 0 <= label < len(self.labels)]
                if unknown:
                    raise I2CLError(
                        f"{row}: label {unknown[0]} is not one of 0 to {len(self.labels) - 1} "
                        f"({_joined(self.labels)}): correct the row or add a label word"
                    )

    def require_single_label(self, what: str, hint: str = "make one task per label") -> None:
        """Raise I2CLError if this is a multi-label task, which ``what`` does not support."""
        if self.multi_label:
            raise I2CLError(
                f"{what} needs exactly one label per text, and {self.name!r} is a multi-label task: {hint}"
            )

    def sample(self, shots: int | None = None, seed: int = 0) -> tuple[Example, ...]:
        """Draw class-balanced demonstrations from the training rows, in random order.

        Source: paper, section "Experiments" (five random examples per class).

        Args:
            shots: demonstrations per class. Default: the task's ``shots``.
            seed: seed of the sample and of its order.

        Raises:
            I2CLError: if a class has fewer training rows.
        """
        count = self.shots if shots is None else shots
        _check_shots(self.name, count)
        groups = group_by_label(self._rows("train"), len(self.labels))
        if empty := [word for word, group in zip(self.labels, groups, strict=True) if not group]:
            it = "it" if len(empty) == 1 else "them"
            raise I2CLError(
                f"task {self.name!r}: no text has the label {name_labels(empty)}: add texts with {it}, or "
                f"leave {it} out of the labels"
            )
        for word, group in zip(self.labels, groups, strict=True):
            if len(group) < count:
                raise I2CLError(
                    f"task {self.name!r}: class {word!r} has {len(group)} training examples, fewer than "
                    f"{count} shots: use fewer shots or add rows of that class"
                )
        if self.multi_label:
            return sample_multi_label(self.train, len(self.labels), count, Random(seed))
        return sample_per_class(groups, [count] * len(groups), Random(seed))

    def queries(self, limit: int | None = None, seed: int = 0) -> tuple[Example, ...]:
        """Return all test rows, or a sample that is as class-balanced as the test split allows.

        The paper's released code evaluates on 500 rows.

        Args:
            limit: maximum number of rows. Default: all, in their order.
            seed: seed of the sample.

        Raises:
            I2CLError: if there are no test rows, or ``limit`` is below 1.
        """
        rows = self._rows("test")
        if limit is not None and limit < 1:
            raise I2CLError(f"task {self.name!r}: {limit} queries requested: use at least 1")
        if limit is None or limit >= len(rows):
            return rows
        return sample_evenly(rows, len(self.labels), limit, Random(f"queries {seed}"))

    def held_out(self, n: int, demonstrations: Examples, seed: int = 0) -> tuple[Example, ...]:
        """Draw ``n`` training examples whose texts are not in the demonstrations, as balanced as possible.

        For methods that tune on held-out rows (paper, appendix "Implementation of Baseline Methods": 32 for
        task vectors).

        Raises:
            I2CLError: if fewer than ``n`` such rows remain.
        """
        free = self._unused_rows(demonstrations)
        if not 1 <= n <= len(free):
            raise I2CLError(
                f"task {self.name!r}: {len(free)} training examples remain besides the demonstrations, but "
                f"{n} held-out examples were requested: use 1 to {len(free)} or add training rows"
            )
        return sample_evenly(free, len(self.labels), n, Random(f"held out {seed}"))

    def unlabelled(self, n: int, demonstrations: Examples, seed: int = 0) -> tuple[str, ...]:
        """Draw up to ``n`` training texts that are not in the demonstrations, ignoring their labels.

        Raises:
            I2CLError: if there are no training rows.
        """
        free = [example.text for example in self._unused_rows(demonstrations)]
        return tuple(Random(f"unlabelled {seed}").sample(free, min(n, len(free))))

    def skewed(self, ratio: int, limit: int | None = None) -> "Task":
        """Return an imbalanced version of the task: classes with an odd id become rarer.

        Used to test methods that assume equal class frequencies.

        Args:
            ratio: one in ``ratio`` rows of the classes with an odd id is kept.
            limit: approximate number of test rows; classes with an even id get ``ratio`` times as many as the
                others, if they have them. Default: sample test rows like training rows.

        Raises:
            I2CLError: for a multi-label task.
        """
        self.require_single_label("skewed")
        weights = [1 if label % 2 else ratio for label in range(len(self.labels))]
        train, test = (group_by_label(rows, len(weights)) for rows in (self.train, self.test))
        quotas = [
            [len(group) * weight // ratio for group, weight in zip(groups, weights, strict=True)]
            for groups in (train, test)
        ]
        if limit is not None:
            pairs = zip(test, weights, strict=True)
            quotas[1] = [min(len(group), limit * weight // sum(weights)) for group, weight in pairs]
        rng = Random("skewed 0")
        return replace(
            self,
            train=sample_per_class(train, quotas[0], rng),
            test=sample_per_class(test, quotas[1], rng),
        )

    def chat(self, tokenizer: "PreTrainedTokenizerBase", instruction: str | None = None) -> "Task":
        """Return the task with the tokenizer's chat template as prompt format, see `Template.chat`.

        ``instruction``: replaces the task's own instruction. Raises I2CLError if the tokenizer has no usable
        chat template.
        """
        text = self.instruction if instruction is None else instruction
        return replace(self, template=Template.chat(tokenizer, text))

    def with_prompt_options(
        self, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, instruction: str | None
    ) -> "Task":
        """Return the task with a chat template, or with an instruction at the beginning of every prompt.

        Args:
            tokenizer: the tokenizer.
            chat: use its chat template, see `chat`.
            instruction: replaces the task's own instruction. Without ``chat``, None adds no instruction.

        Raises:
            I2CLError: like `chat`.
        """
        if chat:
            return self.chat(tokenizer, instruction)
        if instruction is None:
            return self
        return replace(self, template=self.template.with_instruction(instruction))

    def without_data(self) -> "Task":
        """Return the task without training and test rows."""
        return replace(self, train=(), test=())

    def to_dict(self) -> dict[str, object]:
        """Return the task without its rows as JSON-serializable values, for `from_dict`."""
        optional = {
            "opening": self.template.opening,
            "instruction": self.instruction,
            "multi_label": self.multi_label,
        }
        return {
            "name": self.name,
            "labels": list(self.labels),
            "template": self.template.format,
            "separator": self.template.separator,
            "shots": self.shots,
            "title": self.title,
            "description": self.description,
            "group": self.group,
        } | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_dict(cls, description: Mapping[str, object]) -> "Task":
        """Create a task without rows from the output of `to_dict`. Unknown keys are ignored.

        Raises:
            I2CLError: if a key is missing or has the wrong type.
        """
        try:
            return TaskDescription.model_validate(description).to_task()
        except ValidationError as error:
            raise I2CLError(f"task description: {first_problem(error)}") from None

    def _unused_rows(self, demonstrations: Examples) -> list[Example]:
        """Return the training rows whose texts are not in the demonstrations."""
        used = {example.text for example in demonstrations}
        return [example for example in self._rows("train") if example.text not in used]

    def _rows(self, split: str) -> tuple[Example, ...]:
        rows = self.train if split == "train" else self.test
        if not rows:
            hint = "give --test FILE" if split == "test" else "load the task with load_task"
            raise I2CLError(f"task {self.name!r} has no {split} examples: {hint}")
        return rows


class TaskDescription(BaseModel):
    """A task without rows as JSON, or as the fields of a task TOML. See `Task` for the attributes."""

    model_config = ConfigDict(frozen=True, strict=True)

    name: str
    labels: list[str]
    template: str
    separator: str = "\n"
    opening: str = ""
    shots: int = 5
    title: str = ""
    description: str = ""
    group: str = "user"
    instruction: str = ""
    multi_label: bool = False

    def to_task(self, train: tuple[Example, ...] = (), test: tuple[Example, ...] = ()) -> Task:
        """Return the task with the given rows. Raises I2CLError if labels, template or rows are invalid."""
        template = Template(self.template, self.separator, self.opening)
        names = ("name", "shots", "title", "description", "group", "instruction", "multi_label")
        fields = {name: getattr(self, name) for name in names}
        return Task(labels=tuple(self.labels), template=template, train=train, test=test, **fields)


def _check_labels(name: str, labels: tuple[str, ...]) -> None:
    for word in labels:
        if is_blank(word) or word != word.strip():
            raise I2CLError(
                f"task {name!r}: label word {word!r} is empty or padded: give a word without spaces around "
                "it; the space before a label belongs in the template"
            )
    if repeated := sorted(word for word, count in Counter(labels).items() if count > 1):
        raise I2CLError(
            f"task {name!r}: label word {repeated[0]!r} is given twice: give each class its own word"
        )
    if len(labels) < 2:
        raise I2CLError(
            f"task {name!r} has {len(labels)} label word(s), {_joined(labels)}: give at least two"
        )


def _check_shots(name: str, shots: int) -> None:
    if shots < 1:
        raise I2CLError(f"task {name!r}: {shots} shots per class requested: use at least 1")


def _joined(labels: Sequence[str]) -> str:
    return ", ".join(labels) or "none"
