"""An anchored injection is one as any other: stored, in a pool, in the weights, an adapter, a GGUF file."""

import json
from dataclasses import replace

import pytest
import torch

from i2cl import (
    Decoder,
    Example,
    I2CLError,
    Injection,
    InjectionPool,
    Task,
    Template,
    anchor,
    calibrate,
    extract,
)
from i2cl.core.anchored import AnchoredConfig
from i2cl.core.recipe import CalibrationConfig
from i2cl.export import export_gguf, export_hf, export_peft, make_golden, verify
from i2cl.faces.cli import main
from tiny import tiny_model, tiny_tokenizer

SHOWN = (
    Example("a warm film", 0),
    Example("dull, dull", 1),
    Example("kind all the way", 0),
    Example("no", 1),
)
TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
TEXTS = ["fine", "a lifeless film, by far"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("base") / "model"
    tiny_model("llama").save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def decoder(folder):
    return Decoder.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def anchored(decoder):
    context = extract(decoder, TASK, SHOWN)
    found = anchor(decoder, TASK, SHOWN, context, AnchoredConfig(reach=3.0, steps=2))
    assert found.context.values.abs().max() > 0
    return found


def test_it_is_stored(anchored, decoder, tmp_path):
    anchored.save_pretrained(tmp_path / "out")
    kept = Injection.from_pretrained(tmp_path / "out")
    assert kept.settings == anchored.settings
    assert torch.equal(kept.scores(decoder, TEXTS), anchored.scores(decoder, TEXTS))


def test_a_pool_mixes_it_with_i2cl(anchored, decoder):
    other = calibrate(decoder, TASK, SHOWN, extract(decoder, TASK, SHOWN), CalibrationConfig(epochs=2))
    pool = InjectionPool(decoder, {"anchored": anchored, "i2cl": other})
    found = torch.stack(pool.scores([*TEXTS, *TEXTS], ["anchored", "i2cl", "i2cl", "anchored"]))
    wanted = [anchored.scores(decoder, TEXTS), other.scores(decoder, TEXTS)]
    torch.testing.assert_close(found[[0, 3]], wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[[2, 1]], wanted[1], atol=1e-5, rtol=1e-5)


def test_a_label_prior_is_in_no_export(anchored, decoder, folder, tmp_path, capsys):
    biased = replace(anchored, label_bias=(0.25, -0.5))
    for export in (export_hf, export_peft, export_gguf):
        with pytest.raises(I2CLError, match="leave it out with --drop-prior"):
            export(decoder, biased, tmp_path / "out")
    with pytest.raises(I2CLError, match="leave it out"):
        make_golden(decoder, biased)
    biased.save_pretrained(tmp_path / "artefact")
    for more in (["--json"], []):
        out = tmp_path / f"plain{len(more)}"
        arguments = ["export", str(tmp_path / "artefact"), str(out), "--model", str(folder), *more]
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert (stop.value.code, out.exists()) == (2, False)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--drop-prior"])
        assert stop.value.code == 0
        told = capsys.readouterr().out
        if more:
            assert json.loads(told)["label_bias"] == {"positive": 0.25, "negative": -0.5}
        else:
            assert "positive +0.2500, negative -0.5000" in told
    assert verify(out).passed


def test_it_folds(anchored, decoder, folder, tmp_path):
    export_hf(folder, anchored, tmp_path / "out", golden=lambda: make_golden(decoder, anchored))
    assert verify(tmp_path / "out").passed


@pytest.mark.filterwarnings("ignore:.*lora_bias")
def test_it_is_an_adapter(anchored, decoder, folder, tmp_path):
    pytest.importorskip("peft", reason="peft is an extra")
    export_peft(decoder, anchored, tmp_path / "out")
    assert verify(tmp_path / "out", model=str(folder)).passed


def test_it_is_a_gguf_file(anchored, decoder, folder, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is an extra")
    export_gguf(folder, anchored, tmp_path / "out.gguf", golden=lambda: make_golden(decoder, anchored))
    tensors = {one.name: one.data for one in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    for layer in range(decoder.layers):
        bias = torch.from_numpy(tensors[f"blk.{layer}.attn_output.bias"].copy())
        torch.testing.assert_close(bias, anchored.context.values[layer, 0], atol=1e-6, rtol=1e-5)
