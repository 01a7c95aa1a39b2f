"""Export as a language model: files on disk, the card, golden answers and their check."""

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
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
from i2cl.export import Golden, checkpoint, export_causal_lm, golden, make_golden, verify
from i2cl.export.families import FAMILIES
from i2cl.export.golden import GOLDEN
from i2cl.models.checkpoint import INDEX
from tiny import CASES


def run_card(folder):
    """Run the Python code of an export's README.md and return what it prints."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("```")[0]
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue().split()


@pytest.mark.parametrize("task", [cases.TASK, cases.SHARED], ids=["first token", "full sequence"])
def test_the_card_shows_code_that_gives_label_and_probability(task, tmp_path, monkeypatch):
    decoder, injection = drawn("llama", replace(cases.TASK, labels=task.labels))
    injection = injection.with_head(bias=(0.75, -0.5, 0.25)[: len(task.labels)], temperature=2.0)
    export_causal_lm(decoder, injection, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    *label, probability = run_card(tmp_path / "out")
    expected = injection.log_probs(decoder, golden.TEXTS[:1]).softmax(-1)[0]
    assert " ".join(label) == task.labels[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), abs=1e-5)


def test_the_card_is_of_a_text_generation_model(tmp_path):
    export_causal_lm(*drawn("llama"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-generation" in card


def test_the_tokenizer_pads_on_the_left_and_the_card_says_so(tmp_path):
    decoder, injection = drawn("gpt2")
    export_causal_lm(decoder, injection, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token is not None
    assert "Pad batches on the left" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert decoder.tokenizer.padding_side == "right"


def test_golden_answers_include_label_prior_and_temperature(tmp_path):
    decoder, injection = drawn("llama")
    injection = injection.with_head(bias=(0.75, -0.5), temperature=2.0)
    made = cases.with_golden(export_causal_lm, (decoder, injection), tmp_path / "out")
    expected = injection.log_probs(decoder, golden.TEXTS).softmax(-1)
    torch.testing.assert_close(torch.tensor(made.probabilities), expected.float(), atol=1e-6, rtol=1e-5)
    assert verify(tmp_path / "out").passed


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
    export_causal_lm(decoder, injection, tmp_path / "memory")
    export_causal_lm(base, injection, tmp_path / "files")
    one = same_weights(tmp_path / "memory", tmp_path / "files")
    if not FAMILIES[CASES[case][0]].target:
        assert weights(base).keys() <= one.keys()  # the names that transformers itself writes


@pytest.mark.parametrize("case", ["llama", "gemma", "phi3", "gpt2", "qwen3"])
def test_shards_hold_what_one_file_holds(case, tmp_path):
    decoder, injection = drawn(case)
    base, _ = saved(decoder, tmp_path)
    export_causal_lm(decoder, injection, tmp_path / "memory")
    export_causal_lm(base, injection, tmp_path / "whole")
    export_causal_lm(base, injection, tmp_path / "shards", max_shard_size="20KB")
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
    export_causal_lm(base, injection, tmp_path / "out")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(plain(made), hooked(decoder, injection)) <= 1e-5


def test_sharded_bases_and_copies_beside_them_are_read_right(tmp_path):
    decoder, injection = drawn("mistral")
    base = stored(decoder, tmp_path / "base", max_shard_size="20KB")
    save_file({"norm.weight": torch.zeros(32)}, base / "consolidated.safetensors")
    export_causal_lm(base, injection, tmp_path / "out")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(plain(made), hooked(decoder, injection)) <= 1e-5
    (base / INDEX).write_text("{}", encoding="utf-8")
    one_line(r"index\.json' is damaged", export_causal_lm, base, injection, tmp_path / "again")


def test_a_model_on_the_hub_is_read_from_its_snapshot(tmp_path, monkeypatch):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda name, **_: str(base))
    export_causal_lm("nobody/model", Injection.from_pretrained(artefact), tmp_path / "hub")
    export_causal_lm(base, Injection.from_pretrained(artefact), tmp_path / "folder")
    same_weights(tmp_path / "hub", tmp_path / "folder")


def test_memory_stays_near_one_shard(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    base, artefact = saved(decoder_of("llama", **sizes), tmp_path)
    assert (base / "model.safetensors").stat().st_size > 120e6
    assert cases.memory_of("export_causal_lm", base, artefact, tmp_path / "out", max_shard_size="20MB") < 80e6
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 6


def test_an_export_passes_with_all_biases(exported):
    outcome = verify(exported, device="cpu")
    assert outcome.passed
    assert outcome.worst < 1e-5
    value = Golden.from_export(exported)
    assert (value.form, value.tolerance, len(value.biases)) == ("causal-lm", 1e-4, 4)


def scaled(folder, name, factor):
    """One tensor of a checkpoint is another one, or is not there."""
    state = load_file(folder / "model.safetensors")
    tensor = state.pop(name)
    more = {} if factor is None else {name: tensor * factor}
    save_file(state | more, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_zeroed_bias_is_found_and_named(exported, said):
    scaled(exported, "model.layers.1.mlp.down_proj.bias", 0)
    printed = said("verify", exported, "--device", "cpu", code=1)
    assert "Failed: " in printed
    assert "missing or zero: model.layers.1.mlp.down_proj.bias." in printed
    record = json.loads(said("verify", exported, "--device", "cpu", "--json", code=1))
    assert record["missing"] == ["model.layers.1.mlp.down_proj.bias"]


def test_other_weights_fail_without_naming_a_bias(exported):
    scaled(exported, "lm_head.weight", -1)
    outcome = verify(exported, device="cpu")
    assert not outcome.passed
    assert outcome.missing == ()


def test_a_tokenizer_with_other_ids_fails(exported, said):
    path = exported / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["normalizer"] = {"type": "Lowercase"}
    golden_file = exported / GOLDEN
    made = Golden.from_export(exported)
    prompts = [prompt.replace("the", "The") for prompt in made.prompts]
    ids = AutoTokenizer.from_pretrained(exported)(prompts)["input_ids"]
    made.model_copy(update={"prompts": prompts, "ids": ids}).write(exported)
    assert golden_file.is_file()
    path.write_text(json.dumps(state), encoding="utf-8")
    assert "prompts other token ids, such as 'Review" in said("verify", exported, code=1)


@pytest.mark.parametrize("case", cases.ONE_A_ROW)
def test_golden_answers_of_a_bfloat16_model_are_computed_in_float32(case, monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", golden.TEXTS[:1])
    decoder = decoder_of(case, torch.bfloat16)
    injection = injection_for(decoder)
    result = make_golden(decoder, injection)
    assert decoder.model.dtype == torch.bfloat16
    whole = Decoder(decoder.model.float(), decoder.tokenizer)
    expected = torch.tensor(make_golden(whole, injection).probabilities)
    torch.testing.assert_close(torch.tensor(result.probabilities), expected, atol=1e-6, rtol=1e-5)


def test_a_bfloat16_export_passes_within_its_tolerance(tmp_path):
    cases.with_golden(export_causal_lm, drawn("llama", dtype=torch.bfloat16), tmp_path / "out")
    outcome = verify(tmp_path / "out", device="cpu")
    assert outcome.passed
    assert 1e-6 < outcome.worst < outcome.tolerance == 5e-2


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "artefact"
    injection_for(Decoder.from_pretrained("reference", device="cpu")).save_pretrained(folder)
    return folder


def test_export_and_verify(artefact, tmp_path, said):
    out = tmp_path / "plain"
    assert "Next: i2cl verify" in said("export", artefact, out, "--to", "causal-lm", "--device", "cpu")
    assert "Passed: 2 of 2 labels" in said("verify", out, "--device", "cpu")
    options = ("--to", "causal-lm", "--no-golden", "--json", "--max-shard-size", "500KB")
    record = json.loads(said("export", artefact, tmp_path / "bare", *options))
    assert (record["to"], record["golden"]) == ("causal-lm", False)
    assert len(list((tmp_path / "bare").glob("*.safetensors"))) > 1
    assert GOLDEN not in listed(tmp_path / "bare")
    assert weights(out).keys() == weights(tmp_path / "bare").keys()


def test_bad_input_is_one_line(artefact, tmp_path, refused, monkeypatch):
    out, full = tmp_path / "out", tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine", encoding="utf-8")
    assert "holds other files (notes.txt)" in refused("export", artefact, full)
    assert "is not an artefact" in refused("export", full, out)
    assert "see i2cl export --help" in refused("export", artefact, out, "--to", "onnx")
    assert "is not a valid shard size" in refused(
        "export", artefact, out, "--no-golden", "--max-shard-size", "big"
    )
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
    one_line(
        r"\(config.rms_norm_eps 1e-06 and not 1e-05\)", export_causal_lm, base, injection, tmp_path / "out"
    )
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
    assert "has no tensor model.layers.1.mlp.up_proj.weight" in refused(*export)
    (base / "model.safetensors").write_bytes(b"rubbish")
    assert "is damaged" in refused(*export)
    (base / "model.safetensors").unlink()
    assert "has no *.safetensors" in refused(*export)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rubbish", "cannot be read"),
        ("{}", "written by an older version: export the task again"),
        ('{"format_version": 1}', "written by an older version: export the task again"),
        ('{"format_version": 99}', "written by a newer version: upgrade i2cl"),
    ],
)
def test_golden_answers_that_cannot_be_read_are_one_line(content, message, exported, refused):
    (exported / GOLDEN).write_text(content, encoding="utf-8")
    assert message in refused("verify", exported)
