"""I2CLClassifier in forked children and threads, and what it prints."""

import os

import joblib
import pytest
from sklearn.model_selection import GridSearchCV

from interfaces.test_classifier import QUERIES, X, Y, quick, reference
from processes import finished
from tiny import tiny_folder

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

FITTED = """
import multiprocessing, os, sys, threading, torch
from i2cl import I2CLClassifier

X = ["the soup was cold", "stale bread again", "lovely warm bread", "a fine meal"]
Y = ["bad", "bad", "good", "good"]
torch.set_num_threads(2)
classifier = I2CLClassifier("reference", settings={"steps": 1}).fit(X, Y)
here = classifier.predict(X).tolist()

def predict():
    return classifier.predict(X).tolist()

def refit():
    return I2CLClassifier("reference", settings={"steps": 1}).fit(X, Y).predict(X).tolist()
"""


@FORKS
@pytest.mark.parametrize("work", ["predict", "refit"])
def test_forked_process_can_predict_and_fit(work):
    program = f"""{FITTED}
child = multiprocessing.get_context("fork").Process(target=lambda: print({work}() == here, flush=True))
child.start()
child.join(100)
child.kill()
"""
    code, out, errors = finished(program, OMP_NUM_THREADS="2")
    assert (code, out.strip()) == (0, "True"), errors


@FORKS
def test_forked_worker_predicts_on_one_thread():
    program = f"""{FITTED}
if os.fork() == 0:
    print(predict() == here, torch.get_num_threads(), flush=True)
    os._exit(0)
os.wait()
print(torch.get_num_threads())
"""
    code, out, errors = finished(program, OMP_NUM_THREADS="2")
    assert (code, out.split()) == (0, ["True", "1", "2"]), errors


@FORKS
def test_fork_during_use_of_the_model_raises_in_the_child():
    program = f"""{FITTED}
from i2cl.models.restore import frozen
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
        print(error, flush=True)
    os._exit(0)
os.wait()
leave.set()
thread.join()
print(predict() == here)
"""
    code, out, errors = finished(program)
    first, last = out.splitlines()
    assert first.startswith("this process was forked while another thread was using the model: load it")
    assert (code, last) == (0, "True"), errors


def test_threaded_grid_search_equals_sequential_one():
    def best(jobs):
        with joblib.parallel_config("threading"):
            search = GridSearchCV(quick(settings={"steps": 1}), {"shots": [1, 2]}, cv=2, n_jobs=jobs).fit(
                X, Y
            )
        assert search.best_estimator_.model is reference()
        return search.cv_results_["mean_test_score"].tolist(), search.predict(QUERIES).tolist()

    assert best(2) == best(1)


QUIET = f"""{FITTED}
import warnings
from transformers.utils.logging import is_progress_bar_enabled
print(is_progress_bar_enabled(), file=sys.stderr)
"""


def test_fit_and_predict_print_nothing():
    code, out, errors = finished(QUIET)
    assert (code, out, errors.strip()) == (0, "", "True")


def test_verbose_shows_loading_progress():
    code, _, errors = finished(QUIET.replace('settings={"steps": 1}', "verbose=True"))
    assert code == 0
    assert "Loading weights" in errors


def test_missing_model_of_saved_task_is_reported_at_first_prediction(tmp_path):
    program = f"""{FITTED.replace('"reference"', "sys.argv[1]")}
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
    code, out, errors = finished(program, tiny_folder(tmp_path / "model"), tmp_path / "task")
    message, same = out.splitlines()
    assert "does not exist" in message
    assert "set_params(model=...)" in message
    assert (code, same) == (0, "True"), errors
