"""Slots, digests and salts, without vLLM."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fitting import one_line
from i2cl import ExtractConfig, I2CLError
from i2cl.interfaces.vllm.slots import PLAIN, Ledger, Packed, Salts, digest_of, token_slots

from .standins import injection_for, params


class Request:
    """Something that can be referred to weakly."""


def test_tokens_get_the_slot_of_their_request():
    result = token_slots([3, 0, 7], np.array([0, 2, 3, 6]), 8)
    assert result.tolist() == [3, 3, 0, 7, 7, 7, PLAIN, PLAIN]
    assert result.dtype == np.int32
    assert token_slots([], np.array([0]), 2).tolist() == [PLAIN, PLAIN]


def test_a_slot_is_not_reused_while_a_request_needs_it():
    ledger, running = Ledger(2), Request()
    assert ledger.load("a") == (1, True)
    assert ledger.load("b") == (2, True)
    ledger.admit("a", running)
    ledger.drop("a")
    one_line(r'all 2 slots hold tasks.*"slots": 4', ledger.load, "c")
    del running
    assert ledger.load("c") == (1, True)
    assert ledger.load("b") == (2, False)


def test_a_dropped_task_is_admitted_until_its_slot_is_reused():
    ledger, late = Ledger(2), Request()
    ledger.load("a")
    ledger.load("b")
    ledger.drop("a")
    ledger.admit("a", late)  # its front end let it in before the drop
    one_line("all 2 slots", ledger.load, "c")
    assert ledger.load("a") == (1, False)
    ledger.drop("a")
    del late
    ledger.load("c")
    for name in ("a", "never"):
        one_line("dropped before it began", ledger.admit, name, Request())
    ledger.drop("never")


def test_the_digest_depends_on_the_edit_only(decoder, task):
    one = injection_for(decoder, task)
    packed = Packed.of_injection(one)
    assert packed.digest == Packed.of_injection(replace(one, task=replace(task, name="other"))).digest
    again = replace(one, coefficients=one.coefficients * torch.tensor([2.0, 1.0]))
    assert packed.digest != Packed.of_injection(again).digest
    assert packed.digest != Packed.of_injection(injection_for(decoder, task, seed=1)).digest
    rows, scales = packed.tensors(decoder.d_model)
    torch.testing.assert_close(rows[2], one.coefficients[1, 0, 0] * one.context.values[1, 0])
    torch.testing.assert_close(scales, one.coefficients[..., 1].flatten())


def test_salts_keep_tasks_callers_and_plain_requests_apart():
    """Not with the digest, which is public; not with the salt itself; not with what that is made into."""
    salts = Salts()
    asked = [(salt, digest) for salt in (None, "mine", "a:", "a") for digest in ("a", "b")]
    assert len({salts.of(*one) for one in asked}) == len(asked)
    task = salts.of(None, "a")
    seen = {salts.of(sent, None) for sent in ("|i2cl:a", "i2cl:a", "i2cl:", task, salts.of(task, None))}
    assert task not in seen
    assert len(seen) == 5  # and they are kept apart from each other
    assert Salts().of(None, "a") != task  # another engine's is none of this one's
    assert [salts.of(sent, None) for sent in (None, "", "mine")] == [None, "", "mine"]


def test_plain_requests_have_no_digest():
    assert digest_of(params()) is None
    assert digest_of(params(other=1)) is None
    assert digest_of(object()) is None  # a pooling request's parameters
    assert digest_of(params("abc")) == "abc"


def test_unsupported_injections_are_rejected(decoder, task):
    one = injection_for(decoder, task)
    one_line("on positions 'last'", Packed.of_injection, replace(one, positions="last"))
    hidden = replace(one.context, config=ExtractConfig(writers="hidden"), values=one.context.values[:, :1])
    with pytest.raises(I2CLError, match="block outputs"):
        Packed.of_injection(replace(one, context=hidden, coefficients=one.coefficients[:, :1]))
