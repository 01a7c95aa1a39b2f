"""Folding into weights, the checkpoint on disk, and the check that it answers as the injected model."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import listed, run
from export import cases
from export.cases import decoder_of, drawn, hooked, injection_for, plain, relative, saved, stored, weights
from fitting import one_line
from i2cl import Decoder, Injection
from i2cl.export import Golden, checkpoint, export_hf, golden, make_golden, upcast, verify
from i2cl.export.families import FAMILIES
from i2cl.export.golden import GOLDEN
from i2cl.models.checkpoint import INDEX
from tiny import CASES


def test_a_power_of_two_is_folded_exactly_and_verified_with_its_label_prior(tmp_path, said):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    injection = replace(Injection.from_pretrained(artefact), label_bias=(0.75, -0.5), temperature=2.0)
    injection.save_pretrained(tmp_path / "warm")
    out = tmp_path / "out"
    message = said("export", tmp_path / "warm", out, "--model", base, "--temperature", "fold")
    assert "Its temperature 2 is in the head: all probabilities are those at it." in message
    outcome = verify(out)
    assert outcome.passed
    assert outcome.golden.label_bias == [0.375, -0.25]
    decoder = Decoder.from_pretrained(str(base), device="cpu")
    texts = ["a warm film", "dull"]
    wanted = injection.scores(decoder, texts)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    questions = injection.questions(decoder)
    first, bias = list(questions.labels.first), torch.tensor(outcome.golden.label_bias)
    rows = [model(torch.tensor([ids])).logits[0, -1, first] + bias for ids in questions.queries(texts)]
    torch.testing.assert_close(torch.stack(rows).log_softmax(-1), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("to", "case"), [("hf", "llama"), ("peft", "opt"), ("gguf", "llama")])
def test_an_export_says_that_its_probabilities_are_those_at_1(to, case, tmp_path, said, refused):
    base, artefact = saved(decoder_of(case), tmp_path)
    injection = replace(Injection.from_pretrained(artefact), temperature=2.5)
    injection.save_pretrained(tmp_path / "warm")
    one, two, three = (tmp_path / f"out{number}.gguf" for number in range(3))
    words = ["export", tmp_path / "warm", "--to", to, "--model", base, "--no-golden"]
    words += ["--no-tokenizer"] if to == "gguf" else []
    message, record = " ".join(said(*words, one).split()), json.loads(said(*words, two, "--json"))
    assert (record["temperature"], record["temperature_kept"]) == (2.5, False)
    at_1 = "those of temperature 1: divide log-probabilities among the labels by 2.5"
    assert at_1 + (", or export with --temperature fold." if to == "hf" else ".") in message
    if to != "hf":
        line = refused(*words, three, "--temperature", "fold")
        assert f"--temperature fold is for --to hf, {to} leaves the head as it is" in line
        assert not three.exists()


def same_weights(folder, *others):
    one = weights(folder)
    for other in map(weights, others):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    return one


@pytest.mark.parametrize("case", cases.ONE_A_ROW)
def test_files_hold_what_memory_holds(case, tmp_path):
    decoder = decoder_of(case, torch.bfloat16)
    base, _ = saved(decoder, tmp_path)
    # Some of transformers' classes give a tokenizer rules of their own when they load it.
    decoder = Decoder(decoder.model, AutoTokenizer.from_pretrained(base))
    injection = injection_for(decoder)
    export_hf(decoder, injection, tmp_path / "memory")
    export_hf(base, injection, tmp_path / "files")
    one = same_weights(tmp_path / "memory", tmp_path / "files")
    if not FAMILIES[CASES[case][0]].target:
        assert weights(base).keys() <= one.keys()  # the names that transformers itself writes


@pytest.mark.parametrize("case", ["llama", "gemma", "phi3", "gpt2", "qwen3"])
def test_shards_hold_what_one_file_holds(case, tmp_path):
    decoder, injection = drawn(case)
    base, _ = saved(decoder, tmp_path)
    export_hf(decoder, injection, tmp_path / "memory")
    export_hf(base, injection, tmp_path / "whole")
    export_hf(base, injection, tmp_path / "shards", max_shard_size="20KB")
    names = listed(tmp_path / "shards")
    count = sum(name.endswith(".safetensors") for name in names)
    assert count > 2
    assert f"model-00001-of-{count:05}.safetensors" in names
    one = same_weights(tmp_path / "whole", tmp_path / "shards", tmp_path / "memory")
    index = json.loads((tmp_path / "shards" / INDEX).read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    assert relative(plain(made), hooked(decoder, injection)) <= 1e-5
    assert made.generation_config.eos_token_id == decoder.model.generation_config.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "shards")("film").input_ids


def test_older_files_leave_out_the_prefix(tmp_path):
    decoder, injection = drawn("gpt2")
    base, _ = saved(decoder, tmp_path)
    state = {name.removeprefix("transformer."): tensor for name, tensor in weights(base).items()}
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    export_hf(base, injection, tmp_path / "out")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(plain(made), hooked(decoder, injection)) <= 1e-5


def test_sharded_bases_and_copies_beside_them_are_read_right(tmp_path):
    decoder, injection = drawn("mistral")
    base = stored(decoder, tmp_path / "base", max_shard_size="20KB")
    save_file({"norm.weight": torch.zeros(32)}, base / "consolidated.safetensors")
    export_hf(base, injection, tmp_path / "out")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(plain(made), hooked(decoder, injection)) <= 1e-5
    (base / INDEX).write_text("{}", encoding="utf-8")
    one_line(r"index\.json' is damaged", export_hf, base, injection, tmp_path / "again")


def test_a_model_on_the_hub_is_read_from_its_snapshot(tmp_path, monkeypatch):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda name, **_: str(base))
    export_hf("nobody/model", Injection.from_pretrained(artefact), tmp_path / "hub")
    export_hf(base, Injection.from_pretrained(artefact), tmp_path / "folder")
    same_weights(tmp_path / "hub", tmp_path / "folder")


def test_memory_stays_near_one_shard(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    base, artefact = saved(decoder_of("llama", **sizes), tmp_path)
    assert (base / "model.safetensors").stat().st_size > 120e6
    assert cases.memory_of("export_hf", base, artefact, tmp_path / "out", max_shard_size="20MB") < 80e6
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 6


def test_an_export_holds_and_tells_what_it_is(exported):
    outcome = verify(exported, device="cpu")
    assert (outcome.passed, outcome.worst < 1e-5, outcome.dropped) == (True, True, None)
    golden = Golden.from_export(exported)
    assert (golden.artefact["task"]["name"], golden.model_type) == ("films", "llama")
    assert (golden.dtype, len(golden.biases)) == ("float32", 4)
    assert all(row["expected"] == row["found"] for row in outcome.rows())


def scaled(folder, name, factor):
    """One tensor of a checkpoint is another one, or is not there."""
    state = load_file(folder / "model.safetensors")
    tensor = state.pop(name)
    more = {} if factor is None else {name: tensor * factor}
    save_file(state | more, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_zeroed_bias_is_found_and_named(exported, said):
    scaled(exported, "model.layers.1.mlp.down_proj.bias", 0)
    printed = said("verify", exported, "--device", "cpu", code=1)
    assert "does not hold" in printed
    assert "The bias model.layers.1.mlp.down_proj.bias is dropped." in printed
    record = json.loads(said("verify", exported, "--device", "cpu", "--json", code=1))
    assert (record["passed"], record["worst"] > record["tolerance"]) == (False, True)


def test_other_weights_are_told_apart_from_dropped_biases(exported):
    scaled(exported, "lm_head.weight", -1)
    outcome = verify(exported, device="cpu")
    assert (outcome.passed, outcome.dropped) == (False, None)


@pytest.mark.parametrize("case", cases.ONE_A_ROW)
def test_golden_values_in_bfloat16_are_those_of_the_model_in_float32(case, monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", golden.TEXTS[:1])
    decoder = decoder_of(case, torch.bfloat16)
    injection = injection_for(decoder)
    result = make_golden(decoder, injection)
    assert {parameter.dtype for parameter in decoder.model.parameters()} == {torch.bfloat16}
    whole = Decoder(decoder.model.float(), decoder.tokenizer)
    for one, other in zip(result.prompts, make_golden(whole, injection).prompts, strict=True):
        assert one.labels == pytest.approx(other.labels, rel=1e-5)
        assert one.top_logits == pytest.approx(other.top_logits, rel=1e-5)
        assert one.top_ids[0] == other.top_ids[0]


def test_golden_values_of_bfloat16_are_made_in_float32_a_large_head_in_parts(tmp_path, monkeypatch):
    decoder, injection = drawn("llama", dtype=torch.bfloat16)
    whole = cases.with_golden(export_hf, (decoder, injection), tmp_path / "out")
    assert decoder.model.dtype == torch.bfloat16
    outcome = verify(tmp_path / "out", device="cpu")
    assert (outcome.passed, outcome.golden.dtype) == (True, "bfloat16")
    assert 1e-4 < outcome.worst < cases.ROUNDED
    monkeypatch.setattr(upcast, "ROWS", 7)
    parts = make_golden(decoder, injection)
    assert parts.prompts[0].labels == pytest.approx(whole.prompts[0].labels, rel=1e-5)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "artefact"
    injection_for(Decoder.from_pretrained("reference", device="cpu")).save_pretrained(folder)
    return folder


def test_export_and_verify(artefact, tmp_path, said):
    out = tmp_path / "plain"
    assert "Next: i2cl verify" in said("export", artefact, out, "--to", "hf", "--device", "cpu")
    assert "The export holds" in said("verify", out, "--device", "cpu")
    options = ("--no-golden", "--json", "--max-shard-size", "500KB")
    record = json.loads(said("export", artefact, tmp_path / "bare", *options))
    assert record["files"] > 1
    assert GOLDEN not in listed(tmp_path / "bare")
    assert weights(out).keys() == weights(tmp_path / "bare").keys()


def test_bad_input_is_one_line(artefact, tmp_path, refused, monkeypatch):
    out, full = tmp_path / "out", tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine", encoding="utf-8")
    assert "holds other files (notes.txt)" in refused("export", artefact, full)
    assert "is not an injection" in refused("export", full, out)
    assert "see i2cl export --help" in refused("export", artefact, out, "--to", "onnx")
    assert "is no size" in refused("export", artefact, out, "--no-golden", "--max-shard-size", "big")
    assert "no config.json" in refused("export", artefact, out, "--model", full)
    monkeypatch.setattr(checkpoint, "snapshot_download", Mock(side_effect=LocalEntryNotFoundError("offline")))
    message = refused("export", artefact, out, "--model", "nobody/none")
    assert "the hub says LocalEntryNotFoundError" in message
    assert "has no i2cl_golden.json" in refused("verify", full)
    assert listed(tmp_path) == ["full"]


def test_another_configuration_or_model_is_refused(tmp_path, artefact, refused):
    base, mine = saved(decoder_of("llama"), tmp_path)
    injection = Injection.from_pretrained(mine)
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-5}), encoding="utf-8")
    one_line(r"\(config.rms_norm_eps 1e-06 and not 1e-05\)", export_hf, base, injection, tmp_path / "out")
    saved(decoder_of("llama"), tmp_path)
    assert "(layers, width)" in refused("export", artefact, tmp_path / "out", "--model", base)
    other = stored(decoder_of("llama", vocab_size=310), tmp_path / "other")
    message = refused("export", mine, tmp_path / "out", "--model", other, "--no-golden")
    assert "this injection was made on" in message
    assert run("export", mine, tmp_path / "forced", "--model", other, "--device", "cpu", "--force") == 0
    assert not (tmp_path / "out").exists()


def test_a_family_that_is_not_known_is_refused_from_files(artefact, tmp_path, refused):
    (tmp_path / "base").mkdir()
    decoder_of("llama").tokenizer.save_pretrained(tmp_path / "base")
    for kind in ("vit", "mixtral"):
        (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
        message = refused("export", artefact, tmp_path / "out", "--model", tmp_path / "base")
        assert f"a '{kind}' model cannot hold an injection in its weights" in message


def test_damaged_files_and_missing_tensors_are_named(exported, tmp_path, refused):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    export = ("export", artefact, tmp_path / "new", "--no-golden")
    whole = (base / "generation_config.json").read_text(encoding="utf-8")
    (base / "generation_config.json").write_text(whole[:-5], encoding="utf-8")
    assert "generation_config.json' is damaged" in refused(*export)
    (base / "generation_config.json").write_text(whole, encoding="utf-8")
    scaled(base, "model.layers.1.mlp.up_proj.weight", None)
    assert "lacks model.layers.1.mlp.up_proj.weight" in refused(*export)
    (base / "model.safetensors").write_bytes(b"rubbish")
    assert "is damaged" in refused(*export)
    (base / "model.safetensors").unlink()
    assert "holds no *.safetensors" in refused(*export)
    assert not (tmp_path / "new").exists()
    (exported / GOLDEN).write_text("{}", encoding="utf-8")
    assert "cannot be read" in refused("verify", exported)
