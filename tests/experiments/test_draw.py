"""Which rows of a user's file become demonstrations, and the estimated time of a fit."""

from collections import Counter
from dataclasses import replace

import pytest

from fitting import raises
from i2cl import Example, Task, Template, make_methods
from i2cl.core.plan import MAX_EXAMPLES, FitSize, plan_fit
from i2cl.experiments import draw as module
from i2cl.experiments.draw import draw, draw_within_budget, up_to
from i2cl.models.trie import Trie

ANCHORED, I2CL = make_methods(["anchored", "i2cl"])


def of(*counts, test=()):
    """A task with the given number of rows of each class."""
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    rows = [Example(f"text {label} {labels[:at].count(label)}", label) for at, label in enumerate(labels)]
    words = tuple(f"word{label}" for label in range(len(counts)))
    return Task("mine", words, Template("{text} {label}"), train=tuple(rows), test=tuple(test))


def tokens_of(speed, rows):
    return sum(map(len, speed.scorer.queries([row.text for row in rows])))


def counts(rows):
    return [count for _, count in sorted(Counter(row.label for row in rows).items())]


def asked(task, method=ANCHORED, shots=None, **more):
    return draw(task, method, shots, 0, **{"from_file": True, "keep_back": None, "scored": True} | more)


@pytest.fixture
def fast(monkeypatch):
    """Set the seconds that the model takes per token; tokens are counted as usual."""

    def at(seconds_per_token):
        made = module._Speed.of

        def timed(decoder, task, method, ensemble=None):
            speed = made(decoder, task, method, ensemble)
            return replace(speed, seconds_per_token=seconds_per_token, seconds_per_batch=0.0)

        monkeypatch.setattr(module._Speed, "of", timed)

    return at


def test_up_to_draws_what_a_class_has_and_keeps_back_a_share():
    assert counts(up_to(of(30, 3, 7), 5, 0)) == [5, 3, 5]
    task = of(8, 8)
    assert up_to(task, 5, 3) == task.sample(5, 3)
    assert len(set(up_to(of(30, 3), 20, 0))) == 23
    assert counts(up_to(of(10, 9, 30), 20, 0, keep_back=5)) == [8, 9, 20]
    assert counts(up_to(of(10, 10), 20, 0, keep_back=1)) == [1, 1], "a class keeps one demonstration"


def test_requested_shots_are_drawn_or_refused_without_a_model():
    assert counts(asked(of(30, 3), shots=10).demonstrations) == [10, 3]
    assert counts(asked(of(30, 30), I2CL).demonstrations) == [5, 5]
    assert asked(of(30, 30)) is asked(of(*[1] * 80)) is None  # there is no limit on the number of labels
    raises("class 'word0' has 3 training examples, fewer than 5 shots", asked, of(3, 9), from_file=False)
    assert counts(asked(of(30, 3), I2CL, shots="all").demonstrations) == [30, 3]
    assert counts(asked(of(30, 3), shots="all", from_file=False).demonstrations) == [30, 3]
    assert asked(of(30, 3), shots="all") is None, "the model says how long it takes"
    raises("give fewer", asked, of(MAX_EXAMPLES, 9), shots="all")
    raises("give fewer", asked, of(MAX_EXAMPLES, 9), shots=MAX_EXAMPLES)
    raises("no text has the label 'word1': add texts with it, or leave it out", asked, of(3, 0, 3))


@pytest.mark.parametrize(
    ("task", "scored", "shown", "more"),
    [
        (of(10, 10, 10), True, [8, 8, 8], (10, 30)),
        (of(10, 10, 10), False, [10, 10, 10], None),
        (of(5, 5), True, [5, 5], None),
        (of(100, 30), True, [20, 20], None),
        (of(35, 4), True, [20, 4], (35, 39)),
    ],
)
def test_up_to_twenty_rows_of_a_class_are_drawn_by_default(decoder, fast, task, scored, shown, more):
    fast(0.0)
    result = draw_within_budget(decoder, task, ANCHORED, 0, keep_back=None, scored=scored)
    assert counts(result.demonstrations) == shown
    assert (result.shots, result.rows) == (max(shown), len(task.train))
    assert (result.more and result.more[:2]) == more
    again = asked(task, shots=result.shots, keep_back=result.keep_back)
    assert again.demonstrations == result.demonstrations, "the command on the card draws the same"


def test_rows_without_a_label_count_as_one_more_class(decoder, fast):
    fast(0.0)
    labels = [(0,), (1,)] * 4 + [()] * 30
    rows = tuple(Example.multi_label(f"text {place}", one) for place, one in enumerate(labels))
    task = replace(of(1, 1), train=rows, multi_label=True)
    for drawn in (asked(task, None, scored=False), asked(task, I2CL, shots="all")):
        assert len(drawn.demonstrations) == len(rows)
    result = draw_within_budget(decoder, task, ANCHORED, 0, keep_back=None, scored=False)
    assert (result.shots, len(result.demonstrations)) == (20, 28)
    assert asked(task, shots=result.shots).demonstrations == result.demonstrations


@pytest.mark.parametrize(("keep_back", "shown"), [(None, [60, 4]), (5, [48, 4])])
def test_all_rows_are_drawn_on_request_however_long_the_fit_takes(decoder, fast, keep_back, shown):
    fast(1e9)
    result = draw_within_budget(
        decoder, of(60, 4), ANCHORED, 0, keep_back=keep_back, scored=True, shots="all"
    )
    assert counts(result.demonstrations) == shown
    assert (result.rows, result.keep_back, result.more) == (64, keep_back or 0, None)
    assert result.seconds > module.PATIENCE_S


def test_fewer_rows_are_drawn_if_the_fit_would_take_longer_than_five_minutes(decoder, fast):
    task = of(40, 40)
    speed = module._Speed.of(decoder, task, ANCHORED)
    passes = speed._plan(task.train[:13]).passes
    a_row = tokens_of(speed, task.train) / 80 * passes
    fast(module.PATIENCE_S / (13 * a_row))
    result = draw_within_budget(decoder, task, ANCHORED, 0, keep_back=0, scored=False)
    assert (result.shots, len(result.demonstrations)) == (6, 12)
    assert result.seconds <= module.PATIENCE_S
    assert result.more[:2] == (40, 80)


def test_at_least_five_rows_of_a_class_are_drawn(decoder, fast):
    fast(1e9)
    slow = draw_within_budget(decoder, of(40, 40), ANCHORED, 0, keep_back=0, scored=False)
    assert slow.shots == 5
    assert slow.seconds > module.PATIENCE_S


def test_the_estimate_is_that_of_the_plan(decoder, fast):
    fast(1.0)
    task = of(4, 4, 4)  # labels share their first token
    speed = module._Speed.of(decoder, task, ANCHORED)
    labels = speed.scorer.labels
    parameters = decoder.layers * 2 * decoder.d_model + len(labels.tokens) * 3
    plan = plan_fit(FitSize(12, 3, parameters, word_level=True), 1e9)
    assert speed.estimate(task.train) == pytest.approx(plan.passes * tokens_of(speed, task.train))


def test_the_estimate_of_an_evaluation_counts_passes_and_refits(decoder, fast):
    fast(1.0)
    task = of(4, 4)
    drawn = draw(task, ANCHORED, 2, 0, from_file=True, keep_back=None, scored=True)
    assert drawn.evaluation_seconds(task.train) == 0, "the model is not known"
    drawn = drawn.timed(decoder, task, ANCHORED)
    rows = tokens_of(drawn.speed, task.train)
    few_shot = drawn.speed.few_shot(task.train, drawn.demonstrations)
    in_folds = drawn.speed.few_shot(task.train, drawn.demonstrations, folds=3)
    zero_shot = drawn.speed.zero_shot(task.train)
    assert drawn.evaluation_seconds(task.train) == pytest.approx(rows + zero_shot + few_shot)
    refits = drawn.evaluation_seconds(task.train, folds=3) - drawn.evaluation_seconds(task.train)
    assert refits == pytest.approx(2 * drawn.seconds + in_folds - few_shot)
    several = [replace(row, label=-1, labels=(row.label,)) for row in task.train]
    assert drawn.evaluation_seconds(several) == pytest.approx(2 * rows)
    assert drawn.evaluation_seconds(()) == 0
    encoded = replace(drawn, speed=replace(drawn.speed, encoder_seconds=3.0))
    longer = encoded.evaluation_seconds(task.train) - drawn.evaluation_seconds(task.train)
    assert longer == pytest.approx(3.0 * len(task.train))


def test_the_estimate_of_prompts_counts_full_labels_and_cached_demonstrations(decoder, fast):
    fast(1.0)
    task = of(4, 4)  # labels share their first token
    speed = module._Speed.of(decoder, task, ANCHORED)
    sequences = speed.scorer.labels.sequences
    once = tokens_of(speed, task.train) + 8 * len(Trie.of(sequences).tokens)
    assert speed.zero_shot(task.train) == once
    shown = task.train[:2]
    cached = tokens_of(speed, shown) + 2 * len(sequences[0])
    few_shot = cached + once * (1 + cached / decoder.d_model)
    assert speed.few_shot(task.train, shown) == pytest.approx(few_shot)
    distinct = replace(task, labels=("one", "two"), template=Template("{text}:{label}"))
    speed = module._Speed.of(decoder, distinct, ANCHORED)
    assert speed.zero_shot(task.train) == tokens_of(speed, task.train)


def test_many_small_batches_take_longer_than_few(decoder):
    speed = replace(
        module._Speed.of(decoder, of(4, 4), ANCHORED), seconds_per_token=0.0, seconds_per_batch=1.0
    )
    (adamw,) = make_methods(["anchored"], {"solver": "adamw"})
    rows = of(4, 4).train
    passes = replace(speed, method=adamw)._plan(rows).passes
    assert replace(speed, method=adamw).seconds(rows) == passes  # one batch of 16
    assert replace(speed, method=I2CL).seconds(rows) > 100 * 4  # 100 epochs in batches of 2


def test_a_fit_that_exceeds_the_memory_has_no_estimate(decoder):
    (limited,) = make_methods(["anchored"], {"memory": 1e-6})
    speed = module._Speed.of(decoder, of(4, 4), limited)
    assert speed.seconds(of(4, 4).train) == float("inf")
    raises("--memory", speed.estimate, of(4, 4).train)


def test_estimate_of_i2cl_fits(decoder):
    task = of(4, 4)
    drawn = draw(task, I2CL, 4, 0, from_file=True, keep_back=None, scored=True)
    assert drawn.seconds is None
    timed = drawn.timed(decoder, task, I2CL)
    assert timed.demonstrations == drawn.demonstrations
    assert timed.seconds > 0


def test_classes_with_fewer_rows_than_shots_are_reported():
    with pytest.warns(
        module.FewRowsWarning, match=r"fewer than 10 rows, all of which are used: word1 \(3\)$"
    ):
        module.warn_of_small_classes(of(30, 3), 10)
