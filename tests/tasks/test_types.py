import json
import random
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch

from fitting import raises
from i2cl.tasks import Example, Task, Template
from i2cl.tasks.task import even_quotas

WORDS = ("red", "green", "blue")


def rows(*per_class, prefix="text"):
    places = ((label, n) for label, count in enumerate(per_class) for n in range(count))
    return tuple(Example(f"{prefix} {label}-{n}", label) for label, n in places)


def task(train=(20, 20, 20), test=(30, 30, 30), labels=WORDS, **fields):
    return Task("colours", labels, Template.plain(), rows(*train), rows(*test, prefix="test"), **fields)


def counts(examples):
    return Counter(example.label for example in examples)


def test_rows_may_be_lists():
    assert hash(Task("colours", list(WORDS), Template.plain(), list(rows(2, 2, 2)))) == hash(
        task((2, 2, 2), ())
    )


def test_pairs_instead_of_rows_are_refused():
    message = r"^task 'bad', train row 2 must be of type Example, not tuple: give Example\(text, label\)"
    raises(message, Task, "bad", WORDS, Template.plain(), (Example("a", 0), ("b", 1)))


def test_sample_is_balanced_and_seeded():
    some = task()
    drawn = some.sample(4, seed=3)
    assert counts(drawn) == {0: 4, 1: 4, 2: 4}
    assert len(set(drawn)) == 12
    assert set(drawn) <= set(some.train)
    assert drawn == some.sample(4, seed=3)
    assert drawn != some.sample(4, seed=4)
    assert [example.label for example in drawn] != sorted(example.label for example in drawn)
    assert counts(task(shots=2).sample(seed=0)) == {0: 2, 1: 2, 2: 2}  # the default


def test_samples_never_change_and_ignore_the_global_random_state():
    """Published results name seeds, so samples must stay the same across versions."""
    some = task()
    random.seed(1)
    before = random.getstate()
    first = (some.sample(2, 0), some.queries(9, 0), some.held_out(6, (), 0))
    assert random.getstate() == before
    random.seed(2)
    assert (some.sample(2, 0), some.queries(9, 0), some.held_out(6, (), 0)) == first
    assert [example.text for example in task().sample(1, seed=0)] == ["text 0-12", "text 2-1", "text 1-13"]


@pytest.mark.parametrize(
    ("train", "shots", "message"),
    [
        ((20, 3, 20), 5, "class 'green' has 3 training examples, fewer than 5 shots"),
        ((20, 0, 20), 1, "no text has the label 'green': add texts with it, or leave it out of the labels"),
        ((20, 0, 0), 1, "no text has the label 'green' or 'blue': add texts with them"),
        ((0, 0, 0), 1, "has no train examples"),
        ((9, 9, 9), 0, "0 shots per class requested"),
    ],
)
def test_impossible_sample_is_refused(train, shots, message):
    assert message in raises("", task(train).sample, shots, 0)


def test_queries_are_balanced_and_without_limit_in_file_order():
    some = task(test=(100, 100, 100))
    drawn = some.queries(50, seed=0)
    assert len(set(drawn)) == 50
    assert sorted(counts(drawn).values()) == [16, 17, 17]
    assert drawn == some.queries(50, seed=0)
    assert drawn != some.queries(50, seed=1)
    assert counts(task(test=(2, 100, 100)).queries(40)) == {0: 2, 1: 19, 2: 19}  # rest from other classes
    some = task()
    assert some.queries() == some.queries(90) == some.queries(10**6) == some.test
    raises("no test examples", task(test=()).queries)
    raises("0 queries", task().queries, 0)


def test_held_out_shares_no_text_with_the_demonstrations():
    twice = (*rows(8, 8, 8), *rows(8, 8, 8))
    some = Task("twice", WORDS, Template.plain(), twice)
    demonstrations = some.sample(5, seed=0)
    held_out = some.held_out(9, demonstrations, seed=0)
    assert {example.text for example in held_out}.isdisjoint({example.text for example in demonstrations})
    assert counts(held_out) == {0: 3, 1: 3, 2: 3}
    assert held_out == some.held_out(9, demonstrations, seed=0)
    assert held_out != some.held_out(9, demonstrations, seed=1)
    few, some = task(train=(6, 20, 20)), task()
    assert counts(few.held_out(20, few.sample(5, 0), 0))[0] == 1  # all that this class has left
    for n in (0, 46):
        raises("45 training examples remain", some.held_out, n, some.sample(5, 0), 0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("only",), "give at least two"),
        ((), "give at least two"),
        (("yes", "yes"), "'yes' is given twice"),
        (("yes", ""), "'' is empty or padded"),
        (("yes", " no"), "' no' is empty or padded"),
    ],
)
def test_invalid_label_words_are_refused(labels, message):
    assert message in raises("", Task, "bad", labels, Template.plain())


@pytest.mark.parametrize("label", [-1, 3])
def test_label_out_of_range_names_the_row(label):
    message = rf"test row 2: label {label} is not one of 0 to 2 \(red, green, blue\)"
    raises(message, Task, "bad", WORDS, Template.plain(), test=(Example("a", 0), Example("b", label)))


def test_to_dict_round_trips_through_json():
    some = task(title="Colours", description="What colour?", group="paper", shots=2)
    back = Task.from_dict(json.loads(json.dumps(some.to_dict())))
    assert back == some.without_data()
    assert back.train == back.test == ()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", None, "name: Input should be a valid string"),
        ("labels", "red", "labels='red': Input should be a valid list"),
        ("labels", [1, 2], "labels.0=1: Input should be a valid string"),
        ("shots", "5", "shots='5': Input should be a valid integer"),
    ],
)
def test_invalid_description_names_the_key(key, value, message):
    assert message in raises("", Task.from_dict, {**task().to_dict(), key: value})


def test_skewed_makes_odd_classes_rarer():
    whole = task(train=(12, 12, 12), test=(12, 12, 12))
    rarer = whole.skewed(3, limit=14)
    assert counts(rarer.train) == {0: 12, 1: 4, 2: 12}
    assert counts(rarer.queries(14)) == counts(rarer.test) == {0: 6, 1: 2, 2: 6}
    assert counts(whole.skewed(3, limit=60).test) == {0: 12, 1: 8, 2: 12}  # as many as there are
    assert counts(whole.skewed(4).test) == {0: 12, 1: 3, 2: 12}
    assert rarer == whole.skewed(3, limit=14)
    assert sorted(whole.skewed(1).train, key=whole.train.index) == list(whole.train)


def test_quotas_are_even_and_the_remainder_is_seeded():
    known = [([10, 10], 6, [3, 3]), ([1, 10, 10], 7, [1, 3, 3]), ([1, 2, 10], 100, [1, 2, 10])]
    for sizes, total, expected in [*known, ([0, 5], 4, [0, 4]), ([], 4, []), ([3, 3], 0, [0, 0])]:
        assert even_quotas(sizes, total, Random(0)) == expected
    quotas = {tuple(even_quotas([9, 9, 9], 7, Random(seed))) for seed in range(30)}
    assert quotas == {(3, 2, 2), (2, 3, 2), (2, 2, 3)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((None, 0), "the text of an example is None, not a string"),
        (("x", "red"), "the label of an example is 'red', not a class id"),
        (("x", 0.5), "the label of an example is 0.5, not a class id"),
        (("x", 0, float("nan")), "the weight of an example is nan"),
        (("x", 0, -1.0), "the weight of an example is -1.0"),
        (("x", 0, float("inf")), "the weight of an example is inf"),
    ],
)
def test_example_of_wrong_types_or_weights_is_refused(fields, message):
    raises(message, Example, *fields)


@pytest.mark.parametrize("one", [np.int64(1), torch.tensor(1)])
def test_integer_label_of_another_library_becomes_an_int(one):
    assert {Example("x", one)} == {Example("x", 1)}
    assert type(Example("x", one).label) is int


@pytest.mark.parametrize(
    ("labels", "template", "message"),
    [
        ("ab", Template.plain(), "labels of task 'films' are 'ab': give a list of words"),
        ((1, 2), Template.plain(), r"labels of task 'films' are \(1, 2\): give a list of words"),
        (("a", "b"), "{text} {label}", "template of task 'films' is a str"),
    ],
)
def test_task_of_wrong_types_is_refused(labels, template, message):
    raises(message, Task, "films", labels, template)
