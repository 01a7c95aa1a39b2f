"""Label words and class dtypes of I2CLClassifier, inside and outside scikit-learn's meta-estimators."""

import pickle

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import StackingClassifier, VotingClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

from fitting import raises
from i2cl import I2CLError
from i2cl.interfaces.sklearn import I2CLClassifier
from i2cl.interfaces.sklearn.inputs import label_words
from interfaces import test_classifier
from interfaces.test_classifier import QUERIES, TASK, quick, reference

X, Y = test_classifier.X[:32], test_classifier.Y[:32]
WORDS = sorted(TASK.labels)
LABELS = {"list": WORDS, "dict": {word: word for word in WORDS}, "dict of ids": dict(enumerate(WORDS))}
STEP = {"steps": 1, "say_label": False}


def one_step(labels=WORDS, **parameters):
    """A fast classifier that always has the same number of examples per class."""
    return quick(**{"settings": STEP, "labels": labels} | parameters)


def other():
    return make_pipeline(TfidfVectorizer(), LogisticRegression())


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_cover_string_classes_and_their_numbers(labels):
    by_name = one_step(labels).fit(X, Y)
    by_number = one_step(labels).fit(X, [WORDS.index(word) for word in Y])
    assert by_number.injection_.task.labels == by_name.injection_.task.labels == tuple(WORDS)
    assert np.array_equal(by_number.predict_proba(QUERIES), by_name.predict_proba(QUERIES))


@pytest.mark.parametrize(
    ("classes", "labels", "words"),
    [
        (["neg", "pos"], {"neg": "bad", "pos": "good"}, ("bad", "good")),
        ([0, 1], {"neg": "bad", "pos": "good"}, ("bad", "good")),
        ([0, 2], ["a", "b", "c"], ("a", "c")),
        ([0, 2], {"x": "a", "y": "b", "z": "c"}, ("a", "c")),
        (["x", "z"], {"x": "a", "y": "b", "z": "c"}, ("a", "c")),
        ([False, True], ["no", "yes"], ("no", "yes")),
        ([0.0, 1.0], ["no", "yes"], ("no", "yes")),
        ([0, 1], np.array(["no", "yes"]), ("no", "yes")),
        ([1, 2, 5], {1: "poor", 2: "fair", 5: "great"}, ("poor", "fair", "great")),
        ([0, 1, 2], {1: "poor", 2: "fair", 5: "great"}, ("poor", "fair", "great")),
    ],
)
def test_label_words(classes, labels, words):
    assert label_words(np.array(classes), labels) == words


@pytest.mark.parametrize(
    ("classes", "labels", "message"),
    [
        (["bad", "great"], ["bad", "good"], "no word for class 'great'"),
        (["neg", "pos"], ["good", "bad"], "for class 'neg': add it, or pass a dict from each class"),
        ([0, 3], ["a", "b", "c"], "ids 0 to 2, not for class 3"),
        ([0, 1], {0: "a", 2: "c"}, "no word for class 1"),
        (["neg", "pos"], {0: "bad", 1: "good"}, "no word for class 'neg'"),
    ],
)
def test_class_without_word_is_rejected_by_name(classes, labels, message):
    raises(message, label_words, np.array(classes), labels)


def test_cross_val_predict_probabilities_of_string_classes():
    proba = cross_val_predict(one_step(), X, Y, cv=2, method="predict_proba")
    np.testing.assert_allclose(proba.sum(1), 1)
    assert proba.shape == (len(X), len(WORDS))


@pytest.mark.parametrize("method", ["predict_proba", "decision_function"])
@pytest.mark.filterwarnings("ignore:The least populated class", "ignore:Number of classes in training fold")
def test_class_missing_in_a_fold_gets_no_probability_there(method):
    rows = [at for word in ("red", "blue", "green") for at, one in enumerate(Y) if one == word][:30]
    texts, words = [X[at] for at in rows] + ["a rare text"], [Y[at] for at in rows] + ["yellow"]
    scores = cross_val_predict(one_step(), texts, words, cv=2, method=method)
    assert scores[-1, WORDS.index("yellow")] == (0 if method == "predict_proba" else np.finfo(float).min)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda ours: VotingClassifier([("ours", ours), ("other", other())], voting="soft"),
        lambda ours: StackingClassifier([("ours", ours), ("other", other())], cv=2),
        lambda ours: CalibratedClassifierCV(ours, cv=2),
        OneVsRestClassifier,
    ],
    ids=["voting", "stacking", "calibrated", "one-vs-rest"],
)
def test_meta_estimators_fit_string_classes(wrap):
    assert set(wrap(one_step()).fit(X, Y).predict(QUERIES)) <= set(WORDS)


def test_loaded_classifier_fits_numbered_classes(tmp_path):
    one_step(labels=None).fit(X, Y).save_pretrained(tmp_path / "mood")
    loaded = I2CLClassifier.from_pretrained(tmp_path / "mood", model=reference())
    assert cross_val_predict(loaded, X, Y, cv=2, method="predict_proba").shape == (len(X), len(WORDS))


POSITIVE = np.array([word in {"red", "blue"} for word in Y])


def columns():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    strings = {"labels": WORDS}
    yield POSITIVE, "bool", {}
    yield POSITIVE.astype("int8"), "int8", {}
    yield POSITIVE.astype(object), "bool", {}
    yield POSITIVE.astype(int).astype(object), "int64", {}
    yield pandas.Series(POSITIVE, dtype="boolean"), "bool", {}
    yield pandas.Series(POSITIVE.astype(int), dtype="Int64"), "int64", {}
    yield pandas.Series(POSITIVE.astype(int), dtype="Int8"), "int8", {}
    yield pandas.array(POSITIVE, dtype="boolean"), "bool", {}
    yield pandas.Series(POSITIVE).astype("category"), "bool", {}
    yield pandas.Series(Y, dtype="string"), "object", strings
    yield pandas.Series(Y).astype("category"), "object", strings
    yield np.array(Y, dtype=object), "object", strings
    yield np.array(Y, dtype="<U9"), "<U9", strings
    yield Y, "<U6", strings


@pytest.mark.parametrize("column", range(14))
def test_classes_keep_their_dtype_when_pickled_or_saved(column, tmp_path):
    y, dtype, parameters = list(columns())[column]
    made = one_step(**{"labels": ["no", "yes"]} | parameters).fit(X, y)
    made.save_pretrained(tmp_path / "task")
    loaded = I2CLClassifier.from_pretrained(tmp_path / "task", model=reference())
    for classifier in (made, pickle.loads(pickle.dumps(made)), loaded):
        assert classifier.classes_.dtype == dtype
        assert classifier.predict(QUERIES[:2]).dtype == dtype
    assert loaded.predict(QUERIES).tolist() == made.predict(QUERIES).tolist()


def test_numpy_string_dtype_gives_string_classes():
    dtypes = pytest.importorskip("numpy.dtypes")
    made = one_step().fit(np.array(X, dtype=dtypes.StringDType()), np.array(Y, dtype=dtypes.StringDType()))
    assert made.classes_.tolist() == WORDS


@pytest.mark.parametrize("dtype", ["boolean", "Int64", "string", object])
def test_missing_class_is_reported_with_its_row(dtype):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    values = {"boolean": True, "Int64": 1}.get(dtype, "red")
    y = pandas.Series([values, values, pandas.NA] + [values] * (len(X) - 3), dtype=dtype)
    raises(r"^y has no class in row 3 \(missing value\): give each text one class$", one_step().fit, X, y)


@pytest.mark.parametrize("dtype", ["<U999999999", "O8,O8", "V8", "M8[D]"])
def test_artefact_with_invalid_class_dtype_is_rejected(tmp_path, dtype):
    made = one_step().fit(X, Y)
    made.injection_.settings["classifier"]["dtype"] = dtype
    made.save_pretrained(tmp_path / "task")
    with pytest.raises(I2CLError, match="unknown dtype"):
        I2CLClassifier.from_pretrained(tmp_path / "task")
