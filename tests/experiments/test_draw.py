"""Draws of demonstrations from a user's file, and estimates of fit times."""

from collections import Counter
from dataclasses import replace

import pytest

from fitting import one_line
from i2cl import Example, Task, Template, make_methods
from i2cl.core.anchored import MOST_DEMONSTRATIONS
from i2cl.experiments import draw as module
from i2cl.experiments.draw import draw, fitting, up_to

ANCHORED, I2CL = make_methods(["anchored", "i2cl"])


def of(*counts, test=()):
    """A task with these numbers of rows per class."""
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    rows = [Example(f"text {label} {labels[:at].count(label)}", label) for at, label in enumerate(labels)]
    words = tuple(f"word{label}" for label in range(len(counts)))
    return Task("mine", words, Template("{text} {label}"), train=tuple(rows), test=tuple(test))


def tokens_of(pace, rows):
    return sum(map(len, pace.questions.queries([row.text for row in rows])))


def counts(rows):
    return [count for _, count in sorted(Counter(row.label for row in rows).items())]


def asked(task, method=ANCHORED, shots=None, **more):
    return draw(task, method, shots, 0, **{"from_file": True, "keep_back": None, "scored": True} | more)


@pytest.fixture
def fast(monkeypatch):
    """Set the seconds per token that the model appears to take."""

    def at(seconds_per_token):
        made = module._Pace.of

        def timed(decoder, task, method):
            return replace(made(decoder, task, method), seconds_per_token=seconds_per_token)

        monkeypatch.setattr(module._Pace, "of", timed)

    return at


def test_up_to_draws_and_holds_out_rows_of_each_class():
    assert counts(up_to(of(30, 3, 7), 5, 0)) == [5, 3, 5]
    task = of(8, 8)
    assert up_to(task, 5, 3) == task.sample(5, 3)
    assert len(set(up_to(of(30, 3), 20, 0))) == 23
    assert counts(up_to(of(10, 9, 30), 20, 0, keep_back=5)) == [8, 9, 20]
    assert counts(up_to(of(10, 10), 20, 0, keep_back=1)) == [1, 1], "a class keeps one demonstration"


def test_draw_checks_sizes_without_a_model():
    assert counts(asked(of(30, 3), shots=10).demonstrations) == [10, 3]
    assert counts(asked(of(30, 30), I2CL).demonstrations) == [5, 5]
    assert asked(of(30, 30)) is asked(of(*[1] * 80)) is None  # there is no limit on the number of labels
    one_line("class 'word0' has 3 training examples but 5 shots", asked, of(3, 9), from_file=False)
    assert counts(asked(of(30, 3), I2CL, shots="all").demonstrations) == [30, 3]
    assert counts(asked(of(30, 3), shots="all", from_file=False).demonstrations) == [30, 3]
    assert asked(of(30, 3), shots="all") is None, "the model says how long it takes"
    one_line("give fewer", asked, of(MOST_DEMONSTRATIONS, 9), shots="all")
    one_line("give fewer", asked, of(MOST_DEMONSTRATIONS, 9), shots=MOST_DEMONSTRATIONS)
    one_line(r"class 'word1' has 0 training examples .* add rows of that class$", asked, of(3, 0, 3))


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
def test_default_draw_takes_up_to_twenty_rows_per_class(decoder, fast, task, scored, shown, more):
    fast(0.0)
    result = fitting(decoder, task, ANCHORED, 0, keep_back=None, scored=scored)
    assert counts(result.demonstrations) == shown
    assert (result.shots, result.rows) == (max(shown), len(task.train))
    assert (result.more and result.more[:2]) == more
    again = asked(task, shots=result.shots, keep_back=result.keep_back)
    assert again.demonstrations == result.demonstrations, "the command on the card draws the same"


@pytest.mark.parametrize(("keep_back", "shown"), [(None, [60, 4]), (5, [48, 4])])
def test_shots_all_ignores_the_time_budget(decoder, fast, keep_back, shown):
    fast(1e9)
    result = fitting(decoder, of(60, 4), ANCHORED, 0, keep_back=keep_back, scored=True, shots="all")
    assert counts(result.demonstrations) == shown
    assert (result.rows, result.keep_back, result.more) == (64, keep_back or 0, None)
    assert result.seconds > module.PATIENCE_S


def test_default_draw_respects_the_time_budget(decoder, fast):
    task = of(40, 40)
    tokens = tokens_of(module._Pace.of(decoder, task, ANCHORED), task.train)
    once = module.FORWARD + module.BACKWARD / module.SHARED_PREFIX  # labels that share their first token
    a_row = tokens / 80 * (2 * once + 4 + module.FORWARD)
    fast(module.PATIENCE_S / (13 * a_row))
    result = fitting(decoder, task, ANCHORED, 0, keep_back=0, scored=False)
    assert (result.shots, len(result.demonstrations)) == (6, 12)
    assert result.seconds <= module.PATIENCE_S
    assert result.more[:2] == (40, 80)
    fast(1e9)
    slow = fitting(decoder, task, ANCHORED, 0, keep_back=0, scored=False)
    assert (slow.shots, slow.seconds > module.PATIENCE_S) == (5, True), (
        "but to no fewer than the paper's five"
    )


def test_estimate_grows_with_tokens_steps_and_labels(decoder):
    pace = module._Pace.of(decoder, of(4, 4), ANCHORED)
    assert pace.seconds_per_token > 0
    rows = of(4, 4).train
    assert pace.seconds(rows) < replace(pace, steps=8).seconds(rows) < 2 * pace.seconds(rows)
    assert pace.seconds(rows) > pace.seconds(rows[:3])
    wider = module._Pace.of(decoder, of(4, 4, 4, 4, 4), ANCHORED)
    assert replace(wider, seconds_per_token=pace.seconds_per_token).seconds(rows) > pace.seconds(rows)


def test_first_gauss_newton_step_takes_the_largest_share(decoder):
    pace = module._Pace.of(decoder, of(4, 4, 4), ANCHORED)
    seconds, first = pace.estimate(of(4, 4, 4).train)
    assert 1 / pace.steps < first < 1
    assert seconds > 0


def test_estimate_of_i2cl_fits(decoder):
    task = of(4, 4)
    drawn = draw(task, I2CL, 4, 0, from_file=True, keep_back=None, scored=True)
    assert drawn.seconds is None
    timed = drawn.timed(decoder, task, I2CL)
    assert timed.demonstrations == drawn.demonstrations
    assert timed.seconds > 0
    assert timed.first_step == pytest.approx(1 / I2CL.rounds, rel=0.1)


def test_classes_with_fewer_rows_than_shots_are_reported():
    with pytest.warns(
        module.FewRowsWarning, match=r"fewer than 10 rows, all of which are used: word1 \(3\)$"
    ):
        module.warn_of_small_classes(of(30, 3), 10)
