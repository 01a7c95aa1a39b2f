"""Methods that train PEFT adapters."""

import threading

import pytest
import torch
from tokenizers import normalizers

from fitting import FAMILIES, SHOWN, TEXTS, WORDS, first_tokens, fit, ids, new_decoder, raises
from i2cl import Decoder, Example, Task, Template
from i2cl.methods import adapters, make_methods
from i2cl.methods.adapters import adapted
from i2cl.models.encoding import TruncationWarning
from i2cl.models.scoring import LabelScorer
from tiny import PATHS, WINDOW, tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft", reason="peft is an extra")
LoraLayer, IA3Layer = peft.tuners.lora.LoraLayer, peft.tuners.ia3.layer.IA3Layer

PARAMETERS = {
    "lora": 2 * 8 * 112,
    "ia3": 2 * (32 + 16 + 48),
    "prompt_tuning": 32,
    "prefix_tuning": 2 * 2 * 16,
}
CLOSE = {"atol": 2e-5, "rtol": 1e-5}
MANY_WORDS = ("a film", "a mess", "so-so")


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        *((name, one) for name in ("lora", "ia3") for one in (*FAMILIES, "opt", "bloom", "phi3")),
        *((name, one) for name in ("prompt_tuning", "prefix_tuning") for one in ("llama", "gpt2", "bloom")),
    ],
)
def test_adapters_learn_and_are_detached(name, model_type, films, demonstrations):
    decoder = new_decoder(model_type)
    before = fit("zero_shot", decoder, films, demonstrations).log_probs(TEXTS)
    texts = [text for text, _ in SHOWN]
    gold = torch.tensor([label for _, label in SHOWN])

    def loss(predictor):
        return -predictor.log_probs(texts)[torch.arange(len(gold)), gold].mean().item()

    short = fit(name, decoder, films, demonstrations, epochs=0)
    long = fit(name, decoder, films, demonstrations, epochs=10, lr=0.05)
    assert loss(long) < loss(short) - 0.1
    if name in {"lora", "ia3"}:  # untrained, these have no effect
        torch.testing.assert_close(short.log_probs(TEXTS), before, **CLOSE)
    assert torch.equal(fit("zero_shot", decoder, films, demonstrations).log_probs(TEXTS), before)
    assert not any("lora" in key or "ia3" in key for key, _ in decoder.model.named_parameters())


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (WORDS, {}),
        (("positive", "poor", "negative"), {}),
        (MANY_WORDS, {"scoring": "words"}),
        (MANY_WORDS, {"scoring": "words", "word_weights": True}),
    ],
    ids=["first", "shared", "words", "weights"],
)
@pytest.mark.parametrize("name", PARAMETERS)
def test_adapters_learn_among_the_labels(name, words, more, demonstrations, monkeypatch):
    decoder, task = new_decoder("llama"), Task("films", words, Template("Review: {text}\nSentiment:{label}"))
    texts, gold = zip(*SHOWN, strict=True)

    def loss(predictor):
        return torch.nn.functional.cross_entropy(predictor.log_probs(texts), torch.tensor(gold)).item()

    def fitted(**options):
        return fit(name, decoder, task, demonstrations, loss="labels", **more, **options)

    trained = fitted(epochs=10, lr=0.05)
    assert loss(trained) < loss(fitted(epochs=0)) - 0.1
    weights = trained.scorer.word_weights
    assert (weights is None) == ("word_weights" not in more)
    if weights is not None:
        torch.testing.assert_close(weights.sum(0), torch.ones(3))
        assert not torch.allclose(weights, LabelScorer(decoder, task, "words").labels.word_weights)
        assert trained.cost.trained == sum(one.numel() for one in (*trained.state.values(), weights))
    seen = []

    def record(_parameters, loss, *_more, **_options):
        seen.append(loss(range(len(SHOWN))).item())

    monkeypatch.setattr(adapters, "train", record)
    untrained = fitted()
    assert seen == [pytest.approx(loss(untrained), rel=1e-5)]


def test_word_weights_require_word_level_scoring_and_label_loss(films, demonstrations):
    for options in ({}, {"loss": "labels"}):
        error = "word_weights requires scoring=words and loss=labels"
        raises(error, fit, "lora", new_decoder("llama"), films, demonstrations, word_weights=True, **options)


@pytest.mark.parametrize("name", PARAMETERS)
def test_cost_counts_the_trained_parameters_of_adapters(name, films, demonstrations):
    cost = fit(name, new_decoder("llama"), films, demonstrations, epochs=1).cost
    assert cost.trained == cost.cached_values == cost.cached_bytes / 4 == PARAMETERS[name]


def test_adapted_decoder_keeps_the_settings_of_its_base():
    bare = Decoder(tiny_model("llama"), tiny_tokenizer(), name="bare", revision="r", token_budget=77)
    bare.max_length = 50
    base, identity, model = bare.base, bare.residual_identity, bare.model
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with adapted(bare, config) as attached:
        assert (attached.name, attached.revision, attached.token_budget) == (
            "bare",
            "r",
            77,
        )
        assert (attached.architecture, attached.max_length) == (bare.architecture, 47)
        attached.token_budget = 5
    assert (bare.token_budget, bare.max_length, bare.model) == (77, 50, model)
    assert (bare.base, bare.residual_identity) == (base, identity)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "bloom"])
@pytest.mark.parametrize("name", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens_can_start_from_a_text(name, model_type, films, demonstrations):
    decoder, text, count = new_decoder(model_type), "funny and kind", 5
    shown = (ids(decoder, text) * count)[:count]
    assert len(set(shown)) > 1
    options = {"epochs": 0, "start_text": text, "virtual_tokens": count}
    result = fit(name, decoder, films, demonstrations, **options).log_probs(TEXTS)
    rows = [torch.tensor([shown + ids(decoder, films.template.query(text))]) for text in TEXTS]
    with torch.no_grad():
        expected = torch.stack([decoder.model(row).logits[0, -1].log_softmax(-1) for row in rows])
    torch.testing.assert_close(result, expected[:, first_tokens(decoder, films)], **CLOSE)


@pytest.mark.parametrize("model_type", PATHS)
@pytest.mark.parametrize("name", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens_work_or_are_refused_on_every_model_type(name, model_type, films, demonstrations):
    decoder, options = new_decoder(model_type), {"epochs": 1, "virtual_tokens": 3}
    if name == "prefix_tuning" and model_type in {"deepseek_v3", "modernbert-decoder"}:
        error = f"prefix_tuning does not support '{model_type}', whose layers"
        for start in ({}, {"start_text": "kind"}):
            raises(error, fit, name, decoder, films, demonstrations, **options, **start)
        return
    assert fit(name, decoder, films, demonstrations, **options).log_probs(TEXTS).isfinite().all()


@pytest.mark.parametrize("name", ["prompt_tuning", "prefix_tuning"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_text": "\ud800"}, r"start_text '\\ud800' contains a lone surrogate"),
        ({"virtual_tokens": 48}, "virtual_tokens is 48, but the context holds 48 tokens: use fewer"),
    ],
)
def test_invalid_virtual_tokens_are_refused(name, options, message, films, demonstrations):
    decoder = Decoder(tiny_model("gpt2", n_positions=48), tiny_tokenizer())
    raises(message, fit, name, decoder, films, demonstrations, **options)


def test_start_text_without_tokens_or_beyond_the_window_is_refused(films, demonstrations):
    decoder = new_decoder("llama")
    decoder.tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
    error = "start_text ' ' has no tokens: give a longer text"
    raises(error, fit, "prompt_tuning", decoder, films, demonstrations, start_text=" ")
    decoder, options = new_decoder("mistral-sliding"), {"start_text": "a", "virtual_tokens": 40}
    error = f"virtual_tokens is 40, but some layers attend to only {WINDOW} tokens"
    raises(error, fit, "prefix_tuning", decoder, films, demonstrations, **options)


@pytest.mark.parametrize("name", PARAMETERS)
def test_hooks_checkpointing_and_random_state_are_restored(name, films, demonstrations):
    """With gradient checkpointing, PEFT would register a hook on the embedding at every call."""
    decoder = new_decoder("llama")
    decoder.model.gradient_checkpointing_enable()
    embedding = decoder.model.get_input_embeddings()
    hooks = dict(embedding._forward_hooks)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    predictor = fit(name, decoder, films, demonstrations, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)
    predictor.log_probs(TEXTS)
    assert torch.equal(torch.get_rng_state(), before)
    assert dict(embedding._forward_hooks) == hooks
    assert decoder.model.is_activation_checkpointing


@pytest.mark.parametrize("name", ["lora", "ia3"])
def test_failed_attachment_restores_all_modules(name, films, demonstrations, monkeypatch):
    decoder = new_decoder("llama")
    modules = dict(decoder.model.named_modules())
    layer = {"lora": LoraLayer, "ia3": IA3Layer}[name]
    update, calls = layer.update_layer, []

    def fail_late(self, *args, **options):
        calls.append(self)
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return update(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "update_layer", fail_late)
        with pytest.raises(torch.OutOfMemoryError):
            fit(name, decoder, films, demonstrations, epochs=1)
    assert dict(decoder.model.named_modules()) == modules
    assert fit(name, decoder, films, demonstrations, epochs=1).log_probs(TEXTS).isfinite().all()
    decoder.model.set_submodule("model.layers.1.self_attn.v_proj", torch.nn.Sequential(torch.nn.Identity()))
    modules = dict(decoder.model.named_modules())
    error = r"PEFT does not support this 'llama': Target module Sequential.*; use an"
    raises(error, fit, name, decoder, films, demonstrations, epochs=1)
    assert dict(decoder.model.named_modules()) == modules


def test_sublayers_are_those_of_the_base_model_while_an_adapter_is_attached(films, demonstrations):
    """Also if they are first read while an adapter is attached."""
    decoder = new_decoder("llama")
    bare = [module for pair in decoder.architecture.sublayers(decoder.model) for module in pair]
    (lora,) = make_methods(["lora"], {"epochs": 0})
    with adapted(decoder, lora.config(decoder)):
        late = [module for pair in decoder.sublayers for module in pair]
        assert len(decoder.blocks) == decoder.layers
    assert late == bare
    assert decoder.base == new_decoder("llama").base


def test_identity_waits_until_an_adapter_is_detached():
    decoder, seen = new_decoder("llama"), []
    (lora,) = make_methods(["lora"], {"epochs": 0})
    with adapted(decoder, lora.config(decoder)):
        reader = threading.Thread(target=lambda: seen.append(decoder.base))
        reader.start()
        reader.join(timeout=0.2)
        assert seen == []
    reader.join()
    assert seen == [new_decoder("llama").base]


@pytest.mark.parametrize("name", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens_reduce_the_context_length(films, name):
    decoder = Decoder(tiny_model("gpt2", n_positions=48), tiny_tokenizer())
    shots = [Example("a dull film " * 40, 0), Example("warm " * 40, 1)]
    with pytest.warns(TruncationWarning, match="41 tokens of context"):
        predictor = fit(name, decoder, films, shots, epochs=1, virtual_tokens=7)
    with pytest.warns(TruncationWarning):
        assert predictor.log_probs(["a dull film " * 40]).isfinite().all()
