import sys
from unittest.mock import Mock, call

import pytest

from fitting import raises
from i2cl.tasks import load_task
from i2cl.tasks.loaders import load_hub
from i2cl.tasks.schema import HubSource

datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
pa = pytest.importorskip("pyarrow", reason="the extra hub is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra hub is not installed")

WORDS, PARQUET_REVISION = ("bad", "good"), "refs/convert/parquet"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A local data set in the hub's format: one Parquet file per split."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    where = tmp_path / "set"
    where.mkdir()
    write(where / "train.parquet", [(f"train {n}", n % 4) for n in range(40)])
    write(where / "test.parquet", [("test 0", 0), ("test 1", 1), ("  ", 1), (None, 0)])
    return where


def write(path, rows):
    table = pa.table({"sentence": [text for text, _ in rows], "label": [label for _, label in rows]})
    pq.write_table(table, path)


def source(folder, **fields):
    if "test_fraction" not in fields:
        fields = {"test": "test", **fields}
    return HubSource(dataset=str(folder), **{"text": "sentence", **fields})


def test_a_local_folder_is_read_with_the_given_label_words(folder):
    train, test = load_hub(source(folder), ("a", "b", "c", "d"))
    assert [(e.text, e.label) for e in train[:3]] == [("train 0", 0), ("train 1", 1), ("train 2", 2)]
    assert len(train) == 40
    assert [(e.text, e.label) for e in test] == [("test 0", 0), ("test 1", 1)], "rows without text"
    train, test = load_hub(source(folder, keep_labels=[3, 1]), WORDS)
    assert {(int(e.text.split()[1]) % 4, e.label) for e in train} == {(3, 0), (1, 1)}
    assert [(e.text, e.label) for e in test] == [("test 1", 1)]


def test_max_per_class_and_test_fraction_draw_seeded_samples(folder):
    train, _ = load_hub(source(folder, max_per_class=3), ("a", "b", "c", "d"))
    assert sorted(e.label for e in train) == sorted([0, 1, 2, 3] * 3)
    assert train == load_hub(source(folder, max_per_class=3), ("a", "b", "c", "d"))[0]
    write(folder / "train.parquet", [(f"text {n % 50}", n % 2) for n in range(100)])
    train, test = load_hub(source(folder, test_fraction=0.2), WORDS)
    assert (len(train), len(test)) == (80, 20)
    assert {e.text for e in train}.isdisjoint({e.text for e in test})
    assert (train, test) == load_hub(source(folder, test_fraction=0.2), WORDS)


def test_task_toml_with_a_hub_table_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("I2CL_DATA_DIR", raising=False)
    toml = tmp_path / "mine.toml"
    toml.write_text(
        'name = "mine"\nlabels = ["a", "b", "c", "d"]\ntemplate = "{text} {label}"\n'
        f'[hub]\ndataset = {str(folder)!r}\ntest = "test"\ntext = "sentence"\n'
    )
    task = load_task(toml)
    assert (len(task.train), len(task.test), task.group) == (40, 2, "user")


@pytest.mark.parametrize(
    ("fields", "labels", "message"),
    [
        ({"text": "body"}, "abcd", "train: no column 'body', the columns are sentence, label"),
        ({}, "ab", "train: label 2 is not one of a, b"),
        ({"test": "validation"}, "abcd", "data_dir"),
    ],
)
def test_unexpected_column_label_or_split_is_named(folder, fields, labels, message):
    assert message in raises("", load_hub, source(folder, **fields), tuple(labels))


def test_failed_download_suggests_a_data_folder(monkeypatch):
    offline = Mock(side_effect=ConnectionError("no route to host\nsecond line"))
    monkeypatch.delenv("I2CL_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    caught = raises("", load_task, "sst2")
    for part in ("stanfordnlp/sst2", "no route to host", "I2CL_DATA_DIR"):
        assert part in caught


def test_missing_datasets_package_names_the_extra(monkeypatch):
    monkeypatch.delenv("I2CL_DATA_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    raises(r"pip install 'i2cl\[hub\]', or give a folder", load_task, "sst2")


def test_data_set_revision_and_splits_are_requested(monkeypatch):
    load_dataset = Mock(return_value=datasets.Dataset.from_dict({"text": ["x", "y"], "coarse_label": [0, 5]}))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("I2CL_DATA_DIR", raising=False)
    assert [e.label for e in load_task("trec").test] == [0, 5]
    calls = [call("CogComp/trec", None, split=one, revision=PARQUET_REVISION) for one in ("train", "test")]
    assert load_dataset.call_args_list == calls
