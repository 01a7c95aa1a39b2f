"""Check and time predictions, fits and the server on a GPU; `gpu_session.sh` runs it within 8 minutes.

    python benchmarks/gpu.py -o gpu.json
    python benchmarks/gpu.py --tiny             everything in seconds on the CPU, to try the script

Speed is measured on random weights of the shapes of Llama 3 8B and SmolLM2-135M, which are created on the
device: speed does not depend on their values. Correctness is measured on the bundled model, and with
``--model`` on a real one. Results are written after every part, so that a session that is cut off keeps what
it has measured.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import measures
from i2cl import AnchoredConfig, Decoder, Example, Task, Template, anchor, list_tasks, load_task
from i2cl.models.edits import AffineEdit
from i2cl.models.memory import peak_memory
from measures import Measure, seconds
from tables import machine
from workload import WORDS, Workload, random_decoder

Part = Callable[[], list[dict[str, Any]]]

LABELS = ("positive", "negative", "yellow", "green")
ROWS_PER_BATCH = 64


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    shapes: tuple[str, ...]  #: of random models
    tasks: int  #: tasks of the bundled model
    queries: int  #: per task
    texts: int  #: to classify with each random model
    pairs: int  #: neighbouring runs that a ratio is the median of
    matrix: int  #: rows of the square matrices that give the peak rate
    serve_seconds: float  #: of one measurement of the server


FULL = Scale(("llama-3-8b", "smollm2-135m"), 11, 100, 4096, 21, 8192, 5.0)
TINY = Scale(("tiny",), 1, 8, 8, 2, 256, 0.3)


def row(name: str, value: float, unit: str, target: str = "", **detail: object) -> dict[str, Any]:
    """Print and return one line of the results."""
    print(f"{name}: {value:.4g} {unit}{f' (target {target})' if target else ''}", flush=True)
    return {"name": name, "value": value, "unit": unit, "target": target, "detail": detail}


def of_measure(measure: Measure, target: str, name: str = "") -> dict[str, Any]:
    """A measure as a line of the results."""
    return row(name or measure.name, measure.value, measure.unit, target, **measure.detail)


# Correctness


def correctness(name: str, tasks: Sequence[Task], device: str, queries: int) -> list[dict[str, Any]]:
    """Share of rows with the CPU's answer, for injections fitted on the CPU, in float32 and bfloat16."""
    cpu = Decoder.from_pretrained(name, device="cpu", dtype="float32")
    cases = []
    for task in tasks:
        injection = anchor(cpu, task, task.sample(seed=0))
        texts = [example.text for example in task.test[:queries]]
        cases.append((task, injection, texts, injection.log_probs(cpu, texts).softmax(-1)))
    rows = []
    for dtype in ("float32", "bfloat16"):
        decoder = Decoder.from_pretrained(name, device=device, dtype=dtype)
        same, gold, cpu_gold, count, largest = 0, 0, 0, 0, 0.0
        for task, injection, texts, expected in cases:
            probabilities = injection.log_probs(decoder, texts).softmax(-1).cpu()
            labels = torch.tensor([example.label for example in task.test[: len(texts)]])
            same += int((probabilities.argmax(-1) == expected.argmax(-1)).sum())
            gold += int((probabilities.argmax(-1) == labels).sum())
            cpu_gold += int((expected.argmax(-1) == labels).sum())
            count += len(texts)
            largest = max(largest, float((probabilities - expected).abs().max()))
        detail = {"rows": count, "tasks": [task.name for task in tasks], "largest_difference": largest}
        detail |= {"accuracy": gold / count, "accuracy_cpu_float32": cpu_gold / count}
        target = "1" if dtype == "float32" else ">= 0.95"
        rows.append(row(f"{name}, {dtype}: rows with the CPU's answer", same / count, "", target, **detail))
    decoder = Decoder.from_pretrained(name, device=device, dtype="float32")
    task, injection, texts, expected = cases[0]
    refitted = anchor(decoder, task, task.sample(seed=0)).log_probs(decoder, texts).cpu()
    same = int((refitted.argmax(-1) == expected.argmax(-1)).sum())
    rows.append(row(f"{name}, float32: rows with the CPU's answer, fitted here", same / len(texts), "", "1"))
    return rows


def rounding(decoder: Decoder) -> dict[str, Any]:
    """Relative error of an injected output in this precision against float64."""
    output = torch.randn(1, 64, decoder.d_model, device=decoder.device, dtype=decoder.model.dtype)
    values = torch.randn(decoder.layers, 2, decoder.d_model)
    coefficients = torch.tensor([0.1, 1.003]).repeat(decoder.layers, 2, 1)
    batch: Any = None
    result = AffineEdit.linear(values, coefficients).output(0, 0, output, batch).double().cpu()
    wanted = 0.1 * values[0, 0].double() + 1.003 * output.double().cpu()
    error = ((result - wanted).norm() / wanted.norm()).item()
    return row(f"{decoder.name}: relative error of an injection", error, "", "<= 0.004")


# Speed


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a large square product, a multiply-add counted as two."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.matmul(left, right)
    repeats = 20
    taken = seconds(lambda: [torch.matmul(left, right) for _ in range(repeats)], device)
    return 2 * size**3 * repeats / taken


def plain_forward(work: Workload) -> None:
    """Run transformers' own forward of all prompts, sorted by length, in padded batches."""
    queries = sorted(work.queries, key=len)
    device: Any = work.decoder.device
    with torch.no_grad():
        for start in range(0, len(queries), ROWS_PER_BATCH):
            rows = queries[start : start + ROWS_PER_BATCH]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in rows], device=device)
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=device)
            work.decoder.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)


def speed(work: Workload, scale: Scale) -> list[dict[str, Any]]:
    """Injected against plain passes, mixed batches, and texts per second against the card's peak."""
    decoder, name = work.decoder, work.decoder.name
    injection, device, dtype = work.injection(), decoder.device, decoder.model.dtype
    rate = matrix_rate(device, dtype, scale.matrix)
    rows = [row(f"{name}: peak of matrix products", rate / 1e12, "TFLOP/s"), rounding(decoder)]
    injected = measures.injected_over_plain(work, injection, scale.pairs)
    rows.append(of_measure(injected, "<= 1.02", f"{name}: injected / plain forward, time"))
    mixed = measures.mixed_over_one(work, scale.pairs)
    rows.append(of_measure(mixed, ">= 0.97", f"{name}: {mixed.name}"))
    predict = partial(injection.log_probs, decoder, work.texts)
    pair = measures.paired(predict, partial(plain_forward, work), device, max(2, scale.pairs // 7))
    parameters = (parameter for block in decoder.blocks for parameter in block.parameters())
    matrices = sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)
    operations = 2 * matrices * sum(map(len, work.queries))
    count = len(work.texts)
    rows.append(row(f"{name}: predict", count / pair.first, "texts/s", **asdict(pair)))
    rows.append(row(f"{name}: transformers' forward in batches", count / pair.second, "texts/s"))
    rows.append(row(f"{name}: predict / transformers' forward, throughput", pair.ratio, "x", ">= 0.9"))
    rows.append(row(f"{name}: predict, share of the peak", operations / pair.first / rate, ""))
    return rows


def fit(work: Workload) -> list[dict[str, Any]]:
    """Seconds and peak memory of a fit: 5 examples of each of 4 labels."""
    task = Task("colours", LABELS, Template("Text: {text}\nLabel: {label}"))
    words = WORDS.split()
    texts = [" ".join(words[number % 7 : number % 7 + 10]) for number in range(5 * len(LABELS))]
    shown = [Example(f"{text} {number}", number % len(LABELS)) for number, text in enumerate(texts)]
    run = partial(anchor, work.decoder, task, shown)
    run(AnchoredConfig(steps=1))  # warm up
    with peak_memory(work.decoder.device) as peak:
        taken = seconds(run, work.decoder.device)
    detail = {"peak_memory_bytes": peak.bytes, "added_memory_bytes": peak.added}
    name = f"{work.decoder.name}: fit, {len(shown)} examples of {len(LABELS)} labels"
    return [row(name, taken, "s", "<= 10", **detail), row(f"{name}, peak memory", peak.bytes / 1e9, "GB")]


def serve(shape: str, device: str, scale: Scale) -> list[dict[str, Any]]:
    """16 connections to a server, against direct calls with the same number of rows."""
    from serve import Bench

    work = Workload.make(random_decoder(shape, device, dtype_on(device)), queries=64)
    with TemporaryDirectory() as scratch:
        bench = Bench(work, Path(scratch), scale.serve_seconds, rounds=2)
        return [{**line, "name": f"{work.decoder.name}: {line['name']}"} for line in bench.rows("throughput")]


def dtype_on(device: str) -> torch.dtype:
    """The dtype of random weights."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def parts(given: argparse.Namespace, scale: Scale) -> dict[str, Part]:
    """Everything that is measured, by name."""
    named: dict[str, Part] = {}
    bundled = [task.name for task in list_tasks() if task.group == "reference"][: scale.tasks]
    models = {"reference": bundled}
    if given.model:
        models[given.model] = given.tasks.split(",")
    for name, tasks in models.items():
        named[f"correctness {name}"] = lambda name=name, tasks=tasks: correctness(
            name, [load_task(task) for task in tasks], given.device, scale.queries
        )

    def measure(shape: str) -> list[dict[str, Any]]:
        decoder = random_decoder(shape, given.device, dtype_on(given.device))
        work = Workload.make(decoder, scale.texts)
        return speed(work, scale) + fit(work)

    for shape in scale.shapes:
        named[f"speed {shape}"] = partial(measure, shape)
    if find_spec("fastapi") and find_spec("uvicorn") and find_spec("prometheus_client"):
        named["server"] = partial(serve, scale.shapes[-1], given.device, scale)
    else:
        print("server: not measured, it needs the packages fastapi, uvicorn and prometheus-client")
    return {name: part for name, part in named.items() if name.split()[0] in given.only.split(",")}


def main() -> int:
    """Run all parts. Return 1 if a part failed or did not start in time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="write the results here, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--device", help="default: cuda, and cpu with --tiny")
    parser.add_argument("--model", help="also check this one, such as smollm2 or a folder")
    parser.add_argument("--tasks", default="tickets,intents", help="of --model")
    parser.add_argument("--only", default="correctness,speed,server", help="some of these parts")
    parser.add_argument("--limit", type=float, default=440.0, help="start no part after this many seconds")
    given = parser.parse_args()
    given.device = given.device or ("cpu" if given.tiny else "cuda")
    started = time.perf_counter()
    cuda = given.device.startswith("cuda")
    results: dict[str, Any] = {"machine": machine(), "device": given.device, "parts": {}}
    results["accelerator"] = torch.cuda.get_device_name(given.device) if cuda else None
    failed = 0
    for name, part in parts(given, TINY if given.tiny else FULL).items():
        begun = time.perf_counter()
        record: dict[str, Any] = {"status": "done"}
        if begun - started > given.limit:
            record = {"status": "no time left"}
        else:
            try:
                record["rows"] = part()
            except Exception as error:  # noqa: BLE001 - the other parts are still worth measuring
                traceback.print_exc()
                record = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        failed += record["status"] != "done"
        record["seconds"] = time.perf_counter() - begun
        results["parts"][name] = record
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if given.output:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            results["seconds"] = time.perf_counter() - started
            given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - started:.0f} s, {failed} parts failed or not run")
    return min(1, failed)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    sys.exit(main())
