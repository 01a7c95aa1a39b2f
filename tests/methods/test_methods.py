"""Methods against a direct computation, and the contract of all methods."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import fitting
from compressed import with_compressor
from fitting import (
    FAMILIES,
    SHOWN,
    WORDS,
    fit,
    injected,
    left_as_found,
    new_decoder,
    raises,
    random_injection,
    shown_string,
)
from i2cl import CalibrationConfig, Decoder, Example, I2CLError, Task, Template, calibrate, extract
from i2cl.core.recipe import ExtractConfig
from i2cl.methods import METHODS, Cost, make_methods
from i2cl.methods.i2cl_variants import noise_like
from i2cl.methods.postprocessing import Product, Wrapper
from i2cl.models.scoring import LabelScorer
from tiny import byte_level, tiny_model, tiny_tokenizer

KEY_VALUE_WIDTH = {"llama": 16, "qwen2": 16, "gpt2": 32, "gptj": 32, "gpt_neox": 32}
LAYERS, WIDTH = 2, 32
TEXTS = ["a lifeless film", "the best of the year, by far", "hm", "not bad"]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
FINITE = (("linear_probe", "probe_c"), ("anchored", "tolerance"), ("icv", "strength"))
INFINITE = [*product(FINITE, ("inf", float("inf")))]  # not valid in JSON


def plain(decoder, task, texts, shown="", *, full=False):
    """Return the label log-probabilities of each text from separate forward passes of the model."""
    ids = partial(fitting.ids, decoder)

    def one(prompt, word):
        start, whole = len(ids(prompt)), ids(prompt + task.template.continuation(word))
        return fitting.log_probability(decoder, whole[:start], whole[start : None if full else start + 1])

    prompts = [shown + task.template.query(text) for text in texts]
    with torch.no_grad():
        return torch.tensor([[one(prompt, word) for word in task.labels] for prompt in prompts])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_zero_shot_and_few_shot_match_the_model_with_and_without_cache(model_type, films, demonstrations):
    decoder = new_decoder(model_type)
    predictor, alone = fit("zero_shot", decoder, films, demonstrations), plain(decoder, films, TEXTS)
    torch.testing.assert_close(predictor.log_probs(TEXTS), alone, **CLOSE)
    assert (predictor.cost.cached_values, predictor.cost.trained, predictor.cost.held_out) == (0, 0, 0)
    expected = plain(decoder, films, TEXTS, shown_string(films))
    cached = fit("few_shot", decoder, films, demonstrations)
    uncached = fit("few_shot_uncached", decoder, films, demonstrations)
    torch.testing.assert_close(uncached.log_probs(TEXTS), expected, **CLOSE)
    torch.testing.assert_close(cached.log_probs(TEXTS), expected, **CLOSE)
    assert not torch.allclose(expected, alone, atol=1e-2)
    assert decoder.tokenizer.decode(cached.prefix.ids).startswith(f"{shown_string(films)}Review:")
    tokens = len(cached.prefix.ids)
    assert cached.cost.cached_values == 2 * LAYERS * KEY_VALUE_WIDTH[model_type] * tokens
    assert (cached.cost.trained, uncached.cost.cached_values) == (0, 0)


@pytest.mark.parametrize("name", ["zero_shot", "few_shot", "few_shot_uncached"])
def test_labels_that_share_a_token_use_full_sequence_scoring(name, demonstrations):
    task = Task("films", ("poorest", "poorer"), Template("Review: {text}\nSentiment:{label}"))
    decoder = new_decoder("llama")
    shown = [f"Review: {text}\nSentiment:{task.labels[label]}\n" for text, label in SHOWN]
    expected = plain(decoder, task, TEXTS, "" if name == "zero_shot" else "".join(shown), full=True)
    torch.testing.assert_close(fit(name, decoder, task, demonstrations).log_probs(TEXTS), expected, **CLOSE)


@pytest.mark.parametrize("name", ["zero_shot", "few_shot", "lora"])
def test_word_level_scoring_can_be_requested(name, demonstrations):
    task = Task("films", ("good film", "good mess", "so-so"), Template("Review: {text}\nSentiment:{label}"))
    decoder, options = new_decoder("llama"), {"epochs": 0, "loss": "labels"} if name == "lora" else {}
    predictor = fit(name, decoder, task, demonstrations, scoring="words", **options)
    below = fit("few_shot" if name == "few_shot" else "zero_shot", decoder, task, demonstrations)
    expected = LabelScorer(decoder, task, "words").labels.scores(below.next_token_log_probs(TEXTS))
    torch.testing.assert_close(predictor.log_probs(TEXTS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_text_that_merges_with_the_demonstrations_is_not_scored_from_the_cache(model_type, demonstrations):
    joined = byte_level(["one\n\n\n\ntwo\n\n\n\nthree"] * 3, 258, special=())  # newlines into one token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=joined)
    decoder = Decoder(tiny_model(model_type), tokenizer, name=model_type)
    task = Task("films", WORDS, Template("{text}\nSentiment:{label}"))
    texts = ["\n\n\nlate", "early", "\n\nlater", "\nonce"]
    shown = "".join(f"{text}\nSentiment:{WORDS[label]}\n" for text, label in SHOWN)
    predictor = fit("few_shot", decoder, task, demonstrations)
    start = predictor.prefix.ids
    encoded = decoder.encoder([f"{shown}{text}\nSentiment:" for text in texts])
    assert {ids[: len(start)] != start for ids in encoded} == {True, False}
    torch.testing.assert_close(predictor.log_probs(texts), plain(decoder, task, texts, shown), **CLOSE)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"formula": "add"}, {"sublayers": "mha", "positions": "last"}])
def test_i2cl_is_extraction_calibration_and_injection(model_type, films, demonstrations, options):
    decoder = new_decoder(model_type)
    predictor = fit("i2cl", decoder, films, demonstrations, seed=3, epochs="2", **options)
    extraction = ExtractConfig(sublayers=options.get("sublayers", "both"))
    config = CalibrationConfig(epochs=2, **{k: v for k, v in options.items() if k != "sublayers"})
    injection = injected(decoder, films, demonstrations, config, extraction=extraction, seed=3)
    assert torch.equal(predictor.log_probs(TEXTS).log_softmax(-1), injection.log_probs(decoder, TEXTS))
    assert predictor.cost.cached_values == 2 * LAYERS * WIDTH
    assert not torch.allclose(predictor.log_probs(TEXTS), plain(decoder, films, TEXTS), atol=1e-3)


BARE = [({}, 4), ({"formula": "balance"}, 4), ({"formula": "add"}, 2), ({"sublayers": "mlp"}, 2)]
NUMBERS = [(name, *each) for name in ("i2cl", "noise") for each in (*BARE, ({"sublayers": "hidden"}, 2))]
VECTORS = [({}, 2 * WIDTH), ({"sublayers": "mha"}, WIDTH), ({"sublayers": "hidden"}, WIDTH)]


@pytest.mark.parametrize(
    ("name", "options", "per_layer"), [*NUMBERS, *(("anchored", *each) for each in VECTORS)], ids=str
)
def test_cost_counts_the_trained_parameters(films, demonstrations, name, options, per_layer):
    short = {"steps": 1} if name == "anchored" else {"epochs": 0}
    predictor = fit(name, new_decoder("llama"), films, demonstrations, **short, **options)
    assert predictor.cost.trained == per_layer * LAYERS


def test_noise_vector_has_unit_variance(films):
    vectors = torch.randn(4, 2, 2048) * torch.tensor([1.0, 9.0])[:, None]
    injection = random_injection(new_decoder("llama"), films)
    real = replace(injection, context=vectors, coefficients=torch.ones(4, 2, 2))
    standard = noise_like(real, 0)
    assert standard.context.shape == real.context.shape
    assert standard.context.std().item() == pytest.approx(1, abs=0.05)
    assert standard.context.mean().item() == pytest.approx(0, abs=0.05)
    first, again, other = (noise_like(real, seed).context for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_noise_is_calibrated_like_i2cl_with_another_vector(films, demonstrations):
    decoder = new_decoder("llama")
    predictor = fit("noise", decoder, films, demonstrations, seed=2, epochs=2)
    real = extract(decoder, films, demonstrations, seed=2)
    vector = noise_like(real, 2)
    injection = calibrate(decoder, films, demonstrations, vector, CalibrationConfig(epochs=2), seed=2)
    assert torch.equal(predictor.log_probs(TEXTS).log_softmax(-1), injection.log_probs(decoder, TEXTS))
    assert not torch.equal(predictor.injection.context, real.context)
    assert predictor.cost.cached_values == 2 * LAYERS * WIDTH


def test_costs_add_up(decoder):
    prefix = decoder.prefix(decoder.encoder(["five"])[0])
    cost = Cost.of(torch.zeros(3), None, prefix, trained=2) + Cost(held_out=4)
    assert cost == Cost(2, 3 + prefix.values, 12 + prefix.bytes, 4)


@pytest.fixture
def decoder(request, decoder, tmp_path):
    """The shared decoder; for a compressor, with the compressor in its checkpoint."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    known = name in METHODS and METHODS[name].__module__.startswith("i2cl.methods.compressors.")
    return with_compressor(name, tmp_path) if known else decoder


@pytest.fixture
def contract(request):
    """Fit a method with the fewest steps, offline."""

    def fitted(name, decoder, task):
        options = {"epochs": 1} if "epochs" in METHODS[name].options() else {}
        if "encoder" in METHODS[name].options() and find_spec("sentence_transformers"):
            options["encoder"] = request.getfixturevalue("encoder")
        (method,) = make_methods([name], options)
        try:
            return method.fit(decoder, task, task.sample(2), 0)
        except I2CLError as error:
            if "pip install" not in str(error):
                raise
            pytest.skip(f"an optional package is missing: {error}")

    return fitted


@pytest.fixture
def rows(task):
    """The shared task with enough rows for held-out examples, and another template."""
    more = tuple(replace(example, text=f"{example.text} again") for example in task.train)
    template = Template("Review: {text}\nSentiment:{label}")
    return replace(task, template=template, train=task.train + more)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_repeatable_and_restores_the_model(name, decoder, rows, contract):
    model, texts = decoder.model, [query.text for query in rows.queries(5)]
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    with left_as_found(model):
        predictor = contract(name, decoder, rows)
        scores = predictor.log_probs(texts)
    assert scores.shape == (5, 2)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    assert torch.equal(contract(name, decoder, rows).log_probs(texts), scores)
    raises("text 2 is empty", predictor.log_probs, ["good", " "])
    if not issubclass(METHODS[name], Wrapper):  # batch calibration is transductive
        torch.testing.assert_close(predictor.log_probs(texts[::-1]), scores.flip(0), **CLOSE)
    counts = (predictor.cost.cached_values, predictor.cost.trained, predictor.cost.held_out)
    assert all(isinstance(count, int) and count >= 0 for count in counts)


def test_demonstrations_are_reduced_to_fit_the_context(films, demonstrations):
    whole = shown_string(films) + films.template.query(SHOWN[2][0])  # query as long as the longest
    needed = len(tiny_tokenizer()(whole)["input_ids"])
    decoder = Decoder(tiny_model("llama", max_position_embeddings=needed), tiny_tokenizer())
    assert len(fit("few_shot", decoder, films, demonstrations).shown) == 4
    decoder = Decoder(tiny_model("llama", max_position_embeddings=needed - 1), tiny_tokenizer())
    reason = rf"2 demonstrations per class and a query need {needed} tokens, .* showing 1 per class"
    with pytest.warns(UserWarning, match=reason):
        predictor = fit("few_shot", decoder, films, demonstrations)
    assert predictor.shown == tuple((text, WORDS[label]) for text, label in SHOWN[:2])
    decoder = Decoder(tiny_model("llama", max_position_embeddings=30), tiny_tokenizer())
    for name in ("few_shot", "few_shot_uncached"):
        raises(r"need \d+ tokens, but the context holds 30", fit, name, decoder, films, demonstrations)


def test_methods_take_the_options_that_they_have():
    zero, ours = make_methods(["zero_shot", "i2cl"], {"epochs": "7", "formula": "balance"})
    assert (zero.name, ours.calibration.epochs, ours.calibration.formula) == ("zero_shot", 7, "balance")
    assert ours.calibration.lr == CalibrationConfig().lr
    names = ["i2cl", "noise", "lora", "ia3", "prompt_tuning", "prefix_tuning"]
    made = make_methods(names, {"loss": "labels"})
    assert {getattr(one, "calibration", getattr(one, "training", None)).loss for one in made} == {"labels"}
    assert set(METHODS["i2cl"].options()) == {*ExtractConfig.model_fields, *CalibrationConfig.model_fields}
    assert METHODS["zero_shot"].options() == {"scoring": "auto|first_token|sequence|words"}


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["zero_shto"], {}, "unknown method 'zero_shto': did you mean 'zero_shot'"),
        (["i2cl"], {"epoch": 3}, "no chosen method has the option 'epoch'"),
        (["task_vector"], {"epochs": 3}, "choose from \\(no options\\)"),
        (["i2cl"], {"epochs": "many"}, "option epochs='many'"),
        (["i2cl"], {"token": "middle"}, "option token='middle'"),
        (["lora"], {"loss": "words"}, "option loss='words': Input should be 'vocabulary' or 'labels'"),
        (["anchored"], {"loss": "labels"}, "no chosen method has the option 'loss'"),
        (
            ["i2cl"],
            {"formula": "add", "init_lambda": "0"},
            "^formula=.add. cannot train init_lambda <= 0: start above 0",
        ),
        *(([name], {key: inf}, f"option {key}='?inf'?: .*finite number") for (name, key), inf in INFINITE),
    ],
)
def test_unknown_names_and_invalid_options_are_refused(names, options, message):
    raises(message.replace("+", r"\+"), make_methods, names, options)


def test_registry_is_complete_and_read_only():
    assert set(METHODS) >= {"zero_shot", "few_shot", "few_shot_uncached", "i2cl", "noise"}
    assert all(method.name == name for name, method in METHODS.items())
    assert all(method.summary and method.needs for method in METHODS.values())
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["i2cl"]


def test_recipe_applies_only_to_i2cl_methods():
    lora, i2cl, noise = make_methods(["lora", "i2cl", "noise+label_prior"], recipe="released")
    assert lora == make_methods(["lora"])[0]
    for result in (i2cl, noise.inner):
        assert result.calibration == CalibrationConfig.recipe("released")


def test_recipe_that_no_method_has_is_refused():
    raises("no chosen method has the recipe 'fast'", make_methods, ["anchored", "lora"], recipe="fast")


@pytest.mark.parametrize("name", ["zero_shot", "few_shot", "anchored", "zero_shot+label_prior"])
def test_nan_scores_are_refused(films, demonstrations, name):
    decoder = new_decoder("llama")
    options = {} if "prior" not in name else {"unlabelled": 2}
    task = replace(films, train=tuple(Example(text, 0) for text in TEXTS))
    predictor = fit(name, decoder, task, demonstrations, **options)
    with torch.no_grad():
        decoder.model.model.norm.weight.fill_(float("nan"))
    raises("label scores are NaN: the model overflows in float32", predictor.log_probs, TEXTS)


INNER_TEMPERATURES = {
    "zero_shot": 1.5,
    "anchored": 2.4,
    "zero_shot+label_prior": 1.5,
    "zero_shot+batch_calibration": 1.5,
}
INNER_TEMPERATURES |= {"zero_shot+temperature": 1.0, "zero_shot+zero_shot": 1.0}  # products are calibrated


@pytest.mark.parametrize(("inner", "typical"), INNER_TEMPERATURES.items())
def test_product_multiplies_probabilities_and_adds_costs(inner, typical, films, demonstrations):
    task = replace(films, train=tuple(Example(text, 0) for text in TEXTS))
    options = {"unlabelled": 2} if "prior" in inner else {}
    given, seen = (new_decoder("llama"), task, demonstrations), []
    first, second = fit(inner, *given, **options), fit("few_shot", *given)
    both = fit(f"{inner}+few_shot", *given, **options)
    tempered = (first.log_probs(TEXTS).double() / typical).log_softmax(-1)
    expected = (tempered.exp() * second.log_probs(TEXTS).exp()).log()
    result = both.log_probs(TEXTS, seen.append)
    torch.testing.assert_close(result.double(), expected.log_softmax(-1), atol=1e-5, rtol=1e-5)
    assert sum(seen) == len(TEXTS)
    assert both.cost == first.cost + second.cost


def test_product_uses_the_typical_temperature_if_none_can_be_fitted(films):
    given = new_decoder("llama"), films, [Example("a warm film", 0), Example("no", 1)]
    plain, chosen = (fit(f"anchored{name}+few_shot", *given) for name in ("", "+temperature"))
    assert torch.equal(plain.log_probs(TEXTS), chosen.log_probs(TEXTS))


def test_wrapped_methods_take_their_own_options():
    (result,) = make_methods(["i2cl+label_prior+tfidf+temperature"], {"epochs": 3, "refits": 2})
    assert result.full_name == "i2cl+label_prior+tfidf+temperature"
    assert isinstance(result.inner, Product)
    assert (result.inner.inner.inner.calibration.epochs, result.config.refits) == (3, 2)
    assert make_methods(["zero_shot+noise"], recipe="fast")[0].other.calibration.optimizer == "lbfgs"


@pytest.mark.parametrize("name", ["zero_shot+tfidf", "tfidf+zero_shot"])
def test_product_excludes_a_label_that_one_method_has_not_seen(name, films, demonstrations):
    three = replace(films, labels=("positive", "neutral", "negative"), train=(), test=())
    shown = [Example(text, 2 * label) for text, label in SHOWN]
    scores = fit(name, new_decoder("llama"), three, shown).log_probs(TEXTS)
    assert (scores[:, 1] == -torch.inf).all()
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(len(TEXTS), dtype=scores.dtype))
