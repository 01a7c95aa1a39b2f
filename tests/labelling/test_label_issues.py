"""Labels that are probably wrong: confident learning, near-duplicates, and refits without a row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fitting import raises
from i2cl import Example, review
from i2cl.labelling.label_issues import (
    find_label_issues,
    label_margins,
    near_duplicates,
    out_of_fold_log_probs,
)

WORDS = ("wonderful", "boring")


def test_confident_learning_compares_with_the_mean_confidence_of_a_label():
    labels = np.array([0, 0, 0, 1, 1, 1])
    first = np.array([0.9, 0.8, 0.35, 0.45, 0.3, 0.85])  # label 0: on average 0.68; label 1: 0.47
    probabilities = np.stack([first, 1 - first], 1)
    assert np.flatnonzero(find_label_issues(probabilities, labels)).tolist() == [2, 5]
    assert label_margins(probabilities, labels) == pytest.approx([0.8, 0.6, -0.3, 0.1, 0.4, -0.7])


def test_a_label_without_rows_is_never_suggested():
    probabilities = np.array([[0.3, 0.1, 0.6], [0.1, 0.3, 0.6], [0.1, 0.3, 0.6]])
    assert not find_label_issues(probabilities, np.array([0, 1, 1])).any()


def test_near_duplicates_differ_in_few_characters():
    rows = [
        Example("Where is my parcel?", 0),
        Example("where is my parcel ?", 1),
        Example("Where is my parcel??", 0),
        Example("I was charged twice for one order", 1),
        Example("The app crashes when I log in", 0),
    ]
    assert near_duplicates(rows) == {0: (1,), 1: (0, 2), 2: (1,)}


def test_review_lists_flipped_labels_and_contradictions_worst_first(decoder, task):
    names = ("cook", "king", "poet", "dog", "nurse", "singer")
    rows = [Example(f"the {name} was {word}", at) for name in names for at, word in enumerate(WORDS)]
    right = torch.tensor([row.label for row in rows])
    rows[4] = replace(rows[4], label=1)
    rows += [Example("An odd, odd film", 0), Example("an odd, odd film!", 1)]
    log_probs = torch.full((len(rows), 2), 0.1)
    log_probs[range(len(right)), right] = 0.9
    log_probs[-2:] = torch.tensor([[0.6, 0.4], [0.6, 0.4]])
    issues = review(decoder, task, rows, log_probs=log_probs.log())
    assert [one.row for one in issues] == [4, 13]
    assert [(one.label, one.suggested) for one in issues] == [("negative", "positive")] * 2
    assert issues[0].probability == pytest.approx(0.1)
    assert [one.near_duplicates for one in issues] == [(), (12,)]
    assert rows[4].label == 1


def test_each_row_is_scored_by_a_fit_that_has_not_seen_it(decoder, task):
    three = replace(task, labels=("positive", "negative", "neutral"))
    rows = [*task.train[:8], Example("so so", 2)]
    refits = []
    log_probs = out_of_fold_log_probs(decoder, three, rows, folds=2, progress=refits.append)
    assert refits == [1, 1]
    assert log_probs.exp().sum(-1).tolist() == pytest.approx([1] * len(rows), abs=1e-5)
    assert log_probs[-1].tolist() == [-torch.inf, -torch.inf, 0]  # no other text has its label
    changed = [*rows[:-1], replace(rows[-1], text="hm")]
    assert torch.equal(log_probs, out_of_fold_log_probs(decoder, three, changed, folds=2))


def test_a_label_with_many_copies_of_one_text_is_reviewed(decoder, task):
    three = replace(task, labels=("positive", "negative", "neutral"))
    rows = [*task.train[:8], *[Example("so so", 2)] * 300, Example("hm", 2)]
    log_probs = out_of_fold_log_probs(decoder, three, rows, folds=2)
    assert log_probs[-2].tolist() == [-torch.inf, -torch.inf, 0], "all drawn rows of the label have this text"
    assert log_probs[-1].exp().sum() == pytest.approx(1)


def test_label_that_the_task_does_not_have_is_refused(decoder, task):
    rows = [*task.train[:8], Example("so so", 2)]
    raises("has label 2, task 'films' has labels 0 to 1: correct it", review, decoder, task, rows)


def test_one_label_is_refused(decoder, task):
    rows = [row for row in task.train if row.label == 0] + [Example("alone", 1)]
    message = "fewer than two labels have two texts or more: label more texts"
    raises(message, review, decoder, task, rows)
