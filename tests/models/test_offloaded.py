"""Offloaded weights: same identity, same injections, and a restored model."""

import json
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from commands import run
from fitting import hooks, injected, raises
from i2cl import CalibrationConfig, Decoder
from i2cl.models.batching import make_batch
from tiny import tiny_model, tiny_tokenizer

from .conftest import TEXTS, flags, gradients, look, needs_bitsandbytes, saved

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="needs accelerate: pip install 'i2cl[hub]'"
)


MAPS = {
    "all": {"": "disk"},
    "embeddings": {"model.embed_tokens": "disk", "lm_head": "disk"}
    | {"model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"},
    "a layer": {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.layers.0": "cpu"}
    | {"model.layers.1": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"},
}


@pytest.fixture(params=MAPS)
def offloaded(request, checkpoint, tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'i2cl[hub]'")
    decoder = Decoder.from_pretrained(checkpoint, device_map=MAPS[request.param], offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in decoder.model.parameters())
    return decoder


def test_offloaded_model_has_the_same_identity_and_scores(offloaded, plain, task):
    assert offloaded.device == torch.device("cpu")
    assert offloaded.base == plain.base
    batch = make_batch([(5, 9, 2, 7), (3, 1)], offloaded.device)
    assert torch.equal(offloaded.capture(batch), plain.capture(batch))
    assert torch.equal(gradients(offloaded), gradients(plain))
    shown, config = task.sample(2, 0), CalibrationConfig(epochs=2)
    made = [injected(one, task, shown, config) for one in (offloaded, plain)]
    assert torch.equal(made[0].coefficients, made[1].coefficients)
    assert torch.equal(made[0].log_probs(offloaded, TEXTS), made[1].log_probs(plain, TEXTS))


def test_offloaded_model_is_restored(offloaded):
    model = offloaded.model
    model.train()
    frozen = next(name for name, parameter in model.named_parameters() if parameter.is_meta)
    model.get_parameter(frozen).requires_grad_(False)

    def state():
        return flags(model), hooks(model), [parameter.is_meta for parameter in model.parameters()]

    before = state()
    gradients(offloaded)
    look(offloaded)
    assert state() == before
    assert all(module.training for module in model.modules())


@needs_accelerate
@pytest.mark.parametrize("model_type", ["gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tied_offloaded_weights_count_once(model_type, dtype, tmp_path):
    folder = saved(tmp_path / "model", model_type)
    expected = Decoder.from_pretrained(folder)
    assert expected.model.config.tie_word_embeddings
    result = Decoder.from_pretrained(folder, dtype=dtype, device_map={"": "disk"}, offload_folder=tmp_path)
    assert result.base.weights == expected.base.weights


def test_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    raises("on the device meta and has no values", Decoder, empty, tiny_tokenizer())


@needs_bitsandbytes
def test_command_line_quantizes_and_offloads(checkpoint, tmp_path, capsys):
    rows, out, texts = (tmp_path / name for name in ("films.csv", "films", "texts"))
    rows.write_text("text,label\n" + "".join(f"film {n},{('bad', 'good')[n % 2]}\n" for n in range(8)))
    fit = ["fit", checkpoint, rows, "--template", "{text}: {label}", "-o", out, "--shots", 2, "--evaluate", 0]
    assert run(*fit, "--recipe", "fast", "--quantization", "8bit") == 0
    record = json.loads((out / "injection.json").read_text())
    assert record["base_model"]["quantization"] == "bitsandbytes 8bit"
    texts.write_text("film 1\n")
    capsys.readouterr()
    answers, quantized = [], ["--quantization", "8bit"]
    for more in (quantized, [], ["--device-map", '{"": "disk"}', "--offload-folder", tmp_path]):
        assert run("predict", out, texts, *more) == 0
        printed = capsys.readouterr()
        assert ("was made with bitsandbytes 8bit" in printed.err) == (more != quantized)
        answers.append(printed.out)
    assert answers[1] == answers[2] != answers[0]
