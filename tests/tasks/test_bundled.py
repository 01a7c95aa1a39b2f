"""Bundled and synthetic tasks: their rows must be suitable for evaluation."""

import re
import string
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from i2cl.tasks import list_tasks, load_task
from i2cl.tasks.generated import synthetic_task
from i2cl.tasks.loaders import BUILTIN, BUNDLED_TASKS, builtin_spec


def five_word_runs(text):
    """Return all sequences of five consecutive words; a shorter text is one sequence."""
    words = re.findall(r"[\w']+", text.lower())
    return {tuple(words[start : start + 5]) for start in range(max(1, len(words) - 4))}


def test_tickets_has_its_labels_template_and_rows():
    task = load_task("tickets")
    assert task.labels == ("billing", "technical issue", "delivery", "account access")
    assert task.template.exchange("A", "B") == "Ticket: A\nTopic: B\n"
    assert len(task.train) == len(task.test) == 240
    assert all(4 <= len(row.text.split()) <= 90 for row in (*task.train, *task.test))


def test_every_row_file_belongs_to_a_listed_task():
    listed = [task for task in list_tasks() if task.group == "bundled"]
    assert [task.name for task in listed] == list(BUNDLED_TASKS)
    assert "tickets" in BUNDLED_TASKS
    assert all(task.description and not task.train for task in listed)
    sources = [builtin_spec(name).files for name in BUNDLED_TASKS]
    named = [file for source in sources if source for file in (source.train, source.test)]
    assert sorted(file.name for file in BUILTIN.glob("*.jsonl")) == sorted(named)


@pytest.mark.parametrize("name", BUNDLED_TASKS)
def test_rows_are_balanced_shuffled_single_line_and_distinct(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("I2CL_DATA_DIR", str(tmp_path / "none"))  # ignored by bundled tasks
    task = load_task(name)
    assert (task.name, task.group) == (name, "bundled")
    for rows in (task.train, task.test):
        counts = Counter(row.label for row in rows)
        assert len(counts) == len(task.labels)
        assert len(set(counts.values())) == 1
        assert len({row.label for row in rows[: 10 * len(task.labels)]}) == len(task.labels)
        assert all(row.text == " ".join(row.text.split()) for row in rows)
    texts = [row.text for row in (*task.train, *task.test)]
    assert len({text.lower() for text in texts}) == len(texts)

    for (text, runs), (other, other_runs) in combinations(
        zip(texts, map(five_word_runs, texts), strict=True), 2
    ):
        assert 2 * len(runs & other_runs) < min(len(runs), len(other_runs)), (text, other)

    vectors = TfidfVectorizer(token_pattern=r"[\w']+").fit_transform(texts)
    similarity = np.triu((vectors @ vectors.T).toarray(), k=1)
    row, column = np.unravel_index(similarity.argmax(), similarity.shape)
    assert similarity[row, column] < 0.8, (texts[row], texts[column])


def test_synthetic_splits_are_balanced_disjoint_and_seeded():
    task = synthetic_task(seed=1)
    assert task.labels == ("A", "B", "C")
    alphabets = (string.ascii_letters, string.punctuation, string.digits)
    for example in task.train + task.test:
        assert set(example.text) <= set(alphabets[example.label])
        assert 5 <= len(example.text) <= 12
    assert all(int(e.text) >= 10_000 for e in task.train if e.label == 2)
    task = synthetic_task(seed=1, train_per_class=30, test_per_class=40)
    assert Counter(e.label for e in task.train) == {0: 30, 1: 30, 2: 30}
    assert Counter(e.label for e in task.test) == {0: 40, 1: 40, 2: 40}
    texts = [e.text for e in task.train + task.test]
    assert len(set(texts)) == len(texts)
    assert task == synthetic_task(seed=1, train_per_class=30, test_per_class=40)
    assert task.train != synthetic_task(seed=2, train_per_class=30, test_per_class=40).train
    named = load_task("synthetic")  # enough rows for the paper's protocol
    assert (len(named.queries(500)), len(named.sample())) == (500, 15)
