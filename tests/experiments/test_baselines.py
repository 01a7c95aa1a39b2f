"""Whether a fit pays: the rows it is measured on, and what it is set beside."""

import json
from dataclasses import asdict, replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fitting import injected, one_line
from i2cl import CalibrationConfig, Decoder, Example, Injection, evaluate, make_methods
from i2cl.experiments.confidence import confidence
from i2cl.experiments.evidence import baselines
from i2cl.experiments.evidence.baselines import BASELINES, labelled_rows, with_folds, with_worth
from i2cl.injections.temperature import likely_temperature, normalised
from i2cl.models.scoring import Questions
from processes import finished
from tiny import tiny_model, tiny_tokenizer


def fitted(decoder, task):
    shown = task.sample(2, 0)
    return shown, injected(decoder, task, shown, CalibrationConfig(epochs=2))


def measured(decoder, task, limit=160, **more):
    shown, injection = fitted(decoder, task)
    rows = labelled_rows(task, shown, limit)
    return with_worth(injection, decoder, task, shown, rows, seconds=7.0, **more)


def test_rows_are_test_rows_or_else_training_rows_of_other_texts(task):
    shown = task.sample(2)
    for limit, rows in ((160, task.test), (7, task.queries(7)), (0, ())):
        assert labelled_rows(task, shown, limit) == rows
    assert labelled_rows(replace(task, test=(*task.test, shown[0])), shown, 160) == task.test
    one_line("-1 queries", labelled_rows, task, shown, -1)
    twin = Example(task.train[0].text, 1 - task.train[0].label)
    task = replace(task, train=(*task.train, twin), test=())
    shown = (task.train[0], task.train[1])
    rows = labelled_rows(task, shown, 160)
    assert sorted(row.text for row in rows) == sorted(row.text for row in task.train[2:-1])
    fewer = labelled_rows(task, shown, 8)
    assert [row.label for row in fewer].count(0) == len(fewer) // 2 == 4
    assert labelled_rows(task, task.train, 160) == ()


def test_all_methods_are_those_of_an_evaluation_and_kept_with_the_artefact(decoder, task, tmp_path):
    injection = measured(decoder, task)
    value = injection.worth
    assert (value["rows"], value["split"], value["not_run"]) == (16, "test", {})
    assert list(value["methods"]) == [*BASELINES, "i2cl"]
    names = ["zero_shot", "zero_shot+batch_calibration", "few_shot", "i2cl"]
    methods = make_methods(names, {"epochs": 2})
    runs = {method.called: evaluate(decoder, task, method, shots=2) for method in methods}
    for name, score in value["methods"].items():
        assert score["accuracy"] == runs[name].accuracy
        assert score["cached_bytes"] == runs[name].cost.cached_bytes
        assert 0 <= score["low"] <= score["accuracy"] <= score["high"] <= 1
        assert score["milliseconds_per_query"] > 0
    assert value["methods"]["i2cl"]["fit_seconds"] == 7.0
    ours = runs["i2cl"]
    assert injection.metrics == {"accuracy": ours.accuracy, "macro_f1": ours.macro_f1, "n": 16}
    free = {name: runs[name].accuracy for name in names[:2]}
    assert value["against"] == max(free, key=free.get)
    assert value["difference"] == pytest.approx(runs["i2cl"].accuracy - max(free.values()))
    injection.save_pretrained(tmp_path / "with")
    assert Injection.from_pretrained(tmp_path / "with").worth == injection.worth
    replace(injection, worth={}).save_pretrained(tmp_path / "without")
    assert "worth" not in json.loads((tmp_path / "without" / "injection.json").read_text())
    assert Injection.from_pretrained(tmp_path / "without").worth == {}


def test_a_label_prior_is_measured_with_what_it_corrects(decoder, task):
    shown, injection = fitted(decoder, task)
    settings = {"label_prior": {"texts": 64, "prior": None}}
    forced = replace(injection, label_bias=(50.0, 0.0), settings=settings)
    result = with_worth(forced, decoder, task, shown, task.test, seconds=7.0)
    assert list(result.worth["methods"]) == [*BASELINES, "i2cl+label_prior"]
    assert result.metrics["accuracy"] == 0.5  # one class for every text
    mine = result.worth["methods"]["i2cl+label_prior"]
    assert mine["cached_bytes"] == 4 * (injection.context.values.numel() + 2)
    plain = measured(decoder, task).worth["methods"]
    for name in BASELINES:
        assert result.worth["methods"][name]["accuracy"] == plain[name]["accuracy"]


def test_what_is_scored_is_told_with_every_row_and_left_over_training_rows_as_such(decoder, task):
    value = measured(decoder, replace(task, test=()), limit=6).worth
    assert (value["rows"], value["split"]) == (6, "train")
    names, rows = [], []
    measured(decoder, task, watch=names.append, progress=rows.append)
    assert names == [*BASELINES, "i2cl"]
    assert sum(rows) == 4 * 16


def test_few_shot_that_cannot_run_is_told_and_other_errors_are_not_hidden(decoder, task, monkeypatch):
    short = Decoder(tiny_model("llama", max_position_embeddings=64), tiny_tokenizer(), name="short")
    value = measured(short, task).worth
    assert list(value["methods"]) == ["zero_shot", "zero_shot+batch_calibration", "i2cl"]
    assert "the context holds 64" in value["not_run"]["few_shot"]
    value = measured(decoder, task, limit=1).worth
    assert "by itself" in value["not_run"]["zero_shot+batch_calibration"]
    assert ("on 1 row" in value["verdict"], "1 rows" in value["verdict"]) == (True, False)
    shown, injection = fitted(decoder, task)
    one_line("no queries", with_worth, injection, decoder, task, shown, (), seconds=0.0)
    monkeypatch.setattr(Decoder, "prefix", Mock(side_effect=torch.OutOfMemoryError("no room")))
    assert measured(decoder, task).worth["not_run"] == {"few_shot": "out of memory"}
    monkeypatch.setattr(Decoder, "prefix", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        measured(decoder, task)


@pytest.mark.parametrize("name", ["anchored", "i2cl"])
def test_without_rows_refits_answer_what_they_have_not_seen(decoder, task, name):
    options = {"anchored": {"steps": 2}, "i2cl": {"epochs": 2}}[name]
    (method,) = make_methods([name], options)
    shown, asked = task.sample(3, 0), []
    injection = method.injection(decoder, task, shown, 5)

    def make(rest):
        asked.append(rest)
        return method.injection(decoder, task, rest, 5)

    names, rows = [], []
    watched = {"watch": names.append, "progress": rows.append, "method": method}
    result = with_folds(injection, decoder, task, shown, make, seconds=7.0, folds=3, **watched)
    value = result.worth
    assert (value["rows"], value["split"]) == (len(shown), "demonstrations")
    assert names == list(value["methods"]) == [*BASELINES, name]
    assert (sum(rows), len(asked)) == (4 * len(shown), 3)
    gold = torch.tensor([one.label for one in shown])
    right = 0
    for rest in tuple(asked):  # refits below add to it
        out = [one for one in shown if one not in rest]
        best = make(rest).scores(decoder, [one.text for one in out]).argmax(-1)
        right += int((best == torch.tensor([one.label for one in out])).sum())
    assert value["methods"][name]["accuracy"] == pytest.approx(right / len(shown))
    plain = Questions(decoder, task).scores([one.text for one in shown]).argmax(-1)
    assert value["methods"]["zero_shot"]["accuracy"] == pytest.approx((plain == gold).float().mean().item())
    assert value["methods"][name]["fit_seconds"] == 7.0
    assert value["methods"]["few_shot"]["fit_seconds"] > 0
    assert result.metrics == {}  # a card is not to publish it as an evaluation


def test_a_text_with_copies_counts_once(decoder, task):
    (method,) = make_methods(["anchored"], {"steps": 1})
    shown = task.sample(2, 0)
    twice = (*shown, *shown)
    injection = method.injection(decoder, task, twice, 0)
    make = partial(method.injection, decoder, task, seed=0)
    result = with_folds(injection, decoder, task, twice, make, seconds=0.0, method=method)
    assert result.worth["rows"] == len(shown)


def test_of_many_demonstrations_some_are_asked(decoder, task, monkeypatch):
    monkeypatch.setattr(baselines, "MOST_FOLDED", 4)
    (method,) = make_methods(["anchored"], {"steps": 1})
    shown = task.sample(4, 0)
    injection = method.injection(decoder, task, shown, 0)
    make, refitted = partial(method.injection, decoder, task, seed=0), []
    rows = {"seconds": 0.0, "method": method, "progress": refitted.append}
    worth = with_folds(injection, decoder, task, shown, make, **rows).worth
    assert worth["rows"] == 4 < len(shown)
    assert sum(refitted) == 4 * len(worth["methods"])


FIT = """
import sys
lacking = {"scipy", "sklearn", "matplotlib"}  # as if not installed
for name in [name for name in sys.modules if name.partition(".")[0] in lacking | {"i2cl"}]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(lacking))
from i2cl.interfaces.cli import main
main()
"""


def test_fit_needs_no_extra(tmp_path):
    options = ["--recipe", "fast", "--set", "passes=1", "--shots", "1", "--evaluate", "4"]
    code, _, errors = finished(FIT, "fit", "reference", "mood-colour-1", *options, "-o", tmp_path / "out")
    assert code == 0, errors
    assert Injection.from_pretrained(tmp_path / "out").worth["rows"] == 4


def test_the_temperature_is_chosen_on_the_rows_and_changes_no_answer(decoder, task):
    _, plain = fitted(decoder, task)
    result = measured(decoder, task)
    texts = [row.text for row in task.test]
    gold = np.array([row.label for row in task.test])
    scores = plain.scores(decoder, texts)
    assert result.temperature == pytest.approx(likely_temperature(scores.numpy(), gold, 1.5, 1.0), rel=1e-2)
    assert result.temperature != 1
    assert result.predict(decoder, texts) == plain.predict(decoder, texts)
    expected = confidence(normalised(result.scores(decoder, texts).numpy()), gold, scores.argmax(-1).numpy())
    assert result.worth["confidence"] == pytest.approx(asdict(expected), abs=2e-3)
    assert result.worth["selection"] == {}


def test_a_threshold_is_found_where_an_accuracy_is_asked_for(decoder, task):
    one_line("22 labelled rows beside the examples or more", measured, decoder, task, limit=10, target=0.9)
    rows = tuple(replace(row, text=f"{row.text} {at}") for at in range(8) for row in task.test)
    value = measured(decoder, replace(task, test=rows), target=0.5).worth["selection"]
    assert value["target"] == 0.5
    known = {"target", "rows"}
    assert set(value) in (known | {"needed"}, known | {"threshold", "coverage", "accuracy"})
