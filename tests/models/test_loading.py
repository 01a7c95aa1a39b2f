"""Loading models: safetensors only, complete, and no remote code unless it is allowed."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fitting import raises
from i2cl import Decoder
from i2cl.models import loading
from i2cl.models.loading import load_model_and_tokenizer
from tiny import tiny_folder, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "model")


def change(folder, **tensors):
    """Replace tensors in a folder's weights; None removes one."""
    path = folder / "model.safetensors"
    whole = load_file(path) | tensors
    save_file({name: one for name, one in whole.items() if one is not None}, path, {"format": "pt"})


@pytest.fixture
def asked(monkeypatch):
    """Replace transformers' loaders; return the arguments of their calls."""
    calls = {}

    def tokenizer(name, **named):
        calls["tokenizer"] = (name, named)
        return tiny_tokenizer()

    def model(name, **named):
        calls["model"] = (name, named)
        return tiny_model("llama").train(), {"missing_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(loading, "require_reachable", lambda *_named: True)
    return calls


def test_python_without_docstrings_is_refused(folder, monkeypatch):
    """Transformers parses its own, and fails with them gone."""
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    raises("python -O", load_model_and_tokenizer, str(folder))


def test_folder_is_loaded_in_evaluation_mode(folder):
    model, tokenizer = load_model_and_tokenizer(str(folder))
    expected = tiny_model("llama").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert load_model_and_tokenizer(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_hub_id_revision_and_dtype_are_passed_to_transformers(asked, folder):
    decoder = Decoder.from_pretrained("somebody/some-model", revision="v2", device="cpu")
    for name, named in asked.values():
        assert name == "somebody/some-model"
        assert named["revision"] == "v2"
    assert (decoder.name, decoder.revision) == ("somebody/some-model", "v2")
    pairs = ((None, "float32"), ("auto", "float32"), ("checkpoint", "auto"), (torch.float16, torch.float16))
    for given, wanted in pairs:
        load_model_and_tokenizer(str(folder), dtype=given, device="cpu")
        assert asked["model"][1]["dtype"] == wanted


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}])
def test_only_safetensors_are_loaded_and_remote_code_is_off_by_default(asked, options):
    model, _ = load_model_and_tokenizer("somebody/some-model", **options)
    assert asked["model"][1]["use_safetensors"] is True
    assert [named["trust_remote_code"] for _, named in asked.values()] == [bool(options)] * 2
    assert not model.training


def test_remote_code_of_a_folder_is_not_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    raises("trust_remote_code", load_model_and_tokenizer, str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            None,
            r"weights are missing \(model.layers.1.mlp.up_proj.weight",
        ),
        (
            "model.norm.weight",
            torch.ones(7),
            r"norm.weight of shape \(7,\), but its config.json says \(32,\)",
        ),
    ],
)
def test_missing_or_mismatched_weights_are_refused(folder, name, tensor, message):
    change(folder, **{name: tensor})
    raises(message, load_model_and_tokenizer, str(folder))


def test_tied_weights_are_not_reported_missing(tmp_path):
    tiny_folder(tmp_path, "gpt2")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model, _ = load_model_and_tokenizer(str(tmp_path))
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)


@pytest.mark.parametrize("kept", [0, 4, 3000, -1])
def test_truncated_checkpoint_is_refused(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    raises("damaged", load_model_and_tokenizer, str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"device": device}, f"cannot use device '{device}'") for device in ("abacus", "cuda:99", "cpu:x")),
        ({"dtype": "float12"}, "unknown dtype"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
        ({"quantization": "3bit"}, "unknown quantization '3bit': choose 8bit or 4bit"),
    ],
)
def test_invalid_options_are_refused_before_loading(asked, options, message):
    raises(message, load_model_and_tokenizer, "somebody/some-model", **options)
    assert asked == {}


def test_sharded_checkpoint_is_loaded_unless_a_shard_is_missing(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    load_model_and_tokenizer(str(tmp_path))
    shards[-1].unlink()
    raises("cannot load", load_model_and_tokenizer, str(tmp_path))


def test_tokenizer_class_of_another_algorithm_is_refused(folder):
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {"tokenizer_class": "XLNetTokenizer"}
    path.write_text(json.dumps(fields))
    says = "cannot load the tokenizer of .*: compare tokenizer_class in tokenizer_config.json"
    raises(says, load_model_and_tokenizer, str(folder))


@pytest.mark.parametrize("name", ["reference", "folder"])
def test_revision_of_a_local_model_is_refused(folder, name):
    local = str(folder) if name == "folder" else name
    raises("is not on the hub and has no revision", load_model_and_tokenizer, local, revision="v2")


def test_adapter_folder_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    raises("is a PEFT adapter, not a model: give its base model", load_model_and_tokenizer, str(tmp_path))


def test_cached_model_loads_while_the_hub_is_unreachable(folder, monkeypatch):
    monkeypatch.setattr(loading, "require_reachable", lambda *_named: False)
    monkeypatch.setattr(loading, "cached_snapshot", lambda name, revision: str(folder))
    monkeypatch.setattr("socket.socket.connect", lambda *_named: pytest.fail("asked the hub"))
    decoder = Decoder.from_pretrained("acme/tiny", revision="v1.0", device="cpu")
    assert (decoder.base.name, decoder.base.revision) == ("acme/tiny", "v1.0")
