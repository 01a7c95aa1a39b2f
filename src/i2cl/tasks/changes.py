"""Change a task that has rows: rename and remove labels, and add rows, also of new labels."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from i2cl.errors import I2CLError, did_you_mean
from i2cl.tasks.rows import read_labelled
from i2cl.tasks.task import Example, Task


def rename_labels(task: Task, names: Mapping[str, str]) -> Task:
    """Return the task with new label words, given by the old ones.

    Labels that get the same word are merged, at the place of the first. Raises I2CLError on unknown labels,
    or if fewer than two remain.
    """
    _require_known(task, names)
    words = [names.get(word, word) for word in task.labels]
    labels = tuple(dict.fromkeys(words))
    if len(labels) == len(words):
        return replace(task, labels=labels)
    new_id = {label: labels.index(word) for label, word in enumerate(words)}
    return replace(task, labels=labels, train=_relabelled(task, new_id))


def remove_labels(task: Task, words: Collection[str]) -> Task:
    """Return the task without some labels.

    Rows of a multi-label task lose these labels; other rows of these labels are dropped. Raises I2CLError on
    unknown labels, or if fewer than two remain.
    """
    _require_known(task, words)
    remaining = [label for label, word in enumerate(task.labels) if word not in words]
    new_id = {label: index for index, label in enumerate(remaining)}
    return replace(
        task, labels=tuple(task.labels[label] for label in remaining), train=_relabelled(task, new_id)
    )


def _relabelled(task: Task, new_id: Mapping[int, int]) -> tuple[Example, ...]:
    """Return the rows with new label ids, given by the old ones; labels without one are removed."""
    rows = []
    for row in task.train:
        ids = tuple(sorted({new_id[label] for label in row.ids if label in new_id}))
        if task.multi_label:
            rows.append(replace(row, labels=ids))
        elif ids:
            rows.append(replace(row, label=ids[0]))
    return tuple(rows)


def add_rows(task: Task, path: Path, **columns: Any) -> Task:
    """Return the task with further rows of a file, whose new labels come last.

    A row replaces those with the same text.

    Args:
        task: with its rows.
        path: the file.
        **columns: where texts and labels are, see `i2cl.tasks.rows.read_labelled`.

    Raises:
        I2CLError: if the file cannot be read, or its rows do not have labels like the task's.
    """
    if task.multi_label and not columns.get("label_columns"):
        columns = {"multi_label": True} | columns
    rows, lookup = read_labelled(path, known=task.labels, **columns)
    if (rows[0].labels is not None) is not task.multi_label:
        kind = "any number of labels" if task.multi_label else "one label"
        raise I2CLError(f"{path}: a text of task {task.name!r} has {kind}: correct the file or the options")
    texts = {row.text for row in rows}
    unchanged = tuple(row for row in task.train if row.text not in texts)
    return replace(task, labels=lookup.labels, train=(*unchanged, *rows))


def _require_known(task: Task, words: Collection[str]) -> None:
    for word in words:
        if word not in task.labels:
            known = ", ".join(task.labels)
            hint = did_you_mean(word, task.labels)
            raise I2CLError(f"task {task.name!r} has no label {word!r}: {hint}labels are {known}")
