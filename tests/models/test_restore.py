"""Ctrl-C wherever the interpreter looks for it in the code that borrows a model, one place after another.

CPython runs signal handlers where a function begins, after a call and where a loop goes back; nowhere else.
"""

import dis
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fitting import free
from i2cl.methods import adapters
from i2cl.models import decoder, onednn
from i2cl.models.batching import make_batch
from i2cl.models.edits import Keep, edit_inputs, edit_outputs
from i2cl.models.restore import frozen, lock_of
from tiny import tiny_model, tiny_tokenizer

LOOKS = ("CALL", "JUMP_BACKWARD", "RESUME")


class CtrlC:
    """Presses Ctrl-C at one of those places, and counts them."""

    def __init__(self, place, files):
        self.place, self.seen, self.files = place, 0, files
        self._last, self._names = {}, {}

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename.rpartition(os.sep)[2] not in self.files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            code = frame.f_code
            if code not in self._names:
                self._names[code] = {step.offset: step.opname for step in dis.get_instructions(code)}
            last, self._last[frame] = self._last.get(frame, ""), self._names[code][frame.f_lasti]
            if last.startswith(LOOKS):
                self.seen += 1
                if self.seen == self.place:
                    signal.raise_signal(signal.SIGINT)
        return self


def pressed(work, place, files):
    """Work with Ctrl-C at one place; return what was raised, its frames and the places seen."""
    press, raised = CtrlC(place, files), None
    sys.settrace(press)
    try:
        work()
    except KeyboardInterrupt as error:
        raised = error
    finally:
        sys.settrace(None)
    return raised, press.seen


def state(model):
    """Values, flags, hooks, replaced methods and classes of a model."""
    hooks = [(list(part._forward_hooks), list(part._forward_pre_hooks)) for part in model.modules()]
    parts = [(name, type(one), one.training, sorted(vars(one))) for name, one in model.named_modules()]
    values = [(name, value.requires_grad, value.tolist()) for name, value in model.named_parameters()]
    return hooks, parts, values, signal.getsignal(signal.SIGINT)


def pair():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    model[1].bias.requires_grad_(False)
    model[0].eval()
    model[0].register_forward_hook(lambda *_: None)
    return model


def borrowed():
    model = pair()

    def work():
        changes = [(part, lambda value: value) for part in model]
        with frozen(model), edit_outputs(changes), edit_inputs(changes):
            pass

    return model, work


def run():
    whole = decoder.Decoder(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    batch = make_batch([(1, 2, 3)], whole.device)
    answer = SimpleNamespace(logits=torch.zeros(1, 1, 3))
    whole.model.forward = lambda **_: answer  # what runs inside is not what is looked at

    def work():
        with whole.frozen():
            whole.forward(batch, edit=Keep("writers", batch.last))

    return whole.model, work


def adapted():
    from peft import LoraConfig

    whole = decoder.Decoder(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())

    def work():
        with adapters.adapted(whole, LoraConfig(r=1, target_modules=["q_proj"])):
            pass

    return whole.model, work


@pytest.fixture(autouse=True)
def _usual():
    """Python's default handler, also if the tests run in the background, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("make", "files"),
    [
        (borrowed, {"restore.py", "onednn.py", "edits.py", "contextlib.py"}),
        (run, {"decoder.py", "edits.py"}),
        (adapted, {"adapters.py"}),
    ],
)
def test_model_is_restored_wherever_ctrl_c_arrives(make, files, monkeypatch):
    monkeypatch.setattr(onednn, "onednn_pays", lambda: True)
    monkeypatch.setattr(onednn, "MIN_SIZE", 1)
    model, work = make()
    before = state(model)
    _, places = pressed(work, 0, files)
    assert places > 5
    wrong = []
    for place in range(1, places + 1):
        raised, _ = pressed(work, place, files)
        if raised is None or state(model) != before:  # while the error still holds its frames
            wrong.append(place)
    assert wrong == []
    assert free(lock_of(model))


def test_ctrl_c_interrupts_waiting_for_another_thread():
    model, has_it, done = pair(), threading.Event(), threading.Event()

    def hold():
        with frozen(model):
            has_it.set()
            done.wait()

    other = threading.Thread(target=hold)
    other.start()
    has_it.wait()

    def ask():
        threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
        with frozen(model):
            pass

    with pytest.raises(KeyboardInterrupt):
        ask()
    done.set()
    other.join()
    assert free(lock_of(model))


def test_work_continues_if_the_handler_does_not_raise():
    seen, model = [], pair()
    signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    before = state(model)

    def work():
        with frozen(model):
            assert not any(value.requires_grad for value in model.parameters())

    _, places = pressed(work, 0, {"restore.py"})
    for place in range(1, places + 1):
        pressed(work, place, {"restore.py"})
    assert len(seen) == places
    assert state(model) == before


def test_handler_is_restored_after_another_thread_leaves_a_block():
    model, usual = pair(), signal.getsignal(signal.SIGINT)
    block = frozen(model)
    with edit_outputs([]) as _:
        pass
    handed_over = edit_outputs([])
    handed_over.__enter__()
    thread = threading.Thread(target=handed_over.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with block:
        pass
    assert signal.getsignal(signal.SIGINT) is usual
