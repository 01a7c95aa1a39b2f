"""Run the benchmark: paired runs against the plain model, and for a known shape against the naive program.

    python benchmarks/run.py MODEL                     costs of fit and predict on a model
    python benchmarks/run.py -o results/bench.json     the table of docs/performance.md

Every ratio is the median over pairs of adjacent runs, in alternating order.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

import measures
from i2cl import Decoder, Injection
from i2cl.core.context import extract
from i2cl.export import fold
from i2cl.models.batching import make_batch
from i2cl.models.memory import peak_memory
from i2cl.tasks.generated import TASKS
from jobs import accuracy, agreement, whole_jobs
from measures import against_prefix, paired, seconds
from tables import machine, show
from workload import SHAPES, Workload, random_decoder

console = Console(stderr=True)


@dataclass(frozen=True)
class Scale:
    """Size of a benchmark run.

    Attributes:
        queries: number of predicted queries.
        epochs: epochs of a calibration.
        rounds: rounds of the complete jobs.
        pairs: pairs of a short comparison.
        demonstrations: numbers of demonstrations for extraction.
        tokens: numbers of demonstration tokens for few-shot.
        tasks: numbers of tasks in the comparison with few-shot.
        served: number of queries in that comparison.
        loaded: number of tasks in a pool.
        accuracy_tasks: number of tasks for the accuracy of the fast recipe on the reference model.
        accuracy_seeds: number of seeds of each of them.
        changes: changed options of the recipes, for a quick run.
    """

    queries: int = 500
    epochs: int = 100
    rounds: int = 2
    pairs: int = 24
    demonstrations: tuple[int, ...] = (10, 100, 1000, 10_000)
    tokens: tuple[int, ...] = (100, 500, 2000)
    tasks: tuple[int, ...] = (1, 10, 100)
    served: int = 100
    loaded: int = 10_000
    accuracy_tasks: int = 16
    accuracy_seeds: int = 1
    changes: Mapping[str, int] = field(default_factory=dict)


QUICK = Scale(8, 1, 1, 1, (10, 20), (20, 40), (1, 4), 8, 70, 1, 1, {"epochs": 1, "passes": 1})
OF_A_MODEL = Scale(queries=200, pairs=5, tokens=(100, 500), tasks=(1, 10))


def folded_over_plain(work: Workload, injection: Injection, pairs: int) -> dict[str, Any]:
    """Compare the time of the folded checkpoint's forward with the plain model's, on the same batch."""
    ids = make_batch(sorted(work.queries, key=len)[: measures.ROWS], work.decoder.device).input_ids
    folded = fold(work.decoder, injection)
    with torch.no_grad():
        runs = [partial(model, input_ids=ids, use_cache=False) for model in (work.decoder.model, folded)]
        pair = paired(*runs, work.decoder.device, pairs)
    row = measures.Measure.of("folded / plain forward, time", pair, rows=len(ids))
    return {**asdict(row), "target": "1.00"}


def extraction(decoder: Decoder, scale: Scale) -> dict[str, Any]:
    """Compare the extraction time per demonstration for many and for few of them, with peak memory."""
    rows = []
    for count in scale.demonstrations:
        console.print(f"extraction over {count} demonstrations")
        work = Workload.make(decoder, queries=1, shots=count // 2)
        run = partial(extract, decoder, work.task, work.demonstrations)
        with peak_memory(decoder.device) as peak:
            taken = seconds(run, decoder.device)
        rows.append(
            {"demonstrations": count, "ms_each": 1000 * taken / count, "peak_memory_bytes": peak.bytes}
        )
    few, many = rows[1], rows[-1]
    return {
        "name": f"extraction, time each: {many['demonstrations']} / {few['demonstrations']} demonstrations",
        "value": many["ms_each"] / few["ms_each"],
        "unit": "x",
        "target": "1 (linear), memory flat",
        "detail": {"rows": rows},
    }


def start_up(pairs: int) -> list[dict[str, Any]]:
    """Time the import of the package, and the command line's help."""
    program = [sys.executable, "-c"]
    bare, imported, helped = [], [], []
    for _ in range(pairs):
        bare.append(_process([*program, "pass"]))
        imported.append(_process([*program, "import i2cl"]))
        helped.append(_process([*program, "from i2cl.interfaces.cli import main; main(['--help'])"]))
    detail = {"bare_python_seconds": median(bare)}
    return [
        {"name": name, "value": median(times), "unit": "s", "target": "<= 0.3", "detail": detail}
        for name, times in (("import i2cl", imported), ("i2cl --help", helped))
    ]


def _process(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def of_model(decoder: Decoder, scale: Scale) -> dict[str, Any]:
    """Measure the costs of fit and predict on a model, with peak memory."""
    work = Workload.make(decoder, scale.queries)
    rows = []
    for row in measures.rows_of(work, scale.pairs, **scale.changes):
        console.print(f"{row.name}: {row.value:.3g} {row.unit}")
        rows.append(asdict(row))
    room = (decoder.max_length or 10**9) - max(map(len, work.queries))
    fitting = [tokens for tokens in scale.tokens if tokens <= room]
    against = [asdict(row) for row in against_prefix(work, fitting, scale.tasks, console.print)]
    return {"machine": machine(), "model": decoder.name, "rows": rows, "against_cached_prefix": against}


def of_shape(shape: str, scale: Scale) -> dict[str, Any]:
    """Measure every row of the table, on random weights."""
    decoder = random_decoder(shape)
    work = Workload.make(decoder, scale.queries)
    some = Workload.make(decoder, min(200, scale.queries))
    injection = work.injection()
    few = min(3, scale.pairs)
    rows = start_up(min(5, scale.pairs))
    for message, measure, target in (
        ("injected / plain", lambda: measures.injected_over_plain(work, injection, scale.pairs), "<= 1.02"),
        ("64 tasks / one", lambda: measures.mixed_over_one(work, scale.pairs), ">= 0.95"),
        ("many loaded", lambda: measures.mixed_over_one(work, scale.pairs, scale.loaded), ">= 0.95"),
        ("predict / forward", lambda: measures.predict_over_forward(some, injection, few), ">= 0.9"),
    ):
        console.print(message)
        rows.append({**asdict(measure()), "target": target})
    rows.append(folded_over_plain(some, injection, min(11, scale.pairs)))
    rows.append(extraction(decoder, scale))
    served = Workload.make(decoder, scale.served)
    prefixed = against_prefix(served, scale.tokens, scale.tasks, console.print)
    against = [asdict(row) for row in prefixed]
    rows += whole_jobs(work, scale.rounds, scale.epochs)
    rows.append(agreement(some, min(5, scale.epochs)))
    console.print("accuracy of the fast recipe")
    rows.append(
        accuracy([one.name for one in TASKS[: scale.accuracy_tasks]], scale.accuracy_seeds, **scale.changes)
    )
    return {"machine": machine(), "model": decoder.name, "rows": rows, "against_cached_prefix": against}


def main() -> None:
    """Run the benchmark, write JSON, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="'reference', a folder or a hub id: measure only this model")
    parser.add_argument(
        "--shape", choices=SHAPES, default="gpt2-small", help="shape of the random model, without MODEL"
    )
    parser.add_argument("--device", help="of MODEL")
    parser.add_argument("--dtype", help="of MODEL")
    parser.add_argument("-o", "--output", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--quick", action="store_true", help="a few short runs, to test the benchmark")
    given = parser.parse_args()
    started = time.perf_counter()
    if given.model:
        decoder = Decoder.from_pretrained(given.model, device=given.device, dtype=given.dtype)
        results = of_model(decoder, QUICK if given.quick else OF_A_MODEL)
    else:
        results = of_shape(given.shape, QUICK if given.quick else Scale())
    results["minutes"] = (time.perf_counter() - started) / 60
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(results)


if __name__ == "__main__":
    main()
