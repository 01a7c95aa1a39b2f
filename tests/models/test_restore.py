"""Ctrl-C while a model is in use: it is restored, and its lock is free."""

import os
import signal
import threading

import pytest

from fitting import free, left_as_found
from i2cl.methods import adapters
from i2cl.models.batching import make_batch
from i2cl.models.edits import Edit
from i2cl.models.restore import frozen, lock_of


class PressCtrlC(Edit):
    """Raises SIGINT in the middle of a pass."""

    def output(self, layer, index, output, batch):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _default_handler():
    """Python's default handler, also if the tests run in the background, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run_a_pass(decoder):
    with decoder.frozen():
        decoder.forward(make_batch([(1, 2, 3)], decoder.device), edit=PressCtrlC())


def run_with_an_adapter(decoder):
    peft = pytest.importorskip("peft", reason="peft is an extra")
    with adapters.adapted(decoder, peft.LoraConfig(r=1, target_modules=["q_proj"])):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("work", [run_a_pass, run_with_an_adapter])
def test_ctrl_c_restores_the_model(decoder, work):
    decoder.model.lm_head.requires_grad_(False)
    decoder.model.model.layers[0].train()
    decoder.model.lm_head.register_forward_hook(lambda *_: None)
    with left_as_found(decoder.model), pytest.raises(KeyboardInterrupt):
        work(decoder)
    assert free(lock_of(decoder.model))


def test_ctrl_c_interrupts_waiting_for_another_thread(decoder):
    model, has_it, done = decoder.model, threading.Event(), threading.Event()

    def hold():
        with frozen(model):
            has_it.set()
            done.wait()

    other = threading.Thread(target=hold)
    other.start()
    has_it.wait()
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt), frozen(model):
        pass
    done.set()
    other.join()
    assert free(lock_of(model))
