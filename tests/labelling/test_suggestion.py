"""Which texts are suggested for labelling, and with which label."""

import numpy as np
import pytest

from fitting import raises
from i2cl import Suggestion, anchor, suggest
from i2cl.labelling.suggestion import (
    choose_typical,
    text_vectors,
    typicality,
)
from i2cl.models.scoring import LabelScorer
from i2cl.tasks.sample import sample_texts

NONE = np.empty((0, 3), np.float32)


def unit(rows):
    rows = np.asarray(rows, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def around(*sizes):
    """Return vectors close to the axes; the arguments are the number of vectors per axis."""
    rng = np.random.default_rng(0)
    return unit(
        [np.eye(3)[axis] + 0.05 * rng.normal(size=3) for axis, size in enumerate(sizes) for _ in range(size)]
    )


def test_choice_covers_clusters_without_a_label_largest_first():
    vectors = around(10, 30, 20)
    assert [np.argmax(vectors[at]) for at in choose_typical(vectors, 3, NONE)] == [1, 2, 0]
    assert [np.argmax(vectors[at]) for at in choose_typical(vectors, 2, vectors[40:41])] == [1, 0]


def test_typical_vectors_have_near_neighbours():
    vectors = np.concatenate([around(10), unit([[1, 1, 1]])])
    assert typicality(vectors, np.zeros(11, dtype=int)).argmin() == 10
    assert 10 not in choose_typical(vectors, 1, NONE)


@pytest.mark.parametrize("n", [1, 5, 12])
def test_choice_is_distinct_even_among_equal_vectors(n):
    vectors = np.concatenate([around(6), around(6)])
    chosen = choose_typical(vectors, n, vectors[:2], seed=3)
    assert len(set(chosen)) == n
    assert chosen == choose_typical(vectors, n, vectors[:2], seed=3)


def test_sample_is_distinct_and_independent_of_order_and_repetition():
    texts = [f"text {number % 50}" for number in range(500)]
    drawn = sample_texts(texts, 20)
    assert len(set(drawn)) == 20
    assert set(sample_texts(reversed(texts), 20)) == set(drawn)
    assert set(drawn) != set(sample_texts(texts, 20, seed=1))
    assert drawn == [text for text in dict.fromkeys(texts) if text in drawn]
    assert sample_texts(["A  b", "a b", "c"], 9, exclude=["C "]) == ["A  b"]
    counts = np.zeros(50)
    for seed in range(200):
        counts[[int(text.split()[1]) for text in sample_texts(texts, 10, seed=seed)]] += 1
    assert 15 < counts.min() < counts.max() < 70  # 40 on average


def texts_of(task):
    return [row.text for row in task.train]


def test_suggestions_without_a_fit_propose_calibrated_zero_shot_labels(decoder, task):
    texts = texts_of(task)
    chosen = suggest(decoder, task, [*texts, texts[0].upper()], 5, labelled=texts[:3])
    assert len({one.text for one in chosen}) == 5
    assert not {one.text for one in chosen} & {*texts[:3], texts[0].upper()}
    assert [texts[one.index] for one in chosen] == [one.text for one in chosen]
    probabilities = LabelScorer(decoder, task).scores(texts).softmax(-1)
    corrected = probabilities / probabilities.mean(0)
    corrected /= corrected.sum(-1, keepdim=True)
    for one in suggest(decoder, task, texts, 5):
        assert one.probabilities == pytest.approx(corrected[one.index].tolist(), abs=1e-4)
        assert one.label == task.labels[int(corrected[one.index].argmax())]


def test_suggestions_propose_the_answers_of_the_fit_and_are_deterministic(decoder, task):
    texts = texts_of(task)
    injection = anchor(decoder, task, task.sample(2))
    counted = []
    first = suggest(decoder, injection, texts, 2, progress=counted.append)
    assert sum(counted) == len(texts)
    assert first == suggest(decoder, injection, texts, 2)
    assert all(isinstance(one, Suggestion) for one in first)
    assert [one.label for one in first] == injection.predict(decoder, [one.text for one in first])


def test_vectors_of_hidden_states_do_not_depend_on_the_other_texts(decoder, task):
    texts = texts_of(task)[:6]
    vectors = text_vectors(decoder, task, texts)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert vectors[3] == pytest.approx(text_vectors(decoder, task, texts[3:4])[0], abs=1e-5)


def test_too_few_texts_are_refused(decoder, task):
    message = "cannot suggest 3 of 2 distinct texts without a label: give more texts, or ask for fewer"
    raises(message, suggest, decoder, task, ["a", "A", "b", "c"], 3, labelled=["c"])
