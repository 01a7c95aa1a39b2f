"""Optimizations change no results, and the benchmark runs; its timings are not tested.

Compares the package with a straightforward implementation of the paper's algorithm.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import measures
from i2cl import CalibrationConfig, Decoder, Example, InjectionPool, Task, Template, calibrate, extract
from naive import Naive
from processes import finished
from tiny import tiny_model, tiny_tokenizer
from workload import Workload

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FAMILIES = ["llama", "gpt2", "gptj", "gpt_neox", "qwen2", "gemma2", "phi", "falcon", "mixtral", "bloom"]
TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
ENDS = ("dull", "good")
SHOTS = [Example("a warm film " + "indeed " * (3 * at % 7) + ENDS[at % 2], at % 2) for at in range(7)]
TEXTS = ["warm", "a cold and lifeless film " * 3, "one of the best", "dull " * 9, "nothing at all"]
CONFIG = CalibrationConfig(epochs=3, noise=0.0, lr=0.05)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_fast_path_equals_the_naive_one(model_type):
    decoder = Decoder(tiny_model(model_type), tiny_tokenizer(), name=model_type)
    naive = Naive(decoder, TASK, CONFIG)
    steps = CONFIG.batches(len(SHOTS), seed=3)
    naive.extract(SHOTS)
    naive.calibrate(SHOTS, steps)
    context = extract(decoder, TASK, SHOTS)
    injection = calibrate(decoder, TASK, SHOTS, context, CONFIG, seed=3)
    wanted = naive.coefficients.detach().view(decoder.layers, 2, 2)
    assert (wanted - torch.tensor([CONFIG.init_lambda, CONFIG.init_beta])).abs().max() > 0.05
    torch.testing.assert_close(context.context.flatten(0, 1), naive.vectors, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(injection.coefficients, wanted, rtol=1e-3, atol=1e-3)
    plain = naive.scores(TEXTS).log_softmax(-1)
    torch.testing.assert_close(injection.log_probs(decoder, TEXTS), plain, rtol=1e-3, atol=5e-3)
    assert injection.predict(decoder, TEXTS) == [TASK.labels[row] for row in plain.argmax(-1).tolist()]
    mixed = InjectionPool(decoder, {"films": injection}).log_probs(TEXTS, ["films"] * len(TEXTS))
    torch.testing.assert_close(torch.stack(mixed), plain, rtol=1e-3, atol=5e-3)


# The benchmark


@pytest.fixture(scope="module")
def work():
    return Workload.make(Decoder(tiny_model("gpt2"), tiny_tokenizer(), name="tiny"), queries=40)


def test_every_measure_of_a_model(work):
    names = [row.name for row in measures.rows_of(work, pairs=1, epochs=1, passes=1)]
    assert len(names) == len(set(names)) == 6
    rows = list(measures.against_prefix(work, (20, 50), (1, 3)))
    assert [(row.demonstration_tokens, row.tasks) for row in rows] == [(20, 1), (20, 3), (50, 1), (50, 3)]
    size = 2 * work.decoder.layers * work.decoder.d_model * 4
    assert [row.i2cl_bytes for row in rows] == [size, 3 * size] * 2
    assert [row.few_shot_bytes for row in rows] == [20 * size, 60 * size, 50 * size, 150 * size]


SCRIPT = """
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TINY = ["--shape", "tiny"]
TABLE = {"rows", "against_cached_prefix", "machine", "model"}


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("run.py", [*TINY, "--quick"], TABLE),
        ("run.py", ["reference", "--quick", "--device", "cpu"], TABLE),
    ],
)
def test_the_scripts_run(script, options, expected, tmp_path):
    output = tmp_path / "out.json"
    code, _, errors = finished(SCRIPT, BENCHMARKS / script, *options, "-o", output)
    assert code == 0, errors[-2000:]
    assert expected <= set(json.loads(output.read_text(encoding="utf-8")))


def test_gpu_session_runs_in_a_tiny_shape(tmp_path):
    output = tmp_path / "out.json"
    options = ("--tiny", "--only", "correctness,speed", "-o", output)  # the server starts five processes
    code, printed, errors = finished(SCRIPT, BENCHMARKS / "gpu.py", *options)
    assert code == 0, printed + errors[-2000:]
    parts = json.loads(output.read_text(encoding="utf-8"))["parts"]
    assert [(name, part["status"]) for name, part in parts.items()] == [
        ("correctness reference", "done"),
        ("speed tiny", "done"),
    ]
    values = {row["name"]: row["value"] for part in parts.values() for row in part["rows"]}
    assert values["reference, float32: rows with the CPU's answer"] == 1
    assert values["random tiny: fit, 20 examples of 4 labels"] > 0


def test_gpu_session_passes_options_and_a_time_limit(tmp_path):
    script = BENCHMARKS / "gpu_session.sh"
    environment = {"PYTHON": "echo", "LIMIT": "100", "PATH": os.environ["PATH"]}
    command = ["bash", str(script), "--tiny", "-o", "out.json"]
    printed = subprocess.check_output(command, env=environment, text=True)
    assert printed.split()[1:] == ["--limit", "40", "--tiny", "-o", "out.json"]
