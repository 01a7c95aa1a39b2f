"""Tokens of labels: labels that are prefixes of others, and newlines before labels."""

import copy
import json
import random
import warnings

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fitting import decoder_of, encode, log_probability, new_decoder
from i2cl import Decoder, I2CLError, Task, Template
from i2cl.models.label_tokens import LabelTokens, ScoringWarning, _assign_token, find_label_tokens
from i2cl.models.scoring import LabelScorer
from tiny import tiny_model, tiny_tokenizer

TEMPLATE = Template("Review: {text}\nSentiment:{label}")
LABELS = ("positive", "negative")
WORDS = ("hate", "not", "spam", "New", "York", "a", "b", "of")
WORDS += ("good", "bad", "7", "film", "film.", "New-York", "spammy")


def random_labels(seed):
    """Return 2 to 20 distinct labels of one to three words, many of them prefixes of others."""
    picker = random.Random(seed)
    wanted = picker.randint(2, 20)
    result = {" ".join(picker.choices(WORDS, k=picker.randint(1, 3))) for _ in range(wanted)}
    return tuple(sorted(result | {"hate", "hate speech"}, key=lambda _: picker.random()))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
@pytest.mark.parametrize("seed", range(6))
def test_no_label_is_a_prefix_of_another(case, seed):
    decoder, labels = decoder_of(case), random_labels(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScoringWarning)
        asked = LabelScorer(decoder, Task("films", labels, TEMPLATE))
        result = asked.scores(["a warm film"])[0]
    ids = asked.labels.sequences
    assert not any(one != other and other[: len(one)] == one for one in ids for other in ids)
    (end,) = {one[-1] for one in ids}  # what ends all of them: the separator's first token
    assert end == encode("\n")[0]
    prompt = encode(TEMPLATE.query("a warm film"))
    wholes = [encode(TEMPLATE.query("a warm film") + label + "\n") for label in labels]
    with torch.no_grad():
        by_hand = [log_probability(decoder, prompt, whole[len(prompt) :]) for whole in wholes]
    assert torch.allclose(result, torch.stack(by_hand), atol=1e-4)
    assert result.exp().sum() <= 1 + 1e-5  # different answers exclude each other


def test_labels_end_with_eos_if_the_separator_merges():
    decoder = new_decoder("llama")
    template = Template("Review: {text}\nSentiment:{label}", separator="n")
    assert encode("on")[:1] != encode("o")
    with pytest.warns(ScoringWarning):
        result = find_label_tokens(decoder.encoder, template, ("a o", "a o a"))
    assert {ids[-1] for ids in result.sequences} == {decoder.tokenizer.eos_token_id}
    decoder = Decoder(decoder.model, copy.deepcopy(decoder.tokenizer))
    decoder.tokenizer.eos_token = None
    message = r"label .a o. is a prefix of label .a o a..*use other label words"
    with pytest.warns(ScoringWarning), pytest.raises(I2CLError, match=message):
        find_label_tokens(decoder.encoder, template, ("a o", "a o a"))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_newline_before_labels_belongs_to_the_query(case):
    decoder = decoder_of(case)
    asked = LabelScorer(decoder, Task("films", LABELS, Template("Review: {text}\nSentiment:\n{label}")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked.labels.sequences == tuple(map(encode, LABELS))
    assert not asked.labels.full_sequences
    assert asked.labels.query_suffix == "\n"
    assert asked.queries(["dull"]) == [encode("Review: dull\nSentiment:\n")]
    texts = ["a warm film", "dull"]
    first = LabelScorer(decoder, asked.task, "first_token").scores(texts)
    assert torch.allclose(first, asked.scores(texts))


def test_newline_that_merges_with_labels_belongs_to_them():
    tokenizer = merging_tokenizer()
    decoder = Decoder(tiny_model("llama"), tokenizer)
    asked = LabelScorer(decoder, Task("films", ("x", "ab"), Template("{text}:\n{label}")))
    assert asked.labels.query_suffix == ""
    assert [tokenizer.decode(list(ids)) for ids in asked.labels.sequences] == ["\nx", "\nab"]


def merging_tokenizer():
    """A tokenizer with a token for a newline followed by x."""
    base = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    newline, letter = "\u010a", "x"
    base["model"]["vocab"][newline + letter] = len(base["model"]["vocab"])
    base["model"]["merges"].insert(0, [newline, letter])
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    base["pre_tokenizer"] = {"type": "ByteLevel", **options}
    backend = Tokenizer.from_str(json.dumps(base))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def recursive_keywords(choices):
    """Kuhn's algorithm as in a textbook: the token of each label, or None."""
    owner = {}

    def settled(label, tried):
        for token in choices[label]:
            if token not in tried:
                tried.add(token)
                if token not in owner or settled(owner[token], tried):
                    owner[token] = label
                    return True
        return False

    for label in range(len(choices)):
        settled(label, set())
    chosen = {label: token for token, label in owner.items()}
    return [chosen.get(label) for label in range(len(choices))]


@pytest.mark.parametrize("seed", range(30))
def test_label_tokens_match_the_textbook_algorithm(seed):
    picker = random.Random(seed)
    tokens = range(picker.randint(2, 40))
    choices = [picker.sample(tokens, picker.randint(1, min(5, len(tokens)))) for _ in range(30)]
    owner = {}
    found = [_assign_token(label, choices, owner) for label in range(len(choices))]
    chosen = {label: token for token, label in owner.items()}
    assert [chosen.get(label) for label in range(len(choices))] == recursive_keywords(choices)
    assert sum(found) == len(owner)


def test_long_augmenting_paths_are_supported():
    """The last label wants the token of the first one, which wants that of the second, and so on."""
    count = 4096
    choices = [[label, label + 1] for label in range(count)] + [[0]]
    owner = {}
    assert all(_assign_token(label, choices, owner) for label in range(count + 1))
    assert sorted(owner.values()) == list(range(count + 1))


@pytest.mark.parametrize("fitted", [False, True])
def test_token_of_probability_zero_excludes_only_its_labels(fitted):
    labels = LabelTokens(
        ((1, 4), (2,), (3, 5)), full_sequences=False, word_tokens=((1, 4), (2,), (3, 5)), keywords=(1, 2, 3)
    )
    if fitted:
        labels = labels.with_word_weights(labels.word_weights + 0.001)
    logits = torch.zeros(2, 6)
    logits[1, 4] = -torch.inf
    scores = labels.scores(logits)
    assert not scores.isnan().any()
    assert scores.softmax(-1)[1].argmax() == 1
    assert scores.softmax(-1)[1, 0] < 1e-6
