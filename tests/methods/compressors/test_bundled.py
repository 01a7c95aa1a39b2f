"""The compressors of the bundled model, and the script that trains them."""

import json
from pathlib import Path

import pytest
import torch

import i2cl.methods.compressors.base as compressors
from fitting import fit
from i2cl import Decoder, evaluate, load_task, make_methods
from i2cl.tasks.generated import TASKS

KINDS = ("autocompressor", "icae", "cepe")


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference", device="cpu")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    import train_compressor

    return train_compressor


@pytest.mark.parametrize("kind", KINDS)
def test_training_script_writes_a_compressor_that_fit_uses(kind, script, decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "DOCUMENTS", 2)
    weights = {name: one.clone() for name, one in decoder.model.state_dict().items()}
    threads = torch.get_num_threads()
    script.main(["--kind", kind, "--steps", "2", "--output", str(tmp_path)])
    torch.set_num_threads(threads)
    record = json.loads((tmp_path / f"{kind}.json").read_text(encoding="utf-8"))
    assert (record["kind"], record["base"], record["steps"]) == (kind, decoder.base.weights, 2)
    assert set(record["tasks"]) == {task.name for task in TASKS} - set(script.UNSEEN)
    monkeypatch.setattr(compressors, "BUNDLED", tmp_path)
    fresh = Decoder.from_pretrained("reference", device="cpu")
    task = load_task("mood-colour-1")
    predictor = fit(kind, fresh, task, task.sample(2, 0))
    assert torch.isfinite(predictor.log_probs([one.text for one in task.test[:4]])).all()
    assert all(torch.equal(one, weights[name]) for name, one in fresh.model.state_dict().items())
    trained = {name: one.float() for name, one in compressors.bundled_compressor(fresh, kind).tensors.items()}
    assert sum(one.numel() for one in trained.values()) == record["parameters"]


def test_training_documents_exclude_unseen_tasks_and_held_out_texts(script):
    source = script.documents(0)
    held_out = {one.text for name in ("mood-colour-2", "job-letter-1") for one in load_task(name).test}
    for _ in range(50):
        name, shown, asked = next(source)
        assert name not in script.UNSEEN
        assert 4 <= len(shown) <= 20
        assert not {one.text for one in (*shown, *asked)} & held_out


@pytest.mark.parametrize("path", sorted(compressors.BUNDLED.glob("*.json")), ids=lambda path: path.stem)
def test_bundled_compressor_belongs_to_the_model_and_beats_zero_shot_on_a_training_task(path, decoder):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["kind"], record["base"]) == (path.stem, decoder.base.weights)
    assert sum(one.stat().st_size for one in compressors.BUNDLED.iterdir()) < 3_000_000
    task = load_task("mood-colour-2")
    assert task.name in record["tasks"]
    methods = make_methods([path.stem, "zero_shot"])
    compressed, zero_shot = (evaluate(decoder, task, method, limit=60).accuracy for method in methods)
    assert compressed > zero_shot + 0.2
