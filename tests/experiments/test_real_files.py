"""The table of `benchmarks/real_files.py`, on toy numbers."""

import numpy as np
import pytest

import real_files
from i2cl import Example, Task, Template

ROWS = 40


def scored(test_errors, train_errors=0):
    """An expert on two labels, whose first answers are wrong."""
    gold = np.arange(ROWS) % 2
    test, train = (np.where(np.arange(ROWS) < wrong, 1 - gold, gold) for wrong in (test_errors, train_errors))
    probabilities = np.array([[0.9, 0.1], [0.1, 0.9]])
    return real_files.Scored(
        train=np.arange(ROWS),
        train_gold=gold,
        out_of_fold=np.log(probabilities[train]),
        test=np.arange(ROWS),
        test_gold=gold,
        log_probs=np.log(probabilities[test]),
        seconds=np.array(1.0),
    )


def save(folder, draw, *experts):
    for name, expert in zip(real_files.EXPERTS, experts, strict=True):
        expert.save(folder / f"{draw}-{name}.npz")


def test_table_has_losses_first_and_means(tmp_path):
    guess = scored(20, train_errors=20)
    save(tmp_path, "right-0", guess, guess, guess, scored(2))
    save(tmp_path, "right-1", guess, guess, guess, scored(6))
    save(tmp_path, "wrong-0", guess, scored(0, train_errors=40), guess, scored(20))
    header, _, *rows = real_files.table(real_files.load_scores(tmp_path)).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {row.count("|") for row in rows} == {header.count("|")}
    wrong, right, mean = cells
    assert [row[0] for row in cells] == ["wrong", "right", "mean"]
    assert right[1:4] == ["2", "40", "2"]
    assert right[7:10] == ["90.0 (90.0)", "90.0 (90.0)", "+0.0 (+0.0)"], "the weights find the expert"
    assert wrong[9].startswith("-50.0"), "rows that mislead the weights cost the best expert"
    assert mean[7].startswith("70.0")


def test_unfinished_draws_are_left_out(tmp_path):
    save(tmp_path, "some-0", *[scored(1)] * len(real_files.EXPERTS))
    scored(3).save(tmp_path / "some-1-anchored.npz")
    assert len(real_files.load_scores(tmp_path)["some"]) == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_draw_is_stratified_and_keeps_rare_classes(seed):
    rows = tuple(Example(f"text {number}", 0 if number % 50 else 1) for number in range(500))
    task = Task("rare", ("common", "rare"), Template("{text}: {label}"), rows)
    train, test = real_files.draw(task, seed)
    assert len(train) == real_files.MIN_ROWS
    assert sum(row.label for row in train) == real_files.MIN_PER_CLASS + 1
    assert len(test) == real_files.TEST_ROWS
    assert not set(train) & set(test)
