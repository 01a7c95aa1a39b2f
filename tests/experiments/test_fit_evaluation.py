"""Held-out evaluation of a fit: its rows, its baselines, and what it reports."""

import json
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fitting import injected, raises
from i2cl import CalibrationConfig, Decoder, Example, Injection, evaluate, make_methods
from i2cl.errors import OUT_OF_MEMORY
from i2cl.experiments.confidence import confidence
from i2cl.experiments.evidence import fit_evaluation
from i2cl.experiments.evidence.fit_evaluation import (
    BASELINES,
    FREE,
    EvaluationPlan,
    FitObserver,
    FitRequest,
    evaluate_fit,
    plan_evaluation,
    sample_rows,
)
from i2cl.experiments.evidence.verdicts import Comparison
from i2cl.injections.ensemble import EnsembleConfig, cross_fitted, likely_weights
from i2cl.methods.ensemble import llm_prior
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.scoring import LabelScorer
from i2cl.storage.card import model_card, score_notes
from processes import finished
from tiny import tiny_model, tiny_tokenizer


def fitted(decoder, task):
    shown = task.sample(2, 0)
    return shown, injected(decoder, task, shown, CalibrationConfig(epochs=2))


(METHOD,) = make_methods(["i2cl"], {"epochs": 2})


class Recorder(FitObserver):
    """Records its calls."""

    def __init__(self):
        self.names, self.rows = [], []

    def evaluating(self, method):
        self.names.append(method)

    def scored(self, rows):
        self.rows.append(rows)


def refit(_rest):
    raise AssertionError("held-out rows need no refit")


def evaluated(injection, decoder, task, shown, plan=None, **more):
    plan = plan or plan_evaluation(task, shown)
    target, others = more.pop("target", None), {"seconds": 7.0, "refit": refit} | more
    request = FitRequest(others.pop("method", METHOD), target=target)
    return evaluate_fit(injection, decoder, task, shown, plan, request, **others)


def measured(decoder, task, limit=160, **more):
    shown, injection = fitted(decoder, task)
    return evaluated(injection, decoder, task, shown, plan_evaluation(task, shown, limit), **more)


def test_held_out_rows_are_test_rows_or_unused_training_rows(task):
    shown = task.sample(2)
    assert plan_evaluation(task, shown).rows == task.test
    assert plan_evaluation(task, shown, 0) == EvaluationPlan()
    assert plan_evaluation(replace(task, test=(*task.test, shown[0])), shown).rows == task.test
    raises("evaluate is -1", plan_evaluation, task, shown, -1)
    twin = Example(task.train[0].text, 1 - task.train[0].label)
    task = replace(task, train=(*task.train, twin), test=())
    shown = (task.train[0], task.train[1])
    rows = plan_evaluation(task, shown).rows
    assert sorted(row.text for row in rows) == sorted(row.text for row in task.train[2:-1])
    fewer = plan_evaluation(task, shown, 8).rows
    assert [row.label for row in fewer].count(0) == len(fewer) // 2 == 4
    assert plan_evaluation(task, task.train, folds=0).rows == ()


def test_sample_rows_preserves_label_frequencies():
    rows = [Example(f"text {at}", int(at % 5 == 0)) for at in range(1000)]
    counts = Counter(row.label for row in sample_rows(rows, 160))
    assert counts == {0: 128, 1: 32}


def test_sample_rows_keeps_every_label():
    rows = [Example(f"text {at}", 0) for at in range(500)] + [Example("rare", 1), Example("rarer", 2)]
    counts = Counter(row.label for row in sample_rows(rows, 100))
    assert (counts[1], counts[2], sum(counts.values())) == (1, 1, 101)


def test_evaluation_equals_separate_runs_and_is_saved(decoder, task, tmp_path):
    injection = measured(decoder, task)
    value = injection.evaluation
    assert (value["rows"], value["split"], value["not_run"]) == (16, "test", {})
    assert list(value["methods"]) == [*BASELINES, "i2cl"]
    names = [*BASELINES, "i2cl"]
    methods = make_methods(names, {"epochs": 2})
    runs = {method.full_name: evaluate(decoder, task, method, shots=2) for method in methods}
    for name, score in value["methods"].items():
        assert score["accuracy"] == runs[name].accuracy
        assert score["cached_bytes"] == runs[name].cost.cached_bytes
        assert 0 <= score["low"] <= score["accuracy"] <= score["high"] <= 1
        assert score["milliseconds_per_query"] > 0
        assert score["macro_f1"] == runs[name].macro_f1
    assert value["methods"]["i2cl"]["fit_seconds"] == 7.0
    ours = runs["i2cl"]
    assert injection.metrics == {"accuracy": ours.accuracy, "macro_f1": ours.macro_f1, "n": 16}
    rivals = {name: runs[name].accuracy for name in BASELINES}
    assert value["difference"] == pytest.approx(ours.accuracy - max(rivals.values()))
    assert rivals[value["against"]] == max(rivals.values())
    injection.save_pretrained(tmp_path / "with")
    assert Injection.from_pretrained(tmp_path / "with").evaluation == injection.evaluation
    injection.with_report(evaluation={}).save_pretrained(tmp_path / "without")
    assert "evaluation" not in json.loads((tmp_path / "without" / "injection.json").read_text())
    assert Injection.from_pretrained(tmp_path / "without").evaluation == {}


def test_batch_calibration_reuses_the_zero_shot_scores_and_reports_their_time(decoder, task, monkeypatch):
    scored, log_probs = [], PromptPredictor.log_probs

    def counted(self, texts, progress=None):
        scored.append(self)
        return log_probs(self, texts, progress)

    monkeypatch.setattr(PromptPredictor, "log_probs", counted)
    methods = measured(decoder, task).evaluation["methods"]
    assert len(scored) == 3  # zero-shot, few-shot and the fit
    times = [methods[name]["milliseconds_per_query"] for name in ("zero_shot", "zero_shot+batch_calibration")]
    assert times[0] < times[1]


def test_label_prior_is_part_of_the_evaluated_fit(decoder, task):
    shown, injection = fitted(decoder, task)
    settings = {"label_prior": {"texts": 64, "prior": None}}
    forced = injection.with_head(bias=(50.0, 0.0)).with_report(settings=settings)
    result = evaluated(forced, decoder, task, shown)
    assert list(result.evaluation["methods"]) == [*BASELINES, "i2cl+label_prior"]
    assert result.metrics["accuracy"] == 0.5  # it predicts the same class for every text
    mine = result.evaluation["methods"]["i2cl+label_prior"]
    assert mine["cached_bytes"] == 4 * (injection.context.numel() + 2)
    plain = measured(decoder, task).evaluation["methods"]
    for name in BASELINES:
        assert result.evaluation["methods"][name]["accuracy"] == plain[name]["accuracy"]


def test_unused_training_rows_are_scored_with_progress(decoder, task):
    value = measured(decoder, replace(task, test=()), limit=6).evaluation
    assert (value["rows"], value["split"]) == (6, "train")
    seen = Recorder()
    measured(decoder, task, observer=seen)
    assert seen.names == [*BASELINES, "i2cl"]
    assert sum(seen.rows) == 6 * 16


def test_failing_few_shot_is_listed_and_other_errors_are_raised(decoder, task, monkeypatch):
    short = Decoder(tiny_model("llama", max_position_embeddings=64), tiny_tokenizer(), name="short")
    value = measured(short, task).evaluation
    assert list(value["methods"]) == [*FREE, "char_tfidf", "i2cl"]
    assert "the context holds 64" in value["not_run"]["few_shot"]
    shown, injection = fitted(decoder, task)
    raises("the evaluation plan has no rows", evaluated, injection, decoder, task, shown, EvaluationPlan())
    monkeypatch.setattr(Decoder, "prefix", Mock(side_effect=torch.OutOfMemoryError("no room")))
    assert measured(decoder, task).evaluation["not_run"] == {"few_shot": OUT_OF_MEMORY}
    monkeypatch.setattr(Decoder, "prefix", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        measured(decoder, task)


@pytest.mark.parametrize("name", ["anchored", "i2cl"])
def test_cross_validation_scores_rows_by_refits_without_them(decoder, task, name):
    options = {"anchored": {"steps": 2, "say_label": False}, "i2cl": {"epochs": 2}}[name]
    (method,) = make_methods([name], options)
    shown, asked = task.sample(3, 0), []
    injection = method.fit_injection(decoder, task, shown, 5)

    def make(rest):
        asked.append(rest)
        return method.fit_injection(decoder, task, rest, 5)

    seen, plan = Recorder(), plan_evaluation(replace(task, train=shown, test=()), shown)
    result = evaluated(injection, decoder, task, shown, plan, method=method, refit=make, observer=seen)
    value = result.evaluation
    assert (value["rows"], value["split"]) == (len(shown), "demonstrations")
    assert seen.names == list(value["methods"]) == [*BASELINES, name]
    assert (sum(seen.rows), len(asked)) == (6 * len(shown), 3)
    gold = torch.tensor([one.label for one in shown])
    right = 0
    for rest in tuple(asked):  # a copy, because the refits below add to it
        out = [one for one in shown if one not in rest]
        best = make(rest).log_probs(decoder, [one.text for one in out]).argmax(-1)
        right += int((best == torch.tensor([one.label for one in out])).sum())
    assert value["methods"][name]["accuracy"] == pytest.approx(right / len(shown))
    plain = LabelScorer(decoder, task).scores([one.text for one in shown]).argmax(-1)
    assert value["methods"]["zero_shot"]["accuracy"] == pytest.approx((plain == gold).float().mean().item())
    assert value["methods"][name]["fit_seconds"] == 7.0
    assert value["methods"]["few_shot"]["fit_seconds"] > 0
    assert result.metrics == {}  # cross-validation is not published on the card


def cross_validated(decoder, task, shown, **more):
    (method,) = make_methods(["anchored"], {"steps": 1, "say_label": False})
    injection = method.fit_injection(decoder, task, shown, 0)
    plan = plan_evaluation(replace(task, test=()), shown)
    make = partial(method.fit_injection, decoder, task, seed=0)
    return plan, evaluated(injection, decoder, task, shown, plan, method=method, refit=make, **more)


def test_cross_validation_counts_copies_of_a_text_once(decoder, task):
    shown = task.sample(2, 0)
    plan, result = cross_validated(decoder, replace(task, train=shown), (*shown, *shown))
    assert plan.folds == 3
    assert result.evaluation["rows"] == len(shown)


def test_cross_validation_scores_a_limited_number_of_rows(decoder, task, monkeypatch):
    monkeypatch.setattr(fit_evaluation, "MAX_CROSS_VALIDATED_ROWS", 4)
    seen, shown = Recorder(), task.sample(4, 0)
    _, result = cross_validated(decoder, replace(task, train=shown), shown, observer=seen)
    assert result.evaluation["rows"] == 4 < len(shown)
    assert sum(seen.rows) == 4 * len(result.evaluation["methods"])


@pytest.fixture
def imbalanced(task):
    """Ten training rows of the first label and two of the second; no test rows."""
    groups = [[row for row in task.train if row.label == label] for label in (0, 1)]
    many = [replace(groups[0][at % len(groups[0])], text=f"{groups[0][0].text} {at}") for at in range(10)]
    return replace(task, train=(*many, *groups[1][:2]), test=())


def test_held_out_rows_of_one_label_lead_to_cross_validation_over_all_rows(imbalanced):
    shown = (*imbalanced.train[:4], *imbalanced.train[-2:])
    plan = plan_evaluation(imbalanced, shown)
    assert (plan.split, plan.folds, plan.missing) == ("demonstrations", 3, ())
    assert sorted(row.text for row in plan.rows) == sorted(row.text for row in imbalanced.train)


def test_cross_validation_reports_the_rare_label(decoder, imbalanced):
    shown = (*imbalanced.train[:4], *imbalanced.train[-2:])
    _, result = cross_validated(decoder, imbalanced, shown)
    evaluation = result.evaluation
    assert list(evaluation["support"].values()) == [10, 2]
    assert [sum(row) for row in evaluation["confusion"]] == [10, 2]
    assert evaluation["recall"][imbalanced.labels[1]] == evaluation["confusion"][1][1] / 2
    assert evaluation["methods"]["majority_class"]["accuracy"] == pytest.approx(10 / 12)
    assert evaluation["methods"]["majority_class"]["macro_f1"] == pytest.approx((20 / 22) / 2)
    assert evaluation["outcome"] != "better"


def test_no_verdict_from_rows_that_miss_a_label(decoder, imbalanced):
    shown = (*imbalanced.train[:4], *imbalanced.train[-2:])
    plan = plan_evaluation(imbalanced, shown, folds=0)
    assert plan.missing == (imbalanced.labels[1],)
    injection = injected(decoder, imbalanced, shown, CalibrationConfig(epochs=2))
    result = evaluated(injection, decoder, imbalanced, shown, plan)
    assert result.evaluation["outcome"] == "unknown"
    assert f"is labelled {imbalanced.labels[1]!r}" in result.evaluation["verdict"]
    assert result.evaluation["recall"][imbalanced.labels[1]] is None
    assert result.temperature == injection.temperature
    assert result.metrics == {}


@pytest.fixture
def rare(task):
    """Twelve training rows of two labels, and one row of a third; no test rows."""
    rows = [Example(f"{task.train[at % 4].text} {at}", at % 2) for at in range(12)]
    return replace(task, labels=(*task.labels, "rare"), train=(*rows, Example("seldom", 2)), test=())


def test_only_text_of_a_label_stays_in_every_refit_and_is_not_scored(decoder, rare):
    (method,) = make_methods(["anchored"], {"steps": 1, "say_label": False})
    plan, refits = plan_evaluation(rare, rare.train), []

    def make(rest):
        refits.append(rest)
        return method.fit_injection(decoder, rare, rest, 0)

    assert (plan.split, plan.folds, plan.missing) == ("demonstrations", 3, ())
    assert plan.not_evaluated == ("rare",)
    assert set(plan.rows) == set(rare.train[:-1])
    injection = method.fit_injection(decoder, rare, rare.train, 0)
    result = evaluated(injection, decoder, rare, rare.train, plan, method=method, refit=make)
    assert [rest.count(rare.train[-1]) for rest in refits] == [1, 1, 1]
    value = result.evaluation
    assert value["not_evaluated"] == ["rare"]
    assert value["outcome"] != "unknown"
    assert value["support"] == dict(zip(rare.labels, (6, 6, 0), strict=True))
    assert value["recall"]["rare"] is None
    assert value["methods"]["majority_class"]["macro_f1"] == pytest.approx((2 / 3) / 2), "of two labels"
    assert result.metrics == {}
    line = "The label 'rare' was not evaluated, because it has one text."
    assert line in list(score_notes(value))
    assert line in model_card(result.description(), "folder")


def test_held_out_rows_of_all_labels_but_rare_ones_need_no_refit(decoder, rare):
    shown = (*rare.train[:4], rare.train[-1])
    plan = plan_evaluation(rare, shown)
    assert (plan.split, plan.folds, plan.missing, plan.not_evaluated) == ("train", 0, (), ("rare",))
    injection = injected(decoder, rare, shown, CalibrationConfig(epochs=2))
    result = evaluated(injection, decoder, rare, shown, plan)
    assert result.evaluation["outcome"] != "unknown"
    assert result.metrics == {}, "the card publishes only accuracies on every label"
    raises("labelled 'rare'", plan.require_target, 0.8)


def test_rare_label_in_held_out_rows_is_scored_in_a_cross_validation(rare):
    held_out = Example("seldom, too", 2)
    rare = replace(rare, train=(*rare.train, held_out))
    plan = plan_evaluation(rare, rare.train[:-1])
    assert (plan.split, plan.not_evaluated) == ("demonstrations", ())
    assert set(plan.rows) == {*rare.train} - {rare.train[-2]}


def test_rows_of_one_label_are_not_evaluated_if_cross_validation_is_impossible(imbalanced):
    rare = replace(imbalanced, train=imbalanced.train[:-1])  # the second label has one row
    plan = plan_evaluation(rare, (*rare.train[:4], rare.train[-1]))
    assert plan.rows == ()
    assert plan.reason.endswith("give two texts per label")


def test_no_confidence_threshold_from_rows_that_miss_a_label(imbalanced):
    shown = (*imbalanced.train[:4], *imbalanced.train[-2:])
    for folds in (0, 3):
        plan = plan_evaluation(imbalanced, shown, folds=folds)
        raises("held-out rows of every label", plan.require_target, 0.8)


def test_held_out_rows_include_at_least_one_of_each_label(task):
    shown = task.sample(2, 0)
    plan = plan_evaluation(task, shown, limit=1)
    assert {row.label for row in plan.rows} == set(range(len(task.labels)))
    assert plan.missing == ()


def test_advice_depends_on_the_rival():
    advice = partial(fit_evaluation.advice, ["anchored", "char_tfidf"])
    assert advice("sentence_embeddings").endswith("leave out --experts, to combine it with the LLM")
    assert "cheaper" in advice("char_tfidf")
    assert "leave out" not in advice("char_tfidf")
    assert "--experts llm" in advice("anchored")
    assert "label prior" in advice("majority_class")
    assert "longer prompts" in advice("few_shot")
    assert "needs no fit" in advice("zero_shot")
    assert advice("menu") == "use menu instead"


@pytest.mark.parametrize(
    ("rival", "expert"), [("sentence_embeddings", "embeddings"), ("char_tfidf", "tfidf")]
)
def test_advice_for_text_methods_names_their_expert(rival, expert):
    members = ["anchored", "sentence_embeddings", "char_tfidf"]
    assert fit_evaluation.advice(members, rival) == (
        f"{rival} alone is the cheaper choice, since it needs no LLM (--experts {expert})"
    )
    assert EnsembleConfig(experts=expert).uses_llm is False


def test_advice_without_the_llm_prefers_the_expert_without_an_encoder():
    members = ["sentence_embeddings", "char_tfidf"]
    without_llm = partial(fit_evaluation.advice, uses_llm=False)
    assert "needs no sentence encoder (--experts tfidf)" in without_llm(members, "char_tfidf")
    assert without_llm(members, "sentence_embeddings").endswith("alone (--experts embeddings)")
    assert without_llm(["char_tfidf"], "sentence_embeddings") == "add embeddings to --experts"
    assert fit_evaluation.cheaper_methods(uses_llm=False) == ("char_tfidf",)


def test_advice_names_the_experts_that_need_no_llm_if_it_adds_nothing():
    experts, score = ("embeddings", "tfidf"), (0.75, 0.7, 0.8)
    advise = partial(fit_evaluation.advise_without_llm, experts=experts, metric="accuracy", score=score)
    nothing, something = Comparison.of_counts((3, 2), 100), Comparison.of_counts((20, 2), 100)
    scores = "accuracy 0.750, 95 % interval 0.700 to 0.800"
    added = f"--experts embeddings,tfidf saves a task without the LLM ({scores})"
    assert advise("", nothing) == added
    assert advise("more rows", nothing) == f"more rows; {added}"
    assert advise("more rows", something) == "more rows"
    assert advise("use tfidf (--experts tfidf)", nothing) == "use tfidf (--experts tfidf)"


FIT = """
import sys
absent = {"matplotlib", "sentence_transformers"}  # as if not installed
for name in [name for name in sys.modules if name.partition(".")[0] in absent | {"i2cl"}]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(absent))
from i2cl.interfaces.cli import main
main()
"""


def test_fit_needs_no_extra(tmp_path):
    options = ["--recipe", "fast", "--set", "passes=1", "--shots", "1", "--evaluate", "4"]
    code, _, errors = finished(FIT, "fit", "reference", "mood-colour-1", *options, "-o", tmp_path / "out")
    assert code == 0, errors
    assert Injection.from_pretrained(tmp_path / "out").evaluation["rows"] == 4


def test_temperature_is_fitted_on_the_rows_and_confidence_on_other_rows(decoder, task):
    _, plain = fitted(decoder, task)
    result = measured(decoder, task)
    texts = [row.text for row in task.test]
    gold = np.array([row.label for row in task.test])
    scores = plain.log_probs(decoder, texts)
    (weight,) = likely_weights(scores[None].numpy(), gold, [llm_prior(METHOD)])
    assert result.temperature == pytest.approx(1 / weight, rel=1e-2)
    assert result.temperature != 1
    assert result.predict(decoder, texts) == plain.predict(decoder, texts)
    held_out = cross_fitted(scores[None].numpy(), gold, [llm_prior(METHOD)])
    expected = confidence(held_out, gold, scores.argmax(-1).numpy())
    assert result.evaluation["confidence"] == pytest.approx(asdict(expected), abs=2e-3)
    assert result.evaluation["selection"] == {}


def test_target_accuracy_gives_a_threshold(decoder, task):
    raises("needs at least 22 held-out rows", measured, decoder, task, limit=10, target=0.9)
    rows = tuple(replace(row, text=f"{row.text} {at}") for at in range(8) for row in task.test)
    value = measured(decoder, replace(task, test=rows), target=0.5).evaluation["selection"]
    assert value["target"] == 0.5
    known = {"target", "rows"}
    assert set(value) in (known | {"needed"}, known | {"threshold", "coverage", "accuracy"})
