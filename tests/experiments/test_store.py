"""Stores: durable lines, a single writer, damaged files, packing."""

import base64
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from fitting import raises
from i2cl import I2CLError
from i2cl.experiments.grid import Cell
from i2cl.experiments.records import Record, Scores
from i2cl.experiments.store import Store, save_vectors
from i2cl.methods import Cost

PACKED = Path(__file__).parents[2] / "docs" / "experiments" / "store"

OUTCOME = {"accuracy": 0.5, "macro_f1": 0.4, "gold": (0, 1), "predictions": (0, 0), "labels": ("yes", "no")}
OUTCOME |= {"demonstrations": (7, 3), "fit_seconds": 0.25, "predict_seconds": 0.5, "held_out": 0}
OUTCOME |= {"trainable_parameters": 5, "cached_values": 4, "cached_bytes": 16, "unlabelled": 0}

SCORES = Scores.of(np.log([[0.75, 0.25], [0.5, 0.5]])).model_dump()


def record(seed=0, **changes):
    cell = Cell(model="m", task="t", seed=seed, options={"noise": 0.5})
    fields = {"key": cell.key, "cell": cell, "status": "done", "outcome": OUTCOME, "started": "2026-01-01"}
    return Record.model_validate(fields | changes)


def failed(seed=0):
    return record(seed, status="failed", outcome=None, error="ValueError: no")


def write(folder, *records):
    with Store.writing(folder) as store:
        for one in records:
            store.append(one)


def test_appended_records_round_trip(tmp_path):
    write(tmp_path / "s", record(0), failed(1))
    store = Store.open(tmp_path / "s")
    assert list(store.records.values()) == [record(0), failed(1)]
    assert (store.done(record(0).key), store.done(failed(1).key)) == (True, False)
    write(tmp_path, record(7))
    line = json.loads((tmp_path / "cells.jsonl").read_text())
    assert set(line["outcome"]) == {*OUTCOME, "together", "weights"}
    assert line["outcome"]["trainable_parameters"] == 5
    (kept,) = Store.open(tmp_path).records.values()
    run = kept.outcome
    assert (run.model, run.task, run.method, run.seed, run.shots) == ("m", "t", "i2cl", 7, 1)
    assert run.cost == Cost(trained=5, cached_values=4, cached_bytes=16)


def test_committed_store_of_an_older_version_is_readable():
    """It was written before runs had the fields ``cost`` and ``together``."""
    records = Store.open(PACKED).records
    assert len(records) > 4000
    runs = [one.outcome for one in records.values() if one.status == "done"]
    assert {run.together for run in runs} == {1}
    few_shot = next(run for run in runs if run.method == "few_shot")
    assert few_shot.cost.cached_bytes == 4 * few_shot.cost.cached_values > 0
    assert {run.method for run in runs} >= {"i2cl", "move", "transfer"}


def kept(folder):
    return list(Store.open(folder).records.values())


def test_later_record_replaces_earlier_one_unless_it_failed(tmp_path):
    write(tmp_path, failed(0))
    write(tmp_path, record(0))
    assert kept(tmp_path) == [record(0)]
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2
    write(tmp_path, failed(0))
    assert kept(tmp_path) == [record(0)]
    with Store.writing(tmp_path) as store:
        store.append(failed(0))
        assert store.done(record(0).key)


@pytest.mark.parametrize("left", [1, 20, 200, -1])
def test_truncated_last_line_is_dropped_and_damaged_lines_raise(tmp_path, left):
    """A line without its newline is dropped, even if its JSON is complete."""
    write(tmp_path, record(0), record(1))
    file = tmp_path / "cells.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:left])
    assert kept(tmp_path) == [record(0)]
    write(tmp_path, record(2))
    assert kept(tmp_path) == [record(0), record(2)]
    assert all(json.loads(line) for line in file.read_text().splitlines())
    file.write_bytes(lines[0][:30] + b"\n" + lines[1])
    raises(r"line 1 of the store .* remove that line", Store.open, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"key": "0" * 16}, "but the key of its cell is"),
        ({"outcome": None}, "a cell that is done has no outcome"),
        ({"status": "failed"}, "a cell that is failed has an outcome"),
        ({"outcome": OUTCOME | {"gold": (0,)}}, "1 gold labels for 2 predictions"),
        ({"outcome": OUTCOME | {"gold": (0, 2)}}, "a label id is not one of 0 to 1"),
        ({"outcome": OUTCOME | {"gold": (0, 10**30)}}, "a label id is not one of 0 to 1"),
        ({"outcome": OUTCOME | {"labels": ()}}, "a label id is not one of"),
        ({"outcome": OUTCOME | {"scores": SCORES | {"shape": (1, 4)}}}, "scores have shape .*, expected"),
        ({"outcome": OUTCOME | {"scores": SCORES | {"shape": (2, 3)}}}, "scores are 4 numbers, not 2 x 3"),
        ({"outcome": OUTCOME | {"scores": SCORES | {"float16": "Zm8*"}}}, "scores are not base64"),
        ({"outcome": OUTCOME | {"scores": SCORES | {"float16": "AHwAfAB8AHw="}}}, "not all finite"),
    ],
)
def test_inconsistent_line_raises(tmp_path, changes, named):
    write(tmp_path, record(0))
    value = record(1).model_dump(mode="json") | changes
    with (tmp_path / "cells.jsonl").open("a") as handle:
        handle.write(json.dumps(value) + "\n")
    raises(rf"line 2 of the store .*{named}.* remove that line", Store.open, tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, None], ids=["empty", "noise", "broken link"])
def test_damaged_vectors_raise(tmp_path, damage):
    write(tmp_path, record(0))
    save_vectors(tmp_path / "vectors", record(0).key, {"context_vector": np.zeros((1, 2, 3), np.float32)})
    path = tmp_path / "vectors" / f"{record(0).key}.safetensors"
    path.unlink()
    path.symlink_to("none") if damage is None else path.write_bytes(damage)
    raises(rf"{record(0).key}.safetensors' is damaged .* remove it", Store.open(tmp_path).vectors)


def test_damaged_or_missing_store_raises(tmp_path):
    write(tmp_path / "s", record(0))
    Store.open(tmp_path / "s").pack(tmp_path / "packed")
    path = tmp_path / "packed" / "cells.jsonl.gz"
    path.write_bytes(path.read_bytes()[:50])
    raises(r"cells.jsonl.gz' is damaged .* copy it", Store.open, tmp_path / "packed")
    raises("i2cl experiment run", Store.open, tmp_path / "none")
    (tmp_path / "file").write_text("")
    raises("choose another --store", write, tmp_path / "file", record(0))


def test_second_writer_is_rejected(tmp_path):
    with Store.writing(tmp_path), pytest.raises(I2CLError, match="another run is writing to"):
        write(tmp_path, record(0))
    with Store.writing(tmp_path) as store:
        store.append(record(0))
        assert Store.open(tmp_path).done(record(0).key)
    with pytest.raises(ValueError, match="for reading"):
        Store.open(tmp_path).append(record(1))


def test_pack_and_unpack_round_trip(tmp_path):
    source, packed = tmp_path / "it's a store", tmp_path / "packed"
    write(source, failed(0), record(0), failed(1))
    vectors = {"context_vector": np.arange(6, dtype=np.float32).reshape(1, 2, 3)}
    save_vectors(source / "vectors", record(0).key, vectors)
    Store.open(source).pack(packed)
    again = Store.open(packed)
    assert again.records == Store.open(source).records
    raises("is packed", write, packed, record(2))
    again.unpack(tmp_path / "unpacked")
    write(tmp_path / "unpacked", record(2))
    unpacked = Store.open(tmp_path / "unpacked")
    assert unpacked.records == again.records | {record(2).key: record(2)}
    for store in (again, unpacked):
        result = store.vectors()[record(0).key]["context_vector"]
        np.testing.assert_array_equal(result, vectors["context_vector"])
    with gzip.open(packed / "cells.jsonl.gz", "rt") as lines:
        assert [json.loads(line)["status"] for line in lines] == ["done", "failed"]


def test_scores_are_readable_with_numpy_alone(tmp_path):
    write(tmp_path / "s", record(0, outcome=OUTCOME | {"scores": SCORES}), record(1))
    Store.open(tmp_path / "s").pack(tmp_path / "packed")
    for folder in ("s", "packed"):
        with_scores, without = (one.outcome for one in Store.open(tmp_path / folder).records.values())
        np.testing.assert_allclose(with_scores.scores.array, np.log([[0.75, 0.25], [0.5, 0.5]]), rtol=1e-3)
        assert without.scores is None
    line = json.loads((tmp_path / "s" / "cells.jsonl").read_text().splitlines()[0])["outcome"]["scores"]
    plain = np.frombuffer(base64.b64decode(line["float16"]), "<f2").reshape(line["shape"])
    np.testing.assert_array_equal(plain, with_scores.scores.array)
    below = Scores.of(np.array([[0.0, -1e9], [0.0, -np.inf]])).array  # clipped to the minimum of float16
    np.testing.assert_array_equal(below, [[0, -65504], [0, -65504]])


def test_failed_start_leaves_no_store(tmp_path):
    with pytest.raises(OSError, match="no model"), Store.writing(tmp_path / "new"):
        raise OSError("no model")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "old", record(0))
    with pytest.raises(OSError, match="no model"), Store.writing(tmp_path / "old"):
        raise OSError("no model")
    assert kept(tmp_path / "old") == [record(0)]


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_orphan_vectors_are_ignored_and_files_inherit_permissions(tmp_path):
    write(tmp_path, record(0))
    save_vectors(tmp_path / "vectors", "0" * 16, {"context_vector": np.zeros((1, 2, 3), np.float32)})
    assert Store.open(tmp_path).vectors() == {}
    (path,) = (tmp_path / "vectors").iterdir()
    assert path.stat().st_mode & 0o777 == (tmp_path / "vectors").stat().st_mode & 0o666
