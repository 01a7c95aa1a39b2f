"""The linear probe: its features and its classifier computed directly, and what its folds choose."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from sklearn import linear_model

from fitting import SHOWN, TEXTS, block_outputs, fit, ids, new_decoder, raises
from i2cl import Example, Template
from i2cl.methods import linear_probe
from i2cl.models.encoding import TruncationWarning
from i2cl.models.scoring import LabelScorer


def probe_features(decoder, films, layer, tokens):
    """Return states of the prompts of demonstrations and queries; the text's tokens are found by letters."""
    rows = []
    for text in [text for text, _ in SHOWN] + TEXTS:
        prompt = films.template.query(text)
        states = block_outputs(decoder, prompt)[layer]
        pieces = [decoder.tokenizer.decode([token]) for token in ids(decoder, prompt)]
        ends = list(accumulate(map(len, pieces)))
        start = prompt.index(text)
        places = zip(ends, pieces, strict=True)
        inside = [end > start and end - len(piece) < start + len(text) for end, piece in places]
        mean = states[torch.tensor(inside)].mean(0)
        rows.append({"last": states[-1], "mean": mean, "both": torch.cat([states[-1], mean])}[tokens])
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(
    ("layer", "tokens", "c"), [(-1, "last", 1.0), (0, "mean", 0.1), (1, "both", 2.0), (-2, "mean", 1.0)]
)
def test_linear_probe_is_logistic_regression_on_states(layer, tokens, c, films, demonstrations):
    decoder = new_decoder("qwen2")
    states = probe_features(decoder, films, layer, tokens)
    seen, new = states[: len(SHOWN)], states[len(SHOWN) :]
    mean, deviation = seen.mean(0), seen.std(0)
    regression = linear_model.LogisticRegression(C=c, max_iter=10_000)
    regression.fit((seen - mean) / deviation, [label for _, label in SHOWN])
    expected = regression.predict_log_proba((new - mean) / deviation)
    options = {"probe_layer": layer, "probe_tokens": tokens, "probe_c": c}
    predictor = fit("linear_probe", decoder, films, demonstrations, **options)
    expected = torch.from_numpy(expected).float()
    torch.testing.assert_close(predictor.log_probs(TEXTS), expected, atol=1e-3, rtol=1e-3)
    assert predictor.cost.trained == states.shape[1] + 1


@pytest.mark.parametrize(("place", "other"), [(0, "mean"), (1, "last")])
def test_a_probe_is_chosen_by_what_its_folds_get_right(place, other, films, monkeypatch):
    """Noise everywhere but at one place of one of eleven layers, which tells the labels."""
    decoder = new_decoder("llama", num_hidden_layers=11)
    shown = [Example(f"film {number}", number % 2) for number in range(20)]

    def error(_questions, texts, layers, *, pooled):
        states = torch.randn(len(texts), len(layers), 2, 8, generator=torch.Generator().manual_seed(1))
        labels = torch.tensor([int(text.split()[1]) % 2 for text in texts])
        if 8 in layers:
            states[:, list(layers).index(8), place] += 3.0 * labels[:, None]
        return states

    monkeypatch.setattr(linear_probe, "query_states", error)
    best = fit("linear_probe", decoder, films, shown).choice
    assert best.layer == 8
    assert best.tokens != other
    assert fit("linear_probe", decoder, films, shown, probe_tokens="last", probe_c=1).choice.tokens == "last"
    assert fit("linear_probe", decoder, films, shown, probe_layer=-1, probe_c=1).choice.layer == 10
    once = fit("linear_probe", decoder, films, shown[:2])  # one a class: nothing to choose by
    assert once.choice == (9, "both", 0.1)
    uneven = [*shown[:5], shown[6]]  # four of one class and two of the other
    assert fit("linear_probe", decoder, films, uneven, probe_c=1).choice.layer in {8, 9, 10}


@pytest.mark.parametrize("front", ["", "A task.\n\n"])
def test_a_texts_tokens_are_found_in_a_prompt_that_was_cut(front, films):
    decoder = new_decoder("llama", max_position_embeddings=48)
    template = Template("Review: {text}\nSentiment: {label}", opening=front)
    scorer = LabelScorer(decoder, replace(films, template=template))
    texts = ["no", "a very warm film about <|endoftext|> " * 9, "x y"]
    with pytest.warns(TruncationWarning):
        queries = scorer.queries(texts)
    spans = [*zip(queries, linear_probe._spans(scorer, texts, queries), strict=True)]
    parts = [decoder.tokenizer.decode(row[first:last]) for row, (first, last) in spans]
    assert [parts[0].strip(), parts[2].strip()] == ["no", "x y"]
    assert parts[1].strip()
    assert (" " + texts[1]).startswith(parts[1])
    behind = [decoder.tokenizer.decode(row[last:]) for row, (_, last) in spans]
    assert all(one.startswith("\nSentiment") for one in behind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe_layer": 2}, "probe_layer=2: choose a layer from 0 to 1"),
        ({"probe_layer": "first"}, "option probe_layer='first'"),
        ({"probe_c": "-1"}, "option probe_c='-1'.*greater than 0"),
        ({"probe_tokens": "mean"}, "probe_tokens=mean needs a fast tokenizer"),
    ],
)
def test_a_probe_that_cannot_be_made(options, message, films, demonstrations, monkeypatch):
    decoder = new_decoder("llama")
    monkeypatch.setattr(type(decoder.tokenizer), "is_fast", False)
    assert fit("linear_probe", decoder, films, demonstrations).choice.tokens == "last"
    raises(message, fit, "linear_probe", decoder, films, demonstrations, **options)
