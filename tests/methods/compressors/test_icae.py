"""ICAE against results of the released code."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressed import golden
from fitting import raises
from i2cl.methods.compressors import icae
from i2cl.methods.compressors.icae import (
    MEMORY,
    ICAEConfig,
    ReplaceLastEmbedding,
    auto_encoder,
    soft_prompt_predictor,
)
from i2cl.models.batching import make_batch, pack_batch
from i2cl.models.encoding import TruncationWarning


@pytest.fixture(autouse=True)
def _tiny_instruction_tokens(monkeypatch):
    """Replace Mistral's token ids by ids of the tiny vocabulary."""
    monkeypatch.setattr(icae, "PROMPT_START", (3, 17, 29))
    monkeypatch.setattr(icae, "PROMPT_END", (17, 31, 29))


@pytest.fixture(scope="module", params=["icae-v1", "icae-v2"])
def release(request):
    return golden(request.param)


@pytest.fixture(scope="module")
def options(release):
    return {"compressor": str(release.folder / "icae.safetensors")}


@pytest.fixture(scope="module")
def own(decoder, options):
    return auto_encoder(decoder, ICAEConfig(**options))


@torch.no_grad()
def slots(own, context):
    return own.slots(own.segments(context))


@torch.no_grad()
def logits(own, *parts):
    """Return the logits after each of the given tokens and vectors, run as one row without a cache."""
    whole = torch.cat([part if isinstance(part, torch.Tensor) else own.decoder.embed(part) for part in parts])
    return own.decoder.model(inputs_embeds=whole[None], use_cache=False).logits[0]


def test_memory_slots_match_the_release(own, release, within):
    torch.testing.assert_close(slots(own, release.context), release["memory_slots"], **within)
    for name, tokens in (("one_segment", 32), ("two_segments", 33)):
        if f"memory_slots_{name}" in release.tensors:
            result = slots(own, release.context[:tokens])
            torch.testing.assert_close(result, release[f"memory_slots_{name}"], **within)


@pytest.mark.parametrize("budget", [1, 60, 1024], ids=["one-by-one", "few", "all"])
def test_scores_match_the_release_for_every_batch_size(decoder, release, options, within, budget):
    decoder.token_budget = budget
    before = logits_of(decoder, release)
    result = release.fitted(decoder, "icae", **options).log_probs(release.record["queries"])
    torch.testing.assert_close(result, release.expected("query_logits_ft"), **within)
    assert torch.equal(logits_of(decoder, release), before)


def logits_of(decoder, release):
    with torch.no_grad():
        return decoder.model(torch.tensor([release.context])).logits


def test_labels_of_several_tokens_follow_the_last_vector(decoder, own, release):
    task = replace(release.task, labels=("not good", "not dull"))
    with torch.no_grad():
        predictor = soft_prompt_predictor(own, task, release["memory_slots"])
    with pytest.warns(UserWarning, match="share their first token"):
        result = predictor.log_probs(release.record["queries"])
    query = release.task.template.query("x")
    for row, ids in enumerate(release.queries):
        for column, word in enumerate(task.labels):
            label = decoder.encoder([f"{query} {word}"])[0][len(decoder.encoder([query])[0]) :]
            table = logits(own, *prompt(own, release, ids), label)[-len(label) - 1 : -1].log_softmax(-1)
            expected = table[range(len(label)), list(label)].sum()
            torch.testing.assert_close(result[row, column], expected, atol=1e-4, rtol=0)


def prompt(own, release, ids):
    """A query in the format of instruction tuning, as parts of token ids and vectors."""
    kept, mark = release["memory_slots"], own.prompt_mark
    if own.version == "1":
        return kept, mark, ids, mark
    return tuple(release.record["left"]), kept, mark, ids, tuple(release.record["right"])


def test_embedding_is_replaced_in_padded_and_packed_batches(decoder, release):
    rows = [(*ids, 0) for ids in release.queries]
    edit = ReplaceLastEmbedding(torch.linspace(-1, 1, decoder.d_model))
    with torch.no_grad():
        batches = [make(rows, decoder.device) for make in (make_batch, pack_batch)]
        padded, packed = (decoder.forward(batch, edit=edit) for batch in batches)
        plain = decoder.forward(batches[0])
    torch.testing.assert_close(padded, packed, atol=1e-5, rtol=1e-5)
    assert (padded - plain).abs().max() > 0.1


def test_adapter_is_detached_when_reading_and_after_an_error(own, release, within):
    parts = prompt(own, release, release.queries[0])
    with own.adapted():
        wrong = logits(own, *parts)[-1]
    assert (wrong - release["query_logits_ft"][0]).abs().max() > 0.1
    with pytest.raises(IndexError):
        own.slots([(10**6,)])
    assert not any(module._forward_hooks for module in own.decoder.model.modules())
    torch.testing.assert_close(slots(own, release.context), release["memory_slots"], **within)


def test_version_1_truncates_with_a_warning_and_version_2_splits(own, release):
    if own.version == "1":
        with pytest.warns(TruncationWarning, match="1 of 1 contexts was cut from 600 to 512 tokens"):
            assert own.segments((5,) * 600) == [(5,) * 512]
    else:
        assert [len(ids) for ids in own.segments((5,) * 600)] == [32] * 18 + [24]


FIRST = "icae.base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
SEVENTH = FIRST.replace("layers.0", "layers.7").replace("_B", "_A")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            MEMORY,
            lambda one: one[:, 1:],
            r"embed.weight .* has shape \(11, 31\), but this model needs \(any, 32\)",
        ),
        (MEMORY, lambda one: one[:3], "has only 3 memory embeddings"),
        (FIRST, lambda one: None, f"has no tensor {FIRST}"),
        (
            FIRST,
            lambda one: one[1:],
            r"default.weight .* has shape \(31, 4\), but this model needs \(32, 4\)",
        ),
        (SEVENTH, lambda one: torch.zeros(4, 32), "adapts model.layers.7.self_attn.q_proj, which"),
    ],
)
def test_a_compressor_of_another_model_is_refused(decoder, options, tmp_path, name, change, message):
    tensors = load_file(options["compressor"])
    tensors[name] = change(tensors.get(name))
    path = tmp_path / "icae.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items() if value is not None}, path)
    raises(message, auto_encoder, decoder, ICAEConfig(compressor=str(path)))


def test_wrong_sizes_and_token_ids_are_refused(decoder, options, tmp_path, release):
    tensors = {name: one for name, one in load_file(options["compressor"]).items() if "layers.2" not in name}
    save_file(tensors, tmp_path / "icae.safetensors")
    config = ICAEConfig(compressor=str(tmp_path / "icae.safetensors"))
    raises(r"adapts 4 projections, but .* has 6", auto_encoder, decoder, config)
    short = release.decoder()
    short.max_length = 20
    raises(r"a segment and its memory take|the memory slots take", release.fitted, short, "icae", **options)


def test_a_pickle_of_the_release_gives_equal_scores(decoder, release, options, tmp_path):
    tensors = load_file(options["compressor"])
    zeros = {"icae.base_model.model.model.norm.weight": 0.0, "icae.lm_head.weight": torch.zeros(1)}
    torch.save(tensors | zeros, tmp_path / "icae.pt")
    queries = release.record["queries"]
    expected = release.fitted(decoder, "icae", **options).log_probs(queries)
    result = release.fitted(decoder, "icae", **options | {"compressor": str(tmp_path / "icae.pt")})
    assert torch.equal(result.log_probs(queries), expected)


def test_too_long_file_name_is_refused(decoder, release):
    raises("cannot be a file", release.fitted, decoder, "icae", compressor="x" * 300)
