"""I2CLClassifier against scikit-learn's own checks and tools, and against the injection it wraps."""

import copy
import json
import pickle
from dataclasses import replace
from datetime import date
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import (
    check_classifiers_multilabel_output_format_decision_function,
    check_classifiers_multilabel_output_format_predict,
    check_classifiers_multilabel_output_format_predict_proba,
    check_classifiers_multilabel_representation_invariance,
    parametrize_with_checks,
)
from sklearn.utils.validation import check_is_fitted, validate_data

from fitting import injected, left_as_found, raises, weighted
from i2cl import AnchoredConfig, CalibrationConfig, Decoder, Example, I2CLError, anchor, load_task
from i2cl.experiments.draw import FewRowsWarning
from i2cl.experiments.evidence.fit_evaluation import BASELINES
from i2cl.injections.label_prior import with_label_prior
from i2cl.interfaces.sklearn import I2CLClassifier
from i2cl.tasks.loaders import default_template
from i2cl.tasks.template import DEFAULT_TEMPLATE

TASK = load_task("mood-colour-1")
X = [example.text for example in TASK.train[:60]]
Y = [TASK.labels[example.label] for example in TASK.train[:60]]
QUERIES = [example.text for example in TASK.test[:20]]
QUICK = {"epochs": 1}
FAST = {"recipe": "fast", "settings": {"passes": 25}}


@cache
def reference():
    return Decoder.from_pretrained("reference")


def quick(**parameters):
    defaults = {"model": reference(), "template": TASK.template, "shots": 1, "settings": QUICK, "evaluate": 0}
    return I2CLClassifier(**defaults | parameters)


@cache
def fitted():
    return I2CLClassifier(reference(), template=TASK.template, shots=5, **FAST).fit(X, Y)


class OnNumbers(I2CLClassifier):
    """Converts rows of numbers to texts, because scikit-learn's checks pass only numbers."""

    def fit(self, rows, y, sample_weight=None):
        return super().fit(spelled(validate_data(self, rows)), y, sample_weight=sample_weight)

    def _scores(self, rows):
        check_is_fitted(self)
        return super()._scores(spelled(validate_data(self, rows, reset=False)))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array, tags.input_tags.two_d_array = False, True
        tags.classifier_tags.poor_score = True  # so short a calibration on numbers learns nothing
        return tags


def spelled(rows):
    return [" ".join(f"{value:.1f}" for value in row) for row in rows]


WORDS = {0: "red", 1: "blue", 2: "green", 3: "gold", -1: "yellow"}
NAMES = {word: word for word in ("one", "two", "three")}
ROUNDED = "other batches round differently: differences of 1e-6, but 1e-7 is required"
MULTI_LABEL_CHECKS = (
    check_classifiers_multilabel_output_format_decision_function,
    check_classifiers_multilabel_output_format_predict,
    check_classifiers_multilabel_output_format_predict_proba,
    check_classifiers_multilabel_representation_invariance,
)
FAILED_CHECKS = dict.fromkeys(
    [check.__name__ for check in MULTI_LABEL_CHECKS], "the method i2cl takes one label per text"
) | {
    "check_methods_subset_invariance": ROUNDED,
    "check_sample_weight_equivalence_on_dense_data": "it draws examples; without shots, 1e-4 apart",
}


@parametrize_with_checks(
    [OnNumbers("reference", shots=1, settings=QUICK, evaluate=0, labels=WORDS | NAMES)],
    expected_failed_checks=lambda _: FAILED_CHECKS,
)
def test_passes_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("check", MULTI_LABEL_CHECKS, ids=lambda check: check.__name__)
def test_passes_scikit_learn_checks_of_multi_label_classifiers(check):
    options = {"shots": 1, "settings": {"steps": 1}, "evaluate": 0, "labels": WORDS | {4: "black"}}
    check("I2CLClassifier", OnNumbers("reference", **options))


def shown_of(result, shots):
    """Return the task that a classifier makes of its texts, and ``shots`` demonstrations per class."""
    task = replace(TASK, labels=tuple(result.classes_), train=(), test=())
    rows = [Example(text, task.labels.index(word)) for text, word in zip(X, Y, strict=True)]
    return task, replace(task, train=tuple(rows)).sample(shots, 0)


def pooled_like(injection, result):
    head = result.injection_.head
    return injection.with_head(experts=head.experts, expert_weights=head.expert_weights)


def test_fit_equals_extract_and_calibrate():
    tags = quick().__sklearn_tags__().input_tags
    assert (tags.string, tags.two_d_array) == (True, False)
    decoder, result = reference(), fitted()
    task, shown = shown_of(result, 5)
    injection = injected(decoder, task, shown, CalibrationConfig.recipe("fast", passes=25))
    assert result.classes_.tolist() == sorted(TASK.labels)
    assert torch.equal(result.injection_.coefficients, injection.coefficients)
    injection = pooled_like(injection, result)  # weights are chosen on rows that shots left
    scores = injection.log_probs(decoder, QUERIES).double()
    assert np.allclose(result.predict_log_proba(QUERIES), scores.log_softmax(-1).numpy())
    assert np.array_equal(result.decision_function(QUERIES), scores.numpy())
    assert result.predict(QUERIES).tolist() == injection.predict(decoder, QUERIES)


def test_fit_with_anchored_and_unlabelled_texts(tmp_path):
    unlabelled = [example.text for example in TASK.train[-64:]]
    chosen = {"method": "anchored", "settings": {"steps": 2}, "unlabelled": unlabelled}
    result = quick(shots=5, evaluate=8, **chosen).fit(X, Y)
    plain = anchor(reference(), *shown_of(result, 5), AnchoredConfig(steps=2))
    injection = with_label_prior(plain, reference(), unlabelled)
    assert torch.equal(result.injection_.context, injection.context)
    injection = pooled_like(injection, result)
    assert np.allclose(result.decision_function(QUERIES), injection.log_probs(reference(), QUERIES).numpy())
    assert "anchored+label_prior" in result.report_["methods"]
    result.save_pretrained(tmp_path / "out")
    again = I2CLClassifier.from_pretrained(tmp_path / "out", model=reference())
    assert (again.method, again.settings["steps"]) == ("anchored", 2)
    assert np.array_equal(again.predict(QUERIES), result.predict(QUERIES))


def test_loaded_task_keeps_its_label_order(tmp_path):
    """Label biases and word weights follow unsorted labels, also after another save."""
    task = replace(TASK.without_data(), labels=tuple(sorted(TASK.labels, reverse=True)))
    plain = replace(anchor(reference(), *shown_of(fitted(), 1), AnchoredConfig(steps=1)), task=task)
    injection = weighted(reference(), plain).with_head(bias=(0.5, 0.0, -0.5, 1.0))
    injection.save_pretrained(tmp_path / "one")
    for name, after in (("one", "two"), ("two", "three")):
        result = I2CLClassifier.from_pretrained(tmp_path / name, model=reference())
        assert result.classes_.tolist() == sorted(task.labels)
        assert result.predict(QUERIES).tolist() == injection.predict(reference(), QUERIES)
        result.save_pretrained(tmp_path / after)


def test_fit_uses_all_texts_unless_shots_is_given():
    gold = [TASK.labels[example.label] for example in TASK.test[:200]]
    texts = [example.text for example in TASK.test[:200]]
    assert fitted().score(texts, gold) > 0.95
    assert np.allclose(fitted().predict_proba(texts).sum(-1), 1)
    assert quick(shots=None).fit(X[:30], Y[:30]).injection_.demonstrations == 30
    assert quick(shots=2).fit(X, Y).injection_.demonstrations == 8


def test_random_state_determines_the_fit():
    one, same, other = (quick(random_state=seed).fit(X, Y).injection_ for seed in (1, 1, 2))
    assert torch.equal(one.coefficients, same.coefficients)
    assert not torch.equal(one.context, other.context)
    drawn = quick(random_state=np.random.RandomState(5)).fit(X, Y).injection_.seed
    assert drawn == np.random.RandomState(5).randint(2**31 - 1)


def test_labels_maps_numeric_classes_to_words():
    ids = np.array([TASK.labels.index(word) for word in Y]) * 10
    words = {10 * place: word for place, word in enumerate(TASK.labels)}
    by_id = quick(shots=5, labels=words | {99: "unused"}, **FAST).fit(X, ids)
    assert by_id.classes_.tolist() == [0, 10, 20, 30]
    assert by_id.injection_.task.labels == TASK.labels
    assert [words[result] for result in by_id.predict(QUERIES).tolist()] == fitted().predict(QUERIES).tolist()


def test_decision_function_of_two_classes_is_log_odds():
    pair = [(x, y) for x, y in zip(X, Y, strict=True) if y in {"red", "blue"}]
    result = quick().fit(*zip(*pair, strict=True))
    odds = result.decision_function(QUERIES)
    log = result.predict_log_proba(QUERIES)
    assert np.allclose(odds, log[:, 1] - log[:, 0])
    assert result.predict(QUERIES).tolist() == result.classes_[(odds > 0).astype(int)].tolist()


def test_texts_in_any_container_give_the_same_fit():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    expected = quick().fit(X, Y).decision_function(QUERIES)
    for made in (
        *(tuple, np.array, lambda values: np.array(values, dtype=object)),
        lambda values: pandas.Series(values, index=range(100, 100 + len(values)), dtype=object),
        lambda values: pandas.Series(values, dtype="string"),
    ):
        result = quick().fit(made(X), made(Y)).decision_function(made(QUERIES))
        assert np.array_equal(result, expected)


def test_report_uses_the_texts_left_over_by_shots():
    result = quick(shots=2, recipe="fast", settings={"passes": 20}, evaluate=160).fit(X, Y)
    report = result.report_
    assert (report["rows"], report["split"]) == (len(X) - 8, "train")
    assert list(report["methods"]) == [*BASELINES, "i2cl", "ensemble"]
    shown = {row.text for row in shown_of(result, 2)[1]}
    left = [(text, word) for text, word in zip(X, Y, strict=True) if text not in shown]
    assert report["methods"]["i2cl"]["accuracy"] == result.score(*zip(*left, strict=True))
    assert report["methods"]["zero_shot"]["fit_seconds"] < report["methods"]["i2cl"]["fit_seconds"]
    assert json.dumps(report) == json.dumps(pickle.loads(pickle.dumps(result)).report_)


def test_report_is_none_without_texts_to_evaluate(tmp_path):
    assert quick(shots=None, evaluate=160).fit(X[:12], Y[:12]).report_ is None
    result = quick(evaluate=0).fit(X, Y)
    assert result.report_ is None
    result.save_pretrained(tmp_path / "out")
    assert I2CLClassifier.from_pretrained(tmp_path / "out").report_ is None
    assert quick(evaluate=7).fit(X, Y).report_["rows"] == 7
    raises("evaluate is -1", quick(evaluate=-1).fit, X, Y)
    with pytest.raises(NotFittedError):
        _ = quick(evaluate=7).report_


DATES = {date(2020, 1, 1): "red", date(2021, 1, 1): "blue"}


def wrong(x=None, y=None, **parameters):
    quick(**parameters).fit(X if x is None else x, Y if y is None else y)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"x": np.array([X, X]).T}, r"X has 2 dimensions.*frame\['text'\]"),
        ({"x": "one text"}, "X is one string: pass a list"),
        ({"x": [[text] for text in X]}, "text 1 of X is of type list, not a string"),
        ({"x": [*X[:-1], None]}, r"text 60 of X is missing \(None\): fill it in"),
        ({"x": [*X[:-1], float("nan")]}, r"text 60 of X is missing \(nan\): fill it in"),
        ({"x": ["", *X[1:]]}, "text 1 is empty"),
        ({"x": [], "y": []}, "X has no texts"),
        ({"x": iter(X)}, "X is a list_iterator: pass a list of texts"),
        ({"y": Y[:-1]}, "X has 60 texts and y has 59 classes"),
        ({"y": ["red"] * 60}, "y has only one class, 'red'"),
        ({"y": [*Y[:-1], None]}, r"y has no class in row 60 \(missing value\)"),
        ({"y": [0.5, 1.5] * 30}, "Unknown label type: continuous.* values: give each text one class"),
        ({"y": [1, *Y[1:]]}, r"y mixes classes of several types \(int, str\): convert them"),
        ({"y": ["red ", *Y[1:]]}, r"class 'red ' is empty or has spaces around it: strip the classes"),
        ({"y": [0, 1] * 30}, r"class ids such as 0 and no label words.*labels=sorted\(set\(y\)\)"),
        ({"y": [10, 20] * 30}, r"class 10 is not a word that the model can say.*labels=\{10: 'word', ...\}"),
        ({"y": [0, 1] * 30, "labels": {0: "red"}}, "labels has no word for class 1: add it"),
        ({"labels": "red"}, "labels is a str: pass a list of words, or a dict"),
        ({"labels": ["red", "blue"]}, "labels has no word for class 'green'"),
        ({"labels": ["yellow", "red", "green", "blue"]}, r"labels is not sorted.*pass labels=\['blue'"),
        (
            {"y": [1, 2] * 30, "labels": ["red", "blue"]},
            r"for ids 0 to 1, not for class 2.*labels=\{2: 'word'",
        ),
        ({"y": [0, 1] * 30, "labels": {0: "red", 1: "red"}}, "label word 'red' is given twice"),
        ({"shots": 0}, "shots is 0: pass a whole number above 0"),
        ({"model": None}, "no model is given: pass model='smollm2'"),
        ({"class_weight": "even"}, "class_weight is 'even': pass 'balanced' or a dict"),
        ({"class_weight": {"rouge": 2}}, "class_weight has a weight for 'rouge', which is not a class"),
        ({"class_weight": {"red": -1}}, "option class_weight=.*weights are finite and above 0"),
        ({"experts": ["llm"], "settings": {"experts": "tfidf"}}, "experts is given twice: leave it out"),
        ({"recipe": "quick"}, "unknown recipe 'quick': choose one of paper, released, fast"),
        ({"method": "anchored", "recipe": "fast", "settings": None}, "takes no recipe: leave it out"),
        ({"method": "icv"}, "unknown method 'icv': choose one of anchored, i2cl"),
        ({"settings": {"epochs": "many"}}, "option epochs='many'"),
        ({"template": "{text}"}, r"it needs \{text\}, then some text, then \{label\} at the end"),
        ({"model": "no/such/folder/here"}, r"does not exist.*set_params\(model=...\)"),
        ({"model": 3}, "model is a int: pass a name, a folder or a Decoder"),
        ({"shots": 2.0}, "shots is 2.0: pass a whole number above 0, or None"),
        ({"evaluate": 2.5}, "evaluate is 2.5: give a whole number"),
        ({"evaluate": "160"}, "evaluate is '160': give a whole number"),
        ({"min_confidence": np.float32(1.5)}, "is not a probability"),
        ({"min_confidence": "0.5"}, "min_confidence '0.5' is not a probability"),
        ({"method": ["anchored"]}, r"unknown method \['anchored'\]"),
        ({"recipe": ["fast"]}, r"unknown recipe \['fast'\]"),
        (
            {"y": np.array(["2020-01-01", "2021-01-01"] * 30, "datetime64[D]"), "labels": DATES},
            "2020.* is not a string or a number",
        ),
        ({"scoring": "nope"}, "scoring is 'nope': choose one of auto, first_token, sequence"),
        ({"template": None}, "template is None: give a string with {text} and {label}"),
        ({"settings": [1]}, "settings is a list: give a dict"),
        ({"random_state": 2**70}, "random_state is .*63 bits"),
        ({"labels": dict.fromkeys(Y, 3)}, "labels has 3, which is not a string"),
        ({"unlabelled": []}, "unlabelled has no texts"),
        ({"unlabelled": "text"}, "unlabelled is one string"),
    ],
)
def test_invalid_argument_raises_one_line_error(arguments, named):
    raises(named, wrong, **arguments)


def test_tables_and_sparse_matrices_are_rejected():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    from sklearn.feature_extraction.text import CountVectorizer

    raises(r"frame\['text'\]", wrong, pandas.DataFrame({"text": X}))
    raises("X is a sparse matrix: pass the texts themselves", wrong, CountVectorizer().fit_transform(X))


def test_failed_refit_keeps_the_previous_fit():
    result = quick().fit(X, Y)
    before = result.predict_proba(QUERIES)
    with pytest.raises(I2CLError):
        result.set_params(template="{text}").fit(X, Y)
    result.set_params(template=TASK.template)
    assert np.array_equal(result.predict_proba(QUERIES), before)


def test_default_method_is_anchored_unless_an_option_needs_i2cl():
    made = I2CLClassifier(reference(), shots=1, evaluate=0).fit(X, Y)
    assert made.injection_.settings["method"] == "anchored"
    named = made.set_params(recipe="fast", settings={"passes": 1}).fit(X, Y)
    assert named.injection_.settings["passes"] == 1


@pytest.mark.parametrize(("classes", "none"), [(None, ""), ([3, 1, 4, 2], -1), ([3.0, 1.0, 4.0, 2.0], -1)])
def test_predict_returns_placeholder_below_min_confidence(classes, none):
    labels, y = None, Y
    if classes is not None:
        labels = dict(zip(classes, TASK.labels, strict=True))
        y = [classes[TASK.labels.index(word)] for word in Y]
    result = quick(labels=labels).fit(X, y)
    plain, best = result.predict(QUERIES), result.predict_proba(QUERIES).max(-1)
    middle = float(np.sort(best)[len(best) // 2])
    sure = clone(result).set_params(min_confidence=middle).fit(X, y)
    answers = sure.predict(QUERIES)
    assert answers.tolist() == np.where(best >= middle, plain, none).tolist()
    assert 0 < np.sum(answers == none) < len(QUERIES)
    assert np.array_equal(sure.predict_proba(QUERIES), result.predict_proba(QUERIES))
    right = np.where(best >= middle, plain == plain, False).mean()
    assert sure.score(QUERIES, plain) == right  # what gets no class counts as wrong
    assert result.set_params(min_confidence=middle).predict(QUERIES).tolist() == answers.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_placeholder_of_unsigned_classes_is_minus_one(dtype):
    y = np.array([TASK.labels.index(word) % 2 for word in Y]).astype(dtype)
    words = dict(zip(np.unique(y).tolist(), TASK.labels[:2], strict=True))
    result = quick(labels=words, min_confidence=1.0).fit(X, y)
    assert set(result.predict(QUERIES).tolist()) <= {-1, 0, 1}
    assert -1 in result.predict(QUERIES)


def test_class_equal_to_placeholder_is_rejected():
    words = dict(zip([-1, 1, 2, 3], TASK.labels, strict=True))
    y = [[-1, 1, 2, 3][TASK.labels.index(word)] for word in Y]
    result = quick(labels=words).fit(X, y)
    assert -1 in result.predict(QUERIES)
    message = r"^-1 is a class, but min_confidence uses it for 'no prediction': "
    raises(message, result.set_params(min_confidence=0.5).predict, QUERIES)


@pytest.mark.parametrize("least", [0.0, -1.0, 1.5, float("nan")])
def test_invalid_min_confidence_is_rejected_by_fit_and_predict(least):
    message = r"^min_confidence .* is not a probability: give a number above 0, up to 1$"
    raises(message, quick(min_confidence=least).fit, X, Y)
    later = copy.copy(fitted()).set_params(min_confidence=least)
    raises("is not a probability", later.predict, QUERIES)


def test_model_is_left_as_found(decoder):
    next(decoder.model.train().parameters()).requires_grad_(False)
    decoder.tokenizer.padding_side = "left"
    with left_as_found(decoder.model):
        result = quick(model=decoder).fit(X, Y)
        result.predict_proba(QUERIES)
        with pytest.raises(I2CLError):
            result.predict([""])
    assert decoder.tokenizer.padding_side == "left"


def test_default_template_equals_command_line_default():
    assert I2CLClassifier().template == default_template("rows.csv") == DEFAULT_TEMPLATE


def test_shots_above_class_size_use_all_rows_and_warn():
    rows = [*[at for at, word in enumerate(Y) if word == "red"][:3], Y.index("blue"), Y.index("green")]
    with pytest.warns(FewRowsWarning, match=r"fewer than 2 rows, all of which are used: blue \(1\), green"):
        result = quick(shots=2).fit([X[at] for at in rows], [Y[at] for at in rows])
    assert result.injection_.demonstrations == 4
