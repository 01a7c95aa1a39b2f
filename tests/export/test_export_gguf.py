"""A folded Llama as a GGUF file: what is written, and what llama.cpp answers, where it is installed."""

import sys
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from io import StringIO
from types import ModuleType, SimpleNamespace

import pytest
import torch

from commands import listed, run
from export import cases
from export.cases import (
    IDS,
    ONE_OF_EACH,
    SHARED,
    change,
    decoder_of,
    drawn,
    field,
    hooked,
    llama_cpp,
    plain,
    saved,
)
from fitting import raises, weighted
from i2cl.export import Golden, export_gguf, fold, golden, verify_gguf
from i2cl.export.gguf import adjacent_pairs
from i2cl.export.golden import GOLDEN
from i2cl.export.servers import LlamaCpp, start_llama_cpp

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'i2cl[gguf]')")

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
    *((case, {}) for case in ("llama", "llama-biases", "ministral", "mistral", "qwen2", "phi3")),
    *(("llama", fields) for fields in HEADS),
    *(("mistral", TIED | {"head_dim": 12}), ("phi3", TIED)),
    *(("llama", {"rope_parameters": rope | {"rope_theta": 5000.0}}) for rope in ROPES),
]
NAMES = [f"{case}-{','.join(map(str, fields.values()))[:40]}" for case, fields in CASES]


@pytest.fixture
def exported(tmp_path):
    """A folded tiny Llama with its golden values."""
    export_gguf(*drawn("llama"), tmp_path / "out.gguf")
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
    export_gguf(*drawn("llama", tie_word_embeddings=True), tmp_path / "out.gguf", golden=False)
    assert "output.weight" not in tensors(tmp_path / "out.gguf")
    assert field(tmp_path / "out.gguf", "i2cl.golden") is None


@pytest.mark.parametrize(("dtype", "kind"), [(None, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_matrices_have_the_dtype_and_vectors_float32(dtype, kind, tmp_path):
    (decoder, injection), path = drawn("llama", dtype=torch.bfloat16), tmp_path / "out.gguf"
    export_gguf(decoder, injection, path, dtype=dtype)
    for tensor in tensors(path).values():
        assert tensor.tensor_type.name == (kind if len(tensor.shape) > 1 else "F32")
    assert Golden.from_export(path).tolerance == {"BF16": 5e-2, "F16": 1e-2, "F32": 1e-4}[kind]
    folded = tensors(path)["blk.1.ffn_down.weight"]
    values = torch.from_numpy(gguf.quants.dequantize(folded.data, folded.tensor_type).copy())
    source = decoder.model.state_dict()["model.layers.1.mlp.down_proj.weight"].float()
    exact = source * injection.coefficients[1, 1, 1]
    # In float32 it is not rounded to the source's bfloat16 in between.
    assert torch.equal(values, exact.to(dtype or torch.bfloat16).float())


@pytest.mark.parametrize("case", sorted(set(ONE_OF_EACH) - {"llama", "phi3", "qwen2"}))
def test_what_does_not_become_a_llama_is_refused(case, tmp_path):
    reason = "has the activation 'gelu" if case == "gemma" else "only a 'llama' can be written as GGUF"
    message = raises(reason, export_gguf, *drawn(case), tmp_path / "out.gguf")
    assert message.endswith("export with --to classifier or causal-lm")
    assert listed(tmp_path) == []


def test_a_dtype_that_gguf_lacks_or_that_overflows_is_refused(tmp_path):
    call, out = (export_gguf, *drawn("llama")), tmp_path / "out.gguf"
    raises("choose float32, float16 or bfloat16", *call, out, dtype=torch.float64)
    with torch.no_grad():
        call[1].model.lm_head.weight[3, 3] = 1e6
    message = r"lm_head.weight has values beyond the range of torch.float16"
    raises(message, *call, out, dtype=torch.float16, force=True, golden=False)
    assert listed(tmp_path) == []


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    message = r"needs the package gguf: pip install 'i2cl\[gguf\]'"
    raises(message, export_gguf, *drawn("llama"), tmp_path / "out.gguf")


def test_a_missing_llama_cpp_is_named_before_the_file_is_written(tmp_path, call, refused, monkeypatch):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    code, _, message = call("export", artefact, tmp_path / "out.gguf", "--model", base, "--to", "gguf")
    assert code == 0
    assert message.startswith("`i2cl verify` of a GGUF file needs the package xllamacpp: pip install")
    assert "needs the package xllamacpp" in refused("verify", tmp_path / "out.gguf")


def test_bad_input_is_one_line(tmp_path, refused, monkeypatch):
    llama = ModuleType("xllamacpp")  # not used, since the files are checked first
    llama.__spec__ = ModuleSpec("xllamacpp", None, origin="installed")
    monkeypatch.setitem(sys.modules, "xllamacpp", llama)
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
    assert "does not exist: give a folder or a GGUF file" in refused("verify", out)
    assert "is damaged, or not a GGUF file" in refused("verify", tmp_path / "taken.gguf")
    assert run(*gguf_too, out) == 0
    assert f"has no {GOLDEN}" in refused("verify", out)
    assert "leave out --device" in refused("verify", out, "--device", "cuda")
    assert not (tmp_path / "out").exists()


# What llama.cpp answers


def log_probs(path, ids):
    """Return the log-probabilities of all tokens after a prompt, by llama.cpp."""
    server = start_llama_cpp(path)
    return torch.tensor(LlamaCpp(server.listening_address).log_probs(list(ids), list(range(300))))


@llama_cpp
@pytest.mark.parametrize(("case", "fields"), CASES, ids=NAMES)
def test_llama_cpp_computes_what_the_hooks_do(case, fields, tmp_path):
    decoder, injection = drawn(case, **fields)
    export_gguf(decoder, injection, tmp_path / "out.gguf", golden=False)
    expected = hooked(decoder, injection)[-1].log_softmax(-1)
    assert (log_probs(tmp_path / "out.gguf", IDS) - expected).abs().max() < 1e-4
    assert cases.relative(plain(decoder.model)[-1].log_softmax(-1), expected) > 0.1


@llama_cpp
def test_longrope_models_are_exported_with_their_original_context_length(tmp_path):
    decoder, injection = cases.longrope(len(IDS) + 1)
    export_gguf(decoder, injection, tmp_path / "out.gguf", golden=False)
    assert field(tmp_path / "out.gguf", "granite.context_length") == len(IDS) + 1
    expected = hooked(decoder, injection)[-1].log_softmax(-1)
    assert (log_probs(tmp_path / "out.gguf", IDS) - expected).abs().max() < 1e-4


@llama_cpp
def test_an_export_passes_in_llama_cpp(exported, stdout):
    outcome = verify_gguf(exported)
    assert (outcome.passed, outcome.worst < 1e-5, outcome.retokenized) == (True, True, ())
    assert "Passed: 2 of 2 labels" in stdout("verify", exported)
    server = start_llama_cpp(exported)
    assert "Passed: 2 of 2 labels" in stdout("verify", exported, "--url", server.listening_address)


@llama_cpp
def test_llama_cpp_verifies_word_level_scoring_label_prior_and_temperature(tmp_path):
    decoder, injection = drawn("llama", SHARED)
    injection = weighted(decoder, injection).with_head(bias=(0.75, -0.5, 0.25), temperature=2.0)
    export_gguf(decoder, injection, tmp_path / "out.gguf")
    assert verify_gguf(tmp_path / "out.gguf").passed


def test_the_usage_text_scores_the_labels(tmp_path, monkeypatch):
    decoder, injection = drawn("llama")
    injection = injection.with_head(bias=(0.75, -0.5), temperature=2.0)
    export_gguf(decoder, injection, tmp_path / "out.gguf")
    code = field(tmp_path / "out.gguf", "i2cl.usage").split("```python\n")[1].split("```")[0]
    (ids,) = injection.scorer(decoder).queries(golden.TEXTS[:1])

    class Llama:
        """Same as in llama-cpp-python, with the folded model."""

        n_tokens = len(ids)

        def __init__(self, name, **_):
            assert name == "out.gguf"

        def tokenize(self, prompt, **_):
            return list(decoder.encoder([prompt.decode()])[0])

        def eval(self, tokens):
            with torch.no_grad():
                self.scores = fold(decoder, injection)(torch.tensor([tokens])).logits[0].numpy()

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "usage", "exec"), {})
    label, probability = printed.getvalue().split()
    expected = injection.log_probs(decoder, golden.TEXTS[:1]).softmax(-1)[0]
    assert label == injection.task.labels[int(expected.argmax())]
    assert float(probability) == pytest.approx(expected.max().item(), abs=1e-5)


@llama_cpp
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_passes_within_its_tolerance(dtype, tmp_path):
    export_gguf(*drawn("llama"), tmp_path / "out.gguf", dtype=dtype)
    assert verify_gguf(tmp_path / "out.gguf").passed


@llama_cpp
@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.1.ffn_down.bias", "blk.0.ffn_up.weight"])
def test_a_zeroed_tensor_fails(exported, stdout, name):
    change(exported, name)
    assert "Failed: " in stdout("verify", exported, code=1)


@llama_cpp
def test_a_file_that_llama_cpp_refuses_is_one_line(exported, refused):
    change(exported, fields=[("general.architecture", ord("x"))])
    assert "llama.cpp cannot load" in refused("verify", exported)
