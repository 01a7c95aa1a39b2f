"""I2CLClassifier in forked children and threads, and what it prints."""

import json
import os

import pytest

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
    """What one fitted process and its forked children print: values by name, and stderr."""
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


def test_verbose_shows_loading_progress():
    code, _, errors = finished(FITTED.replace('settings={"steps": 1}', 'settings={"steps": 1}, verbose=True'))
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
