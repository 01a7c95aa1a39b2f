"""Baselines against a direct computation on several model families."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn import linear_model
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import fitting
from fitting import FAMILIES, SHOWN, TEXTS, WORDS, block_outputs, fit, ids, new_decoder, raises, shown_string
from i2cl import AnchoredConfig, Decoder, anchor
from i2cl.methods import knn_prompting
from i2cl.methods.icv import COARSE_STRENGTHS, FINE_STRENGTHS, AddPreservingNorm, directions
from i2cl.methods.prompting import anchor_indices
from i2cl.methods.task_vector import ReplaceLast
from i2cl.models.batching import make_batch
from tiny import tiny_model, tiny_tokenizer

CLOSE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_label_anchor_matches_masked_attention(model_type, films, demonstrations):
    """Demonstration tokens attend to all before them, query tokens to anchors and query only.

    Masks differ between model families, so the expected scores are computed without one: each layer's keys
    and values come from the plain run, and the query runs token by token after them.
    """
    decoder = new_decoder(model_type)
    predictor = fit("label_anchor", decoder, films, demonstrations)
    places = anchor_indices(decoder, films, predictor.shown, len(predictor.prefix.ids))
    assert predictor.prefix.remaining == places
    pieces = [decoder.tokenizer.decode([predictor.prefix.ids[place]]) for place in places]
    assert "warm" not in "".join(pieces)
    assert "".join(pieces).count("Review") == "".join(pieces).count("Sentiment") + 1 == len(SHOWN) + 1
    expected = [masked_scores(decoder, films, set(places), len(predictor.prefix.ids), text) for text in TEXTS]
    torch.testing.assert_close(predictor.log_probs(TEXTS), torch.stack(expected), **CLOSE)
    assert predictor.cost.cached_values < fit("few_shot", decoder, films, demonstrations).cost.cached_values


def masked_scores(decoder, task, kept, length, text):
    """Mask dropped tokens inside the softmax by minus infinity."""
    whole = ids(decoder, shown_string(task) + task.template.query(text))
    drop = [place for place in range(length) if place not in kept]
    original = torch.nn.functional.softmax
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def masked_softmax(values, dim=None, **more):
        if values.dim() >= 3 and values.shape[-2:] == (len(whole), len(whole)):
            values = values.clone()
            values[..., length:, drop] = -math.inf
        return original(values, dim=dim, **more)

    def masked_sdpa(query, key, value, attn_mask=None, is_causal=False, **more):
        size = query.shape[-2]
        allowed = torch.ones(size, size).tril().bool()
        allowed[length:, drop] = False
        bias = torch.zeros(size, size).masked_fill(~allowed, -math.inf)
        return sdpa(query, key, value, attn_mask=bias, **more)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "softmax", masked_softmax)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", masked_sdpa)
        logits = decoder.model(torch.tensor([whole]), use_cache=False).logits[0, -1]
    return logits.log_softmax(-1)[fitting.first_tokens(decoder, task)]


@pytest.mark.parametrize("case", ["bloom", "mpt", "falcon-alibi"])
def test_label_anchor_refuses_alibi(case, films, demonstrations):
    raises("which has ALiBi: use few_shot", fit, "label_anchor", new_decoder(case), films, demonstrations)


def test_label_anchor_refuses_a_window_shorter_than_demonstrations_and_query(films, demonstrations):
    unlimited = fit("label_anchor", new_decoder("mistral"), films, demonstrations)
    tokens = len(ids(unlimited.scorer.decoder, shown_string(films) + films.template.query(TEXTS[0])))
    enough, short = (
        fit("label_anchor", new_decoder("mistral", sliding_window=size), films, demonstrations)
        for size in (tokens, tokens - 1)
    )
    torch.testing.assert_close(enough.log_probs(TEXTS[:1]), unlimited.log_probs(TEXTS[:1]), **CLOSE)
    raises(f"are {tokens} tokens, but some layers attend to only {tokens - 1}", short.log_probs, TEXTS[:1])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_task_vector_replaces_one_state(model_type, films, demonstrations):
    decoder = new_decoder(model_type)
    predictor = fit("task_vector", decoder, films, demonstrations, seed=3)
    layer, state = predictor.edit.layer, predictor.edit.state
    dummy = films.held_out(33, demonstrations, 3)[0]
    states = block_outputs(decoder, shown_string(films) + films.template.query(dummy.text))
    torch.testing.assert_close(state, states[layer, -1], **CLOSE)

    def last(output):
        return torch.cat([output[:, :-1], state.expand_as(output[:, -1:])], 1)

    with torch.no_grad(), fitting.replacing([(decoder.blocks[layer], last)]):
        expected = fitting.plain_logits(decoder, [films.template.query(text) for text in TEXTS])
    expected = expected.log_softmax(-1)[:, fitting.first_tokens(decoder, films)]
    torch.testing.assert_close(predictor.log_probs(TEXTS), expected, **CLOSE)
    assert (predictor.cost.cached_values, predictor.cost.held_out) == (decoder.d_model, 33)


def test_task_vector_chooses_the_most_accurate_layer(films, demonstrations):
    decoder = new_decoder("llama")
    chosen = fit("task_vector", decoder, films, demonstrations)
    dummy, *held_out = films.held_out(33, demonstrations, 0)
    states = block_outputs(decoder, shown_string(films) + films.template.query(dummy.text))
    gold, right = torch.tensor([example.label for example in held_out]), []
    for layer in range(decoder.layers):
        tried = replace(chosen, edit=ReplaceLast(layer, states[layer, -1]))
        right.append(
            (tried.log_probs([example.text for example in held_out]).argmax(-1) == gold).sum().item()
        )
    assert chosen.edit.layer == right.index(max(right))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_icv_rotates_states_and_preserves_their_norm(model_type, films, demonstrations):
    decoder = new_decoder(model_type)
    predictor = fit("icv", decoder, films, demonstrations, strength=0.3)
    result = directions(decoder, films, demonstrations)
    states = [[last_states(decoder, one) for one in (WORDS[label], text)] for text, label in SHOWN]
    differences = np.stack([(answer - sentence).reshape(-1) for answer, sentence in states])
    strongest = np.linalg.eigh(differences.T @ differences)[1][:, -1]  # largest mean squared projection
    expected = (strongest * np.sign(strongest @ differences.mean(0))).reshape(decoder.layers, -1)
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-4)
    turned = [(block, _rotate(result[layer], 0.3)) for layer, block in enumerate(decoder.blocks)]
    with torch.no_grad(), fitting.replacing(turned):
        scores = fitting.plain_logits(decoder, [films.template.query(text) for text in TEXTS])
    scores = scores.log_softmax(-1)[:, fitting.first_tokens(decoder, films)]
    torch.testing.assert_close(predictor.log_probs(TEXTS), scores, atol=1e-4, rtol=1e-4)


def last_states(decoder, text):
    return block_outputs(decoder, "<|endoftext|>" + text)[:, -1].double().numpy()


def _rotate(direction, strength):
    def turn(first):
        norm = first.norm(dim=-1, keepdim=True)
        return torch.nn.functional.normalize(first / norm + strength * direction, dim=-1) * norm

    return turn


@pytest.mark.parametrize(
    ("special", "front"),
    [
        ({"eos_token": "<|endoftext|>"}, (0,)),
        ({"bos_token": "a", "eos_token": "<|endoftext|>"}, None),
        ({}, None),
    ],
)
def test_icv_puts_a_token_before_each_label(special, front, films, demonstrations, monkeypatch):
    """The first token is an attention sink, whose state hardly depends on the label."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, **special)
    decoder = Decoder(tiny_model("gpt2"), tokenizer)
    front = front or tuple(tokenizer(special.get("bos_token", "\n"))["input_ids"])
    ran, capture = [], decoder.capture

    def watched(batch, **more):
        lines = zip(batch.input_ids.tolist(), batch.last.tolist(), strict=True)
        ran.extend(tuple(line[: last + 1]) for line, last in lines)
        return capture(batch, **more)

    monkeypatch.setattr(decoder, "capture", watched)
    directions(decoder, films, demonstrations)
    alone = [word for text, label in SHOWN for word in (text, WORDS[label])]
    assert sorted(ran) == sorted(front + tuple(ids(decoder, one)) for one in alone)


def test_icv_adds_no_token_if_the_tokenizer_adds_one(films, demonstrations):
    tokenizer, special = tiny_tokenizer(), [("<|endoftext|>", 0)]
    fronting = processors.TemplateProcessing("<|endoftext|> $A", None, special)
    tokenizer.backend_tokenizer.post_processor = fronting
    bare, fronted = new_decoder("gpt2"), Decoder(tiny_model("gpt2"), tokenizer)
    assert fronted.encoder.leading_ids == (0,)
    both = [directions(one, films, demonstrations) for one in (fronted, bare)]
    torch.testing.assert_close(*both)


def test_icv_strength_is_searched_on_held_out_rows(films, demonstrations):
    searched = fit("icv", new_decoder("llama"), films, demonstrations)
    assert searched.edit.strength in COARSE_STRENGTHS + FINE_STRENGTHS
    assert searched.cost.held_out == 32


@pytest.mark.parametrize("model_type", FAMILIES)
def test_knn_prompting_votes_of_the_nearest_anchors(model_type, films, demonstrations):
    decoder = new_decoder(model_type)
    predictor = fit("knn_prompting", decoder, films, demonstrations, neighbours=1, anchors=6)
    kept = films.held_out(6, demonstrations, 0)

    def distribution(text):
        prompt = shown_string(films) + films.template.query(text)
        with torch.no_grad():
            return decoder.model(torch.tensor([ids(decoder, prompt)])).logits[0, -1].log_softmax(-1)

    anchored = torch.stack([distribution(example.text) for example in kept])
    for text, scores in zip(TEXTS, predictor.log_probs(TEXTS), strict=True):
        query = distribution(text)
        divergence = (query.exp() * (query - anchored)).sum(-1)
        assert kept[divergence.argmin()].label == scores.argmax()
    assert predictor.cost.held_out == 6


@pytest.mark.parametrize("below", ["zero_shot", "few_shot", "i2cl"])
def test_calibrations_divide_by_mean_probabilities(below, films, demonstrations):
    decoder = new_decoder("llama")
    options = {"epochs": 1} if below == "i2cl" else {}
    plain = fit(below, decoder, films, demonstrations, **options)
    probable = plain.log_probs(TEXTS).softmax(-1)
    prior = plain.log_probs(["N/A", "[MASK]", "..."]).softmax(-1).mean(0)
    for name, divisor in (("batch", probable.mean(0)), ("contextual", prior)):
        result = fit(f"{below}+{name}_calibration", decoder, films, demonstrations, **options)
        expected = probable / divisor
        expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(result.log_probs(TEXTS).exp(), expected, **CLOSE)


@pytest.mark.parametrize("below", ["zero_shot", "few_shot"])
def test_label_prior_uses_unlabelled_texts_and_classifies_single_texts(below, films, demonstrations):
    decoder = new_decoder("llama")
    plain = fit(below, decoder, films, demonstrations)
    result = fit(f"{below}+label_prior", decoder, films, demonstrations)
    texts = films.unlabelled(64, demonstrations, 0)
    assert len(set(texts)) == 64
    assert not set(texts) & {example.text for example in demonstrations}
    expected = plain.log_probs(TEXTS).softmax(-1) / plain.log_probs(list(texts)).softmax(-1).mean(0)
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(result.log_probs(TEXTS).exp(), expected, **CLOSE)
    torch.testing.assert_close(result.log_probs(TEXTS[:1]).exp(), expected[:1], **CLOSE)
    assert result.cost.unlabelled == 64
    assert result.cost.cached_values == plain.cost.cached_values + len(WORDS)


def test_label_prior_refuses_too_few_texts(films, demonstrations):
    few = replace(films, train=films.train[:20])
    given = "zero_shot+label_prior", new_decoder("llama"), few, demonstrations
    raises(r"needs 32 training texts .* has 20: add some", fit, *given)
    assert fit(*given, unlabelled=8).cost.unlabelled == 8


def test_anchored_method_injects_the_fitted_vector(films, demonstrations):
    decoder = new_decoder("llama")
    result = fit("anchored", decoder, films, demonstrations, steps=2, prior_std=3)
    expected = anchor(decoder, films, demonstrations, AnchoredConfig(steps=2, prior_std=3.0))
    actual = result.log_probs(TEXTS).log_softmax(-1)
    torch.testing.assert_close(actual, expected.log_probs(decoder, TEXTS), atol=0, rtol=0)
    assert result.cost.trained == result.cost.cached_values == expected.context.numel()


def test_tfidf_matches_logistic_regression_on_weighted_words(films, demonstrations):
    """Features: sublinear term frequency times smoothed inverse document frequency, unit length."""

    def features(text):
        words = re.findall(r"\w+", text.lower())
        return [*words, *(" ".join(pair) for pair in pairwise(words))]

    known = sorted({one for text, _ in SHOWN for one in features(text)})
    seen = [sum(word in features(text) for text, _ in SHOWN) for word in known]
    rarity = 1 + np.log((1 + len(SHOWN)) / (1 + np.array(seen)))

    def row(text):
        counts = np.array([features(text).count(word) for word in known], float)
        weighted = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * rarity
        return weighted / max(np.linalg.norm(weighted), 1e-12)

    texts = ["a dull film", "FUNNY and kind", "nothing of that"]
    regression = linear_model.LogisticRegression(C=10, max_iter=10_000)
    regression.fit([row(text) for text, _ in SHOWN], [label for _, label in SHOWN])
    expected = regression.predict_log_proba([row(text) for text in texts])
    result = fit("tfidf", new_decoder("llama"), films, demonstrations)
    torch.testing.assert_close(
        result.log_probs(texts), torch.from_numpy(expected).float(), atol=1e-3, rtol=1e-3
    )
    assert result.cost.trained == len(known) + 1
    assert result.cost.cached_values == 2 * len(known) + 1


def test_batch_calibration_refuses_a_single_text(decoder, films, demonstrations):
    predictor = fit("zero_shot+batch_calibration", decoder, films, demonstrations)
    raises("cannot classify a single text", predictor.log_probs, ["dull"])
    assert predictor.log_probs(["dull", "warm"]).shape == (2, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_icv_computes_in_float32(dtype):
    """At strength 0 only rounding changes states, and large states do not overflow."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(1, 4, 4096, generator=generator).mul(1200).to(dtype)
    directions = torch.nn.functional.normalize(torch.randn(1, 4096, generator=generator), dim=-1)
    batch = make_batch([(1, 2, 3, 4)], torch.device("cpu"))
    same = AddPreservingNorm(directions, 0.0).output(0, 0, state, batch)
    assert same.dtype == dtype
    assert (same == state).float().mean() > 0.99
    turned = AddPreservingNorm(directions, 0.5).output(0, 0, state, batch)
    wanted = AddPreservingNorm(directions, 0.5).output(0, 0, state.float(), batch)
    torch.testing.assert_close(turned, wanted.to(dtype))


def test_knn_prompting_processes_texts_in_chunks(films, demonstrations, monkeypatch):
    predictor, seen = fit("knn_prompting", new_decoder("llama"), films, demonstrations), []
    whole = predictor.log_probs(TEXTS)
    monkeypatch.setattr(knn_prompting, "CHUNK_SIZE", 2)
    assert torch.equal(predictor.log_probs(TEXTS, seen.append), whole)
    assert seen == [2, 1]
