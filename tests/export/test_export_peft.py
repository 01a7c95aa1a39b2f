"""PEFT adapters: where LoRA is exact, what is refused, and that they answer as the injected model."""

import copy
import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from commands import listed, run
from export.cases import HOW, SHARED, TASK, decoder_of, drawn, hooked, injection_for, plain, relative, stored
from export.test_causal_lm import run_card
from fitting import left_as_found, raises, weighted
from i2cl import AnchoredConfig, Decoder, Injection, anchor, load_task
from i2cl.export import Golden, export_peft, golden, verify
from i2cl.export.causal_lm import usage
from i2cl.export.folding import require_exportable
from i2cl.export.golden import GOLDEN
from i2cl.export.peft import CONFIG, WEIGHTS, lora_adapter
from tiny import CASES

peft = pytest.importorskip("peft", reason="peft is an extra")
pytestmark = pytest.mark.filterwarnings("ignore:.*lora_bias")

REFUSED = [case for case in CASES if "normalize the output" in HOW[case] or "mixture of experts" in HOW[case]]
LINEAR = sorted(set(CASES) - set(REFUSED))


def additive(case, **changes):
    """A decoder, and an injection whose every beta is 1."""
    decoder, injection = drawn(case, **changes)
    coefficients = injection.coefficients.clone()
    coefficients[..., 1] = 1
    return decoder, replace(injection, coefficients=coefficients)


def load(decoder, *folders):
    model = copy.deepcopy(decoder.model)
    for folder in folders:
        model = peft.PeftModel.from_pretrained(model, str(folder), folder.name).eval()
    return model


@pytest.mark.parametrize("case", LINEAR)
def test_an_adapter_does_what_the_hooks_do(case, tmp_path):
    decoder, injection = additive(case)
    export_peft(decoder, injection, tmp_path / "out", golden=False)
    expected = hooked(decoder, injection)
    assert relative(plain(decoder.model), expected) > 0.1  # the injection is larger than the bound
    assert relative(plain(load(decoder, tmp_path / "out")), expected) <= 1e-5


def test_an_adapter_of_a_bfloat16_model_is_in_float32(tmp_path):
    decoder, injection = additive("llama", dtype=torch.bfloat16)
    export_peft(decoder, injection, tmp_path / "out", golden=False)
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "out" / WEIGHTS).values())
    made = plain(load(decoder, tmp_path / "out"))
    assert relative(made, hooked(decoder, injection)) <= 0.05


def test_the_adapter_names_its_base_model_as_the_user_did():
    decoder, injection = additive("llama")
    decoder.model.config.name_or_path = "/a/local/file.gguf"
    decoder.name = "smollm2"
    config, _ = lora_adapter(decoder, injection)
    assert config.base_model_name_or_path == "smollm2"


def test_the_card_loads_a_gguf_base_model_as_a_file(tmp_path):
    decoder, injection = additive("llama")
    injection = replace(injection, base=replace(injection.base, name="/models/smol.gguf"))
    text = usage(injection, require_exportable(decoder, injection), "out", "peft")
    assert "from_pretrained('FOLDER', gguf_file='smol.gguf')" in text


def test_the_card_loads_the_bundled_base_model(tmp_path, monkeypatch):
    decoder, task = Decoder.from_pretrained("reference"), load_task("mood-colour-1")
    injection = anchor(decoder, task, task.sample(1, 0), AnchoredConfig(steps=1))
    export_peft(decoder, injection, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    label, probability = run_card(tmp_path / "out")
    expected = injection.log_probs(decoder, golden.TEXTS[:1]).softmax(-1)[0]
    assert label == task.labels[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), abs=1e-5)


def test_two_adapters_take_turns_on_one_model(tmp_path):
    decoder, one = additive("phi")
    two = replace(one, coefficients=one.coefficients * torch.tensor([-1.0, 1.0]))
    export_peft(decoder, one, tmp_path / "one", golden=False)
    export_peft(decoder, two, tmp_path / "two", golden=False)
    model = load(decoder, tmp_path / "one")
    model.load_adapter(str(tmp_path / "two"), "two")
    for name, injection in (("two", two), ("one", one)):
        model.set_adapter(name)
        assert relative(plain(model), hooked(decoder, injection)) <= 1e-5


@pytest.mark.parametrize("case", REFUSED)
def test_model_types_without_a_last_linear_map_are_refused_with_the_reason(case):
    raises(HOW[case].removeprefix("no: "), lora_adapter, *additive(case))


def test_injections_that_lora_cannot_express_are_refused(tmp_path):
    decoder, injection = additive("llama")
    raises("positions 'last'", lora_adapter, decoder, replace(injection, positions="last"))
    raises("cannot scale", export_peft, *drawn("llama"), tmp_path / "out")
    words = weighted(*additive("llama", task=SHARED))
    raises("word-level scoring changes the LM head", export_peft, decoder, words, tmp_path / "out")
    _, other = additive("llama", vocab_size=310)
    raises("this injection was made on", export_peft, decoder, other, tmp_path / "out")
    assert listed(tmp_path) == []


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    raises(r"pip install 'i2cl\[peft\]'", lora_adapter, *additive("phi"))


def test_the_base_model_is_not_changed(tmp_path):
    decoder, injection = additive("phi")
    with left_as_found(decoder.model.train()):
        export_peft(decoder, injection, tmp_path / "out")
    assert not hasattr(decoder.model, "peft_config")


@pytest.fixture
def exported(tmp_path):
    """A base model in a folder, an injection into it, and its adapter with golden answers."""
    base = stored(decoder_of("phi"), tmp_path / "base")
    injection = injection_for(Decoder.from_pretrained(str(base), device="cpu"))
    coefficients = injection.coefficients.clone()
    coefficients[..., 1] = 1
    replace(injection, coefficients=coefficients).save_pretrained(tmp_path / "artefact")
    assert run("export", tmp_path / "artefact", tmp_path / "out", "--to", "peft", "--device", "cpu") == 0
    return base, tmp_path / "artefact", tmp_path / "out"


def test_export_and_verify_on_the_command_line(exported, tmp_path, stdout):
    base, artefact, out = exported
    assert {"README.md", CONFIG, WEIGHTS, GOLDEN, "tokenizer.json"} <= set(listed(out))
    assert Golden.from_export(out).form == "peft"
    assert AutoTokenizer.from_pretrained(out).padding_side == "left"
    assert "Passed: 2 of 2 labels" in stdout("verify", out, "--device", "cpu")
    config = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    assert (config["base_model_name_or_path"], config["task_type"]) == (str(base), "CAUSAL_LM")
    assert config["inference_mode"] is True
    message = stdout("export", artefact, tmp_path / "bare", "--to", "peft", "--no-golden")
    assert f"films as a LoRA adapter of {base}" in message
    assert GOLDEN not in listed(tmp_path / "bare")


def test_a_base_model_that_moved_is_named(exported, tmp_path, refused):
    base, _, out = exported
    base.rename(tmp_path / "moved")
    assert "--model names another place" in refused("verify", out, "--device", "cpu")
    assert run("verify", out, "--device", "cpu", "--model", tmp_path / "moved") == 0
    assert "has no i2cl_golden.json" in refused("verify", tmp_path / "moved", "--model", base)


def test_changed_and_damaged_adapters_are_found(exported, stdout, tmp_path, refused):
    *_, out = exported
    other = stored(decoder_of("phi", hidden_size=64), tmp_path / "other")
    assert "cannot load the adapter" in refused("verify", out, "--device", "cpu", "--model", other)
    state = load_file(out / WEIGHTS)
    state[next(name for name in state if name.endswith("layers.1.mlp.fc2.lora_B.bias"))].zero_()
    save_file(state, out / WEIGHTS, metadata={"format": "pt"})
    assert "Failed: " in stdout("verify", out, "--device", "cpu", code=1)
    (out / WEIGHTS).write_bytes(b"rubbish")
    assert "export it again" in refused("verify", out, "--device", "cpu")
    (out / CONFIG).write_text("[]", encoding="utf-8")
    assert "export it again" in refused("verify", out, "--device", "cpu")


def test_code_in_the_card_prints_label_and_probability(exported, tmp_path, monkeypatch):
    base, artefact, out = exported
    monkeypatch.chdir(tmp_path)
    label, probability = run_card(out)
    decoder = Decoder.from_pretrained(str(base), device="cpu")
    expected = Injection.from_pretrained(artefact).log_probs(decoder, golden.TEXTS[:1]).softmax(-1)[0]
    assert label == TASK.labels[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), abs=1e-5)
    assert verify(out, device="cpu").worst < 1e-5
