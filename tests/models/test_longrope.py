"""Rotary embeddings that depend on the length of a batch must not affect results of a row."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fitting import fit, log_probability, one_line
from i2cl import CalibrationConfig, Decoder, Example, InjectionPool, Task, Template, calibrate
from i2cl.core.context import extract
from i2cl.methods import adapters
from i2cl.models.batching import rope_limits
from i2cl.models.encoding import LabelTokens
from i2cl.models.scoring import score
from tiny import LIMIT, LONGROPE, tiny_model, tiny_tokenizer

FILMS = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
LONG = ("warm", "dull and lifeless and " * 8, "so dull " * 8, "a film", "funny " * 4)
SHOWN = [Example(text, label) for text, label in zip(LONG, (0, 1, 1, 0, 0), strict=True)]
TAKEN = 5
"""Virtual tokens, with which one of these queries exceeds the limit."""
LABELS = LabelTokens(((5, 9, 7), (8,)), full=False)
SAME = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def decoder():
    return Decoder(tiny_model("phi3", **LONGROPE), tiny_tokenizer(), name="tiny-longrope")


def ids(length, start=1):
    return tuple((7 * place + start) % 290 + 1 for place in range(length))


def by_hand(decoder, row, labels):
    """Compute scores from one row per label without a cache."""
    wanted = [label if labels.full else label[:1] for label in labels.sequences]
    with torch.no_grad():
        return torch.stack([log_probability(decoder, row, label) for label in wanted])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("cached", [0, 1, LIMIT - 6, LIMIT - 1, LIMIT, LIMIT + 1, 50])
def test_scores_match_single_queries_with_and_without_cache(decoder, cached, full):
    labels, front = replace(LABELS, full=full), ids(cached)
    around = range(LIMIT - 2, LIMIT + 2)
    rows = [ids(length, length) for length in (2, 1, 3, 4, 5, 6, 7, *around, LIMIT + 9, 40, 70)]
    wanted = torch.stack([by_hand(decoder, front + row, labels) for row in rows])
    result = score(decoder, rows, labels, prefix=decoder.prefix(front) if front else None)
    torch.testing.assert_close(result, wanted, **SAME)


def test_few_shot_scores_and_context_vectors_match_single_rows(decoder):
    task = replace(FILMS, train=tuple(SHOWN))
    cached, uncached = (fit(name, decoder, task, SHOWN[:1]) for name in ("few_shot", "few_shot_uncached"))
    assert len(cached.prefix.ids) < LIMIT
    texts = ["dull", "dull " * 5, "a warm film " * 9]
    torch.testing.assert_close(cached.log_probs(texts), uncached.log_probs(texts), **SAME)
    alone = torch.stack([extract(decoder, FILMS, [one]).context for one in SHOWN])
    torch.testing.assert_close(extract(decoder, FILMS, SHOWN).context, alone.mean(0), **SAME)


def test_pruned_cache_is_refused_beyond_the_limit(decoder):
    prefix = decoder.prefix(ids(12), whole=True).prune((0, 3, 11))
    assert score(decoder, [ids(LIMIT - 12)], LABELS, prefix=prefix).isfinite().all()
    message = (
        f"query are {LIMIT + 1} tokens, but this model's rotary embedding .longrope. changes beyond {LIMIT}"
    )
    one_line(message, score, decoder, [ids(LIMIT - 11)], LABELS, prefix=prefix)
    beyond = decoder.prefix(ids(LIMIT + 1), whole=True).prune((0, 3, 11))
    assert score(decoder, [ids(30)], LABELS, prefix=beyond).isfinite().all()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("among", "labels"),
    [
        ("vocabulary", FILMS.labels),
        ("labels", FILMS.labels),
        ("labels", ("positive", "poor")),  # whole sequences
    ],
)
def test_loss_matches_single_rows(decoder, monkeypatch, packed, shown, among, labels):
    monkeypatch.setattr("i2cl.core.calibration.packing_pays", lambda *_: packed)
    prompt = partial(FILMS.template.prompt, (("funny", "positive"),)) if shown else None
    task = replace(FILMS, labels=labels)
    context = extract(decoder, task, SHOWN)

    def loss(rows):
        config = CalibrationConfig(noise=0.0, epochs=1, loss=among)
        result = calibrate(decoder, task, SHOWN, context, config, batches=[rows], prompt=prompt)
        return result.history[0]

    alone = [loss([row]) for row in range(len(SHOWN))]
    assert loss([0, 1, 2, 3, 4]) == pytest.approx(sum(alone) / 5, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lora", {"lora_dropout": 0.0}),
        ("prompt_tuning", {"virtual_tokens": TAKEN}),
        ("prefix_tuning", {"virtual_tokens": TAKEN}),
    ],
)
def test_adapter_loss_and_scores_match_single_rows(decoder, monkeypatch, name, options):
    pytest.importorskip("peft", reason="peft is an extra")
    lengths = [len(ids) for ids in decoder.encoder([FILMS.template.query(one.text) for one in SHOWN])]
    assert {LIMIT - TAKEN < length <= LIMIT for length in lengths} == {True, False}
    losses = []
    every = list(range(len(SHOWN)))

    def record(_parameters, loss, *_more, **_options):
        losses.extend(loss(rows).item() for rows in [every, *([row] for row in every)])

    monkeypatch.setattr(adapters, "train", record)
    predictor = fit(name, decoder, FILMS, SHOWN, **options)
    assert losses[0] == pytest.approx(sum(losses[1:]) / len(SHOWN), abs=1e-5)
    texts = [example.text for example in SHOWN]
    alone = torch.cat([predictor.log_probs([text]) for text in texts])
    torch.testing.assert_close(predictor.log_probs(texts), alone, **SAME)


def test_pool_scores_match_single_texts(decoder):
    context = extract(decoder, FILMS, SHOWN)
    quick = CalibrationConfig(epochs=1)
    made = {str(seed): calibrate(decoder, FILMS, SHOWN, context, quick, seed=seed) for seed in range(2)}
    texts, names = [example.text for example in SHOWN], ["0", "1", "1", "0", "1"]
    result = InjectionPool(decoder, made).log_probs(texts, names)
    for text, name, row in zip(texts, names, result, strict=True):
        torch.testing.assert_close(row, made[name].log_probs(decoder, [text])[0], **SAME)


def test_limits_cover_every_kind_of_layer():
    def long(limit):
        return {"rope_type": "longrope", "original_max_position_embeddings": limit}

    ropes = {"full_attention": long(64), "sliding_attention": long(16)}
    ropes |= {"other": {"rope_type": "yarn"}, "no": None}
    assert rope_limits(SimpleNamespace(rope_parameters=ropes)) == (16, 64)
    assert rope_limits(SimpleNamespace(rope_parameters=None)) == rope_limits(SimpleNamespace()) == ()


def test_earlier_batches_do_not_change_dynamic_rope():
    """Dynamic NTK keeps the frequencies of a longer row until a row shorter than the context runs."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_model("llama", max_position_embeddings=32, rope_parameters=rope)
    decoder = Decoder(model, tiny_tokenizer())
    assert decoder.max_length == 31
    rows = [ids(decoder.max_length), ids(9)]
    before = score(decoder, rows, LABELS)
    for tokens in (33, 90):
        with torch.no_grad():
            model(torch.tensor([ids(tokens)]))
        torch.testing.assert_close(score(decoder, rows, LABELS), before, **SAME)
