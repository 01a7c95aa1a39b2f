import weakref
from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch

from fitting import PATHS, close, encode, raises, raw_modules, replacing
from i2cl import Decoder, Example, ExtractConfig, Task, Template, extract, extract_classes
from i2cl.models.encoding import TruncationWarning
from tiny import tiny_model, tiny_tokenizer

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment: {label}"))
LONG = "a funny, warm and funny film with a longest river in it"
GIVEN = (("a warm film", 0), ("dull", 1), (LONG, 0), ("dull", 0), ("a lifeless film", 1))
SHOTS = tuple(Example(text, label) for text, label in GIVEN)


@cache
def decoder_of(case, token_budget=4096):
    return Decoder(tiny_model(case), tiny_tokenizer(), name=case, token_budget=token_budget)


def prompt(example, separator=True):
    text = f"Review: {example.text}\nSentiment: {TASK.labels[example.label]}"
    return encode(text + "\n" * separator)


def single(decoder, case, ids, place, sublayers="both"):
    """Capture one token of one unpadded row with plain hooks: [layer, sublayer, d]."""
    seen = []
    modules = chain(*raw_modules(decoder.model, case, "hidden" if sublayers == "hidden" else "sublayers"))
    watched = ((module, lambda output: seen.append(output.clone())) for module in modules)
    with torch.no_grad(), replacing(watched):
        decoder.model(torch.tensor([ids]), use_cache=False)
    kept = [output.reshape(len(ids), -1)[place] for output in seen]
    return torch.stack(kept).view(decoder.layers, -1, decoder.d_model)


def rows(decoder, case, *, place=-1, sublayers="both", separator=True):
    return torch.stack([single(decoder, case, prompt(shot, separator), place, sublayers) for shot in SHOTS])


OTHER_TOKENS = [{"separator": False}, {"token": "first"}, {"token": "first", "separator": False}]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        *((case, {"sublayers": sublayers}) for case in PATHS for sublayers in ("both", "hidden")),
        *(("llama", config) for config in OTHER_TOKENS),
    ],
)
def test_context_vector_is_the_mean_of_single_runs(case, config):
    decoder, place = decoder_of(case), {"first": 0}.get(config.get("token"), -1)
    outcome = extract(decoder, TASK, SHOTS, ExtractConfig(**config))
    values = {name: value for name, value in config.items() if name != "token"}
    assert close(outcome.context, rows(decoder, case, place=place, **values).mean(0))
    assert outcome.demonstrations == len(SHOTS)
    assert outcome.context.dtype == torch.float32


@pytest.mark.parametrize("seed", range(3))
def test_random_token_is_drawn_for_each_demonstration(seed):
    decoder, shot = decoder_of("llama"), SHOTS[:1]
    outcome = extract(decoder, TASK, shot, ExtractConfig(token="random"), seed=seed)
    ids = prompt(shot[0])
    candidates = [single(decoder, "llama", ids, place) for place in range(len(ids))]
    assert sum(bool(close(outcome.context, candidate)) for candidate in candidates) == 1


@pytest.mark.parametrize("token", ["last", "random"])
@pytest.mark.parametrize("budget", [1, 60])
def test_order_of_demonstrations_does_not_change_the_vector(budget, token):
    decoder, config = decoder_of("gpt2", budget), ExtractConfig(token=token)
    outcome = [extract(decoder, TASK, order, config).context for order in (SHOTS, SHOTS[3:] + SHOTS[2::-1])]
    assert torch.equal(*outcome)


@pytest.mark.parametrize("token", ["last", "random"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "opt", "gemma2"])
def test_batch_size_does_not_change_the_vector(case, token):
    config = ExtractConfig(token=token)
    outcome = [extract(decoder_of(case, budget), TASK, SHOTS, config).context for budget in (1, 60, 4096)]
    assert close(outcome[0], outcome[2])
    assert close(outcome[1], outcome[2])
    other = extract(decoder_of(case), TASK, SHOTS, config, seed=1).context  # affects the random token
    assert torch.equal(other, outcome[2]) == (token == "last")


def test_memory_does_not_grow_with_the_number_of_demonstrations(monkeypatch):
    decoder = Decoder(decoder_of("llama").model, tiny_tokenizer(), token_budget=1)
    captured, most = [], 0
    capture = decoder.capture

    def counting(*args, **kwargs):
        nonlocal most
        result = capture(*args, **kwargs)
        captured.append(weakref.ref(result))
        most = max(most, sum(reference() is not None for reference in captured))
        return result

    monkeypatch.setattr(decoder, "capture", counting)
    extract(decoder, TASK, SHOTS * 3)
    assert len(captured) == 3 * len(SHOTS)
    assert most <= 2


@pytest.mark.parametrize(
    ("shown", "options", "message"),
    [
        ([], {}, "no demonstrations"),
        ([SHOTS[0], Example("a film", 2)], {}, "demonstration 2 has label 2"),
        ([SHOTS[0], Example("a film", -1)], {}, "demonstration 2 has label -1"),
    ],
)
def test_invalid_demonstrations_are_refused(shown, options, message):
    raises(message, extract, decoder_of("llama"), TASK, shown, ExtractConfig(**options))


@pytest.mark.parametrize("separator", [True, False])
def test_long_demonstrations_are_truncated_only_in_their_text(separator):
    decoder = Decoder(tiny_model("llama", max_position_embeddings=48), tiny_tokenizer())
    seen = []
    capture = decoder.capture
    decoder.capture = lambda batch, *args, **kwargs: seen.append(batch) or capture(batch, *args, **kwargs)
    shots = [Example("a dull film " * 50, 1), Example("a warm film " * 50, 0), SHOTS[0]]
    with pytest.warns(TruncationWarning, match="2 of 3") as caught:
        extract(decoder, TASK, shots, ExtractConfig(separator=separator))
    assert len(caught) == 1
    (batch,) = seen
    ends = {tuple(prompt(shot, separator))[-8:] for shot in SHOTS}
    for ids, last in zip(batch.input_ids.tolist(), batch.last.tolist(), strict=True):
        assert last < 48
        assert tuple(ids[: last + 1])[-8:] in ends
        assert tuple(ids[: len(encode("Review: ")) - 1]) == encode("Review: ")[:-1]


def test_demonstration_longer_than_the_context_is_refused():
    decoder = Decoder(tiny_model("llama", max_position_embeddings=8), tiny_tokenizer())
    needed = max(len(prompt(Example("", label))) for label in (0, 1))
    raises(rf"needs {needed} tokens, but only 8 fit", extract, decoder, TASK, SHOTS[:1])


# Vectors per class

THREE = replace(TASK, labels=("positive", "negative", "mixed"))
TEXTS = ("a warm film", "dull", "warm and dull", "funny", "a lifeless film", "so so")
FILMS = tuple(Example(text, row % 3) for row, text in enumerate(TEXTS))
UNEVEN = (*FILMS, Example("the best of the year", 0))


@pytest.mark.parametrize("config", [{}, {"sublayers": "hidden"}, {"token": "first"}, {"separator": False}])
@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
def test_class_vectors_match_separate_extraction(case, config):
    decoder, config = decoder_of(case), ExtractConfig(**config)
    vectors = extract_classes(decoder, THREE, UNEVEN, config)
    assert [one.demonstrations for one in vectors] == [3, 2, 2]
    for label, vector in enumerate(vectors):
        alone = extract(decoder, THREE, [shot for shot in UNEVEN if shot.label == label], config)
        assert torch.equal(vector.context, alone.context)
        assert vector.extraction == config
    whole = extract(decoder, THREE, UNEVEN, config)
    mean = sum(one.demonstrations * one.context for one in vectors) / len(UNEVEN)
    torch.testing.assert_close(mean, whole.context, atol=1e-5, rtol=1e-5)


def test_class_without_demonstrations_is_refused():
    for shown, message in (
        (FILMS[:2], "class 'mixed' of task 'films' has no demonstration"),
        ([], "no demonstrations: give at least one"),
        ([Example("a film", 3)], "demonstration 1 has label 3"),
    ):
        raises(message, extract_classes, decoder_of("llama"), THREE, shown)
