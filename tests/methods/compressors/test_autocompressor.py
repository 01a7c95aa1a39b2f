"""AutoCompressor against results of the released code."""

import json
import os
from dataclasses import replace
from pickle import UnpicklingError

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from compressed import golden
from fitting import raises
from i2cl import Decoder
from i2cl.methods.compressors.autocompressor import summarizer
from i2cl.methods.compressors.base import hidden_states


@pytest.fixture(scope="module", params=["autocompressor-llama", "autocompressor-opt"])
def release(request):
    return golden(request.param)


@pytest.fixture(scope="module")
def own(decoder):
    return summarizer(decoder)


@pytest.fixture(scope="module")
def segments(release):
    return [tuple(ids) for ids in release.record["segments"]]


@torch.no_grad()
def after(own, soft, release):
    """Return the logits after each query that follows vectors, without a cache."""
    rows = []
    for ids in release.queries:
        positions = own.positions(len(soft), len(ids), 0)
        rows.append(hidden_states(own.decoder, torch.cat([soft, own.decoder.embed(ids)]), positions)[-1])
    return own.decoder.model.get_output_embeddings()(torch.stack(rows))


@torch.no_grad()
def softs(own, segments, release):
    newest = replace(own, accumulate=False)
    return {
        "softprompt_after_1": own.summaries(segments[:1]),
        "softprompt_after_2": own.summaries(segments),
        "softprompt_one_segment": own.summaries([release.context]),
        "softprompt_without_accumulation": newest.summaries(segments),
    }


def test_summaries_and_logits_match_the_release(own, segments, release, within):
    result = softs(own, segments, release)
    for name, soft in result.items():
        torch.testing.assert_close(soft, release[name], **within)
    kept = result["softprompt_after_2"]
    without = result["softprompt_without_accumulation"]
    for name, soft in (("query_logits", kept), ("query_logits_without_accumulation", without)):
        torch.testing.assert_close(after(own, soft, release), release[name], **within)


@pytest.mark.parametrize("budget", [1, 60, 1024], ids=["one-by-one", "few", "all"])
def test_scores_match_the_release_for_every_batch_size(decoder, release, within, budget):
    decoder.token_budget = budget
    predictor = release.fitted(decoder, "autocompressor")
    result = predictor.log_probs(release.record["queries"])
    torch.testing.assert_close(result, release.expected("query_logits_one_segment"), **within)
    whole = after(summarizer(decoder), release["softprompt_one_segment"], release)
    uncached = whole.log_softmax(-1)[:, [ids[0] for ids in release.labels]]
    torch.testing.assert_close(result, uncached, atol=3e-5, rtol=0)
    config = decoder.model.config
    assert predictor.cost.cached_values == 2 * 5 * config.hidden_size * config.num_hidden_layers
    assert predictor.cost.trained == 0


def test_segments_do_not_split_demonstrations(decoder, release, segments, within):
    predictor = release.fitted(decoder, "autocompressor", segment=str(max(map(len, segments))))
    result = predictor.log_probs(release.record["queries"])
    torch.testing.assert_close(result, release.expected("query_logits"), **within)
    assert predictor.prefix.length == 10
    assert predictor.prefix.next_position == (10 if "llama" in release.name else 0)


def test_only_the_first_segment_starts_with_bos(own, release):
    result = own.segments(release.shown_ids, (7, 8), 60)
    assert sum(result, ()) == (7, 8, *release.context)
    assert all(len(ids) <= 60 for ids in result)
    ends = {len((7, 8, *sum(release.shown_ids[:count], ()))) for count in range(1, 11)}
    starts = [len(sum(result[:count], ())) for count in range(1, len(result) + 1)]
    assert set(starts) <= ends


def test_embeddings_of_another_width_are_refused(release, tmp_path):
    AutoConfig.from_pretrained(release.folder).save_pretrained(tmp_path)
    tensors = load_file(release.folder / "model.safetensors")
    tensors["embed_summary.weight"] = tensors["embed_summary.weight"][:, :31].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    message = r"embed_summary.weight .* has shape \(5, 31\), but this model needs \(5, 32\)"
    raises(message, release.fitted, release.decoder(tmp_path), "autocompressor")


def test_demonstrations_that_do_not_fit_are_refused(decoder, release):
    message = r"demonstration 1 takes 30 tokens, and a segment after 0 .* holds 29"
    raises(message, release.fitted, decoder, "autocompressor", segment=29)
    short = release.decoder()
    short.max_length = 60
    if "llama" in release.name:
        message = r"summary vectors holds \d+: use shorter"
        raises(message, release.fitted, short, "autocompressor", shown=release.shown * 4)


@pytest.fixture
def pickled(release, tmp_path):
    """A checkpoint in the published layout: two pickle shards, configuration and tokenizer."""
    release.decoder().model.config.save_pretrained(tmp_path)
    release.decoder().tokenizer.save_pretrained(tmp_path)
    tensors = list(load_file(release.folder / "model.safetensors").items())
    homes = {}
    for number, part in enumerate((tensors[:20], tensors[20:]), 1):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(dict(part) | {"steps": 0.0}, tmp_path / name)
        homes |= dict.fromkeys(dict(part), name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return tmp_path


def rewritten(folder):
    """Convert a folder with the code that the error message suggests."""
    line = raises("has only pickle weights", Decoder.from_pretrained, str(folder))
    exec(line.partition("without running any, with ")[2], {"AutoModelForCausalLM": AutoModelForCausalLM})
    return Decoder.from_pretrained(str(folder), device="cpu")


def test_converted_pickles_give_equal_scores(release, pickled):
    queries = release.record["queries"]
    expected = release.fitted(release.decoder(), "autocompressor").log_probs(queries)
    assert torch.equal(release.fitted(rewritten(pickled), "autocompressor").log_probs(queries), expected)


def test_code_in_a_pickle_is_not_run(release, pickled):
    ran = pickled / "ran"
    trap = type("Trap", (), {"__reduce__": lambda self: (os.mkdir, (str(ran),))})()
    torch.save({"embed_summary.weight": trap}, pickled / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(UnpicklingError):
        rewritten(pickled)
    release.decoder().model.save_pretrained(pickled)
    decoder = Decoder.from_pretrained(str(pickled), device="cpu")
    raises("would run code when loaded", release.fitted, decoder, "autocompressor")
    assert not ran.exists()
