"""Running single cells of a grid, and their records."""

import pytest
import torch
from safetensors.torch import load_file

from experiments.runs import ONE, OTHER, cell, run_alone, run_missing
from fitting import raises
from i2cl import CalibrationConfig, Decoder, Injection, calibrate, extract, load_task, transfer
from i2cl.experiments.evaluation import fit_method
from i2cl.experiments.grid import Experiment
from i2cl.experiments.paper import worst_demonstrations
from i2cl.experiments.report.document import build
from i2cl.experiments.runner import Bench, default_i2cl, pending_cells
from i2cl.experiments.store import Store
from i2cl.methods import make_methods
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.scoring import LabelScorer
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference")


@pytest.fixture
def bench(decoder, tmp_path):
    return Bench(decoder, None, tmp_path / "vectors")


def keep_short(bench, task):
    """Save a short fit as if an earlier cell of default I2CL had made it."""
    own = cell(task=task)
    result = bench.task(own)
    shown = result.sample(None, 0)
    (method,) = make_methods(["i2cl"], {"epochs": 3})
    fitted = fit_method(bench.decoder, result, method, shown, 0)
    bench.save(own, fitted)
    return fitted.predictor


def test_method_cell_has_predictions_and_demonstrations(bench):
    outcome = bench.run(cell(method="few_shot", seed=4))
    task = load_task(ONE)
    assert outcome.gold == tuple(query.label for query in task.queries(12))
    assert [task.train[place] for place in outcome.demonstrations] == list(task.sample(None, 4))
    right = sum(a == b for a, b in zip(outcome.gold, outcome.predictions, strict=True))
    assert outcome.accuracy == right / 12
    assert outcome.labels == task.labels
    assert outcome.coefficients is None
    assert list(bench.vectors.glob("*")) == []


def test_chat_cell_uses_the_chat_template(bench, monkeypatch):
    wanted = cell(method="zero_shot", chat=True)
    raises("chat template", bench.run, wanted)
    chat_template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    monkeypatch.setattr(bench.decoder.tokenizer, "chat_template", chat_template)
    asked = load_task(ONE).chat(bench.decoder.tokenizer)
    assert asked.template.query("x").endswith("<assistant>")
    scores = LabelScorer(bench.decoder, asked).scores([query.text for query in asked.queries(12)])
    assert bench.run(wanted).predictions == tuple(scores.argmax(-1).tolist())


def test_only_default_i2cl_saves_vectors(bench):
    assert len(bench.run(cell(options={"epochs": 1})).coefficients) == bench.decoder.layers
    assert not bench.vectors.exists()
    predictor = keep_short(bench, ONE)
    result = bench.injection(cell())
    assert isinstance(result, Injection)
    torch.testing.assert_close(result.coefficients, predictor.injection.coefficients)
    torch.testing.assert_close(result.context, predictor.injection.context)
    task = bench.task(cell())
    shown = [one for one in task.sample(None, 0) if one.label == 2]
    (kept,) = bench.vectors.glob("*.safetensors")
    own = extract(bench.decoder, task, shown).context
    torch.testing.assert_close(load_file(kept)["class_vectors"][2].float(), own, atol=2e-3, rtol=2e-3)


def test_move_cell_injects_another_tasks_fit(bench):
    source = keep_short(bench, OTHER)
    outcome = bench.run(cell(study="move", sources=(OTHER,)))
    task = bench.task(cell())
    predictor = PromptPredictor(LabelScorer(bench.decoder, task), edit=source.edit)
    scores = predictor.log_probs([query.text for query in task.queries(12)])
    assert outcome.predictions == tuple(scores.argmax(-1).tolist())
    assert outcome.coefficients == source.injection.coefficients.tolist()


class ShortCalibration(CalibrationConfig):
    """Few epochs by default."""

    epochs: int = 3


def test_transfer_cell_equals_transfer_function(bench, monkeypatch):
    monkeypatch.setattr("i2cl.injections.transfer.CalibrationConfig", ShortCalibration)
    for task in (ONE, OTHER):
        keep_short(bench, task)
    outcome = bench.run(cell(study="transfer", sources=(OTHER,)))
    task = bench.task(cell())
    anchors = [bench.injection(default_i2cl(cell(), OTHER))]
    first = bench.injection(default_i2cl(cell(), ONE))
    expected = transfer(bench.decoder, task, task.sample(None, 0), anchors, first=first)
    assert outcome.coefficients == expected.injection.coefficients.tolist()
    assert outcome.weights == {OTHER: pytest.approx(1.0)}


def test_missing_source_fits_are_made_on_demand(bench, monkeypatch):
    calls = []

    def calibrate_quickly(decoder, task, demonstrations, context, config, **more):
        calls.append(1)
        short = config.model_copy(update={"epochs": 1})
        return calibrate(decoder, task, demonstrations, context, short, **more)

    monkeypatch.setattr("i2cl.methods.i2cl.calibrate", calibrate_quickly)

    bench.injection(cell(task=OTHER))
    bench.injection(cell(task=OTHER))
    assert calls == [1]


def test_worst_demonstrations_have_the_lowest_few_shot_accuracy(bench, monkeypatch):
    monkeypatch.setattr("i2cl.experiments.paper.MAX_JUDGING_ROWS", 10)
    monkeypatch.setattr("i2cl.experiments.paper.GROUPS", 6)
    task = bench.task(cell())
    chosen, judged = worst_demonstrations(bench.decoder, task, 1, seed=3)
    groups = [task.sample(1, 1_000_000 + 6 * 3 + number) for number in range(6)]
    texts = [one.text for one in judged]
    (few_shot,) = make_methods(["few_shot"])
    gold = torch.tensor([one.label for one in judged])
    fits = [few_shot.fit(bench.decoder, task, group, 0) for group in groups]
    accuracies = [(fit.log_probs(texts).argmax(-1) == gold).float().mean().item() for fit in fits]
    assert chosen == groups[accuracies.index(min(accuracies))]
    assert not {one.text for group in groups for one in group} & set(texts)
    assert not {one.text for one in task.test} & set(texts)
    outcome = bench.run(cell(method="zero_shot", demonstrations="worst", shots=1, seed=3))
    assert [task.train[place] for place in outcome.demonstrations] == list(chosen)
    assert outcome.cost.held_out == len(judged) == 10


def test_records_have_provenance_even_if_failed(decoder, tmp_path):
    record = run_alone(cell(shots=100_000), decoder, tmp_path)
    assert (record.status, record.outcome) == ("failed", None)
    assert record.error.startswith("I2CLError: task 'mood-colour-1'")
    record = run_alone(cell(method="zero_shot"), decoder, tmp_path)
    assert record.key == cell(method="zero_shot").key
    assert record.provenance["weights"] == decoder.base.weights
    assert {"i2cl", "torch", "transformers", "device", "dtype", "commit", "machine"} <= set(record.provenance)
    assert record.peak_memory_bytes > 10**7


def test_unsupported_compressor_is_skipped_once(tmp_path):
    decoder = Decoder(tiny_model("gpt2"), tiny_tokenizer(), name="tiny")
    cells = [cell(method=name) for name in ("zero_shot", "autocompressor", "icae", "cepe")]
    tally = run_missing(cells, decoder, tmp_path / "store")
    assert tally == {"done": 1, "skipped": 3}
    store = Store.open(tmp_path / "store")
    assert pending_cells(cells, store) == []
    rows = ({"name": "I2CL", "method": "zero_shot"}, {"name": "AutoComp.", "method": "autocompressor"})
    plan = Experiment(name="mine", title="T", measures="M", rows=rows)
    (section,) = build([plan], store.records.values(), {}, figures=False).sections
    message = "AutoComp. was skipped: autocompressor supports llama and opt, not 'gpt2'"
    assert message in section.missing
    assert not any("makes them" in one for one in section.missing)
