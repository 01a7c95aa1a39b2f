"""Rotary embeddings that depend on the length of a batch must not affect results of a row."""

from types import SimpleNamespace

import pytest
import torch

from i2cl import Decoder, Task, Template
from i2cl.models.batching import context_length
from i2cl.models.encoding import TruncationWarning
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.scoring import LabelScorer, score
from tiny import LIMIT, LONGROPE, tiny_model, tiny_tokenizer

FILMS = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
LABELS = LabelTokens(((5, 9, 7), (8,)), full_sequences=False)
SAME = {"atol": 1e-5, "rtol": 1e-5}


def ids(length, start=1):
    return tuple((7 * place + start) % 290 + 1 for place in range(length))


def test_longrope_context_ends_where_other_frequencies_begin():
    decoder = Decoder(tiny_model("phi3", **LONGROPE), tiny_tokenizer(), name="tiny-longrope")
    assert decoder.max_length == LIMIT
    with pytest.warns(TruncationWarning, match=f"1 of 2 texts were cut to fit {LIMIT} tokens"):
        queries = LabelScorer(decoder, FILMS).queries(["so dull " * 40, "warm"])
    assert len(queries[1]) < len(queries[0]) <= LIMIT


@pytest.mark.parametrize(
    ("limits", "given", "length"),
    [((64, 16), 128, 16), ((64,), 32, 32), ((64,), None, 64), ((), None, None), ((), 128, 128)],
)
def test_context_length_is_the_shortest_limit_of_any_layer(limits, given, length):
    ropes = {
        str(place): {"rope_type": "longrope", "original_max_position_embeddings": one}
        for place, one in enumerate(limits)
    }
    ropes |= {"other": {"rope_type": "yarn"}, "no": None}
    config = SimpleNamespace(rope_parameters=ropes, max_position_embeddings=given)
    assert context_length(config, 10**30) == length


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
