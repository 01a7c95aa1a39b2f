"""Order, groups, shared fits and failures of cells, and stores of other weights or rows."""

import pytest

from commands import jsonl
from experiments.runs import OTHER, cell, kept, quick, run_alone, run_groups_of, shot, single
from fitting import one_line
from i2cl import Decoder, I2CLError
from i2cl.experiments import runner, studies
from i2cl.experiments.runner import pending, run_groups, run_job
from i2cl.experiments.store import Store
from i2cl.methods.few_shot import FewShot
from i2cl.methods.i2cl import I2CL
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference")


def test_pending_orders_cells_and_drops_duplicates(tmp_path):
    moved = cell(study="move", sources=(OTHER,))
    cells = [shot(1), moved, cell(), cell(), shot(0), shot(1), cell(seed=1)]
    with Store.writing(tmp_path) as store:
        assert pending(cells, store) == single(cell(), shot(0), moved, shot(1), cell(seed=1))


def test_failing_seed_does_not_fail_others(decoder, tmp_path, monkeypatch):
    cells = tuple(quick(seed) for seed in range(3))

    def refuse(self, decoder, task, demonstrations, seed, prepare=I2CL.prepare):
        if seed == 1:
            raise I2CLError("not this one")
        return prepare(self, decoder, task, demonstrations, seed)

    monkeypatch.setattr(I2CL, "prepare", refuse)
    records = run_job(single(*cells), None, tmp_path, (), decoder)
    assert [one.status for one in records] == ["done", "failed", "done"]
    assert records[1].error == "I2CLError: not this one"


def test_cells_that_share_a_fit_are_one_job(decoder, tmp_path, monkeypatch):
    def asked(method, **changes):
        return cell(method=method, **{"limit": 40} | changes)

    cells = [asked(name) for name in ("zero_shot", "few_shot", "contextual_calibration")]
    cells += [asked("few_shot+label_prior", skew=3), asked("few_shot", seed=1)]
    fits, jobs = [], []

    def noted(groups, *more):
        jobs.append([one.key for group in groups for one in group.missing])
        return run_job(groups, *more)

    def counted(self, *arguments, fit=FewShot.fit):
        fits.append(1)
        return fit(self, *arguments)

    monkeypatch.setattr(FewShot, "fit", counted)
    monkeypatch.setattr(runner, "run_job", noted)
    with Store.writing(tmp_path) as store:
        run_groups(pending(cells, store), store, lambda: decoder, 1, None)
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
    assert run_groups_of(cells[:1], first, tmp_path / "s")["done"] == 1
    assert run_groups_of(cells[:2], first, tmp_path / "s")["done"] == 1
    message = "the weights of 'm' differ from those of the store's results: choose another --store"
    one_line(message, run_groups_of, cells, other, tmp_path / "s")
    assert len(Store.open(tmp_path / "s").records) == 2


def test_store_rejects_other_rows_of_a_task(tmp_path, decoder):
    for folder, word in (("one", "good"), ("other", "great")):
        (tmp_path / folder / "sst2").mkdir(parents=True)
        for split in ("train", "test"):
            lines = [{"text": f"{word} {n}", "label": n % 2} for n in range(12)]
            jsonl(tmp_path / folder / "sst2" / f"{split}.jsonl", lines)
    cells = [cell(task="sst2", method="few_shot", seed=seed, limit=2, shots=1) for seed in range(2)]
    assert run_groups_of(cells[:1], decoder, tmp_path / "s", str(tmp_path / "one"))["done"] == 1
    message, given = (
        "the rows of task 'sst2' differ from those of the store's results",
        (cells, decoder, tmp_path / "s"),
    )
    one_line(message, run_groups_of, *given, str(tmp_path / "other"))


def test_store_rejects_another_wording_of_a_task(tmp_path, decoder):
    for split in ("train", "test"):
        jsonl(tmp_path / f"{split}.jsonl", [{"text": f"text {n}", "label": n % 2} for n in range(8)])

    def written(template):
        (tmp_path / "mine.toml").write_text(
            f'name = "mine"\nlabels = ["red", "blue"]\ntemplate = "{template}"\nshots = 1\n'
            '[files]\ntrain = "train.jsonl"\ntest = "test.jsonl"\n'
        )
        for remembered in (studies._load, studies._hashes):
            remembered.cache_clear()

    mine = str(tmp_path / "mine.toml")
    cells = [cell(task=mine, method="few_shot", seed=seed, limit=2) for seed in range(2)]
    written("Text: {text} Colour: {label}")
    assert run_groups_of(cells[:1], decoder, tmp_path / "s")["done"] == 1
    assert run_groups_of(cells[:1], decoder, tmp_path / "s")["done"] == 0
    written("{text} is {label}")
    message = "the template, label words, instruction or shots of task .* differ from"
    one_line(message, run_groups_of, cells, decoder, tmp_path / "s")
    assert run_groups_of(cells, decoder, tmp_path / "other")["done"] == 2
