"""Whether a fit pays: the rows it is measured on, and what it is set beside."""

import json
from dataclasses import replace

import pytest
import torch

from i2cl import CalibrationConfig, Example, I2CLError, Injection, calibrate, extract
from i2cl.experiments import worth
from i2cl.experiments.evaluation import evaluate
from i2cl.experiments.worth import (
    BASELINES,
    labelled_rows,
    with_left_out,
    with_worth,
)
from i2cl.methods import make_methods
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions
from processes import finished
from tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::i2cl.models.encoding.ScoringWarning")


def fitted(decoder, task, shots=2, seed=0):
    shown = task.sample(shots, seed)
    context = extract(decoder, task, shown, seed=seed)
    return shown, calibrate(decoder, task, shown, context, CalibrationConfig(epochs=2), seed=seed)


def measured(decoder, task, limit=160, **more):
    shown, injection = fitted(decoder, task)
    rows = labelled_rows(task, shown, limit)
    return with_worth(injection, decoder, task, shown, rows, seconds=7.0, **more)


# The rows


def test_rows_are_test_rows_where_there_are_some(task):
    shown = task.sample(2)
    assert labelled_rows(task, shown, 160) == task.test
    assert labelled_rows(task, shown, 7) == task.queries(7)
    assert labelled_rows(task, shown, 0) == ()
    assert labelled_rows(replace(task, test=(*task.test, shown[0])), shown, 160) == task.test
    with pytest.raises(I2CLError, match="-1 queries"):
        labelled_rows(task, shown, -1)


def test_rows_are_else_training_rows_of_other_texts(task):
    twin = Example(task.train[0].text, 1 - task.train[0].label)
    task = replace(task, train=(*task.train, twin), test=())
    shown = (task.train[0], task.train[1])
    rows = labelled_rows(task, shown, 160)
    assert sorted(row.text for row in rows) == sorted(row.text for row in task.train[2:-1])
    fewer = labelled_rows(task, shown, 8)
    assert [row.label for row in fewer].count(0) == len(fewer) // 2 == 4
    assert labelled_rows(task, task.train, 160) == ()


# What is measured


def test_all_methods_are_those_of_an_evaluation(decoder, task):
    injection = measured(decoder, task)
    told = injection.worth
    assert (told["rows"], told["split"], told["not_run"]) == (16, "test", {})
    assert list(told["methods"]) == [*BASELINES, "i2cl"]
    names = ["zero_shot", "zero_shot+batch_calibration", "few_shot", "i2cl"]
    runs = {
        method.called: evaluate(decoder, task, method, shots=2)
        for method in make_methods(names, {"epochs": 2})
    }
    for name, score in told["methods"].items():
        assert score["accuracy"] == runs[name].accuracy
        assert score["cached_bytes"] == runs[name].cost.cached_bytes
        assert 0 <= score["low"] <= score["accuracy"] <= score["high"] <= 1
        assert score["milliseconds_per_query"] > 0
    assert told["methods"]["i2cl"]["fit_seconds"] == 7.0
    assert injection.metrics == {
        "accuracy": runs["i2cl"].accuracy,
        "macro_f1": runs["i2cl"].macro_f1,
        "n": 16,
    }
    free = {name: runs[name].accuracy for name in names[:2]}
    assert told["against"] == max(free, key=free.get)
    assert told["difference"] == pytest.approx(runs["i2cl"].accuracy - max(free.values()))


def test_a_label_prior_is_measured_with_what_it_corrects(decoder, task):
    shown, injection = fitted(decoder, task)
    forced = replace(
        injection, label_bias=(50.0, 0.0), settings={"label_prior": {"texts": 64, "prior": None}}
    )
    found = with_worth(forced, decoder, task, shown, task.test, seconds=7.0)
    assert list(found.worth["methods"]) == [*BASELINES, "i2cl+label_prior"]
    assert found.metrics["accuracy"] == 0.5  # one class for every text
    mine = found.worth["methods"]["i2cl+label_prior"]
    assert mine["cached_bytes"] == 4 * (injection.context.values.numel() + 2)
    plain = measured(decoder, task).worth["methods"]
    for name in BASELINES:
        assert found.worth["methods"][name]["accuracy"] == plain[name]["accuracy"]


def test_left_over_training_rows_are_told_as_such(decoder, task):
    told = measured(decoder, replace(task, test=()), limit=6).worth
    assert (told["rows"], told["split"]) == (6, "train")


def test_what_is_scored_is_told_with_every_row(decoder, task):
    names, rows = [], []
    measured(decoder, task, watch=names.append, progress=rows.append)
    assert names == [*BASELINES, "i2cl"]
    assert sum(rows) == 4 * 16


def test_few_shot_that_does_not_fit_is_told_and_nothing_fails(task):
    short = Decoder(tiny_model("llama", max_position_embeddings=64), tiny_tokenizer(), name="short")
    told = measured(short, task).worth
    assert list(told["methods"]) == ["zero_shot", "zero_shot+batch_calibration", "i2cl"]
    assert "the context holds 64" in told["not_run"]["few_shot"]


def test_a_single_row_has_no_batch_calibration(decoder, task):
    told = measured(decoder, task, limit=1).worth
    assert "by itself" in told["not_run"]["zero_shot+batch_calibration"]
    assert "on 1 row" in told["verdict"]
    assert "1 rows" not in told["verdict"]


def test_few_shot_that_exceeds_the_memory_is_told_and_other_errors_are_not_hidden(decoder, task, monkeypatch):
    def fail(error):
        def prefix(*_arguments, **_named):
            raise error

        monkeypatch.setattr(Decoder, "prefix", prefix)

    fail(torch.OutOfMemoryError("no room"))
    assert measured(decoder, task).worth["not_run"] == {"few_shot": "out of memory"}
    fail(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        measured(decoder, task)


def test_without_rows_nothing_can_be_said(decoder, task):
    shown, injection = fitted(decoder, task)
    with pytest.raises(I2CLError, match="no queries"):
        with_worth(injection, decoder, task, shown, (), seconds=0.0)


def test_it_is_kept_with_the_artefact_and_one_without_it_loads(decoder, task, tmp_path):
    injection = measured(decoder, task)
    injection.save_pretrained(tmp_path / "with")
    loaded = Injection.from_pretrained(tmp_path / "with")
    assert loaded.worth == injection.worth
    replace(injection, worth={}).save_pretrained(tmp_path / "without")
    assert "worth" not in json.loads((tmp_path / "without" / "injection.json").read_text())
    assert Injection.from_pretrained(tmp_path / "without").worth == {}


def test_the_model_stays_as_it_was(decoder, task):
    before = [parameter.requires_grad for parameter in decoder.model.parameters()]
    side = decoder.tokenizer.padding_side
    measured(decoder, task)
    assert [parameter.requires_grad for parameter in decoder.model.parameters()] == before
    assert decoder.tokenizer.padding_side == side
    assert not any(module._forward_hooks for module in decoder.model.modules())


@pytest.fixture
def left_out(decoder, task):
    (method,) = make_methods(["anchored"], {"steps": 2, "reach": 1.0})
    shown = task.sample(3, 0)
    injection = method.injection(decoder, task, shown, 5)
    names, rows = [], []
    watch = {"watch": names.append, "progress": rows.append}
    found = with_left_out(injection, decoder, task, shown, method, seconds=7.0, **watch)
    assert names == ["zero_shot", "few_shot", "anchored"]
    assert sum(rows) == 3 * len(shown)
    return shown, method, injection, found


def test_without_rows_each_demonstration_is_left_out_of_what_answers_it(decoder, task, left_out):
    shown, method, injection, found = left_out
    told = found.worth
    assert (told["rows"], told["split"]) == (len(shown), "demonstrations")
    gold = torch.tensor([one.label for one in shown])

    def share(scores):
        return (scores.argmax(-1) == gold).float().mean().item()

    texts = [one.text for one in shown]
    plain = Questions(decoder, task).scores(texts)
    (few_shot,) = make_methods(["few_shot"])
    rest = [[other for other in shown if other is not one] for one in shown]
    each = [
        few_shot.fit(decoder, task, others, 0).scores([text])
        for others, text in zip(rest, texts, strict=True)
    ]
    ours = method.left_out_scores(decoder, task, shown, injection)
    expected = {"zero_shot": plain, "few_shot": torch.cat(each), "anchored": ours}
    for name, scores in expected.items():
        assert told["methods"][name]["accuracy"] == pytest.approx(share(scores))
    assert told["methods"]["anchored"]["fit_seconds"] == 7.0
    assert found.metrics == {}  # a card is not to publish it as an evaluation


def test_a_text_is_left_out_with_all_its_copies_and_counts_once(decoder, task, left_out):
    shown, method, injection, found = left_out
    twice = (*shown, *shown)
    told = with_left_out(injection, decoder, task, twice, method, seconds=0.0).worth
    assert told["rows"] == len(shown)
    ours = method.left_out_scores(decoder, task, twice, injection)
    torch.testing.assert_close(ours[: len(shown)], ours[len(shown) :])
    few_shot = told["methods"]["few_shot"]
    assert few_shot["fit_seconds"] > 0
    assert few_shot["accuracy"] == found.worth["methods"]["few_shot"]["accuracy"]  # no copy answers it
    assert all(one["milliseconds_per_query"] > 0 for one in told["methods"].values())


def test_many_demonstrations_are_too_many_for_few_shot_without_each(decoder, task, left_out, monkeypatch):
    monkeypatch.setattr(worth, "MOST_LEFT_OUT", 3)
    shown, method, injection, _ = left_out
    told = with_left_out(injection, decoder, task, shown, method, seconds=0.0).worth
    assert list(told["methods"]) == ["zero_shot", "anchored"]
    assert told["not_run"] == {"few_shot": f"it would run again without each of {len(shown)} demonstrations"}


FIT = """
import sys
lacking = {"scipy", "sklearn", "duckdb", "matplotlib"}  # as if not installed
for name in [name for name in sys.modules if name.partition(".")[0] in lacking | {"i2cl"}]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(lacking))
from i2cl.faces.cli import main
main()
"""


def test_fit_needs_no_extra(tmp_path):
    options = [
        "--recipe",
        "fast",
        "--set",
        "passes=1",
        "--shots",
        "1",
        "--evaluate",
        "4",
        "-o",
        tmp_path / "out",
    ]
    code, _, errors = finished(FIT, "fit", "reference", "mood-colour-1", *options)
    assert code == 0, errors
    assert Injection.from_pretrained(tmp_path / "out").worth["rows"] == 4
