import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from fitting import ASKED, TASKS, decoder_of, hooks, raises, random_injection
from i2cl import ExtractConfig, Injection, InjectionPool, predict

FAMILIES = ["llama", "gpt2", "opt", "falcon", "gemma2", "granite", "mpt"]
KINDS = [(case, torch.float32, 1e-4) for case in FAMILIES]
KINDS += [("llama", dtype, 0.1) for dtype in (torch.bfloat16, torch.float16)]
TEXTS = list(ASKED)


def make_injection(decoder, number, *, sublayers="both", **fields):
    extraction = ExtractConfig(sublayers=sublayers)
    return random_injection(decoder, TASKS[number % 3], number, extraction=extraction, fields=fields)


def pool_of(decoder, injections):
    return InjectionPool(decoder, {str(number): one for number, one in enumerate(injections)})


@pytest.mark.parametrize(("case", "dtype", "apart"), KINDS)
def test_rows_match_their_own_injection(case, dtype, apart):
    decoder = decoder_of(case, dtype)
    injections = [make_injection(decoder, number) for number in range(5)]
    texts = TEXTS * 4
    names = [str(7 * row % 5) for row in range(len(texts))]
    outcome = pool_of(decoder, injections).log_probs(texts, names)
    for text, name, row in zip(texts, names, outcome, strict=True):
        own = injections[int(name)].log_probs(decoder, [text])[0]
        torch.testing.assert_close(row, own, rtol=apart, atol=apart)
    assert len({tuple(row.tolist()) for row in outcome}) > 20


def test_mixed_kinds_of_injections_match_separate_scores():
    decoder = decoder_of("llama")
    places = [{}, {"positions": "first"}, {"positions": "last"}]
    places += [{"positions": "random", "seed": seed} for seed in (5, 6)]
    kinds = [*places, {"sublayers": "hidden"}, {"scoring": "sequence"}]
    injections = [make_injection(decoder, number, **fields) for number, fields in enumerate(kinds)]
    injections.append(replace(make_injection(decoder, 7, scoring="sequence"), task=TASKS[0]))
    more = [{"bias": (0.0, 4.0)}, {"bias": (-3.0, 0.0), "scoring": "sequence"}]
    more += [{"temperature": 0.5}, {"temperature": 3.0, "bias": (0.75, -0.5)}]
    more += [{"temperature": 2.0, "scoring": "sequence"}]
    injections += [make_injection(decoder, 3 * number, **fields) for number, fields in enumerate(more)]
    injections.append(make_injection(decoder, 1, bias=(1.0, -1.0, 2.0)))
    texts = [text for text in TEXTS for _ in injections]
    names = [str(number) for _ in TEXTS for number in range(len(injections))]
    outcome = pool_of(decoder, injections).log_probs(texts, names)
    for text, name, row in zip(texts, names, outcome, strict=True):
        own = injections[int(name)]
        assert row.shape == (len(own.task.labels),)
        wanted = own.log_probs(decoder, [text])[0]
        torch.testing.assert_close(row, wanted, rtol=1e-4, atol=1e-4, check_dtype=False)
    labels = [injections[int(name)].task.labels for name in names]
    words = [each[int(row.argmax())] for each, row in zip(labels, outcome, strict=True)]
    assert pool_of(decoder, injections).predict(texts, names) == words


def test_predictions_are_label_words_of_each_task():
    decoder = decoder_of("llama")
    injections = {task.name: make_injection(decoder, number) for number, task in enumerate(TASKS)}
    names = ["films", "topics", "flags"] * 2
    pairs = zip(TEXTS, names, strict=True)
    expected = [injections[name].predict(decoder, [text])[0] for text, name in pairs]
    assert predict(decoder, TEXTS, injections, names) == expected
    assert predict(decoder, [], injections, []) == []


def test_injections_can_be_replaced_and_dropped():
    decoder = decoder_of("llama")
    pool = InjectionPool(decoder)
    pool.load("a", make_injection(decoder, 0))
    pool.load("b", make_injection(decoder, 1))
    assert (len(pool), list(pool), "a" in pool, "c" in pool) == (2, ["a", "b"], True, False)
    before = pool.log_probs(["warm"], ["a"])[0]
    pool.load("a", make_injection(decoder, 3))
    assert not torch.equal(pool.log_probs(["warm"], ["a"])[0], before)
    pool.drop("a")
    assert list(pool) == ["b"]
    for call in (lambda: pool.drop("a"), lambda: pool.predict(["x", "warm"], ["b", "a"])):
        raises("no injection 'a' is loaded", call)


def test_loaded_task_stores_only_its_scaled_vector():
    decoder = decoder_of("llama")
    (loaded,) = pool_of(decoder, [make_injection(decoder, 0)])._loaded.values()
    assert loaded.edit.shift.nbytes == 4 * 2 * decoder.layers * decoder.d_model
    assert not any(isinstance(value, Injection) for value in vars(loaded).values())


def test_bad_input():
    decoder = decoder_of("llama")
    pool = pool_of(decoder, [make_injection(decoder, 0), make_injection(decoder, 1)])
    raises("2 texts, but 1 task ids", pool.log_probs, ["a", "b"], ["0"])
    raises("task_ids is the string '01': give a list", pool.log_probs, ["a", "b"], "01")
    raises("task_ids is the string '01': give a list", pool.predict, ["a", "b"], "01")
    raises("text 3 is empty", pool.log_probs, ["a", "b", " "], ["0", "0", "1"])
    raises("was made on", pool.load, "c", make_injection(decoder_of("gpt2"), 0))
    other = make_injection(decoder, 0)
    other = replace(other, base=replace(other.base, weights="other"))
    raises("force", pool.load, "c", other)
    pool.load("c", other, force=True)


def test_tasks_can_be_loaded_and_dropped_while_batches_run():
    decoder = decoder_of("gpt2")
    injections = [make_injection(decoder, number) for number in range(3)]
    pool = pool_of(decoder, injections)
    names = ["0", "1", "2"] * 2
    wanted = pool.log_probs(TEXTS, names)
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            pool.load("other", injections[0])
            pool.load("1", injections[1])
            pool.drop("other")

    def close(_):
        pairs = zip(pool.log_probs(TEXTS, names), wanted, strict=True)
        return all(torch.allclose(*pair, atol=1e-4) for pair in pairs)

    with ThreadPoolExecutor(4) as threads:
        churning = threads.submit(churn)
        try:
            assert all(threads.map(close, range(45)))
        finally:
            stop.set()
        churning.result()


def test_two_threads_can_share_a_decoder():
    decoder = decoder_of("llama")
    injections = [replace(make_injection(decoder, number), task=TASKS[0]) for number in range(2)]
    wanted = [injection.log_probs(decoder, TEXTS) for injection in injections]

    def close(number):
        return torch.allclose(injections[number].log_probs(decoder, TEXTS), wanted[number], atol=1e-4)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(close, [0, 1] * 15))
    assert hooks(decoder.model) == 0
