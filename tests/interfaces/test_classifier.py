"""I2CLClassifier against scikit-learn's own checks and tools, and against the injection it wraps."""

import copy
import gc
import json
import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from i2cl import (
    AnchoredConfig,
    CalibrationConfig,
    Decoder,
    Example,
    I2CLError,
    Injection,
    anchor,
    calibrate,
    extract,
    load_task,
    with_label_prior,
    with_temperature,
)
from processes import finished
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import joblib
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import check_is_fitted, validate_data

from i2cl.interfaces.sklearn import I2CLClassifier, shared
from i2cl.methods import calibrating_method
from tiny import tiny_folder

TASK = load_task("mood-colour-1")
X = [example.text for example in TASK.train[:60]]
Y = [TASK.labels[example.label] for example in TASK.train[:60]]
QUERIES = [example.text for example in TASK.test[:20]]
QUICK = {"epochs": 1}


@cache
def reference():
    return Decoder.from_pretrained("reference")


def quick(**parameters):
    return I2CLClassifier(**{"model": reference(), "shots": 1, "settings": QUICK, "evaluate": 0} | parameters)


@cache
def fitted():
    return I2CLClassifier(reference(), shots=5, recipe="fast").fit(X, Y)


def state_of(decoder):
    model = decoder.model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    return weights, hooks, flags, decoder.tokenizer.padding_side


# What scikit-learn checks itself


class OnNumbers(I2CLClassifier):
    """Spells rows of numbers out as texts, since scikit-learn's checks know no others."""

    def fit(self, rows, y):
        return super().fit(spelled(validate_data(self, rows)), y)

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
FAILING = {
    "check_methods_subset_invariance": "other batches round differently: 1e-6 apart where 1e-7 is asked"
}


@parametrize_with_checks(
    [OnNumbers("reference", shots=1, settings=QUICK, evaluate=0, labels=WORDS | NAMES)],
    expected_failed_checks=lambda _: FAILING,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def test_its_tags_say_text():
    tags = quick().__sklearn_tags__()
    assert tags.input_tags.string
    assert not tags.input_tags.two_d_array


# It is the injection


def test_it_is_what_extract_and_calibrate_make():
    decoder = reference()
    found = fitted()
    task = replace(TASK, labels=tuple(sorted(TASK.labels)), train=(), test=())
    rows = [Example(text, task.labels.index(word)) for text, word in zip(X, Y, strict=True)]
    shown = replace(task, train=tuple(rows)).sample(5, 0)
    context = extract(decoder, task, shown)
    injection = calibrate(decoder, task, shown, context, CalibrationConfig.recipe("fast"), seed=0)
    assert found.classes_.tolist() == list(task.labels)
    assert torch.equal(found.injection_.coefficients, injection.coefficients)
    injection = with_temperature(injection, found.injection_.temperature)  # chosen on rows that shots left
    scores = injection.scores(decoder, QUERIES).double()
    assert np.allclose(found.predict_log_proba(QUERIES), scores.log_softmax(-1).numpy())
    assert np.array_equal(found.decision_function(QUERIES), scores.numpy())
    assert found.predict(QUERIES).tolist() == injection.predict(decoder, QUERIES)


def test_another_method_and_unlabelled_texts(tmp_path):
    unlabelled = [example.text for example in TASK.train[-64:]]
    chosen = {"method": "anchored", "settings": {"steps": 2}, "unlabelled": unlabelled}
    found = quick(shots=5, evaluate=8, **chosen).fit(X, Y)
    task = replace(TASK, labels=tuple(found.classes_), test=())
    rows = [Example(text, task.labels.index(word)) for text, word in zip(X, Y, strict=True)]
    shown = replace(task, train=tuple(rows)).sample(5, 0)
    plain = anchor(reference(), task, shown, AnchoredConfig(steps=2))
    injection = with_label_prior(plain, reference(), unlabelled)
    assert torch.equal(found.injection_.context.values, injection.context.values)
    injection = with_temperature(injection, found.injection_.temperature)
    assert np.allclose(found.decision_function(QUERIES), injection.scores(reference(), QUERIES).numpy())
    assert "anchored+label_prior" in found.report_["methods"]
    found.save_pretrained(tmp_path / "out")
    again = I2CLClassifier.from_pretrained(tmp_path / "out", model=reference())
    assert (again.method, again.settings["steps"]) == ("anchored", 2)
    assert np.array_equal(again.predict(QUERIES), found.predict(QUERIES))


def test_it_learns_the_task():
    gold = [TASK.labels[example.label] for example in TASK.test[:200]]
    texts = [example.text for example in TASK.test[:200]]
    assert fitted().score(texts, gold) > 0.95
    assert np.allclose(fitted().predict_proba(texts).sum(-1), 1)


def test_all_training_texts_are_shown_unless_shots_says_less():
    assert quick(shots=None).fit(X[:30], Y[:30]).injection_.context.demonstrations == 30
    assert quick(shots=2).fit(X, Y).injection_.context.demonstrations == 8


def test_seeds():
    one, same, other = (quick(random_state=seed).fit(X, Y).injection_ for seed in (1, 1, 2))
    assert torch.equal(one.coefficients, same.coefficients)
    assert not torch.equal(one.context.values, other.context.values)
    drawn = quick(random_state=np.random.RandomState(5)).fit(X, Y).injection_.seed
    assert drawn == np.random.RandomState(5).randint(2**31 - 1)


def test_classes_of_any_kind_with_words_of_their_own():
    ids = np.array([TASK.labels.index(word) for word in Y]) * 10
    words = {10 * place: word for place, word in enumerate(TASK.labels)}
    by_id = I2CLClassifier(reference(), shots=5, recipe="fast", labels=words | {99: "unused"}).fit(X, ids)
    assert by_id.classes_.tolist() == [0, 10, 20, 30]
    assert by_id.injection_.task.labels == TASK.labels
    assert [words[found] for found in by_id.predict(QUERIES).tolist()] == fitted().predict(QUERIES).tolist()


def test_two_classes_have_log_odds():
    pair = [(x, y) for x, y in zip(X, Y, strict=True) if y in {"red", "blue"}]
    found = quick().fit(*zip(*pair, strict=True))
    odds = found.decision_function(QUERIES)
    log = found.predict_log_proba(QUERIES)
    assert np.allclose(odds, log[:, 1] - log[:, 0])
    assert found.predict(QUERIES).tolist() == found.classes_[(odds > 0).astype(int)].tolist()


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "object", "series", "string series"])
def test_texts_come_in_many_containers(kind):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    made = {
        "list": list,
        "tuple": tuple,
        "array": np.array,
        "object": lambda values: np.array(values, dtype=object),
        "series": lambda values: pandas.Series(values, index=range(100, 100 + len(values)), dtype=object),
        "string series": lambda values: pandas.Series(values, dtype="string"),
    }[kind]
    found = quick().fit(made(X), made(Y))
    assert np.array_equal(
        found.decision_function(made(QUERIES)), quick().fit(X, Y).decision_function(QUERIES)
    )


# Whether it pays


def test_it_reports_on_the_texts_that_shots_left_over():
    found = I2CLClassifier(reference(), shots=2, recipe="fast", settings={"passes": 20}).fit(X, Y)
    report = found.report_
    assert (report["rows"], report["split"]) == (len(X) - 8, "train")
    assert list(report["methods"]) == ["zero_shot", "zero_shot+batch_calibration", "few_shot", "i2cl"]
    task = replace(TASK, labels=tuple(found.classes_), test=())
    rows = [Example(text, task.labels.index(word)) for text, word in zip(X, Y, strict=True)]
    shown = {row.text for row in replace(task, train=tuple(rows)).sample(2, 0)}
    left = [(text, word) for text, word in zip(X, Y, strict=True) if text not in shown]
    assert report["methods"]["i2cl"]["accuracy"] == found.score(*zip(*left, strict=True))
    assert report["methods"]["zero_shot"]["fit_seconds"] < report["methods"]["i2cl"]["fit_seconds"]
    assert json.dumps(report) == json.dumps(pickle.loads(pickle.dumps(found)).report_)


def test_there_is_no_report_where_no_text_is_left_or_none_is_wanted(tmp_path):
    assert quick(shots=None, evaluate=160).fit(X[:12], Y[:12]).report_ is None
    rows = [at for word in sorted(set(Y)) for at in [at for at, one in enumerate(Y) if one == word][:3]]
    texts, words = [X[at] for at in rows], [Y[at] for at in rows]
    refitted = quick(shots=None, evaluate=160, folds=2).fit(texts, words)
    assert refitted.report_["rows"] == len(set(texts))
    assert refitted.report_["split"] == "demonstrations"
    assert refitted.injection_.temperature != 1
    with pytest.raises(I2CLError, match="folds=1"):
        quick(folds=1).fit(X, Y)
    found = quick(evaluate=0).fit(X, Y)
    assert found.report_ is None
    found.save_pretrained(tmp_path / "out")
    assert I2CLClassifier.from_pretrained(tmp_path / "out").report_ is None
    assert quick(evaluate=7).fit(X, Y).report_["rows"] == 7
    with pytest.raises(I2CLError, match="-1 queries"):
        quick(evaluate=-1).fit(X, Y)
    with pytest.raises(NotFittedError):
        _ = quick(evaluate=7).report_


# Input that is not right


def wrong(x=None, y=None, **parameters):
    quick(**parameters).fit(X if x is None else x, Y if y is None else y)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"x": np.array([X, X]).T}, r"X has 2 dimensions.*frame\['text'\]"),
        ({"x": "one text"}, "X is one string: give a list"),
        ({"x": [[text] for text in X]}, "text 1 of X is a list and no string"),
        ({"x": [*X[:-1], None]}, "text 60 of X is a NoneType and no string"),
        ({"x": [*X[:-1], float("nan")]}, "text 60 of X is a float and no string"),
        ({"x": ["", *X[1:]]}, "text 1 is empty"),
        ({"x": [], "y": []}, "X holds no texts"),
        ({"x": iter(X)}, "X has 0 dimensions"),
        ({"y": Y[:-1]}, "X has 60 texts and y has 59 classes"),
        ({"y": ["red"] * 60}, "y holds one class alone, 'red'"),
        ({"y": [*Y[:-1], None]}, "y mixes classes of several types|y.*give each text one class"),
        ({"y": [0.5, 1.5] * 30}, "Unknown label type: continuous"),
        ({"y": [0, 1] * 30}, r"classes such as 0 are no words.*labels=\{0: 'word', ...\}"),
        ({"y": [0, 1] * 30, "labels": {0: "red"}}, "labels has no word for class 1: add it"),
        ({"labels": ["red", "blue"]}, "labels is a list: give a dict"),
        ({"y": [0, 1] * 30, "labels": {0: "red", 1: "red"}}, "label word 'red' is given twice"),
        ({"y": [0, 1] * 30, "labels": {0: "red", 1: " blue"}}, "label word ' blue' is empty or padded"),
        ({"shots": 50}, "class 'blue' has .* training examples but 50 shots"),
        ({"recipe": "quick"}, "unknown recipe 'quick': choose one of paper, released, fast"),
        ({"method": "anchored", "recipe": "fast", "settings": None}, "I2CL's: leave the recipe out"),
        ({"method": "icv"}, "unknown method 'icv': choose one of anchored, i2cl"),
        ({"settings": {"epoch": 3}}, "has the option 'epoch'"),
        ({"settings": {"epochs": "many"}}, "option epochs='many'"),
        ({"template": "{text}"}, r"\{label\} 0 times"),
        ({"model": "no/such/folder/here"}, r"does not exist.*set_params\(model=...\)"),
        ({"model": 3}, "model is a int: give a name, a folder or a Decoder"),
        ({"shots": 2.0}, "shots is 2.0: give a whole number, or None"),
        ({"shots": "2"}, "shots is '2'"),
        ({"scoring": "nope"}, "scoring is 'nope': choose one of auto, first_token, full"),
        ({"template": None}, "template is None: give a string with {text} and {label}"),
        ({"settings": [1]}, "settings is a list: give a dict"),
        ({"random_state": 2**70}, "random_state is .*63 bits"),
        ({"labels": dict.fromkeys(Y, 3)}, "labels has 3, which is no word"),
        ({"unlabelled": []}, "unlabelled holds no texts"),
        ({"unlabelled": "text"}, "unlabelled is one string"),
    ],
)
def test_bad_input_is_one_line(arguments, named):
    with pytest.raises(I2CLError, match=named) as caught:
        wrong(**arguments)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_tables_and_vectorised_texts_are_refused():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    from sklearn.feature_extraction.text import CountVectorizer

    with pytest.raises(I2CLError, match=r"frame\['text'\]"):
        wrong(pandas.DataFrame({"text": X}))
    with pytest.raises(I2CLError, match="X is a sparse matrix: give the texts themselves"):
        wrong(CountVectorizer().fit_transform(X))


@pytest.mark.parametrize("method", ["predict", "predict_proba", "decision_function"])
def test_nothing_works_before_fit(method):
    with pytest.raises(NotFittedError):
        getattr(quick(), method)(QUERIES)
    with pytest.raises(NotFittedError):
        quick().save_pretrained("nowhere")


def test_a_fitted_classifier_is_kept_when_a_later_fit_fails():
    found = quick().fit(X, Y)
    before = found.predict_proba(QUERIES)
    with pytest.raises(I2CLError):
        found.set_params(shots=50).fit(X, Y)
    assert np.array_equal(found.predict_proba(QUERIES), before)


# Model selection


def test_cross_validation_loads_a_named_model_once(tmp_path, monkeypatch):
    tiny_folder(tmp_path)
    loaded = []
    load = Decoder.from_pretrained

    def counted(name, **options):
        loaded.append(name)
        return load(name, **options)

    monkeypatch.setattr(shared.Decoder, "from_pretrained", counted)
    classifier = I2CLClassifier(tmp_path, shots=1, settings=QUICK)
    assert len(cross_val_score(classifier, X, Y, cv=3)) == 3
    assert loaded == [str(tmp_path)]


def test_a_named_model_is_freed_when_nobody_holds_it(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        tiny_folder(folder)
    first = shared.shared_decoder(folders[0])
    assert shared.shared_decoder(str(folders[0])) is first
    second = shared.shared_decoder(folders[1])
    assert shared.shared_decoder(folders[0]) is first  # still held here
    del first, second
    shared.shared_decoder("reference")
    gc.collect()
    assert not {name for name, *_ in shared._ALIVE} & {str(folder) for folder in folders}


def test_a_folder_of_that_name_does_not_hide_the_bundled_model(tmp_path, monkeypatch):
    (tmp_path / "reference").mkdir()
    monkeypatch.chdir(tmp_path)
    assert shared.shared_decoder("reference").base.name == "reference"


def test_a_folder_with_a_dangling_link_can_be_loaded(tmp_path):
    tiny_folder(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert shared.shared_decoder(tmp_path).layers == 2


def test_a_folder_that_has_changed_is_loaded_anew(tmp_path):
    tiny_folder(tmp_path)
    before = shared.shared_decoder(tmp_path)
    tiny_model("llama", seed=1).save_pretrained(tmp_path)
    after = shared.shared_decoder(tmp_path)
    assert after.base.difference(before.base).startswith("weights")


def test_clones_share_the_model():
    decoder = reference()
    copied = clone(quick())
    assert copied.model is decoder
    assert not hasattr(copied, "injection_")
    assert copied.get_params() == quick().get_params()
    assert copied.set_params(shots=3).shots == 3
    for twin in (copy.copy(fitted()), copy.deepcopy(fitted())):
        assert twin.model is decoder
        assert twin.predict(QUERIES).tolist() == fitted().predict(QUERIES).tolist()
    assert copy.deepcopy(fitted()).injection_.coefficients is not fitted().injection_.coefficients


def searched(**how):
    """Scores of a grid search in a pipeline, whether its best one holds the model itself, and its answers."""
    strip = FunctionTransformer(np.char.strip)
    pipeline = make_pipeline(strip, I2CLClassifier(reference(), method="anchored", evaluate=0))
    grid = {"i2clclassifier__shots": [1, 5], "i2clclassifier__settings": [{"steps": 2}]}
    search = GridSearchCV(pipeline, grid, cv=2, **how).fit(np.array(X), Y)
    scores = search.cv_results_["mean_test_score"].tolist()
    return [scores, search.best_estimator_[-1].model is reference(), search.predict(QUERIES).tolist()]


IN_PROCESSES = """
import json, sys, joblib
from interfaces.test_classifier import searched
with joblib.parallel_config("multiprocessing"):  # forks, where loky would start Python anew
    json.dump(searched(n_jobs=2), sys.stdout)
"""


def test_a_grid_search_over_processes_in_a_pipeline():
    code, found, errors = finished(IN_PROCESSES)
    assert code == 0, errors
    here = searched()
    assert json.loads(found) == here
    assert here[1]


# Kept and carried


@pytest.mark.parametrize("how", ["pickle", "joblib"])
def test_a_pickle_holds_no_weights(tmp_path, how):
    if how == "pickle":
        carried = pickle.dumps(fitted())
        found = pickle.loads(carried)
    else:
        joblib.dump(fitted(), tmp_path / "classifier")
        carried = (tmp_path / "classifier").read_bytes()
        found = joblib.load(tmp_path / "classifier")
    tensors = fitted().injection_.context.values.nbytes + fitted().injection_.coefficients.nbytes
    assert len(carried) < tensors + 5000
    assert found.model == reference().base
    assert not hasattr(found, "_held")  # nothing is loaded yet
    assert np.array_equal(found.predict_proba(QUERIES), fitted().predict_proba(QUERIES))
    assert clone(found).fit(X, Y).predict(QUERIES).tolist() == fitted().predict(QUERIES).tolist()


def test_a_pickle_works_in_a_fresh_process(tmp_path):
    joblib.dump(fitted(), tmp_path / "classifier")
    program = (
        "import joblib, sys; found = joblib.load(sys.argv[1]); "
        "assert 'model' in repr(found); print(*found.predict(sys.argv[2:]))"
    )
    code, told, errors = finished(program, tmp_path / "classifier", *QUERIES)
    assert code == 0, errors
    assert told.split() == fitted().predict(QUERIES).tolist()


def test_precision_travels_with_a_pickle(tmp_path):
    tiny_folder(tmp_path)
    half = I2CLClassifier(Decoder.from_pretrained(str(tmp_path), dtype="bfloat16"), shots=1, settings=QUICK)
    half.fit(X, Y)
    found = pickle.loads(pickle.dumps(half))
    assert found.dtype == "bfloat16"
    assert np.array_equal(found.decision_function(QUERIES), half.decision_function(QUERIES))


def test_another_model_under_the_same_name_is_refused(tmp_path):
    tiny_folder(tmp_path)
    by_name = I2CLClassifier(str(tmp_path), shots=1, settings=QUICK).fit(X, Y)
    by_model = quick(model=Decoder.from_pretrained(str(tmp_path))).fit(X, Y)
    unfitted = quick(model=Decoder.from_pretrained(str(tmp_path)))
    carried = [pickle.dumps(one) for one in (by_name, by_model, unfitted)]
    tiny_model("llama", seed=1).save_pretrained(tmp_path)
    with pytest.raises(I2CLError, match=r"made on .* \(weights"):
        pickle.loads(carried[0]).predict(QUERIES)
    with pytest.raises(I2CLError, match=r"is not the model it was \(weights"):
        pickle.loads(carried[1]).predict(QUERIES)
    with pytest.raises(I2CLError, match=r"is not the model it was \(weights"):
        pickle.loads(carried[2]).fit(X, Y)


def test_a_model_in_memory_alone_is_given_again():
    decoder = Decoder(tiny_model("llama"), tiny_tokenizer(), name="./tiny-llama")
    found = pickle.loads(pickle.dumps(quick(model=decoder).fit(X, Y)))
    with pytest.raises(I2CLError, match=r"tiny-llama.*set_params\(model=...\)"):
        found.predict(QUERIES)
    found.set_params(model=decoder)
    assert found.predict(QUERIES).tolist() == quick(model=decoder).fit(X, Y).predict(QUERIES).tolist()


def test_saved_and_loaded(tmp_path):
    ids = [TASK.labels.index(word) for word in Y]
    words = dict(enumerate(TASK.labels))
    made = I2CLClassifier(reference(), shots=2, labels=words, recipe="released", settings=QUICK).fit(X, ids)
    made.save_pretrained(tmp_path / "mood")
    found = I2CLClassifier.from_pretrained(tmp_path / "mood")
    assert found.classes_.tolist() == [0, 1, 2, 3]
    assert found.shots == 2
    assert np.array_equal(found.predict_proba(QUERIES), made.predict_proba(QUERIES))
    again = clone(found).fit(X, ids)
    assert torch.equal(again.injection_.coefficients, made.injection_.coefficients)
    plain = Injection.from_pretrained(tmp_path / "mood")
    assert plain.predict(reference(), QUERIES) == [words[label] for label in made.predict(QUERIES)]


def test_it_is_anchored_where_nothing_of_i2cl_is_asked_for():
    made = I2CLClassifier(reference(), shots=1, evaluate=0).fit(X, Y)
    assert made.injection_.settings["method"] == "anchored"
    named = made.set_params(recipe="fast", settings={"passes": 1}).fit(X, Y)
    assert named.injection_.settings["passes"] == 1


def test_a_classifier_of_an_injection_with_other_settings_can_be_fitted(tmp_path):
    combined = replace(fitted().injection_, settings={"combined": []})
    combined.save_pretrained(tmp_path / "both")
    found = I2CLClassifier.from_pretrained(tmp_path / "both", model=reference())
    assert "epochs" not in found.settings
    again = clone(found).set_params(settings=QUICK, shots=1).fit(X, Y)
    assert again.predict(QUERIES).shape == (len(QUERIES),)
    calibrating_method(found.method, found.settings, found.recipe)  # its own settings are known options


def test_an_injection_is_a_classifier_of_its_label_words(tmp_path):
    injection = replace(fitted().injection_, settings={})
    backwards = replace(injection.task, labels=TASK.labels)
    assert list(TASK.labels) != sorted(TASK.labels)
    replace(injection, task=backwards).save_pretrained(tmp_path / "mood")
    found = I2CLClassifier.from_pretrained(tmp_path / "mood", model=reference())
    assert found.classes_.tolist() == sorted(TASK.labels)
    assert found.predict(QUERIES).tolist() == fitted().predict(QUERIES).tolist()
    assert np.array_equal(found.predict_proba(QUERIES), fitted().predict_proba(QUERIES))


def test_a_label_bias_follows_its_labels(tmp_path):
    bias = tuple(50.0 * (word == "red") for word in TASK.labels)
    assert list(TASK.labels) != sorted(TASK.labels)
    injection = replace(fitted().injection_, task=replace(fitted().injection_.task, labels=TASK.labels))
    injection = replace(injection, settings={}, label_bias=bias)
    injection.save_pretrained(tmp_path / "mood")
    found = I2CLClassifier.from_pretrained(tmp_path / "mood", model=reference())
    wanted = injection.scores(reference(), QUERIES).softmax(-1).numpy()
    order = [TASK.labels.index(word) for word in found.classes_]
    np.testing.assert_allclose(found.predict_proba(QUERIES), wanted[:, order], rtol=1e-5)
    assert set(found.predict(QUERIES)) == {"red"} != set(fitted().predict(QUERIES))


@pytest.mark.parametrize(("classes", "none"), [(None, ""), ([3, 1, 4, 2], -1), ([3.0, 1.0, 4.0, 2.0], -1)])
def test_below_min_confidence_predict_gives_no_class(classes, none):
    labels, y = None, Y
    if classes is not None:
        labels = dict(zip(classes, TASK.labels, strict=True))
        y = [classes[TASK.labels.index(word)] for word in Y]
    found = quick(labels=labels).fit(X, y)
    plain, best = found.predict(QUERIES), found.predict_proba(QUERIES).max(-1)
    middle = float(np.sort(best)[len(best) // 2])
    sure = clone(found).set_params(min_confidence=middle).fit(X, y)
    answers = sure.predict(QUERIES)
    assert answers.tolist() == np.where(best >= middle, plain, none).tolist()
    assert 0 < np.sum(answers == none) < len(QUERIES)
    assert np.array_equal(sure.predict_proba(QUERIES), found.predict_proba(QUERIES))
    right = np.where(best >= middle, plain == plain, False).mean()
    assert sure.score(QUERIES, plain) == right  # what gets no class counts as wrong
    assert found.set_params(min_confidence=middle).predict(QUERIES).tolist() == answers.tolist()


def test_a_class_of_the_name_of_no_class_is_refused():
    words = dict(zip([-1, 1, 2, 3], TASK.labels, strict=True))
    y = [[-1, 1, 2, 3][TASK.labels.index(word)] for word in Y]
    found = quick(labels=words).fit(X, y)
    assert -1 in found.predict(QUERIES)
    with pytest.raises(I2CLError, match=r"^-1 is a class and what min_confidence answers: "):
        found.set_params(min_confidence=0.5).predict(QUERIES)


@pytest.mark.parametrize("least", [0.0, -1.0, 1.5, float("nan")])
def test_a_threshold_that_is_none_is_refused_at_fit_and_later(least):
    with pytest.raises(
        I2CLError, match=r"^min_confidence .* is no probability: give a number above 0, up to 1$"
    ):
        quick(min_confidence=least).fit(X, Y)
    later = copy.copy(fitted()).set_params(min_confidence=least)
    with pytest.raises(I2CLError, match="is no probability"):
        later.predict(QUERIES)


def test_the_model_is_left_as_found(decoder):
    model = decoder.model.train()
    next(model.parameters()).requires_grad_(False)
    decoder.tokenizer.padding_side = "left"
    before = state_of(decoder)
    found = quick(model=decoder).fit(X, Y)
    found.predict_proba(QUERIES)
    with pytest.raises(I2CLError):
        found.predict([""])
    after = state_of(decoder)
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    assert after[1:] == before[1:]


def test_without_scikit_learn_the_cure_is_named():
    _, _, told = finished("import sys; sys.modules['sklearn'] = None; import i2cl; i2cl.I2CLClassifier")
    assert "I2CLError: I2CLClassifier needs the package scikit-learn: pip install 'i2cl[sklearn]'" in told


def test_a_grid_search_over_numpy_numbers_can_be_saved(tmp_path):
    best = quick(shots=np.arange(1, 3)[0]).fit(X, Y)
    best.save_pretrained(tmp_path / "best")
    stored = json.loads((tmp_path / "best" / "injection.json").read_text())
    assert '"shots": 1' in json.dumps(stored)
