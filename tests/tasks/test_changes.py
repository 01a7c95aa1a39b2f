"""Rename and remove labels, and add rows, also of new labels."""

import json

import pytest

from i2cl import Example, I2CLError, Task, Template
from i2cl.tasks.changes import add_rows, remove_labels, rename_labels

TEMPLATE = Template("{text} is {label}")
ONE = Task("one", ("a", "b", "c"), TEMPLATE, train=tuple(Example(f"text {n}", n % 3) for n in range(6)))
SETS = [(), (0,), (0, 2), (1,)]
ANY = Task(
    "any",
    ("a", "b", "c"),
    TEMPLATE,
    train=tuple(Example.multi_label(f"text {n}", ids) for n, ids in enumerate(SETS)),
    multi_label=True,
)


def labelled(task):
    return {row.text: tuple(task.labels[one] for one in row.ids) for row in task.train}


def write(path, rows):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return path


def test_renamed_labels_keep_their_rows():
    assert rename_labels(ONE, {"b": "beta"}).labels == ("a", "beta", "c")
    assert rename_labels(ONE, {"b": "beta"}).train == ONE.train


def test_labels_renamed_to_the_same_word_are_merged():
    task = rename_labels(ONE, {"b": "c"})
    assert task.labels == ("a", "c")
    assert labelled(task) == {row.text: ("a",) if row.label == 0 else ("c",) for row in ONE.train}
    assert labelled(rename_labels(ANY, {"c": "a"})) == {
        "text 0": (),
        "text 1": ("a",),
        "text 2": ("a",),
        "text 3": ("b",),
    }
    with pytest.raises(I2CLError, match="give at least two"):
        rename_labels(ONE, {"a": "c", "b": "c"})


def test_rows_of_removed_labels_are_dropped():
    task = remove_labels(ONE, ["b"])
    assert task.labels == ("a", "c")
    assert labelled(task) == {"text 0": ("a",), "text 2": ("c",), "text 3": ("a",), "text 5": ("c",)}


def test_rows_of_a_multi_label_task_lose_removed_labels():
    task = remove_labels(ANY, ["a"])
    assert task.labels == ("b", "c")
    assert labelled(task) == {"text 0": (), "text 1": (), "text 2": ("c",), "text 3": ("b",)}


def test_added_rows_may_have_one_new_label_and_replace_equal_texts(tmp_path):
    task = add_rows(ONE, write(tmp_path / "more.jsonl", [("text 0", "d"), ("new", "d")]))
    assert task.labels == ("a", "b", "c", "d")
    assert labelled(task)["text 0"] == labelled(task)["new"] == ("d",)
    assert len(task.train) == 7


def test_added_rows_of_a_multi_label_task(tmp_path):
    task = add_rows(ANY, write(tmp_path / "more.jsonl", [("new", ["d", "a"]), ("other", [])]))
    assert labelled(task)["new"] == ("a", "d")
    assert labelled(task)["other"] == ()


def test_unknown_labels_and_other_kinds_of_rows_are_refused(tmp_path):
    with pytest.raises(I2CLError, match="no label 'x': labels are a, b, c"):
        rename_labels(ONE, {"x": "y"})
    with pytest.raises(I2CLError, match="give at least two"):
        remove_labels(ONE, ["a", "b"])
    with pytest.raises(I2CLError, match="is not a list"):
        add_rows(ANY, write(tmp_path / "one.jsonl", [("new", "a")]))
    with pytest.raises(I2CLError, match="has one label: correct the file"):
        add_rows(ONE, write(tmp_path / "lists.jsonl", [("new", ["a"])]))
