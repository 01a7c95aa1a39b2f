"""Order, shared fits and failures of cells, and stores of other weights or rows."""

import pytest

from commands import jsonl
from experiments.runs import OTHER, cell, kept, run_alone, run_missing
from fitting import raises
from i2cl import Decoder
from i2cl.experiments import runner
from i2cl.experiments.runner import pending_cells, run_cells, run_job
from i2cl.experiments.store import Store
from i2cl.methods.prompting import FewShot
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference")


def test_pending_orders_cells_and_drops_duplicates(tmp_path):
    moved = cell(study="move", sources=(OTHER,))
    first, second = (cell(method="few_shot", seed=seed) for seed in (0, 1))
    cells = [second, moved, cell(), cell(), first, second, cell(seed=1)]
    with Store.writing(tmp_path) as store:
        assert pending_cells(cells, store) == [cell(), first, moved, second, cell(seed=1)]


def test_cells_that_share_a_fit_are_one_job(decoder, tmp_path, monkeypatch):
    def asked(method, **changes):
        return cell(method=method, **{"limit": 40} | changes)

    cells = [asked(name) for name in ("zero_shot", "few_shot", "contextual_calibration")]
    cells += [asked("few_shot+label_prior", skew=3), asked("few_shot", seed=1)]
    fits, jobs = [], []

    def noted(sharing, *more):
        jobs.append([one.key for one in sharing])
        return run_job(sharing, *more)

    def counted(self, *arguments, fit=FewShot.fit):
        fits.append(1)
        return fit(self, *arguments)

    monkeypatch.setattr(FewShot, "fit", counted)
    monkeypatch.setattr(runner, "run_job", noted)
    with Store.writing(tmp_path) as store:
        run_cells(pending_cells(cells, store), store, lambda: decoder, 1, None)
        result = dict(store.records)
    zero, few, over, prior, other = (one.key for one in cells)
    assert jobs == [[zero], [few, over, prior], [other]]
    assert len(fits) == 2
    for one in cells:
        assert kept(result[one.key]) == kept(run_alone(one, decoder, tmp_path / "alone"))
    assert result[over].outcome.fit_seconds > result[few].outcome.fit_seconds
    gold = result[prior].outcome.gold
    assert sorted(map(gold.count, set(gold))) != sorted(map(result[few].outcome.gold.count, set(gold)))


def test_store_rejects_other_weights(tmp_path):
    models = [tiny_model("llama", hidden_size=size) for size in (32, 64)]
    first, other = (Decoder(model, tiny_tokenizer(), name="m") for model in models)
    cells = [cell(method="few_shot", seed=seed, limit=2, shots=1) for seed in range(3)]
    assert run_missing(cells[:1], first, tmp_path / "s")["done"] == 1
    assert run_missing(cells[:2], first, tmp_path / "s")["done"] == 1
    message = "the weights of 'm' differ from those of the store's results: choose another --store"
    raises(message, run_missing, cells, other, tmp_path / "s")
    assert len(Store.open(tmp_path / "s").records) == 2


def test_store_rejects_other_rows_of_a_task(tmp_path, decoder):
    for folder, word in (("one", "good"), ("other", "great")):
        (tmp_path / folder / "sst2").mkdir(parents=True)
        for split in ("train", "test"):
            lines = [{"text": f"{word} {n}", "label": n % 2} for n in range(12)]
            jsonl(tmp_path / folder / "sst2" / f"{split}.jsonl", lines)
    cells = [cell(task="sst2", method="few_shot", seed=seed, limit=2, shots=1) for seed in range(2)]
    assert run_missing(cells[:1], decoder, tmp_path / "s", str(tmp_path / "one"))["done"] == 1
    message, given = (
        "the rows of task 'sst2' differ from those of the store's results",
        (cells, decoder, tmp_path / "s"),
    )
    raises(message, run_missing, *given, str(tmp_path / "other"))


def test_store_rejects_another_wording_of_a_task(tmp_path, decoder):
    for split in ("train", "test"):
        jsonl(tmp_path / f"{split}.jsonl", [{"text": f"text {n}", "label": n % 2} for n in range(8)])

    def written(template):
        (tmp_path / "mine.toml").write_text(
            f'name = "mine"\nlabels = ["red", "blue"]\ntemplate = "{template}"\nshots = 1\n'
            '[files]\ntrain = "train.jsonl"\ntest = "test.jsonl"\n'
        )
        for remembered in (runner._load_task, runner._hash_task):
            remembered.cache_clear()

    mine = str(tmp_path / "mine.toml")
    cells = [cell(task=mine, method="few_shot", seed=seed, limit=2) for seed in range(2)]
    written("Text: {text} Colour: {label}")
    assert run_missing(cells[:1], decoder, tmp_path / "s")["done"] == 1
    assert run_missing(cells[:1], decoder, tmp_path / "s")["done"] == 0
    written("{text} is {label}")
    message = "the template, label words, instruction or shots of task .* differ from"
    raises(message, run_missing, cells, decoder, tmp_path / "s")
    assert run_missing(cells, decoder, tmp_path / "other")["done"] == 2
