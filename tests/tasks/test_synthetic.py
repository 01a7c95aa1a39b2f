import string
from collections import Counter

from i2cl.tasks import load_task
from i2cl.tasks.synthetic import synthetic_task


def test_classes_are_letters_specials_and_numbers_in_balanced_disjoint_and_seeded_splits():
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
    named = load_task("synthetic")  # covers the protocol of the paper
    assert (len(named.queries(500)), len(named.sample())) == (500, 15)
