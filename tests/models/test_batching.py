import random
import warnings
from functools import partial

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from fitting import encode
from i2cl.errors import I2CLError
from i2cl.models.batching import batch_sizes, longest_first, make_batch, pack_batch, packing_pays
from i2cl.models.encoding import PromptEncoder, TruncationWarning
from tiny import tiny_tokenizer

CPU = torch.device("cpu")
HEAD, MIDDLE = "Review: ", "\nSentiment:"
WORDS = "a warm and funny film "


def query(text):
    return HEAD + text + MIDDLE


def with_special_tokens(single):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single, None, [("<|endoftext|>", 0)])
    return tokenizer


@pytest.fixture(scope="module")
def encoder():
    return PromptEncoder.of(tiny_tokenizer())


def test_rows_are_packed_if_that_is_cheaper():
    batch = make_batch([(5, 6, 7), (8,)], CPU)
    assert (batch.input_ids[0].tolist(), batch.input_ids[1, 0]) == ([5, 6, 7], 8)
    assert (batch.last.tolist(), batch.rows, batch.packed) == ([2, 0], (0, 1), False)
    batch = pack_batch([(5, 6, 7), (8,), (9, 10)], CPU)
    assert (batch.input_ids.tolist(), batch.packed) == ([[5, 6, 7, 8, 9, 10]], True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert (batch.first.tolist(), batch.last.tolist()) == ([0, 3, 4], [2, 3, 5])
    assert packing_pays([5, 20], d_model=64)
    assert not packing_pays([20, 20], d_model=64)
    assert not packing_pays([900, 1000], d_model=64)
    ids = [(1,), (2, 3), (1,), (4, 5, 6), (2, 2)]
    assert [ids[row] for row in longest_first(ids)] == [(4, 5, 6), (2, 2), (2, 3), (1,), (1,)]


def cuts(count):
    """Yield every way to split n rows into batches."""
    if not count:
        yield []
    for first in range(1, count + 1):
        yield from ([first, *rest] for rest in cuts(count - first))


def cost(lengths, sizes, price):
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return sum(lengths[start] * size + price for start, size in zip(starts, sizes, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_batches_minimize_padding_and_passes(seed):
    draw = random.Random(seed)
    lengths = sorted((draw.randint(1, 12) for _ in range(draw.randint(0, 9))), reverse=True)
    most = [draw.randint(1, 6)] * len(lengths)
    price = draw.choice([0, 2.5, 30])
    sizes = batch_sizes(lengths, most, price)
    allowed = [one for one in cuts(len(lengths)) if all(size <= most[0] for size in one)]
    assert sizes in allowed
    assert cost(lengths, sizes, price) == min(cost(lengths, one, price) for one in allowed)


@pytest.mark.parametrize("behind", ["", " <|endoftext|>"])
@pytest.mark.parametrize(("before", "front"), [("", ()), ("<|endoftext|> ", (0,))])
def test_leading_special_tokens_are_kept_and_trailing_ones_removed(before, behind, front):
    encoder = PromptEncoder.of(with_special_tokens(f"{before}$A{behind}"))
    assert encoder.leading_ids == front
    assert encoder(["a film", "b"]) == [front + encode("a film"), front + encode("b")]


def test_texts_that_fit_are_not_truncated(encoder):
    assert encoder([]) == encoder.encode(query, [], 3) == []
    texts = ["a film", WORDS]
    longest = len(encode(query(WORDS)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for limit in (None, longest, longest + 1):
            assert encoder.encode(query, texts, limit) == [encode(query(text)) for text in texts]


@pytest.mark.parametrize("limit", [25, 26, 27, 40, 61])
def test_long_texts_are_truncated_only_at_their_end(encoder, limit):
    text = WORDS * 30
    with pytest.warns(TruncationWarning, match=f"^1 of 2 texts were cut to fit {limit} tokens") as caught:
        cut, short = encoder.encode(query, [text, "a"], limit)
    assert len(caught) == 1
    assert short == encode(query("a"))
    candidates = [encode(query(text[:end])) for end in range(limit * 4)]
    assert cut in candidates
    assert len(cut) == max(len(ids) for ids in candidates if len(ids) <= limit)
    assert cut[: len(encode(HEAD)) - 1] == encode(HEAD)[:-1]
    assert cut[-len(encode(MIDDLE)) :] == encode(MIDDLE)


def test_truncation_warns_once_for_all_texts(encoder):
    builds = [lambda text: text + " yes", lambda text: "no " + text]
    with pytest.warns(TruncationWarning, match="2 of 2") as caught:
        first, second = encoder.encode(builds, ["abc" * 50, "def" * 50], 12)
    assert len(caught) == 1
    assert first[-len(encode(" yes")) :] == encode(" yes")
    assert second[:3] == encode("no ")


def test_demonstrations_are_never_truncated(encoder):
    shown = "".join(query("a dull film") + " negative\n" for _ in range(3))
    needed = len(encode(shown + query("")))
    with pytest.warns(TruncationWarning):
        (cut,) = encoder.encode(lambda text: shown + query(text), [WORDS * 30], needed + 6)
    assert cut[: len(encode(shown + HEAD)) - 1] == encode(shown + HEAD)[:-1]
    assert needed < len(cut) <= needed + 6
    with pytest.raises(I2CLError, match=rf"needs {needed} tokens, but only {needed - 1} fit"):
        encoder.encode(lambda text: shown + query(text), [WORDS * 30], needed - 1)


@pytest.mark.parametrize(
    "text", ["x" * 200_000, WORDS * 2_000, "ä☃" * 20_000], ids=["one word", "words", "unicode"]
)
@pytest.mark.parametrize("front", ["", "<|endoftext|> "])
def test_very_long_texts_are_truncated_with_room_for_special_tokens(text, front):
    encoder = PromptEncoder.of(with_special_tokens(f"{front}$A"))
    with pytest.warns(TruncationWarning, match="1 of 1"):
        (cut,) = encoder.encode(query, [text], 100)
    assert cut[: len(encoder.leading_ids)] == encoder.leading_ids == ((0,) if front else ())
    assert 97 <= len(cut) <= 100
    assert cut[-len(encode(MIDDLE)) :] == encode(MIDDLE)


def test_truncation_encodes_only_the_start_of_a_long_text(encoder, monkeypatch):
    encoded = []
    build = partial(lambda text: encoded.append(len(text)) or query(text))
    with pytest.warns(TruncationWarning):
        encoder.encode(build, ["x" * 100_000], 50)
    assert sum(encoded) < 100_000 + 100 * 50
