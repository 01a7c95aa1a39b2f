"""Export as a language model: files on disk, the card, golden answers and their check."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from commands import listed, run
from export.cases import (
    SHARED,
    TASK,
    decoder_of,
    drawn,
    injection_for,
    saved,
    stored,
    weights,
)
from fitting import raises, weighted
from i2cl import Decoder, Injection
from i2cl.export import Golden, export_causal_lm, golden, make_golden, verify
from i2cl.export.golden import GOLDEN


def run_card(folder):
    """Run the Python code of an export's README.md and return what it prints."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("```")[0]
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue().split()


@pytest.mark.parametrize("scoring", ["first_token", "words"])
def test_code_in_the_card_prints_label_and_probability(scoring, tmp_path, monkeypatch):
    decoder, injection = drawn("llama", TASK if scoring == "first_token" else SHARED)
    injection = injection if scoring == "first_token" else weighted(decoder, injection)
    bias = (0.75, -0.5, 0.25)[: len(injection.task.labels)]
    injection = injection.with_head(bias=bias, temperature=2.0)
    export_causal_lm(decoder, injection, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    *label, probability = run_card(tmp_path / "out")
    expected = injection.log_probs(decoder, golden.TEXTS[:1]).softmax(-1)[0]
    assert " ".join(label) == injection.task.labels[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), abs=1e-5)
    assert verify(tmp_path / "out").passed


def test_the_exported_causal_lm_has_a_text_generation_card_and_pads_on_the_left(tmp_path):
    decoder, injection = drawn("gpt2")
    export_causal_lm(decoder, injection, tmp_path / "out")
    assert "pipeline_tag: text-generation" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == decoder.model.generation_config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token is not None
    assert decoder.tokenizer.padding_side == "right"


@pytest.mark.parametrize("case", ["gpt_neox", "llama", "gpt2"])
def test_tensors_have_the_names_that_transformers_writes(case, tmp_path):
    decoder, injection = drawn(case)
    export_causal_lm(decoder, injection, tmp_path / "out", golden=False)
    assert weights(stored(decoder, tmp_path / "base")).keys() <= weights(tmp_path / "out").keys()


def test_a_dtype_rounds_the_folded_weights_once(tmp_path):
    decoder, injection = drawn("llama")
    export_causal_lm(decoder, injection, tmp_path / "out", dtype=torch.bfloat16)
    value = decoder.model.model.layers[0].mlp.down_proj.weight * injection.coefficients[0, 1, 1]
    made = weights(tmp_path / "out")
    assert torch.equal(made["model.layers.0.mlp.down_proj.weight"], value.bfloat16())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    outcome = verify(tmp_path / "out", device="cpu")
    assert outcome.passed
    assert 1e-6 < outcome.worst < outcome.tolerance == 5e-2


def test_an_export_passes(exported, stdout):
    outcome = verify(exported, device="cpu")
    assert outcome.passed
    assert outcome.worst < 1e-5
    value = Golden.from_export(exported)
    assert (value.form, value.tolerance) == ("causal-lm", 1e-4)
    assert "Passed: 2 of 2 labels" in stdout("verify", exported, "--device", "cpu")


def test_a_zeroed_bias_fails(exported, stdout):
    state = load_file(exported / "model.safetensors")
    state["model.layers.1.mlp.down_proj.bias"].zero_()
    save_file(state, exported / "model.safetensors", metadata={"format": "pt"})
    assert "Failed: " in stdout("verify", exported, "--device", "cpu", code=1)
    assert json.loads(stdout("verify", exported, "--device", "cpu", "--json", code=1))["passed"] is False


def test_a_tokenizer_with_other_ids_fails(exported, stdout):
    path = exported / "tokenizer.json"
    made = Golden.from_export(exported)
    prompts = [prompt.replace("the", "The") for prompt in made.prompts]
    ids = AutoTokenizer.from_pretrained(exported)(prompts)["input_ids"]
    made.model_copy(update={"prompts": prompts, "ids": ids}).write(exported)
    state = json.loads(path.read_text(encoding="utf-8")) | {"normalizer": {"type": "Lowercase"}}
    path.write_text(json.dumps(state), encoding="utf-8")
    assert "prompts other token ids, such as 'Review" in stdout("verify", exported, code=1)


@pytest.mark.parametrize("case", ["gemma", "gpt2"])
def test_golden_answers_of_a_bfloat16_model_are_computed_in_float32(case):
    decoder = decoder_of(case, torch.bfloat16)
    injection = injection_for(decoder)
    result = make_golden(decoder, injection)
    assert decoder.model.dtype == torch.bfloat16
    whole = Decoder(decoder.model.float(), decoder.tokenizer)
    expected = torch.tensor(make_golden(whole, injection).probabilities)
    torch.testing.assert_close(torch.tensor(result.probabilities), expected, atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "artefact"
    injection_for(Decoder.from_pretrained("reference", device="cpu")).save_pretrained(folder)
    return folder


def test_export_and_verify_on_the_command_line(artefact, tmp_path, stdout):
    out = tmp_path / "plain"
    assert "Next: i2cl verify" in stdout("export", artefact, out, "--to", "causal-lm", "--device", "cpu")
    assert "Passed: 2 of 2 labels" in stdout("verify", out, "--device", "cpu")
    options = ("--to", "causal-lm", "--no-golden", "--json", "--dtype", "bfloat16")
    record = json.loads(stdout("export", artefact, tmp_path / "bare", *options))
    assert (record["to"], record["golden"]) == ("causal-lm", False)
    assert GOLDEN not in listed(tmp_path / "bare")
    assert weights(out).keys() == weights(tmp_path / "bare").keys()


def test_bad_input_is_one_line(artefact, tmp_path, refused):
    out, full = tmp_path / "out", tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine", encoding="utf-8")
    assert "holds other files (notes.txt)" in refused("export", artefact, full)
    assert "is not an artefact" in refused("export", full, out)
    assert "see i2cl export --help" in refused("export", artefact, out, "--to", "onnx")
    assert "no config.json" in refused("export", artefact, out, "--model", full)
    assert "is not for --to peft" in refused("export", artefact, out, "--to", "peft", "--dtype", "float16")
    assert "has no i2cl_golden.json" in refused("verify", full)
    assert listed(tmp_path) == ["full"]


def test_another_model_is_refused_unless_forced(tmp_path, artefact, refused):
    base, mine = saved(decoder_of("llama"), tmp_path)
    injection = Injection.from_pretrained(mine)
    other = decoder_of("llama", rms_norm_eps=1e-5)
    raises(r"rms_norm_eps 1e-06 and not 1e-05", export_causal_lm, other, injection, tmp_path / "out")
    assert "(layers, width)" in refused("export", artefact, tmp_path / "out", "--model", base)
    other = stored(decoder_of("llama", vocab_size=310), tmp_path / "other")
    message = refused("export", mine, tmp_path / "out", "--model", other, "--no-golden")
    assert "this injection was made on" in message
    assert run("export", mine, tmp_path / "forced", "--model", other, "--device", "cpu", "--force") == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["rubbish", "{}", '{"format_version": 99}'])
def test_unreadable_golden_answers_give_a_one_line_error(content, exported, refused):
    (exported / GOLDEN).write_text(content, encoding="utf-8")
    assert "export it again" in refused("verify", exported)
