"""Calibrations that share their steps give the results of separate ones."""

from unittest.mock import Mock

import pytest
import torch

from fitting import made, one_line
from i2cl import CalibrationConfig, Decoder, Example, Task, Template, calibrate, calibrate_many, extract
from i2cl.core.context import ExtractConfig
from i2cl.core.edits import RowsEdit
from i2cl.core.loss import CalibrationLoss
from i2cl.models.memory import MemoryWarning

FILMS = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
BOOKS = Task("books", ("long", "short", "odd"), Template("Book: {text}\nSize:{label}"))
QUIET = CalibrationConfig(epochs=1, noise=0.0, lr=0.05)  # three steps or four


def shots(count, labels, word):
    return [Example(f"{word} " * (1 + row % 4) + "indeed", row % labels) for row in range(count)]


RUNS = [
    (FILMS, shots(5, 2, "warm"), 3),
    (BOOKS, shots(5, 3, "a novel of many pages"), 0),
    (FILMS, shots(7, 2, "dull"), 1),
    (FILMS, shots(5, 2, "warm"), 4),
]


def both(decoder, config, extraction=None, runs=RUNS, **options):
    """Injections of all runs fitted together, and of each fitted separately."""
    tasks, demonstrations, seeds = zip(*runs, strict=True)
    contexts = [extract(decoder, task, examples, extraction) for task, examples, _ in runs]
    together = calibrate_many(decoder, tasks, demonstrations, contexts, config, seeds=seeds, **options)
    alone = [
        calibrate(decoder, task, examples, context, config, seed=seed)
        for (task, examples, seed), context in zip(runs, contexts, strict=True)
    ]
    return together, alone


def same(together, alone):
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.coefficients, other.coefficients, rtol=1e-3, atol=1e-4)
        assert one.history == pytest.approx(other.history, rel=1e-3)
        assert (one.task, one.base, one.seed) == (other.task, other.base, other.seed)
        assert one.settings == other.settings
        torch.testing.assert_close(one.context.values, other.context.values)


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2", "gptj", "falcon", "opt", "mixtral"])
def test_joint_fits_equal_separate_ones(case):
    together, alone = both(made(case), QUIET)
    assert (together[0].coefficients - together[3].coefficients).abs().max() > 1e-3  # seeds differ
    same(together, alone)


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("pays", [True, False])
def test_packed_and_padded_batches_agree(monkeypatch, case, pays):
    packed = []
    monkeypatch.setattr("i2cl.core.loss.packing_pays", lambda *_: pays)
    rows = RowsEdit.injected
    monkeypatch.setattr(RowsEdit, "injected", lambda *at: packed.append(at[-1].packed) or rows(*at))
    same(*both(made(case), QUIET))
    assert set(packed) == {pays}


@pytest.mark.parametrize("change", [{"formula": "add"}, {"formula": "balance"}, {"layers": (1,)}])
@pytest.mark.parametrize("positions", ["last", "random"])
def test_options_apply_to_joint_calibration(change, positions):
    same(*both(made("llama"), QUIET.model_copy(update={**change, "positions": positions})))


def test_block_outputs_can_be_calibrated_jointly():
    same(*both(made("llama"), QUIET, ExtractConfig(writers="hidden")))


def test_small_budget_splits_runs_into_more_groups():
    decoder = made("llama")
    whole, _ = both(decoder, QUIET)
    seen = []
    decoder.token_budget = 1
    parts, _ = both(decoder, QUIET, progress=lambda *at: seen.append(at))
    assert len(seen) == len(RUNS) * QUIET.epochs
    same(parts, whole)


@pytest.mark.parametrize("place", ["residual", "writer"])
@pytest.mark.parametrize("pays", [True, False])
def test_noise_of_each_run_is_independent_of_the_others(monkeypatch, pays, place):
    monkeypatch.setattr("i2cl.core.loss.packing_pays", lambda *_: pays)
    decoder = made("llama")
    noisy = QUIET.model_copy(update={"noise": 0.05, "noise_place": place})
    together, alone = both(decoder, noisy)
    quiet, _ = both(decoder, QUIET)
    same(together, alone)
    for one, still in zip(together, quiet, strict=True):
        assert (one.coefficients - still.coefficients).abs().max() > 1e-3


@pytest.mark.parametrize("pays", [True, False])
def test_tasks_scored_by_first_tokens_and_by_words_share_their_steps(monkeypatch, pays):
    monkeypatch.setattr("i2cl.core.loss.packing_pays", lambda *_: pays)
    moods = Task("moods", ("positive", "poor", "negative", "odd"), FILMS.template)
    grades = Task("grades", ("poorest", "poorer"), BOOKS.template)
    runs = [*RUNS[:2], (moods, shots(5, 4, "dull"), 2), (grades, shots(5, 2, "a novel of many pages"), 5)]
    config = QUIET.model_copy(update={"noise": 0.05, "loss": "labels"})
    groups, make = [], CalibrationLoss.__init__
    monkeypatch.setattr(CalibrationLoss, "__init__", lambda *at: groups.append(len(at[1])) or make(*at))
    together, alone = both(made("llama"), config, runs=runs)
    assert groups == [4, 1, 1, 1, 1]
    assert [one.scoring for one in together] == ["auto", "auto", "words", "words"]
    same(together, alone)


def test_lbfgs_calibrates_runs_separately():
    config = CalibrationConfig.recipe("fast", passes=5)
    for one, other in zip(*both(made("llama"), config), strict=True):
        assert torch.equal(one.coefficients, other.coefficients)
        assert one.history == other.history


def test_groups_are_halved_on_an_out_of_memory_error(monkeypatch):
    decoder = made("llama")
    whole, _ = both(decoder, QUIET)
    forward = Decoder.forward

    def small(self, batch, **options):
        if len(batch.rows) > 4:
            raise torch.OutOfMemoryError("no room")
        return forward(self, batch, **options)

    monkeypatch.setattr(Decoder, "forward", small)
    with pytest.warns(MemoryWarning, match="out of memory with 3 calibrations together; continuing with 2"):
        parts, _ = both(decoder, QUIET)
    same(parts, whole)
    monkeypatch.setattr(Decoder, "forward", Mock(side_effect=torch.OutOfMemoryError("no")))
    task, examples, _ = RUNS[0]
    context = whole[0].context
    message = "a step of one run does not fit into memory"
    one_line(message, calibrate_many, decoder, [task], [examples], [context], QUIET)


def test_empty_runs_zero_epochs_and_bad_input():
    decoder = made("llama")
    assert calibrate_many(decoder, [], [], []) == []
    together, _ = both(decoder, QUIET.model_copy(update={"epochs": 0}))
    assert [one.history for one in together] == [()] * len(RUNS)
    task, examples, _ = RUNS[0]
    context = extract(decoder, task, examples)
    wild = CalibrationConfig(lr=1e30)
    for message, *given in (
        ("2 tasks, 1 sets of demonstrations, 1 context vectors", [task] * 2, [examples], [context]),
        ("demonstration", [task], [[]], [context]),
        ("the training loss became nan", [task], [examples], [context], wild),
        ("the training loss of run 1 of 2 became nan", [task] * 2, [examples] * 2, [context] * 2, wild),
    ):
        one_line(message, calibrate_many, decoder, *given)
