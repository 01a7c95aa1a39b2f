"""I2CLClassifier kept and carried: clones, searches, pickles, folders, processes, and a shared model."""

import copy
import gc
import io
import json
import os
import pickle
from unittest.mock import Mock

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from fitting import raises
from i2cl import Decoder, Injection
from i2cl.interfaces.sklearn import I2CLClassifier, shared
from i2cl.methods import make_injector
from interfaces.test_classifier import QUERIES, QUICK, TASK, X, Y, fitted, quick, reference
from processes import finished
from tiny import tiny_folder, tiny_model, tiny_tokenizer


def test_cross_validation_loads_a_named_model_once(tmp_path, monkeypatch):
    tiny_folder(tmp_path)
    load = Mock(wraps=Decoder.from_pretrained)
    monkeypatch.setattr(shared.Decoder, "from_pretrained", load)
    classifier = I2CLClassifier(tmp_path, shots=1, settings=QUICK, evaluate=0)
    assert len(cross_val_score(classifier, X, Y, cv=3)) == 3
    assert [call.args for call in load.call_args_list] == [(str(tmp_path),)]


def test_named_model_is_freed_after_the_last_reference(tmp_path):
    folders = [tiny_folder(tmp_path / name) for name in ("one", "two")]
    first = shared.shared_decoder(folders[0])
    assert shared.shared_decoder(str(folders[0])) is first
    second = shared.shared_decoder(folders[1])
    assert shared.shared_decoder(folders[0]) is first  # still held here
    del first, second
    shared.shared_decoder("reference")
    gc.collect()
    assert not {name for name, *_ in shared._ALIVE} & {str(folder) for folder in folders}


def test_folder_does_not_shadow_bundled_model_and_changed_folder_is_reloaded(tmp_path, monkeypatch):
    (tmp_path / "reference").mkdir()
    monkeypatch.chdir(tmp_path)
    assert shared.shared_decoder("reference").base.name == "reference"
    tiny_folder(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # a dangling link
    before = shared.shared_decoder(tmp_path)
    assert before.layers == 2
    tiny_model("llama", seed=1).save_pretrained(tmp_path)
    assert shared.shared_decoder(tmp_path).base.difference(before.base).startswith("weights")


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
    """Run a grid search in a pipeline; return scores, answers, and whether the best one holds the model."""
    strip = FunctionTransformer(np.char.strip)
    classifier = I2CLClassifier(reference(), method="anchored", experts=("llm",), evaluate=0)
    pipeline = make_pipeline(strip, classifier)
    grid = {"i2clclassifier__shots": [1, 2], "i2clclassifier__settings": [{"steps": 1, "say_label": False}]}
    search = GridSearchCV(pipeline, grid, cv=2, **how).fit(np.array(X[:32]), Y[:32])
    scores = search.cv_results_["mean_test_score"].tolist()
    return [scores, search.best_estimator_[-1].model is reference(), search.predict(QUERIES).tolist()]


IN_PROCESSES = """
import json, sys, joblib
from interfaces.test_classifier_kept import searched
with joblib.parallel_config("multiprocessing"):  # forks; loky would start new interpreters
    json.dump(searched(n_jobs=2), sys.stdout)
"""


def test_grid_search_over_processes_in_a_pipeline():
    code, result, errors = finished(IN_PROCESSES)
    assert code == 0, errors
    here = searched()
    assert json.loads(result) == here
    assert here[1]


@pytest.mark.parametrize("module", [pickle, joblib], ids=["pickle", "joblib"])
def test_pickle_contains_no_weights(module):
    carried = io.BytesIO()
    module.dump(fitted(), carried)
    injection = fitted().injection_
    tensors = injection.context.nbytes + injection.coefficients.nbytes
    for expert in injection.head.experts:
        tensors += sum(tensor.nbytes for tensor in expert.tensors().values())
    assert carried.tell() < tensors + 6000
    carried.seek(0)
    result = module.load(carried)
    assert result.model == reference().base
    assert not hasattr(result, "_loaded_decoder")  # nothing is loaded yet
    assert np.array_equal(result.predict_proba(QUERIES), fitted().predict_proba(QUERIES))
    assert clone(result).fit(X, Y).predict(QUERIES).tolist() == fitted().predict(QUERIES).tolist()


def test_pickle_loads_in_a_new_process(tmp_path):
    joblib.dump(fitted(), tmp_path / "classifier")
    program = (
        "import joblib, sys; loaded = joblib.load(sys.argv[1]); "
        "assert 'model' in repr(loaded); print(*loaded.predict(sys.argv[2:]))"
    )
    code, message, errors = finished(program, tmp_path / "classifier", *QUERIES)
    assert code == 0, errors
    assert message.split() == fitted().predict(QUERIES).tolist()


def test_pickle_keeps_the_precision(tmp_path):
    tiny_folder(tmp_path)
    half = quick(model=Decoder.from_pretrained(str(tmp_path), dtype="bfloat16")).fit(X, Y)
    result = pickle.loads(pickle.dumps(half))
    assert result.dtype == "bfloat16"
    assert np.array_equal(result.decision_function(QUERIES), half.decision_function(QUERIES))


def test_changed_model_under_the_same_name_is_rejected(tmp_path):
    tiny_folder(tmp_path)
    by_name = quick(model=str(tmp_path)).fit(X, Y)
    by_model = quick(model=Decoder.from_pretrained(str(tmp_path))).fit(X, Y)
    unfitted = quick(model=Decoder.from_pretrained(str(tmp_path)))
    carried = [pickle.dumps(one) for one in (by_name, by_model, unfitted)]
    tiny_model("llama", seed=1).save_pretrained(tmp_path)
    named, given, plain = map(pickle.loads, carried)
    raises(r"made on .* \(weights", named.predict, QUERIES)
    for use in (lambda: given.predict(QUERIES), lambda: plain.fit(X, Y)):
        raises(r"has changed since the fit \(weights", use)


def test_pickled_in_memory_model_must_be_passed_again():
    decoder = Decoder(tiny_model("llama"), tiny_tokenizer(), name="./tiny-llama")
    result = pickle.loads(pickle.dumps(quick(model=decoder).fit(X, Y)))
    raises(r"tiny-llama.*set_params\(model=...\)", result.predict, QUERIES)
    result.set_params(model=decoder)
    assert result.predict(QUERIES).tolist() == quick(model=decoder).fit(X, Y).predict(QUERIES).tolist()


def test_saved_classifier_predicts_the_same_after_loading(tmp_path):
    ids = [TASK.labels.index(word) for word in Y]
    words = dict(enumerate(TASK.labels))
    made = quick(shots=2, labels=words, recipe="released").fit(X, ids)
    made.save_pretrained(tmp_path / "mood")
    result = I2CLClassifier.from_pretrained(tmp_path / "mood")
    assert result.classes_.tolist() == [0, 1, 2, 3]
    assert result.shots == 2
    assert np.array_equal(result.predict_proba(QUERIES), made.predict_proba(QUERIES))
    again = clone(result).fit(X, ids)
    assert torch.equal(again.injection_.coefficients, made.injection_.coefficients)
    plain = Injection.from_pretrained(tmp_path / "mood")
    assert plain.predict(reference(), QUERIES) == [words[label] for label in made.predict(QUERIES)]


@pytest.mark.parametrize("own", [{}, {"encoder": "words", "embeddings_c": 3.0}], ids=["anchored", "encoder"])
def test_loaded_anchored_classifier_can_be_refitted(tmp_path, words_encoder, own):
    options = {"steps": 1} | own
    made = quick(settings=options, recipe=None).fit(X, Y)
    made.save_pretrained(tmp_path / "mood")
    result = I2CLClassifier.from_pretrained(tmp_path / "mood", model=reference())
    assert result.method == "anchored"
    assert result.experts == (["llm", "embeddings", "tfidf"] if own else ["llm", "tfidf"])
    assert result.settings.items() >= options.items()
    np.testing.assert_allclose(result.predict_proba(QUERIES), made.predict_proba(QUERIES), atol=1e-6)
    again = clone(result).set_params(evaluate=0).fit(X, Y)
    assert torch.equal(again.injection_.context, made.injection_.context)
    assert np.array_equal(again.predict_proba(QUERIES), made.predict_proba(QUERIES))


def test_loaded_injection_with_changed_settings_can_be_refitted(tmp_path):
    fitted().injection_.with_report(settings={"combined": []}).save_pretrained(tmp_path / "both")
    result = I2CLClassifier.from_pretrained(tmp_path / "both", model=reference())
    assert result.settings is None
    again = clone(result).set_params(settings=QUICK, shots=1).fit(X, Y)
    assert again.predict(QUERIES).shape == (len(QUERIES),)
    make_injector(result.method, result.settings, result.recipe)  # its own settings are known options


def test_grid_search_over_numpy_numbers_can_be_saved(tmp_path):
    best = quick(shots=np.arange(1, 3)[0]).fit(X, Y)
    best.save_pretrained(tmp_path / "best")
    stored = json.loads((tmp_path / "best" / "injection.json").read_text())
    assert '"shots": 1' in json.dumps(stored)


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

FITTED = """
import multiprocessing, os, sys, threading, torch
from i2cl import I2CLClassifier

X = ["the soup was cold", "stale bread again", "lovely warm bread", "a fine meal"]
Y = ["bad", "bad", "good", "good"]
torch.set_num_threads(2)
settings = {"steps": 1, "say_label": False}
classifier = I2CLClassifier("reference", settings=settings).fit(X, Y)
here = classifier.predict(X).tolist()

def predict():
    return classifier.predict(X).tolist()

def refit():
    return I2CLClassifier("reference", settings=settings).fit(X, Y).predict(X).tolist()
"""


IN_CHILDREN = f"""{FITTED}
import json
from i2cl.models.restore import frozen
from transformers.utils.logging import is_progress_bar_enabled

print("fitted", is_progress_bar_enabled(), file=sys.stderr, flush=True)

def tell(name, value):
    print(json.dumps([name, value]), flush=True)

for work in (predict, refit):
    target = lambda: tell(work.__name__, work() == here)
    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    child.join(100)
    child.kill()
if os.fork() == 0:
    tell("child", [predict() == here, torch.get_num_threads()])
    os._exit(0)
os.wait()
tell("parent", torch.get_num_threads())

model, entered, leave = classifier._loaded_decoder.model, threading.Event(), threading.Event()

def borrow():
    with frozen(model):
        entered.set()
        leave.wait()

thread = threading.Thread(target=borrow)
thread.start()
entered.wait()
if os.fork() == 0:
    try:
        predict()
    except ValueError as error:
        tell("during use", str(error))
    os._exit(0)
os.wait()
leave.set()
thread.join()
tell("after use", predict() == here)
"""


@pytest.fixture(scope="module")
def children():
    """Fit in one process, fork it, and return the printed values by name, and stderr."""
    code, out, errors = finished(IN_CHILDREN, OMP_NUM_THREADS="2")
    assert code == 0, errors
    return dict(map(json.loads, out.splitlines())), errors


@FORKS
@pytest.mark.parametrize("work", ["predict", "refit"])
def test_forked_process_can_predict_and_fit(children, work):
    printed, errors = children
    assert printed.get(work), errors


@FORKS
def test_forked_worker_predicts_on_one_thread(children):
    printed, errors = children
    assert (printed["child"], printed["parent"]) == ([True, 1], 2), errors


@FORKS
def test_fork_during_use_of_the_model_raises_in_the_child(children):
    printed, errors = children
    message = "this process was forked while another thread was using the model: load it"
    assert printed["during use"].startswith(message), errors
    assert printed["after use"]


@FORKS
def test_fit_prints_nothing_and_leaves_progress_bars_enabled(children):
    printed, errors = children
    assert errors.partition("fitted")[0] == ""
    assert errors.splitlines()[0] == "fitted True"
    assert set(printed) == {"predict", "refit", "child", "parent", "during use", "after use"}


MODEL_DELETED = f"""{FITTED.replace('"reference"', "sys.argv[1], verbose=True")}
import shutil
classifier.save_pretrained(sys.argv[2])
shutil.rmtree(sys.argv[1])
loaded = I2CLClassifier.from_pretrained(sys.argv[2])
try:
    loaded.predict(X)
except ValueError as error:
    print(error)
print(loaded.set_params(model=classifier._loaded_decoder).predict(X).tolist() == here)
"""


@pytest.fixture(scope="module")
def model_deleted(tmp_path_factory):
    """Output of a process that shows its progress, and whose model is deleted after the fit."""
    folder = tmp_path_factory.mktemp("deleted")
    return finished(MODEL_DELETED, tiny_folder(folder / "model"), folder / "task")


def test_verbose_shows_loading_progress(model_deleted):
    assert "Loading weights" in model_deleted[2]


def test_missing_model_of_saved_task_is_reported_at_first_prediction(model_deleted):
    code, out, errors = model_deleted
    message, same = out.splitlines()
    assert "does not exist" in message
    assert "set_params(model=...)" in message
    assert (code, same) == (0, "True"), errors
