import random
import warnings
from functools import cache
from itertools import product

import pytest
import torch

from fitting import decoder_of, encode, linear_edit, log_probability, new_decoder, raises, random_edit
from i2cl import Decoder, Task, Template
from i2cl.models.edits import AffineEdit
from i2cl.models.encoding import TruncationWarning
from i2cl.models.label_tokens import ScoringWarning, find_label_tokens
from i2cl.models.memory import MemoryWarning
from i2cl.models.scoring import LabelScorer, score
from i2cl.models.trie import Trie, TrieIndices, edge_scores
from tiny import CASES, PATHS, tiny_model, tiny_tokenizer

FAMILIES = ["llama", "gpt2", "gptj", "gpt_neox", "qwen2", "opt", "gemma2", "falcon", "bloom"]
SLIDING = ["gemma3_text", "gpt_neo", "mistral-sliding", "olmo3", "qwen2-sliding"]
TEMPLATE = Template("Review: {text}\nSentiment:{label}")
LABELS = ("positive", "negative")
TEXTS = ("a warm film", "dull", "a dull and lifeless film, " * 3, "where is the longest river", "dull")
SHOWN = "Review: funny\nSentiment:positive\n"


def direct(decoder, text, label, *, full, before=""):
    """Compute a label's log-probability from one unpadded row."""
    prompt = encode(before + TEMPLATE.query(text))
    whole = encode(before + TEMPLATE.query(text) + TEMPLATE.continuation(label))
    assert whole[: len(prompt)] == prompt
    with torch.no_grad():
        return log_probability(decoder, prompt, whole[len(prompt) : None if full else len(prompt) + 1])


@cache
def expected(decoder, *, full, texts=TEXTS, before="", labels=LABELS):
    rows = [[direct(decoder, text, label, full=full, before=before) for label in labels] for text in texts]
    return torch.tensor(rows)


def scorer(decoder, scoring="auto", labels=LABELS):
    return LabelScorer(decoder, Task("films", tuple(labels), TEMPLATE), scoring)


def scores(decoder, scoring="auto", texts=TEXTS, **arguments):
    asked = scorer(decoder, scoring)
    return score(decoder, asked.queries(texts), asked.labels, **arguments)


def close(actual, wanted):
    return torch.allclose(actual, wanted, rtol=1e-5, atol=2e-5)


@pytest.fixture(params=[False, True], ids=["first_token", "sequence"])
def full(request):
    return request.param


def kind(full):
    return "sequence" if full else "first_token"


@pytest.mark.parametrize(("budget", "side"), [(1, "left"), (40, "right"), (10**6, "left")])
@pytest.mark.parametrize("case", [*FAMILIES, *SLIDING])
def test_scores_match_the_model_for_every_padding_side_and_batch_size(case, side, budget, full):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, side
    decoder = Decoder(decoder_of(case).model, tokenizer, token_budget=budget)
    assert close(scores(decoder, kind(full)), expected(decoder_of(case), full=full))
    assert tokenizer.padding_side == side


class Counting(Decoder):
    """Counts the tokens that it runs."""

    tokens = 0

    def forward(self, batch, **arguments):
        self.tokens += batch.input_ids.numel()
        return super().forward(batch, **arguments)


NO_FORKS = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "minimax_m3_vl_text")
NO_FORKS += ("bloom", "falcon-alibi", "mpt")
"""Model types that cache more than keys and values, or compute positions themselves (ALiBi)."""

MANY = ("positive", "negative", "funny and warm", "warm", "where is the river", "dull and lifeless film")


def counting(case, budget=64):
    bare = decoder_of(case)
    return Counting(bare.model, bare.tokenizer, name=case, token_budget=budget)


def drawn_edit(decoder, *pair, **options):
    """Random vectors with one pair of coefficients."""
    values, _ = random_edit(decoder)
    return linear_edit(values, torch.tensor(pair).expand(decoder.layers, 2, 2), **options)


WAYS = sorted({*PATHS, *NO_FORKS, *SLIDING})
EDITED = [*product([case for case in CASES if case not in WAYS], [None]), *product(WAYS, ["all", "last"])]


@pytest.mark.parametrize(("case", "positions"), EDITED)
def test_a_query_runs_once_for_all_labels_if_that_changes_nothing(case, positions):
    model_type, variant = CASES[case]
    wide = {name: 512 for name in ("sliding_window", "window_size") if decoder_of(case).window}
    model = tiny_model(model_type, **variant | wide)
    decoder = Counting(model, tiny_tokenizer(), name=case, token_budget=256)
    asked = scorer(decoder, "sequence", MANY)
    edit = drawn_edit(decoder, 0.1, 0.9, positions=positions) if positions else None
    queries = asked.queries(TEXTS if positions else TEXTS[:2])
    assert decoder.can_fork is (case not in NO_FORKS)
    once = decoder.can_fork and positions != "last"
    decoder.tokens = 0
    result = score(decoder, queries, asked.labels, edit=edit)
    forked, decoder.tokens, decoder.can_fork = decoder.tokens, 0, False
    assert close(result, score(decoder, queries, asked.labels, edit=edit))
    assert (1.5 * forked < decoder.tokens) is once
    assert once or forked == decoder.tokens


@pytest.mark.parametrize("case", CASES)
def test_a_query_after_cached_demonstrations_runs_once_for_all_labels(case):
    model_type, variant = CASES[case]
    wide = {name: 512 for name in ("sliding_window", "window_size") if decoder_of(case).window}
    model = tiny_model(model_type, **variant | wide)
    decoder = Counting(model, tiny_tokenizer(), name=case, token_budget=256)
    asked = scorer(decoder, "sequence", MANY)
    prefix = decoder.prefix(decoder.encoder(["A cold river. warm\n"])[0])
    queries = asked.queries(TEXTS[:3])
    decoder.tokens = 0
    result = score(decoder, queries, asked.labels, prefix=prefix)
    forked, decoder.tokens, can_fork = decoder.tokens, 0, decoder.can_fork
    decoder.can_fork = False
    assert close(result, score(decoder, queries, asked.labels, prefix=prefix))
    assert (1.5 * forked < decoder.tokens) is can_fork


@pytest.fixture(params=[("gemma2", "sliding_window"), ("gpt2", "n_positions")], ids=lambda pair: pair[0])
def limited(request):
    """A decoder with a context or window of 42 tokens, and scorer with many labels."""
    case, limit = request.param
    decoder = Counting(tiny_model(case, **{limit: 42}), tiny_tokenizer(), name=case)
    return decoder, scorer(decoder, "sequence", MANY)


def test_queries_beyond_a_window_or_the_context_do_not_share_a_row(limited):
    decoder, asked = limited
    assert decoder.can_fork
    queries = asked.queries(["dull", "a warm film", "where is the longest river"])
    lengths = [len(query) + len(Trie.of(asked.labels.sequences).tokens) for query in queries]
    assert min(lengths) <= 42 < max(lengths)
    decoder.tokens = 0
    result, once = score(decoder, queries, asked.labels), decoder.tokens
    decoder.tokens, decoder.can_fork = 0, False
    assert close(result, score(decoder, queries, asked.labels))
    assert once < decoder.tokens


def test_cached_demonstrations_count_towards_a_window_and_the_context(limited):
    decoder, asked = limited
    queries = asked.queries(["dull"])
    room = 42 - len(queries[0]) - len(Trie.of(asked.labels.sequences).tokens)
    fitting, long = (decoder.prefix((5,) * length) for length in (room, room + 1))
    tokens = []
    for prefix in (fitting, long):
        decoder.tokens = 0
        score(decoder, queries, asked.labels, prefix=prefix)
        tokens.append(decoder.tokens)
    assert tokens[0] < tokens[1]


def test_queries_keep_their_own_vectors_in_mixed_batches(limited):
    decoder, asked = limited
    long = "where is the longest river"
    queries = asked.queries([long, "dull", "a warm film", long])
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(4, decoder.layers, 2, decoder.d_model, generator=draw)
    keep = torch.ones(4, decoder.layers, 2)
    result = score(decoder, queries, asked.labels, edit=AffineEdit(vectors, keep, tasks=torch.arange(4)))
    for row, query in enumerate(queries):
        own = AffineEdit(vectors[row], keep[0])
        assert close(result[row : row + 1], score(decoder, [query], asked.labels, edit=own))


def test_attention_without_mask_support_does_not_share_rows():
    decoder = counting("llama")
    decoder.model.config._attn_implementation = "flash_attention_2"
    try:
        assert not decoder.can_fork
    finally:
        decoder.model.config._attn_implementation = "sdpa"


@pytest.mark.parametrize("seed", range(8))
def test_trie_contains_every_prefix_once(seed):
    draw = random.Random(seed)
    labels = {tuple(draw.choices(range(3), k=draw.randint(1, 5))) for _ in range(draw.randint(1, 20))}
    trie = Trie.of(tuple(sorted(labels)))
    beginnings = {ids[:end] for ids in labels for end in range(1, len(ids))}
    assert len(trie.tokens) == len(beginnings)
    spelled: list[tuple[int, ...]] = []
    for token, parent, seen in zip(trie.tokens, trie.parents, trie.visible, strict=True):
        spelled.append((*(spelled[parent] if parent >= 0 else ()), token))
        assert [trie.tokens[node] for node in seen.nonzero()[:, 0]] == list(spelled[-1])
    assert set(spelled) == beginnings
    assert len(set(trie.edges)) == len(trie.edges)
    for ids, steps in zip(sorted(labels), trie.steps, strict=True):
        assert [trie.edges[step][1] for step in steps] == list(ids)
    logits = torch.rand(1, 1 + len(trie.tokens), 3)
    values = torch.stack([logits[0].log_softmax(-1)[node + 1, token] for node, token in trie.edges])
    wanted = torch.stack([values[list(own)].sum() for own in trie.steps])
    assert close(edge_scores(logits, [trie])[0], wanted)


@pytest.mark.parametrize(("limit", "budget", "fork"), [(10, 1000, True), (2, 100, False)])
def test_batches_are_halved_when_memory_runs_out(monkeypatch, limit, budget, fork):
    decoder = counting("llama", budget)
    decoder.can_fork = fork
    asked = scorer(decoder, "sequence", MANY)
    queries = asked.queries(["a warm film"] * 30)
    wanted, forward, done = score(decoder, queries, asked.labels), decoder.forward, []

    def short_of_memory(batch, **options):
        if len(batch.rows) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(batch, **options)

    monkeypatch.setattr(decoder, "forward", short_of_memory)
    with pytest.warns(MemoryWarning, match="smaller batches"):
        result = score(decoder, queries, asked.labels, progress=done.append)
    assert close(result, wanted)
    assert sum(done) == pytest.approx(len(queries))
    assert decoder.token_budget >= len(queries[0])


def test_progress_counts_every_query_once(full):
    done = []
    scores(decoder_of("llama"), kind(full), progress=done.append)
    assert sum(done) == pytest.approx(len(TEXTS))
    assert scores(decoder_of("llama"), kind(full), ()).shape == (0, 2)
    decoder, done = counting("llama"), []  # whose queries run once
    asked = scorer(decoder, "sequence", MANY)
    score(decoder, asked.queries(TEXTS), asked.labels, progress=done.append)
    assert (sum(done), {type(count) for count in done}) == (len(TEXTS), {int})


def test_scores_are_float32_for_every_dtype():
    result = scores(decoder_of("llama", torch.bfloat16))
    assert result.dtype == torch.float32
    assert torch.allclose(result, scores(decoder_of("llama")), atol=0.3)


# The prefix cache


@pytest.mark.parametrize(
    ("case", "budget", "edited"),
    [
        *((case, 1024, False) for case in (*FAMILIES, *SLIDING)),
        *((case, 1024, True) for case in ("gpt2", "gemma2", "falcon")),
        *(("gemma2", budget, False) for budget in (1, 10**6)),
    ],
)
def test_scores_after_a_prefix_match_the_full_prompt(case, budget, full, edited):
    decoder = Decoder(decoder_of(case).model, tiny_tokenizer(), token_budget=budget)
    shown = encode(SHOWN)
    assert len(shown) > 8  # longer than the sliding windows
    prefix = decoder.prefix(shown)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in prefix.cache.layers]
    edit = drawn_edit(decoder, 0.0, 1.0) if edited else None  # runs the hooks and changes nothing
    result = scores(decoder, kind(full), prefix=prefix, edit=edit)
    assert close(result, expected(decoder_of(case), full=full, before=SHOWN))
    for layer, (keys, values) in zip(prefix.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.parametrize("case", [*FAMILIES, *SLIDING])
def test_prefix_can_keep_all_tokens_in_every_layer(case):
    decoder = decoder_of(case)
    whole = decoder.prefix(encode(SHOWN), whole=True)
    for prefix in (whole, whole.prune(tuple(range(len(whole.ids))))):
        assert close(scores(decoder, prefix=prefix), expected(decoder, full=False, before=SHOWN))


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2", "falcon", "opt"])
def test_edited_prefix_matches_an_edited_prompt(case):
    decoder, shown = decoder_of(case), encode(SHOWN)
    labels = find_label_tokens(decoder.encoder, TEMPLATE, LABELS)
    edit = drawn_edit(decoder, 0.3, 0.8)
    result = scores(decoder, edit=edit, prefix=decoder.prefix(shown, edit=edit))
    whole = [shown + encode(TEMPLATE.query(text)) for text in TEXTS]
    assert close(result, score(decoder, whole, labels, edit=edit))
    assert not close(result, scores(decoder, edit=edit, prefix=decoder.prefix(shown)))


# Label tokens


def test_labels_are_encoded_in_context():
    encoder, spaced = decoder_of("llama").encoder, Template("Review: {text}\nSentiment: {label}")
    with pytest.warns(ScoringWarning):
        result = find_label_tokens(encoder, spaced, LABELS)
    assert result.sequences == tuple(encode(" " + label) for label in LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, forced = (
            find_label_tokens(encoder, TEMPLATE, LABELS, scoring) for scoring in ("auto", "sequence")
        )
    assert result.sequences == tuple(encode(label) for label in LABELS)
    assert (result.full_sequences, result.tokens_after_query, result.target(0)) == (
        False,
        0,
        encode("positive")[:1],
    )
    room = max(len(encode(label)) for label in LABELS) - 1
    assert (forced.full_sequences, forced.tokens_after_query, forced.target(1)) == (
        True,
        room,
        encode("negative"),
    )


def test_labels_that_share_their_first_token_use_full_sequences():
    decoder, labels = decoder_of("llama"), ("positive", "poor", "negative")
    with pytest.warns(ScoringWarning, match="share their first token") as caught:
        result = find_label_tokens(decoder.encoder, TEMPLATE, labels)
    assert len(caught) == 1
    assert result.full_sequences
    queries = scorer(decoder, labels=labels).queries(TEXTS)
    assert close(score(decoder, queries, result), expected(decoder, full=True, labels=labels))
    raises("scoring='sequence'", find_label_tokens, decoder.encoder, TEMPLATE, labels, "first_token")


def test_labels_with_the_same_tokens_are_refused():
    raises("same tokens", find_label_tokens, decoder_of("llama").encoder, TEMPLATE, ("good", "good"))


# Queries


@pytest.mark.parametrize("case", ["llama", "gpt2", "opt"])
def test_long_texts_leave_room_for_the_label(case, full):
    decoder = new_decoder(case, max_position_embeddings=48)
    assert decoder.max_length == 48
    labels = find_label_tokens(decoder.encoder, TEMPLATE, LABELS, kind(full))
    with pytest.warns(TruncationWarning, match="1 of 2") as caught:
        cut, _ = scorer(decoder, kind(full)).queries(["a dull film " * 100, "b"])
    assert len(caught) == 1
    room = max(len(encode(label)) for label in LABELS) - 1 if full else 0
    assert labels.tokens_after_query == room
    assert 45 - room <= len(cut) <= 48 - room
    assert cut[-len(encode("\nSentiment:")) :] == encode("\nSentiment:")
    assert score(decoder, [cut], labels).isfinite().all()


def test_shared_labels_are_copied_to_the_device_once_per_batch(monkeypatch):
    copies, to = [], TrieIndices.to
    monkeypatch.setattr(TrieIndices, "to", lambda self, device: [copies.append(1), to(self, device)][1])
    decoder = decoder_of("llama")
    asked = scorer(decoder, "sequence", MANY)
    assert decoder.can_fork
    copies.clear()
    score(decoder, asked.queries(["a warm film"] * 5), asked.labels)
    assert len(copies) == 1
