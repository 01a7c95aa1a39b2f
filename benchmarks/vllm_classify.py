"""Compare exported text classifiers in vLLM, without the plugin, with `i2cl predict`.

    i2cl fit smollm2 reviews.csv -o reviews
    python benchmarks/vllm_classify.py reviews=test.csv --vllm-python ~/vllm/bin/python

Exports each task with ``i2cl export --to classifier``, serves it with vLLM's pooling runner, and sends texts
to ``/classify``. vLLM runs in its own environment, which needs no i2cl. Prints JSON: for each task and
precision the number of texts, the number of different labels, and the largest difference of a probability.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx

from i2cl.interfaces.batch_prediction.prediction import read_chunks

START_SECONDS = 900
MODEL = "classifier"  # name of the served model


def i2cl(*args: str) -> str:
    """Run a command of i2cl and return its output."""
    command = [sys.executable, "-c", "from i2cl.interfaces.cli import main; main()", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def predict(artefact: str, texts: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Return the answers of `i2cl predict`: label and the probability of each label."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return [json.loads(line) for line in i2cl("predict", artefact, str(path), "--json").splitlines()]


@contextmanager
def served(python: str, folder: Path, dtype: str, max_model_len: int) -> Iterator[str]:
    """Serve a classifier with plain vLLM, and yield the server's URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VLLM_PLUGINS"}}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | env
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--runner", "pooling", "--enforce-eager", "--dtype", dtype, "--served-model-name", MODEL]
    command += ["--max-model-len", str(max_model_len), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=env, stdout=sys.stderr, stderr=sys.stderr, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", process)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a server answers."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(url).is_success:
                return
        time.sleep(1)
    raise SystemExit("vLLM did not start")


def classify(url: str, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Send texts to vLLM's ``/classify``, and return its answers in their order."""
    reply = httpx.post(f"{url}/classify", json={"model": MODEL, "input": list(texts)}, timeout=600)
    reply.raise_for_status()
    return sorted(reply.json()["data"], key=lambda answer: int(answer["index"]))


def compare(
    labels: Sequence[str], expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the number of different labels, and the largest difference of a probability."""
    pairs = list(zip(expected, found, strict=True))
    differences = [
        abs(mine["probabilities"][label] - theirs["probs"][place])
        for mine, theirs in pairs
        for place, label in enumerate(labels)
    ]
    return {
        "texts": len(pairs),
        "different_labels": sum(mine["label"] != theirs["label"] for mine, theirs in pairs),
        "largest_difference": max(differences),
    }


def main() -> None:
    """Compare every task at every precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="+", metavar="ARTEFACT=FILE", help="fitted task, and file of texts")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--texts", type=int, default=40, help="per task")
    parser.add_argument("--dtype", nargs="+", default=["float32", "auto"], help="precisions of vLLM")
    parser.add_argument("--exports", type=Path, help="keep exports here, and use those that are here")
    parser.add_argument("--max-model-len", type=int, default=1024)
    given = parser.parse_args()
    results = []
    for pair in given.tasks:
        artefact, _, file = pair.rpartition("=")
        texts = [query.text for query in next(read_chunks(file, size=given.texts))]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            expected = predict(artefact, texts, folder)
            model = (given.exports or folder) / f"{Path(artefact).name}-{MODEL}"
            if not model.exists():
                i2cl("export", artefact, str(model), "--to", "classifier")
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            labels = [config["id2label"][str(place)] for place in range(len(config["id2label"]))]
            for dtype in given.dtype:
                with served(given.vllm_python, model.resolve(), dtype, given.max_model_len) as url:
                    found = classify(url, texts)
                results.append({"task": artefact, "dtype": dtype} | compare(labels, expected, found))
                print(results[-1], file=sys.stderr)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
