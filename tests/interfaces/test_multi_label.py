"""Multi-label tasks through the command line, the estimator, the server and the classifier export."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.preprocessing import MultiLabelBinarizer

from commands import run, write_csv
from fitting import raises
from i2cl import (
    Decoder,
    Example,
    I2CLClassifier,
    I2CLError,
    Injection,
    Task,
    Template,
    make_methods,
)
from i2cl.experiments.evidence.fit_evaluation import EvaluationPlan, FitRequest, plan_evaluation
from i2cl.experiments.evidence.multi_label import choose_thresholds, compare, decide
from i2cl.experiments.fitting import fit_task
from i2cl.export import export_classifier, verify
from i2cl.injections.ensemble import EnsembleConfig
from i2cl.interfaces.cli import console
from i2cl.interfaces.cli.fit import _show_evaluation
from i2cl.interfaces.sklearn.inputs import as_indicators, label_names
from i2cl.tasks import load_task
from tiny import tiny_folder

LABELS = ("billing", "login", "refund")
WORDS = ("charged twice", "cannot sign in", "money back")
SETS = [(), (0,), (1,), (2,), (0, 2), (0, 1), (1, 2), (0, 1, 2)] * 3
ROWS = [
    (f"{number} {' '.join(WORDS[one] for one in ids) or 'hello'}", ids) for number, ids in enumerate(SETS)
]
TEXTS = [text for text, _ in ROWS]
LISTS = [[LABELS[one] for one in ids] for _, ids in ROWS]
TEMPLATE = "Text: {text}\nLabel: {label}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("home") / "model")


def separated(path):
    return write_csv(
        path, ["text", "label"], [(text, ";".join(words)) for text, words in zip(TEXTS, LISTS, strict=True)]
    )


def listed(path, rows=None):
    rows = rows or zip(TEXTS, LISTS, strict=True)
    path.write_text("".join(json.dumps({"text": text, "label": words}) + "\n" for text, words in rows))
    return path


def marked(path):
    rows = [(text, *(int(one in ids) for one in range(3))) for text, ids in ROWS]
    return write_csv(path, ["text", *LABELS], rows)


@pytest.fixture(scope="module")
def fitted(model, tmp_path_factory):
    """A fit with its evaluation."""
    folder = tmp_path_factory.mktemp("fits")
    path = separated(folder / "rows.csv")
    words = ("--label-separator", ";", "--shots", "3", "--evaluate", "20", "--set", "steps=2")
    assert run("fit", model, path, "-o", folder / "task", *words) == 0
    return folder / "task"


def test_three_formats_hold_the_same_task(tmp_path):
    tasks = [
        load_task(separated(tmp_path / "t.csv"), template=TEMPLATE, label_separator=";"),
        load_task(listed(tmp_path / "t.jsonl"), template=TEMPLATE),
        load_task(marked(tmp_path / "t.tsv.csv"), template=TEMPLATE, label_columns=LABELS),
    ]
    for task in tasks:
        assert task.multi_label
        assert task.labels == LABELS
        assert [row.ids for row in task.train] == [ids for _, ids in ROWS]


def test_fit_evaluates_and_chooses_thresholds(fitted):
    injection = Injection.from_pretrained(fitted)
    evaluation = injection.evaluation
    assert [*evaluation["methods"]] == ["label_frequency", "zero_shot", "char_tfidf", "anchored", "ensemble"]
    assert injection.head.members == ("llm", "tfidf")
    assert set(evaluation["support"]) == set(LABELS)
    assert evaluation["verdict"]
    assert injection.head.thresholds != (0.5,) * 3
    assert injection.metrics.keys() >= {"micro_f1", "macro_f1", "mean_average_precision", "exact_match"}
    card = (fitted / "README.md").read_text()
    assert "Labels, of which a text has any number: billing, login, refund" in card
    assert "| anchored |" in card


def test_the_only_text_of_a_label_is_in_every_training_fold_and_not_scored(model):
    decoder = Decoder.from_pretrained(model)
    rows = [Example.multi_label(text, ids) for text, ids in ROWS]
    rows.append(Example.multi_label("where is my parcel, charged twice", [0, 3]))
    task = Task("t", (*LABELS, "delivery"), Template(TEMPLATE), train=tuple(rows), multi_label=True)
    plan = plan_evaluation(task, rows, folds=2)
    assert (plan.folds, plan.not_evaluated, set(plan.rows)) == (2, ("delivery",), set(rows[:-1]))
    (method,) = make_methods(["anchored"], {"steps": 1})
    request = FitRequest(method, EnsembleConfig(experts=("llm",)))
    injection = fit_task(decoder, task, rows, request, plan)
    assert injection.evaluation["not_evaluated"] == ["delivery"]
    assert injection.evaluation["labels"]["delivery"] is None
    assert injection.evaluation["outcome"] != "unknown"


def test_predict_writes_labels_and_probabilities(call, fitted, tmp_path):
    path = listed(tmp_path / "in.jsonl")
    code, out, err = call("predict", fitted, path, "--output-format", "csv")
    assert code == 0, err
    rows = list(csv.DictReader(out.splitlines()))
    injection = Injection.from_pretrained(fitted)
    decoder = Decoder.from_pretrained(injection.base.name)
    assert [row["labels"] for row in rows] == [";".join(words) for words in injection.predict(decoder, TEXTS)]
    found = torch.tensor([[float(row[label]) for label in LABELS] for row in rows])
    torch.testing.assert_close(found, injection.log_probs(decoder, TEXTS).exp(), atol=1e-4, rtol=0)
    code, out, _ = call("predict", fitted, path, "--json", "--min-confidence", "0.999999")
    assert code == 0
    assert [json.loads(line)["labels"] for line in out.splitlines()] == [[]] * len(TEXTS)


def test_exported_classifier_answers_with_a_sigmoid(fitted, tmp_path):
    from transformers import pipeline

    injection = Injection.from_pretrained(fitted)
    decoder = Decoder.from_pretrained(injection.base.name)
    notes = export_classifier(decoder, injection, tmp_path / "out")
    (note,) = (note for note in notes if "threshold" in note)
    assert f"billing {injection.head.llm_thresholds[0]:.4g}, " in note
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["problem_type"]
        == "multi_label_classification"
    )
    assert verify(tmp_path / "out").passed
    classify = pipeline("text-classification", model=str(tmp_path / "out"), device="cpu", top_k=None)
    wanted = injection.llm_alone().log_probs(decoder, TEXTS[:4]).exp()
    for answer, row in zip(classify(TEXTS[:4]), wanted, strict=True):
        scores = {one["label"]: one["score"] for one in answer}
        assert [scores[label] for label in LABELS] == pytest.approx(row.tolist(), abs=1e-4)


def test_export_says_that_it_holds_the_llm_alone(stdout, fitted, tmp_path):
    out = stdout("export", fitted, tmp_path / "out", "--no-golden")
    scores = Injection.from_pretrained(fitted).evaluation["methods"]
    micro_f1 = [f"{scores[name]['micro_f1']:.3f}" for name in ("anchored", "ensemble")]
    assert f"the LLM alone, without tfidf: micro-F1 {' instead of '.join(micro_f1)} on " in out


def test_experts_llm_fits_the_llm_alone(call, model, tmp_path):
    words = (
        "--label-separator",
        ";",
        "--experts",
        "llm",
        "--shots",
        "2",
        "--evaluate",
        "8",
        "--set",
        "steps=1",
    )
    code, out, err = call("fit", model, separated(tmp_path / "rows.csv"), "-o", tmp_path / "task", *words)
    assert code == 0, err
    injection = Injection.from_pretrained(tmp_path / "task")
    assert injection.ensemble is None
    assert "ensemble" not in injection.evaluation["methods"]
    assert "Calibration: temperature" in out


@pytest.mark.parametrize("form", ["causal-lm", "peft", "gguf"])
def test_other_exports_are_refused(call, fitted, tmp_path, form):
    code, _, err = call("export", fitted, tmp_path / ("out.gguf" if form == "gguf" else "out"), "--to", form)
    assert code == 2
    assert "needs exactly one label per text" in err
    assert "--to classifier" in err


def test_comparisons_are_refused(call, model, tmp_path):
    code, _, err = call("eval", model, listed(tmp_path / "rows.jsonl"), "--shots", "1")
    assert code == 2
    assert "`i2cl fit` evaluates it" in err


def test_estimator_takes_indicators(model):
    table = MultiLabelBinarizer(classes=LABELS).fit_transform(LISTS)
    decoder = Decoder.from_pretrained(model)
    estimator = I2CLClassifier(decoder, labels=LABELS, shots=3, settings={"steps": 2}, evaluate=0)
    estimator.fit(TEXTS, table)
    probabilities = estimator.predict_proba(TEXTS)
    assert estimator.classes_.tolist() == list(LABELS)
    assert estimator.injection_.head.members == ("llm", "tfidf")
    log_probs = estimator.injection_.log_probs(decoder, TEXTS)
    assert probabilities == pytest.approx(log_probs.exp().numpy(), abs=1e-6)
    assert probabilities.shape == table.shape
    assert np.array_equal(estimator.predict(TEXTS), (probabilities >= 0.5).astype(int))
    assert np.array_equal(estimator.decision_function(TEXTS) >= 0, probabilities >= 0.5)
    assert 0 <= estimator.score(TEXTS, table) <= 1
    with pytest.raises(I2CLError, match="MultiLabelBinarizer"):
        estimator.fit(TEXTS, LISTS)


def test_indicators_may_have_columns_of_several_types():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"a": [True, False], "b": [0, 1]})
    assert as_indicators(frame, 2).tolist() == [[True, False], [False, True]]
    raises("not only zeros and ones", as_indicators, frame.assign(b=["x", "y"]), 2)


def test_label_words_of_columns_are_not_the_characters_of_a_string():
    raises("y has 2 columns and no word for each", label_names, np.eye(2), 2, "ab")


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (separated, ["--label-separator", ";", "--labels", "billing;refund,login,refund"], "not one of"),
        (separated, ["--label-separator", ";", "--method", "i2cl"], "use the method anchored"),
        (separated, ["--label-separator", ";", "--class-weight", "balanced"], "--class-weight"),
        (separated, ["--label-separator", ";", "--target-accuracy", "0.9"], "--target-accuracy"),
        (separated, ["--label-separator", ";", "--compare", "menu"], "--compare needs exactly one label"),
        (separated, ["--label-separator", " "], "is blank"),
        (marked, ["--label-columns", "billing,gone"], "no column 'gone'.*correct its name .--label-columns"),
        (marked, ["--label-columns", "billing,text"], "label column 'text' has .*write 0 or 1"),
        (marked, ["--label-columns", ",".join(LABELS), "--labels", "a,b,c"], "rename the columns"),
        (
            lambda path: listed(path.with_suffix(".jsonl"), [("a", ["x"]), ("b", "y"), ("c", [])]),
            [],
            "is not a list",
        ),
        (
            lambda path: listed(path.with_suffix(".jsonl"), [("a", ["x", "y"]), ("b", ["y"])]),
            [],
            "every row has the label 'y'",
        ),
        (
            lambda path: listed(path.with_suffix(".jsonl"), [("a", ["x;y"]), ("b", ["z"]), ("c", [])]),
            [],
            "contains ';'",
        ),
        (
            lambda path: listed(path.with_suffix(".jsonl")),
            ["--labels", "billing,login,refund,never"],
            "no row has the label 'never'",
        ),
    ],
)
def test_bad_rows_and_options_are_one_line(call, model, tmp_path, make, options, why):
    path = make(tmp_path / "rows.csv")
    code, _, err = call("fit", model, path, "-o", tmp_path / "out", *options)
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert re.search(why, err), err
    assert not (tmp_path / "out").exists()


def test_labels_that_look_like_several_are_pointed_out(call, model, tmp_path):
    path = separated(tmp_path / "rows.csv")
    rows = [row for row in path.read_text().splitlines() if not row.endswith(",")]
    path.write_text("\n".join(rows) + "\n")
    code, out, err = call("fit", model, path, "-o", tmp_path / "out", "--set", "steps=0", "--evaluate", "0")
    assert code == 0, err
    assert "--label-separator ';'" in out


def test_labels_that_look_like_several_need_a_new_fit_instead_of_an_update(call, model, tmp_path):
    first = write_csv(tmp_path / "a.csv", ["text", "label"], [("a", "sales"), ("b", "login")])
    more = write_csv(tmp_path / "b.csv", ["text", "label"], [("c", "sales, login")])
    quick = ("--evaluate", "0", "--set", "steps=0", "--keep-examples")
    assert call("fit", model, first, "-o", tmp_path / "task", *quick)[0] == 0
    code, out, err = call("update", tmp_path / "task", more, "--evaluate", "0")
    assert code == 0, err
    fix = "if they are, fit a new task from all rows, and separate them with --label-separator ,."
    assert f"! Some labels look like several: {fix}" in " ".join(out.split())


def test_table_of_a_fit_fits_into_80_columns(fitted, capsys, monkeypatch):
    monkeypatch.setattr(console, "out", Console(highlight=False, width=80))
    injection = Injection.from_pretrained(fitted)
    methods = injection.evaluation["methods"]
    methods = methods | {"sentence_embeddings": methods["anchored"]}
    slow = {"fit_seconds": 988.0, "milliseconds_per_query": 1161.0}
    methods = {name: score | slow for name, score in methods.items()}
    _show_evaluation(injection.with_report(evaluation=injection.evaluation | {"methods": methods}))
    table = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    table = [line for line in table if line]
    assert max(map(len, table)) <= 80
    assert len(table) == 2 + len(methods), "each row is one line"


def test_thresholds_have_the_highest_f1():
    probabilities = np.array([0.1, 0.2, 0.3, 0.35, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95])[:, None]
    gold = np.array([0, 0, 0, 1, 0, 1, 1, 1, 1, 1], dtype=bool)[:, None]
    (threshold,) = choose_thresholds(probabilities, gold)
    assert 0.3 < threshold < 0.35
    assert decide(probabilities, gold, "0.5").sum() == 6


def test_thresholds_are_not_biased_by_alternating_labels():
    gold = np.tile(np.eye(2, dtype=bool), (20, 1))
    assert np.array_equal(decide(np.where(gold, 0.3, 0.1), gold, "f1"), gold)


def test_label_frequency_is_estimated_without_the_scored_rows(model):
    shown = (Example("a", -1, labels=(0,)), Example("b", label=-1, labels=(1,)))
    scored = tuple(Example(f"c{number}", -1, labels=(0,)) for number in range(6))
    task = Task("words", ("one", "two"), Template(TEMPLATE), train=shown + scored, multi_label=True)
    (method,) = make_methods(["anchored"], {"steps": 0})
    request = FitRequest(method, EnsembleConfig(experts=("llm",)), threshold="0.5")
    plan = EvaluationPlan("train", scored)
    evaluation = fit_task(Decoder.from_pretrained(model), task, shown, request, plan).evaluation
    assert evaluation["methods"]["label_frequency"]["micro_f1"] == pytest.approx(2 / 3)


def test_comparison_of_equal_answers_is_not_significant():
    counts = np.array([[2, 2], [0, 1], [2, 3]] * 20)
    same = compare(counts, counts)
    assert (same.difference, same.p) == (0.0, 1.0)
    better = compare(np.array([[2, 2]] * 60), counts)
    assert better.low > 0
    assert better.p < 0.01


def test_update_adds_a_label_and_equals_a_fit_of_all_rows(call, model, tmp_path):
    first = listed(tmp_path / "rows.jsonl")
    more = listed(tmp_path / "more.jsonl", [(f"spam {number}", ["spam"]) for number in range(3)])
    quick = ("--evaluate", "0", "--set", "steps=1", "--keep-examples")
    assert call("fit", model, first, "-o", tmp_path / "task", "--shots", "all", *quick)[0] == 0
    before = Injection.from_pretrained(tmp_path / "task")
    assert sorted(row.text for row in before.examples) == sorted(TEXTS)
    assert "are in `examples.jsonl`" in (tmp_path / "task" / "README.md").read_text()
    code, _, err = call("update", tmp_path / "task", more, "--rename", "login=access", "--evaluate", "0")
    assert code == 0, err
    after = Injection.from_pretrained(tmp_path / "task")
    assert after.task.labels == ("billing", "access", "refund", "spam")
    assert after.demonstrations == len(TEXTS) + 3
    assert after.settings["steps"] == 1
    code, _, err = call(
        "update", tmp_path / "task", "--remove", "spam", "-o", tmp_path / "less", "--evaluate", "0"
    )
    assert code == 0, err
    less = Injection.from_pretrained(tmp_path / "less")
    assert less.task.labels == ("billing", "access", "refund")
    assert len(less.examples) == len(TEXTS) + 3


def test_update_keeps_the_kind_of_the_thresholds(call, model, tmp_path):
    rows = listed(tmp_path / "rows.jsonl")
    options = ["--experts", "tfidf", "--threshold", "0.5", "--keep-examples"]
    assert call("fit", model, rows, "-o", tmp_path / "task", *options)[0] == 0
    code, _, err = call("update", tmp_path / "task", "--rename", "login=access")
    assert code == 0, err
    injection = Injection.from_pretrained(tmp_path / "task")
    assert injection.evaluation["threshold"] == "0.5"
    assert injection.head.thresholds == (0.5,) * 3


def test_update_rejects_a_rename_without_an_equals_sign(call, fitted):
    code, _, err = call("update", fitted, "--rename", "login")
    assert code == 2
    assert "--rename 'login' is not OLD=NEW: write it like --rename blue=navy" in err


def test_update_without_kept_examples_is_refused(call, fitted, tmp_path):
    code, _, err = call("update", fitted, "--remove", "login", "-o", tmp_path / "out")
    assert code == 2
    assert "without --keep-examples" in err
    assert len(err.strip().splitlines()) == 1
