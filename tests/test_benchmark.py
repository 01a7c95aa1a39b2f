"""The benchmark measures what it says; its numbers are no test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import measures
from i2cl.models.decoder import Decoder
from prefixed import against_prefix
from timing import paired
from tiny import tiny_model, tiny_tokenizer
from workload import QUERY_TOKENS, Workload

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def work():
    return Workload.make(Decoder(tiny_model("gpt2"), tiny_tokenizer(), name="tiny"), queries=40)


def test_texts_have_the_lengths_that_were_asked_for(work):
    lengths = sorted(len(ids) for ids in work.queries)
    assert len(set(work.texts)) > 30
    middle = lengths[len(lengths) // 2]
    assert abs(middle - QUERY_TOKENS[5]) <= 12  # the tiny tokenizer spells words in several tokens
    assert lengths[0] < middle < lengths[-1]
    again = Workload.make(work.decoder, queries=40)
    assert again.texts == work.texts
    assert Workload.make(work.decoder, queries=40, seed=1).texts != work.texts


def test_pairs_change_who_goes_first():
    order = []
    pair = paired(lambda: order.append("a"), lambda: order.append("b"), torch.device("cpu"), 3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert pair.low <= pair.ratio <= pair.high


def test_every_measure_of_the_table(work):
    names = [row.name for rows in measures.steps(work, pairs=1) for row in rows]
    assert len(names) == len(set(names)) == 7
    rows = list(against_prefix(work, (20, 50), (1, 3)))
    assert [(row.demonstration_tokens, row.tasks) for row in rows] == [(20, 1), (20, 3), (50, 1), (50, 3)]
    size = 2 * work.decoder.layers * work.decoder.d_model * 4
    assert [row.i2cl_bytes for row in rows] == [size, 3 * size] * 2
    assert [row.few_shot_bytes for row in rows] == [20 * size, 60 * size, 50 * size, 150 * size]


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("run.py", ["--quick"], {"rows", "against_cached_prefix", "machine"}),
        (
            "gpu.py",
            ["--shape", "tiny", "--device", "cpu", "--queries", "64"],
            {"calibration", "prediction", "check"},
        ),
    ],
)
def test_the_scripts_run(script, options, expected, tmp_path):
    output = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / script), *options, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(output.read_text(encoding="utf-8"))
    assert expected <= set(found)
