"""Compare exported classifiers with the library on real tasks, and time export, verify and inference.

    python benchmarks/classifier_export.py smollm2 tickets,sst2 --artefacts DIR --queries 200 -o results.json

Prints JSON with one record per task: the share of queries whose label is the library's, and the largest
difference of a probability, in batches padded on the right and on the left; seconds of export and verify;
and, for the first task, milliseconds per query of the eager model and of the program of torch.export.

A fitted task is read from ``DIR/TASK``. A task that is not there gets context vectors of a few examples per
class at a fixed strength, without a fit: equality does not depend on the fit, which takes minutes per task.
The nine tasks of the paper need I2CL_DATA_DIR or the hub.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import pipeline

from i2cl import Decoder, Injection, Task, extract, load_task
from i2cl.core.injection import LabelHead
from i2cl.export import export_classifier, verify
from i2cl.models.scoring import LabelScorer

STRENGTH = 0.1  # lambda of tasks without a fit; beta is 1
SHOTS = 5


def injection_of(decoder: Decoder, task: Task, folder: Path | None) -> tuple[Injection, str]:
    """Load a fitted task, or make one of context vectors; and say which."""
    if folder is not None and (folder / task.name / "injection.json").is_file():
        return Injection.from_pretrained(folder / task.name), "fitted"
    context = extract(decoder, task, task.sample(SHOTS, 0), seed=0)
    coefficients = torch.tensor([STRENGTH, 1.0]).expand(*context.values.shape[:2], 2)
    head = LabelHead(scoring=LabelScorer.for_fit(decoder, task).scoring)
    return Injection(context, coefficients, task, decoder.base, head), "context vectors"


def milliseconds(run: Any, repetitions: int = 10) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2]


def latency(classify: Any, text: str) -> dict[str, float]:
    """Time one text in the eager model and in the program of torch.export, and compare their logits."""
    inputs = dict(classify.tokenizer([text], return_tensors="pt"))
    model = classify.model.eval()
    model.config.use_cache = False
    with torch.no_grad():
        program = torch.export.export(model, (), inputs).module()
        difference = float((model(**inputs).logits - program(**inputs).logits).abs().max())
        eager = milliseconds(lambda: model(**inputs))
        exported = milliseconds(lambda: program(**inputs))
        whole = milliseconds(lambda: classify([text]))
    return {"eager_ms": eager, "torch_export_ms": exported, "pipeline_ms": whole, "difference": difference}


def measure(
    decoder: Decoder, task: Task, artefacts: Path | None, queries: int, *, timed: bool
) -> dict[str, Any]:
    """Return the record of one task."""
    injection, kind = injection_of(decoder, task, artefacts)
    texts = [query.text for query in task.queries(queries)]
    expected = injection.log_probs(decoder, texts).exp()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "classifier"
        start = time.perf_counter()
        export_classifier(decoder, injection, out)
        exported = time.perf_counter()
        passed = verify(out).passed
        verified = time.perf_counter()
        record: dict[str, Any] = {"task": task.name, "injection": kind, "labels": len(task.labels)}
        record |= {"queries": len(texts), "verify": "passed" if passed else "failed"}
        record |= {"export_seconds": exported - start, "verify_seconds": verified - exported}
        classify = pipeline("text-classification", model=str(out), device="cpu")
        for side in ("right", "left"):
            classify.tokenizer.padding_side = side
            answers = classify(texts, top_k=None, batch_size=8, truncation=True, function_to_apply="softmax")
            by_label = [{one["label"]: one["score"] for one in answer} for answer in answers]
            found = torch.tensor([[one[label] for label in injection.task.labels] for one in by_label])
            equal = (found.argmax(-1) == expected.argmax(-1)).float().mean()
            largest = (found - expected).abs().max()
            record[side] = {"equal_labels": float(equal), "largest_difference": float(largest)}
        if timed:
            record["latency"] = latency(classify, texts[0])
    return record


def main() -> None:
    """Measure all tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("tasks")
    parser.add_argument("--artefacts", type=Path, help="folder of fitted tasks")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    decoder = Decoder.from_pretrained(options.model, dtype="float32", device="cpu")
    records: list[dict[str, Any]] = []
    for name in options.tasks.split(","):
        timed = not records
        records.append(measure(decoder, load_task(name), options.artefacts, options.queries, timed=timed))
        text = json.dumps({"model": options.model, "tasks": records}, indent=1) + "\n"
        if options.output is not None:
            options.output.write_text(text, encoding="utf-8")
        sys.stdout.write(json.dumps(records[-1]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
