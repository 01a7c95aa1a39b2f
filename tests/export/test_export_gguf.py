"""A folded Llama as a GGUF file: what is written, and what llama.cpp answers, where it is installed."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from unittest.mock import Mock

import pytest
import torch

from commands import listed, run
from export import cases
from export.cases import IDS, change, decoder_of, drawn, field, hooked, llama_cpp, saved, with_golden
from fitting import one_line
from i2cl import I2CLError, Injection
from i2cl.export import Golden, export_gguf, fold, golden, verify_gguf
from i2cl.export.families import FAMILIES
from i2cl.export.gguf import Weights, adjacent_pairs
from i2cl.export.golden import GOLDEN
from i2cl.export.llama_cpp import LlamaCpp

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'i2cl[gguf]')")

# Model types that become a Llama which llama.cpp has.
LLAMAS = {"llama", "ministral", "mistral", "qwen2", "phi3", "helium"}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    YARN,
    YARN | {"attention_factor": 1.3},
]

TIED = {"tie_word_embeddings": True}
HEADS = (TIED, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"head_dim": 16})
CASES = [
    *((case, {}) for case in ("llama", "llama-biases", "ministral", "mistral", "qwen2", "phi3", "helium")),
    *(("llama", fields) for fields in HEADS),
    *(("mistral", TIED | {"head_dim": 12}), ("phi3", TIED)),
    *(("llama", {"rope_parameters": rope | {"rope_theta": 5000.0}}) for rope in ROPES),
]
NAMES = [f"{case}-{','.join(map(str, fields.values()))[:40]}" for case, fields in CASES]


@pytest.fixture
def exported(tmp_path):
    """A folded tiny Llama with its golden values."""
    with_golden(export_gguf, drawn("llama"), tmp_path / "out.gguf")
    return tmp_path / "out.gguf"


def tensors(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_the_file_says_what_it_is(exported):
    assert field(exported, "general.architecture") == "granite"
    assert field(exported, "granite.attention.head_count_kv") == 2
    assert field(exported, "granite.context_length") == 1024
    assert field(exported, "i2cl.template") == "Review: {text}\nSentiment:{label}"
    assert field(exported, "i2cl.labels") == ["positive", "negative"]
    made = Golden.from_export(exported)
    assert made.form == "gguf"
    names = [f"blk.{n}.{name}.bias" for n in (0, 1) for name in ("attn_output", "ffn_down")]
    assert sorted(made.biases) == names
    assert made.prompts[0].startswith("Review: the letter arrived")
    assert "Llama('out.gguf'" in field(exported, "i2cl.usage")


def test_every_tensor_is_the_folded_one(exported):
    decoder, injection = drawn("llama")
    state = fold(decoder, injection).state_dict()
    there = tensors(exported)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, decoder.layers)
    left_out = set()
    for name, tensor in state.items():
        mine = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if mine not in there:
            left_out.add(name)
            assert not tensor.any()  # llama.cpp does without a bias of zeros
            continue
        result = torch.from_numpy(there[mine].data.copy())
        assert torch.equal(
            result, adjacent_pairs(tensor, 8) if "q_proj" in name or "k_proj" in name else tensor
        )
    assert len(left_out) == 2 * 5  # q, k, v, gate and up of two layers
    assert "output.weight" in there


def test_rows_of_queries_change_places_and_back():
    rows = torch.arange(16)
    assert adjacent_pairs(rows, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    matrix = rows[:, None] * torch.ones(1, 3)
    assert torch.equal(adjacent_pairs(matrix, 8)[:, 0].long(), adjacent_pairs(rows, 8))


def test_a_tied_head_is_written_once(tmp_path):
    export_gguf(*drawn("llama", tie_word_embeddings=True), tmp_path / "out.gguf")
    assert "output.weight" not in tensors(tmp_path / "out.gguf")
    assert field(tmp_path / "out.gguf", "i2cl.golden") is None


@pytest.mark.parametrize(("dtype", "kind"), [(None, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_matrices_have_the_dtype_and_vectors_float32(dtype, kind, tmp_path):
    (decoder, injection), path = drawn("llama", dtype=torch.bfloat16), tmp_path / "out.gguf"
    made = with_golden(export_gguf, (decoder, injection), path, dtype=dtype)
    for tensor in tensors(path).values():
        assert tensor.tensor_type.name == (kind if len(tensor.shape) > 1 else "F32")
    assert made.tolerance == {"BF16": 5e-2, "F16": 1e-2, "F32": 1e-4}[kind]
    folded = tensors(path)["blk.1.ffn_down.weight"]
    values = torch.from_numpy(gguf.quants.dequantize(folded.data, folded.tensor_type).copy())
    source = decoder.model.state_dict()["model.layers.1.mlp.down_proj.weight"].float()
    exact = source * injection.coefficients[1, 1, 1]
    # In float32 it is not rounded to the source's bfloat16 in between.
    assert torch.equal(values, exact.to(dtype or torch.bfloat16).float())


def test_files_hold_what_memory_holds(tmp_path):
    decoder = decoder_of("mistral")
    base, artefact = saved(decoder, tmp_path)
    injection = Injection.from_pretrained(artefact)
    for name in ("memory", "files"):
        (tmp_path / name).mkdir()  # the usage text names the file
    export_gguf(decoder, injection, tmp_path / "memory" / "out.gguf")
    export_gguf(base, injection, tmp_path / "files" / "out.gguf")
    assert (tmp_path / "memory" / "out.gguf").read_bytes() == (tmp_path / "files" / "out.gguf").read_bytes()


def test_memory_stays_near_one_tensor(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    base, artefact = saved(decoder_of("llama", **sizes), tmp_path)
    assert cases.memory_of("export_gguf", base, artefact, tmp_path / "out.gguf") < 50e6
    assert (tmp_path / "out.gguf").stat().st_size > 120e6


@pytest.mark.parametrize("case", sorted(set(FAMILIES) - LLAMAS))
def test_what_is_no_llama_is_refused(case, tmp_path):
    reason = "has the activation 'gelu" if case == "gemma" else "only a 'llama' can be written as GGUF"
    message = one_line(reason, export_gguf, *drawn(case), tmp_path / "out.gguf")
    assert message.endswith("export with --to classifier or causal-lm")
    assert listed(tmp_path) == []


def test_a_dtype_that_gguf_lacks_or_that_overflows_is_refused(tmp_path):
    call, out = (export_gguf, *drawn("llama")), tmp_path / "out.gguf"
    one_line("choose float32, float16 or bfloat16", *call, out, dtype=torch.float64)
    with torch.no_grad():
        call[1].model.lm_head.weight[3, 3] = 1e6
    message = r"lm_head.weight has values beyond the range of torch.float16"
    one_line(message, *call, out, dtype=torch.float16, force=True)
    assert listed(tmp_path) == []


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    message = r"needs the package gguf: pip install 'i2cl\[gguf\]'"
    one_line(message, export_gguf, *drawn("llama"), tmp_path / "out.gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    one_line("needs the package llama-cpp-python", LlamaCpp, tmp_path / "out.gguf", 8)


def test_what_verify_lacks_is_told_before_the_file_is_written(tmp_path, refused, monkeypatch):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    export = ("export", artefact, "--model", base, "--to", "gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(Weights, "tensor", Mock(side_effect=I2CLError("the disk is full")))
    message = refused(*export, tmp_path / "out.gguf", lines=2)
    assert message.startswith("`i2cl verify` of a GGUF file needs the package llama-cpp-python: pip install")
    assert "the disk is full" in message
    assert "llama" not in refused(*export, tmp_path / "out.gguf", "--no-golden")


def test_bad_input_is_one_line(tmp_path, refused):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    out, folder = tmp_path / "out.gguf", tmp_path / "folder.gguf"
    folder.mkdir()
    (tmp_path / "taken.gguf").write_text("mine", encoding="utf-8")
    export = ("export", artefact, "--model", base, "--no-golden")
    gguf_too = (*export, "--to", "gguf")
    assert "end it with .gguf" in refused(*gguf_too, tmp_path / "out")
    assert "is a folder" in refused(*gguf_too, folder)
    assert "already exists" in refused(*gguf_too, tmp_path / "taken.gguf")
    assert "cannot write to" in refused(*gguf_too, tmp_path / "taken.gguf" / "out.gguf")
    assert "add --to gguf" in refused(*export, tmp_path / "out", "--dtype", "float16")
    assert "add --to gguf" in refused(*export, tmp_path / "out", "--no-tokenizer")
    assert "does not exist: give a folder or a GGUF file" in refused("verify", out)
    assert "is damaged, or not a GGUF file" in refused("verify", tmp_path / "taken.gguf")
    assert run(*gguf_too, out) == 0
    assert f"has no {GOLDEN}" in refused("verify", out)
    assert "leave out --device" in refused("verify", out, "--device", "cuda")
    assert not (tmp_path / "out").exists()


# What llama.cpp answers


@llama_cpp
@pytest.mark.parametrize(("case", "fields"), CASES, ids=NAMES)
def test_llama_cpp_does_what_the_hooks_do(case, fields, tmp_path):
    decoder, injection = drawn(case, **fields)
    export_gguf(decoder, injection, tmp_path / "out.gguf")
    expected = hooked(decoder, injection)
    with LlamaCpp(tmp_path / "out.gguf", len(IDS)) as model:
        for length in (1, 7, len(IDS)):
            result = model.logits(IDS[:length])
            wanted = expected[length - 1]
            assert (result.log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < cases.CLOSE
    with torch.no_grad():
        bare = decoder.model(torch.tensor([IDS])).logits[0, -1]
    assert cases.relative(bare, expected[-1]) > 0.1  # the injection is not lost in the bound


@llama_cpp
def test_long_rotary_scaling_holds_up_to_the_length_that_the_file_names(tmp_path):
    decoder, injection = cases.longrope(len(IDS))
    export_gguf(decoder, injection, tmp_path / "out.gguf")
    assert field(tmp_path / "out.gguf", "granite.context_length") == len(IDS)
    with LlamaCpp(tmp_path / "out.gguf", len(IDS)) as model:
        result = model.logits(IDS).log_softmax(-1)
    assert (result - hooked(decoder, injection)[-1].log_softmax(-1)).abs().max() < cases.CLOSE


@llama_cpp
def test_an_export_holds(exported, said):
    outcome = verify_gguf(exported)
    assert (outcome.passed, outcome.worst < 1e-5, outcome.retokenized) == (True, True, ())
    assert "Passed: 2 of 2 labels" in said("verify", exported)


@llama_cpp
@pytest.mark.parametrize("task", [cases.TASK, cases.SHARED], ids=["first token", "full sequence"])
def test_the_usage_text_shows_code_that_gives_label_and_probability(task, tmp_path, monkeypatch):
    decoder, injection = drawn("llama", replace(cases.TASK, labels=task.labels))
    injection = injection.with_head(bias=(0.75, -0.5, 0.25)[: len(task.labels)], temperature=2.0)
    export_gguf(decoder, injection, tmp_path / "out.gguf")
    monkeypatch.chdir(tmp_path)
    code = field("out.gguf", "i2cl.usage").split("```python\n")[1].split("```")[0]
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "usage", "exec"), {})
    *label, probability = printed.getvalue().split()
    expected = injection.log_probs(decoder, golden.TEXTS[:1]).softmax(-1)[0]
    assert " ".join(label) == task.labels[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), abs=1e-4)


@llama_cpp
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_holds_within_its_tolerance(dtype, tmp_path):
    with_golden(export_gguf, drawn("llama"), tmp_path / "out.gguf", dtype=dtype)
    assert verify_gguf(tmp_path / "out.gguf").passed


@llama_cpp
@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.1.ffn_down.bias"])
def test_a_zeroed_bias_is_found_and_named(exported, said, name):
    change(exported, name)
    printed = said("verify", exported, code=1)
    assert "Failed: " in printed
    assert f"missing or zero: {name}." in printed


@llama_cpp
def test_other_weights_and_a_file_that_llama_cpp_refuses_are_told(exported, refused):
    change(exported, "blk.0.ffn_up.weight")
    outcome = verify_gguf(exported)
    assert (outcome.passed, outcome.missing) == (False, ())
    change(exported, fields=[("general.architecture", ord("x"))])
    assert "llama.cpp cannot load" in refused("verify", exported)
