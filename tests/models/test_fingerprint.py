import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, ByT5Tokenizer, PreTrainedTokenizerFast

from fitting import raises
from i2cl.models import fingerprint
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import tensors_fingerprint, tokenizer_fingerprint, weights_fingerprint
from tiny import tiny_model, tiny_tokenizer

FAMILIES = ["llama", "gpt2", "gptj", "gpt_neox", "qwen2", "opt", "gemma2", "falcon", "bloom"]
BASE = fingerprint.ModelIdentity("here", None, "llama", 2, 32, "aa", "bb", config={"eps": 1e-6, "theta": 1e4})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fingerprint_is_independent_of_precision_and_depends_on_every_tensor(model_type):
    full, half = weights_fingerprint(tiny_model(model_type)), tiny_model(model_type, dtype=torch.float16)
    assert full == weights_fingerprint(tiny_model(model_type, dtype=torch.bfloat16))
    assert full != weights_fingerprint(tiny_model(model_type, seed=1))
    assert len(full) == 16
    assert weights_fingerprint(half) == weights_fingerprint(half.float())
    model = tiny_model(model_type)
    before = weights_fingerprint(model)
    for _, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(2)
            assert weights_fingerprint(model) != before
            parameter.div_(2)
    assert weights_fingerprint(model) == before


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A model with a cached fingerprint, the number of reads so far, and the cache file."""
    reads = []
    monkeypatch.setattr(fingerprint, "CACHE_MIN_BYTES", 0)
    place = partial(fingerprint.cached_assets_path, assets_dir=tmp_path / "assets")
    monkeypatch.setattr(fingerprint, "cached_assets_path", place)
    read = fingerprint.tensors_fingerprint
    monkeypatch.setattr(fingerprint, "tensors_fingerprint", lambda named: [read(named), reads.append(1)][0])
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "model"), reads, tmp_path / "assets"


@pytest.mark.parametrize("blocked", [False, True])
def test_large_models_fingerprint_is_cached_if_possible(kept, blocked):
    model, reads, assets = kept
    if blocked:
        assets.write_text("in the way")
    whole = tensors_fingerprint(fingerprint.named_weights(model))
    assert [weights_fingerprint(model) for _ in range(3)] == [whole] * 3
    assert len(reads) == (3 if blocked else 1)


def test_fingerprint_of_a_gguf_file_is_cached(kept, tmp_path):
    model, reads, _ = kept
    model.name_or_path = str(tmp_path / "model.gguf")
    Path(model.name_or_path).write_bytes(b"GGUF")
    assert len({weights_fingerprint(model) for _ in range(3)}) == len(reads) == 1
    os.utime(model.name_or_path, ns=(0, 0))
    weights_fingerprint(model)
    assert len(reads) == 2


@pytest.mark.parametrize("change", ["memory", "file", "damage"])
def test_changed_files_invalidate_the_cached_fingerprint(kept, change):
    model, reads, assets = kept
    before = weights_fingerprint(model)
    if change == "memory":
        model.model.layers[1].mlp.down_proj.weight.data.view(-1)[0] += 1
    elif change == "file":
        os.utime(Path(model.name_or_path) / "model.safetensors", ns=(0, 0))
    else:
        next(path for path in assets.rglob("*") if path.is_file()).write_text("half")
    assert (weights_fingerprint(model) == before) == (change != "memory")
    assert len(reads) == 2


@pytest.mark.parametrize("place", [0, 1, 4321, -1])
def test_cached_fingerprint_is_invalid_for_a_model_edited_in_memory(kept, place):
    """One value of thousands; edits through ``data`` do not change torch's version counters."""
    model, _, _ = kept
    before = weights_fingerprint(model)
    model.get_input_embeddings().weight.data.view(-1)[place] += 0.5
    assert weights_fingerprint(model) != before


def test_swapped_rows_change_the_checksum():
    weight = torch.randn(64, 1024)
    before = torch.cat([*fingerprint._checksums(weight)])
    assert not torch.equal(torch.cat([*fingerprint._checksums(weight[torch.arange(64).roll(1)])]), before)
    assert torch.equal(torch.cat([*fingerprint._checksums(weight.clone())]), before)


@pytest.mark.parametrize("place", [0, fingerprint.CHUNK_SIZE - 1, fingerprint.CHUNK_SIZE, -1])
def test_every_chunk_of_a_large_tensor_changes_the_fingerprint(place):
    large = torch.zeros(3 * fingerprint.CHUNK_SIZE + 5)
    before = tensors_fingerprint([("large", large)])
    large[place] = 1
    assert tensors_fingerprint([("large", large)]) != before


def test_integers_are_not_rounded():
    packed = [torch.tensor([2**20 + last], dtype=torch.int32) for last in (0, 1)]
    assert len({tensors_fingerprint([("qweight", one)]) for one in packed}) == 2


def test_fingerprint_is_independent_of_chunk_size_and_memory_layout(monkeypatch):
    model = tiny_model("llama")
    before = weights_fingerprint(model)
    monkeypatch.setattr(fingerprint, "CHUNK_SIZE", 1000)
    head = model.lm_head.weight
    head.data = head.data.T.contiguous().T
    assert weights_fingerprint(model) == before


SCORES = "e_score_correction_bias"
BUFFERS = {"deepseek_v3": SCORES, "minimax_m2": SCORES, "llama": "inv_freq"}


@pytest.mark.parametrize(("case", "buffer"), BUFFERS.items())
def test_only_persistent_buffers_change_the_fingerprint(case, buffer):
    model = tiny_model(case)
    before = weights_fingerprint(model)
    next(one for path, one in model.named_buffers() if path.endswith(buffer))[0] += 1
    assert (weights_fingerprint(model) != before) == (buffer == SCORES)


# The configuration


def identity(case="llama", **overrides):
    return Decoder(tiny_model(case, **overrides), tiny_tokenizer()).base


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        ("llama", "rms_norm_eps", 1e-5),
        ("llama", "hidden_act", "gelu"),
        ("gemma2", "attn_logit_softcapping", 7.0),
        ("mistral", "sliding_window", 4),
        ("granite", "residual_multiplier", 0.5),
        ("mixtral", "num_experts_per_tok", 1),
    ],
)
def test_configuration_fields_that_change_results_are_compared(case, field, value):
    one, other = identity(case), identity(case, **{field: value})
    assert one.weights == other.weights
    assert one.difference(other).startswith(f"config.{field} ")


def test_configuration_fields_without_effect_are_ignored():
    model = tiny_model("llama")
    before = fingerprint.inference_config(model.config)
    changes = {"use_cache": False, "pad_token_id": 3, "eos_token_id": [1, 2], "attention_dropout": 0.5}
    for field, value in changes.items():
        setattr(model.config, field, value)
    model.config.name_or_path = "elsewhere"
    model.config.architectures = ["Other"]
    model.set_attn_implementation("eager")
    assert fingerprint.inference_config(model.to(torch.bfloat16).config) == before


@pytest.mark.parametrize("case", ["dbrx", "mpt", "granitemoehybrid", "llama4_text"])
def test_configuration_survives_saving_and_loading(case, tmp_path):
    config = tiny_model(case).config
    config.save_pretrained(tmp_path)
    value = fingerprint.inference_config(config)
    assert value == fingerprint.inference_config(type(config).from_pretrained(tmp_path))
    assert value == json.loads(json.dumps(value, allow_nan=False))
    assert not any("dropout" in field or field.endswith("pdrop") for field in str(value).split("'"))


# The tokenizer


def test_slow_tokenizers_are_identified_by_their_vocabulary():
    tokenizer, before = tiny_tokenizer(), tokenizer_fingerprint(tiny_tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(rebuilt(model={"continuing_subword_prefix": ""})) == before
    tokenizer.add_tokens(["<extra>"])
    assert tokenizer_fingerprint(tokenizer) != before
    assert tokenizer_fingerprint(ByT5Tokenizer()) == tokenizer_fingerprint(ByT5Tokenizer())
    assert tokenizer_fingerprint(ByT5Tokenizer()) != tokenizer_fingerprint(ByT5Tokenizer(extra_ids=3))


def rebuilt(**parts):
    """The tiny tokenizer with other components and the same vocabulary."""
    record = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    record["model"] |= parts.pop("model", {})
    backend = Tokenizer.from_str(json.dumps(record))
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def swapped():
    merges = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]["merges"]
    return [*merges[:-2], merges[-1], merges[-2]]


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.NFC()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"model": {"merges": swapped()}},
        {"model": {"ignore_merges": True}},
        {"post_processor": processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])},
    ],
)
def test_tokenizer_rules_change_the_fingerprint(parts):
    other = rebuilt(**parts)
    assert other.get_vocab() == tiny_tokenizer().get_vocab()
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tiny_tokenizer())


# What is compared


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt2"}, {"layers": 3}, {"d_model": 8}, {"weights": "cc"}, {"tokenizer": "cc"}]
)
def test_differences_are_named_briefly(change):
    ((field, value),) = change.items()
    difference = BASE.difference(replace(BASE, **change))
    assert [part in difference for part in (field, repr(value), repr(getattr(BASE, field)))] == [True] * 3
    other = replace(BASE, layers=1, d_model=1, weights="x", tokenizer="x", config={"eps": 0, "theta": 0})
    assert BASE.difference(other).endswith("config.eps 1e-06 and not 0, 1 more")


def test_name_revision_and_new_fields_are_ignored():
    for fields in ({"name": "there", "revision": "main"}, {"config": {"eps": 1e-6, "later": 3}}):
        assert BASE.difference(replace(BASE, **fields)) is None


@pytest.mark.parametrize("fields", [{}, asdict(BASE) | {"extra": 1}, asdict(BASE) | {"config": 3}])
def test_identity_round_trips_through_a_dict_and_refuses_invalid_fields(fields):
    assert fingerprint.ModelIdentity.from_dict(json.loads(json.dumps(asdict(BASE)))) == BASE
    raises("base_model entry is malformed", fingerprint.ModelIdentity.from_dict, fields)
