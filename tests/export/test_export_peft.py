"""PEFT adapters: where one is exact, what is refused, and that they answer as the injected model."""

import copy
import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from commands import listed, run
from export.cases import IDS, TASK, decoder_of, drawn, hooked, injection_for, plain, relative, saved, scaled
from export.test_causal_lm import run_card
from fitting import left_as_found, one_line
from i2cl import AnchoredConfig, ContextVector, Decoder, Example, ExtractConfig, Injection, anchor
from i2cl.export import Golden, export_peft, golden, verify
from i2cl.export.families import LAST_MAPS, REFUSED
from i2cl.export.golden import GOLDEN
from i2cl.export.peft import CONFIG, WEIGHTS, make_adapter
from tiny import CASES

peft = pytest.importorskip("peft", reason="peft is an extra")

EXPERTS = {kind for kind, paths in LAST_MAPS.items() if not all(paths)}
LINEAR = [case for case, (kind, _) in CASES.items() if kind in LAST_MAPS and kind not in EXPERTS]
_BIASED = """biogpt bloom codegen ctrl gpt_bigcode gpt_neo gpt_neox gpt_neox-sequential gptj
internlm3-biases jais2 llama-biases opt opt-projected persimmon phi starcoder2 starcoder2-sliding xglm"""
BIASED = _BIASED.split()
"""Cases whose last linear maps are plain and have the biases that GLoRA needs."""


def with_beta_one(injection):
    coefficients = injection.coefficients.clone()
    coefficients[..., 1] = 1
    return replace(injection, coefficients=coefficients)


def attention_only(injection):
    coefficients = injection.coefficients.clone()
    coefficients[:, 1] = torch.tensor([0.0, 1.0])
    return replace(injection, coefficients=coefficients)


def exact(case, dtype=torch.float32):
    """A decoder, and an injection into it that an adapter can be."""
    decoder, injection = drawn(case, dtype=dtype)
    return decoder, with_beta_one(injection) if case == "llama" else injection


def wearing(decoder, folder):
    return peft.PeftModel.from_pretrained(copy.deepcopy(decoder.model), str(folder)).eval()


def close(decoder, folder, injection, bound=1e-5):
    expected = hooked(decoder, injection)
    assert relative(plain(decoder.model), expected) > 0.1  # the injection is not lost in the bound
    assert relative(plain(wearing(decoder, folder)), expected) <= bound


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("case", LINEAR)
def test_lora_adds_where_beta_is_one(case, tmp_path):
    decoder, injection = drawn(case)
    injection = with_beta_one(injection)
    made = export_peft(decoder, injection, tmp_path / "out")
    assert made.tuner == "LoRA"
    assert len(made.constants) == 2 * decoder.layers
    assert GOLDEN not in listed(tmp_path / "out")
    close(decoder, tmp_path / "out", injection)


TURNED_ON = [(one, {"attention_bias": True, "mlp_bias": True}) for one in ("granite", "smollm3", "nemotron")]
TURNED_ON += [(case, {"attention_bias": True}) for case in ("cohere", "cohere2")]
"""Biases that the config turns on. Cohere's attention takes both constants."""


@pytest.mark.parametrize(("case", "fields"), [*((case, {}) for case in BIASED), *TURNED_ON], ids=str)
def test_glora_scales_and_adds_where_there_are_biases(case, fields, tmp_path):
    decoder, injection = drawn(case, **fields)
    made = export_peft(decoder, injection, tmp_path / "out")
    assert made.tuner == "GLoRA"
    close(decoder, tmp_path / "out", injection)
    config = json.loads((tmp_path / "out" / CONFIG).read_text(encoding="utf-8"))
    assert config["peft_type"] == "GLORA"
    assert config["target_modules"] == sorted(config["target_modules"])  # of which there are two


@pytest.mark.parametrize("case", ["gptj", "opt", "phi"])
def test_a_glora_adapter_can_be_merged_and_taken_off(case, tmp_path):
    decoder, injection = drawn(case)
    export_peft(decoder, injection, tmp_path / "out")
    expected = hooked(decoder, injection)
    worn = wearing(decoder, tmp_path / "out")
    with worn.disable_adapter():
        assert torch.equal(plain(worn), plain(decoder.model))
    merged = worn.merge_and_unload()
    assert not any("glora" in name for name, _ in merged.named_modules())
    assert relative(plain(merged), expected) <= 1e-5


def test_two_adapters_take_turns_on_one_model(tmp_path):
    decoder, one = drawn("phi")
    two = scaled(one, -1.0)
    export_peft(decoder, one, tmp_path / "one")
    export_peft(decoder, two, tmp_path / "two")
    worn = peft.PeftModel.from_pretrained(copy.deepcopy(decoder.model), str(tmp_path / "one"), "one").eval()
    worn.load_adapter(str(tmp_path / "two"), "two")
    for name, injection in (("two", two), ("one", one)):
        worn.set_adapter(name)
        assert relative(plain(worn), hooked(decoder, injection)) <= 1e-5


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("case", ["llama", "gptj", "mixtral", "qwen3_moe"])
def test_a_writer_that_is_left_alone_needs_no_adapter(case, tmp_path):
    decoder, injection = drawn(case)
    injection = attention_only(injection)
    added = with_beta_one(injection)
    made = export_peft(decoder, added, tmp_path / "added")
    assert len(made.constants) == decoder.layers
    close(decoder, tmp_path / "added", added)
    if case == "gptj":  # whose attention has no bias: the MLP's takes the constant
        export_peft(decoder, injection, tmp_path / "scaled")
        close(decoder, tmp_path / "scaled", injection)


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_an_anchored_fit_of_attention_alone_is_an_adapter_of_experts(case, tmp_path):
    decoder = decoder_of(case)
    shown = (Example("a warm film", 0), Example("dull, dull", 1))
    result = anchor(decoder, TASK, shown, AnchoredConfig(writers="mha", prior_std=300.0, steps=1))
    assert not result.context.values[:, 1].any()
    assert len(export_peft(decoder, result, tmp_path / "out").constants) == decoder.layers
    close(decoder, tmp_path / "out", result)
    both = anchor(decoder, TASK, shown, AnchoredConfig(steps=1))
    one_line("fit with --set writers=mha; or", make_adapter, decoder.model.config, both)


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("case", ["llama", "phi"])
def test_adapters_of_a_model_in_bfloat16_round_once_more(case, tmp_path):
    decoder, injection = exact(case, torch.bfloat16)
    export_peft(decoder, injection, tmp_path / "out")
    assert decoder.model.dtype == torch.bfloat16
    worn = wearing(decoder, tmp_path / "out")
    with torch.no_grad():
        result = worn(torch.tensor([IDS])).logits[0].float()
    assert relative(result, hooked(decoder, injection)) <= 0.05
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "out" / WEIGHTS).values())


@pytest.mark.parametrize("case", sorted(set(LINEAR) - set(BIASED)))
def test_scales_without_biases_are_refused(case):
    decoder, injection = drawn(case)
    line = one_line("", make_adapter, decoder.model.config, injection)
    other = case.startswith(("falcon", "gpt2"))
    assert ("GLoRA supports torch.nn.Linear only" if other else "a layer without a bias, such as ") in line
    assert "fit with --set formula=add" in line
    folds = CASES[case][0] not in REFUSED and not case.endswith("-sliding")
    assert ("export with --to classifier or causal-lm" in line) == folds
    assert line.endswith("predict with hooks instead (`i2cl predict`)")


@pytest.mark.parametrize("case", sorted(case for case, (kind, _) in CASES.items() if kind not in LAST_MAPS))
def test_the_others_are_refused_with_the_reason(case):
    decoder, injection = drawn(case)
    one_line(REFUSED[CASES[case][0]], make_adapter, decoder.model.config, with_beta_one(injection))


@pytest.mark.parametrize("case", sorted(EXPERTS))
def test_experts_are_refused(case):
    decoder, injection = drawn(case)
    config, one = decoder.model.config, with_beta_one(injection)
    cured = "fit with --set writers=mha" in one_line(
        "experts are not linear layers", make_adapter, config, one
    )
    assert cured == (case != "jetmoe")
    if cured:
        make_adapter(config, attention_only(one))


def test_injections_that_are_no_bias_are_refused():
    decoder, injection = drawn("phi")
    config = decoder.model.config
    values = torch.zeros(decoder.layers, 1, decoder.d_model)
    hidden = ContextVector(values, ExtractConfig(writers="hidden", separator=False), 1)
    nothing = torch.tensor([0.0, 1.0]).expand_as(injection.coefficients)
    blocks = {"context": hidden, "coefficients": torch.zeros(decoder.layers, 1, 2)}
    for changes, message in (
        ({"positions": "last"}, "positions 'last'"),
        (blocks, "block outputs"),
        ({"coefficients": nothing}, "changes nothing"),
    ):
        one_line(message, make_adapter, config, replace(injection, **changes))
    quantized = copy.deepcopy(config)
    quantized.quantization_config = {"quant_method": "bitsandbytes"}
    one_line("quantized", make_adapter, quantized, injection)


def test_another_model_is_refused(tmp_path):
    decoder, (_, injection) = decoder_of("phi"), drawn("phi", vocab_size=310)
    one_line("this injection was made on", export_peft, decoder, injection, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_peft(decoder, injection, tmp_path / "out", force=True)
    assert (tmp_path / "out" / CONFIG).is_file()


def test_peft_that_is_absent_or_old_is_named(monkeypatch):
    decoder, injection = drawn("phi")
    monkeypatch.delattr(peft, "GloraConfig")
    one_line("pip install -U peft", make_adapter, decoder.model.config, injection)
    monkeypatch.setitem(sys.modules, "peft", None)
    one_line(r"pip install 'i2cl\[peft\]'", make_adapter, decoder.model.config, injection)


@pytest.mark.parametrize("case", ["llama", "phi"])
def test_the_users_model_is_left_as_found(case, tmp_path):
    decoder, injection = exact(case)
    with left_as_found(decoder.model.train()):
        export_peft(decoder, injection, tmp_path / "out")
    assert not hasattr(decoder.model, "peft_config")


@pytest.fixture
def exported(tmp_path):
    """A base model in a folder, an injection into it, and its adapter with golden values."""
    base, artefact = saved(decoder_of("phi"), tmp_path)
    assert run("export", artefact, tmp_path / "out", "--to", "peft", "--device", "cpu") == 0
    return base, artefact, tmp_path / "out"


def test_export_and_verify(exported, tmp_path, said):
    base, artefact, out = exported
    assert {"README.md", CONFIG, WEIGHTS, GOLDEN, "tokenizer.json"} <= set(listed(out))
    outcome = verify(out, device="cpu")
    assert (outcome.passed, outcome.worst < 1e-5) == (True, True)
    assert len(Golden.from_export(out).biases) == 4
    assert AutoTokenizer.from_pretrained(out).padding_side == "left"
    assert "Passed: 2 of 2 labels" in said("verify", out, "--device", "cpu")
    config = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    assert (config["base_model_name_or_path"], config["task_type"]) == (str(base), "CAUSAL_LM")
    assert config["inference_mode"] is True
    message = said("export", artefact, tmp_path / "bare", "--to", "peft", "--no-golden", "--json")
    assert json.loads(message)["golden"] is False
    assert GOLDEN not in listed(tmp_path / "bare")
    message = said("export", artefact, tmp_path / "told", "--to", "peft", "--no-golden")
    assert f"films as a GLoRA adapter of {base}" in message


def test_a_base_model_that_moved_is_named(exported, tmp_path, refused):
    base, _, out = exported
    base.rename(tmp_path / "moved")
    assert "--model names another place" in refused("verify", out, "--device", "cpu")
    assert run("verify", out, "--device", "cpu", "--model", tmp_path / "moved") == 0
    assert "has no i2cl_golden.json" in refused("verify", tmp_path / "moved", "--model", base)


def test_a_constant_that_is_lost_and_damaged_adapters_are_named(exported, said, tmp_path, refused):
    *_, out = exported
    state = load_file(out / WEIGHTS)
    name = next(name for name in state if name.endswith("layers.1.mlp.fc2.glora_E.X"))
    state[name].zero_()
    save_file(state, out / WEIGHTS, metadata={"format": "pt"})
    assert f"missing or zero: {name}." in said("verify", out, "--device", "cpu", code=1)
    other, _ = saved(decoder_of("phi", hidden_size=64), tmp_path / "other")
    assert "does not fit" in refused("verify", out, "--device", "cpu", "--model", other)
    torch.save({}, out / "adapter_model.bin")
    (out / WEIGHTS).unlink()
    for content in (None, b"", b"rubbish"):
        if content is not None:
            (out / WEIGHTS).write_bytes(content)
        assert "holds a damaged adapter" in refused("verify", out, "--device", "cpu")
    (out / CONFIG).write_text("[]", encoding="utf-8")
    assert run("verify", out, "--device", "cpu") == 2


def test_what_is_refused_leaves_nothing_behind(tmp_path, refused):
    _, artefact = saved(decoder_of("llama"), tmp_path)
    export = ("export", artefact, tmp_path / "out", "--to", "peft", "--device", "cpu")
    assert "--max-shard-size is not for --to peft" in refused(*export, "--max-shard-size", "1MB")
    assert "fit with --set formula=add" in refused(*export)
    assert not (tmp_path / "out").exists()
    base = Decoder.from_pretrained(str(tmp_path / "base"), device="cpu")
    with_beta_one(injection_for(base)).save_pretrained(artefact)
    assert run(*export) == 0
    assert run("verify", tmp_path / "out", "--device", "cpu") == 0


def test_the_card_shows_code_that_gives_label_and_probability(exported, tmp_path, monkeypatch):
    base, artefact, out = exported
    monkeypatch.chdir(tmp_path)
    label, probability = run_card(out)
    decoder = Decoder.from_pretrained(str(base), device="cpu")
    expected = Injection.from_pretrained(artefact).log_probs(decoder, golden.TEXTS[:1]).softmax(-1)[0]
    assert label == TASK.labels[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), abs=1e-5)
