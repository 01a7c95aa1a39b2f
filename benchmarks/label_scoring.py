"""Accuracy, log-loss and time of fits whose labels share first tokens, by the way labels are scored.

    python benchmarks/label_scoring.py run words --tasks intents,banking77=DIR --out results.jsonl
    python benchmarks/label_scoring.py compare results.jsonl words full

A task is the name of a bundled task, or NAME=PATH: a JSON Lines file, or a folder with train.jsonl,
test.jsonl and labels.json. Of many labels each seed draws ``--labels`` at random, again until two of them
share their first token. ``run`` appends one JSON line for each task and seed, skips those that the file
already holds, and can be interrupted at any time. Seconds are process CPU seconds, which other programs on
the machine change little; run it with OMP_NUM_THREADS=1. ``compare`` prints a paired t-test over draws.
"""

import argparse
import json
import resource
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from scipy.stats import ttest_1samp

from i2cl import AnchoredConfig, Decoder, Example, Task, Template, anchor, load_task
from i2cl.models.scoring import LabelScorer

# name of a variant: the ``scoring`` of a fit, and its solver
VARIANTS = {
    "auto": ("auto", "auto"),
    "sequence": ("sequence", "auto"),
    "words": ("words", "auto"),
    "words_adamw": ("words", "adamw"),
}
TEST_SHARE = 0.5  # of the rows of a single file


def rows_of(path: Path) -> list[tuple[str, Any]]:
    """Read the texts and labels of a JSON Lines file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(row["text"], row["label"]) for row in map(json.loads, lines)]


def load(name: str) -> Task:
    """Load a bundled task, or one from a file or a folder."""
    name, _, place = name.partition("=")
    if not place:
        return load_task(name)
    path = Path(place)
    if path.is_dir():
        labels = [str(word).replace("_", " ") for word in json.loads((path / "labels.json").read_text())]
        train, test = (rows_of(path / f"{split}.jsonl") for split in ("train", "test"))
    else:
        rows = rows_of(path)
        labels = sorted({str(label) for _, label in rows})
        rows = [(text, labels.index(str(label))) for text, label in rows]
        Random(0).shuffle(rows)
        cut = int(TEST_SHARE * len(rows))
        train, test = rows[cut:], rows[:cut]
    template = Template("Text: {text}\nLabel: {label}")
    splits = [tuple(Example(text, label) for text, label in rows) for rows in (train, test)]
    return Task(name, tuple(labels), template, train=splits[0], test=splits[1])


def subset(task: Task, count: int, seed: int, decoder: Decoder) -> Task:
    """Draw ``count`` of the task's labels, of which two share their first token."""
    picker = Random(f"labels {seed}")
    while True:
        keep = sorted(picker.sample(range(len(task.labels)), min(count, len(task.labels))))
        words = tuple(task.labels[label] for label in keep)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokens = LabelScorer(
                decoder, replace(task, labels=words, train=(), test=()), "sequence"
            ).labels.ids
        if len({ids[0] for ids in tokens}) < len(words):
            break
    splits = [
        tuple(replace(row, label=keep.index(row.label)) for row in rows if row.label in keep)
        for rows in (task.train, task.test)
    ]
    return replace(task, labels=words, train=splits[0], test=splits[1])


def measure(
    decoder: Decoder, task: Task, variant: str, shots: int, queries: int, seed: int
) -> dict[str, Any]:
    """Fit one draw and answer test rows."""
    scoring, solver = VARIANTS[variant]
    shown, rows = task.sample(shots, seed), task.queries(queries, seed)
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        injection = anchor(decoder, task, shown, AnchoredConfig(solver=solver), seed=seed, scoring=scoring)
    fitted = time.process_time()
    scores = injection.log_probs(decoder, [row.text for row in rows])
    done = time.process_time()
    gold = torch.tensor([row.label for row in rows])
    return {
        "task": task.name,
        "seed": seed,
        "variant": variant,
        "solved_by": injection.settings["solved_by"],
        "labels": len(task.labels),
        "examples": len(shown),
        "queries": len(rows),
        "accuracy": 100 * (scores.argmax(-1) == gold).double().mean().item(),
        "log_loss": torch.nn.functional.cross_entropy(scores, gold).item(),
        "history": [round(loss, 4) for loss in injection.history],
        "fit_s": fitted - started,
        "predict_s": done - fitted,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def done_in(path: Path) -> set[tuple[str, int, str]]:
    """Return the (task, seed, variant) of every line of a result file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(row["task"], row["seed"], row["variant"]) for row in map(json.loads, lines)}


def differences(path: Path, first: str, second: str) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield first minus second of every metric, of each task and of all together."""
    by_draw: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        by_draw[row["task"], row["seed"]][row["variant"]] = row
    pairs = {draw: rows for draw, rows in by_draw.items() if first in rows and second in rows}
    for task in [*dict.fromkeys(task for task, _ in pairs), "all"]:
        chosen = [rows for (name, _), rows in pairs.items() if task in (name, "all")]
        yield (
            task,
            {
                metric: [rows[first][metric] - rows[second][metric] for rows in chosen]
                for metric in ("accuracy", "log_loss", "fit_s", "predict_s")
            },
        )


def compare(path: Path, first: str, second: str) -> None:
    """Print the mean differences of two variants with their p-values."""
    for task, metrics in differences(path, first, second):
        for metric, values in metrics.items():
            p = ttest_1samp(values, 0).pvalue if len(values) > 1 else float("nan")
            mean = sum(values) / len(values)
            print(f"{task:12} {metric:10} {first} - {second}: {mean:+.3f} (p = {p:.3f}, n = {len(values)})")


def main() -> None:
    """Measure or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="fit, answer, append JSON lines")
    run.add_argument("variant", choices=VARIANTS)
    run.add_argument("--tasks", required=True, help="comma-separated names or NAME=PATH")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--model", default="smollm2")
    run.add_argument("--labels", type=int, default=10, help="drawn from each task that has more than 12")
    run.add_argument("--shots", type=int, default=5, help="examples per class")
    run.add_argument("--queries", type=int, default=100)
    run.add_argument("--seeds", type=int, default=4)
    run.add_argument("--limit", type=int, default=10**6, help="draws to measure before it exits")
    between = commands.add_parser("compare", help="paired t-tests")
    between.add_argument("path", type=Path)
    between.add_argument("first")
    between.add_argument("second")
    given = parser.parse_args()
    if given.command == "compare":
        compare(given.path, given.first, given.second)
        return
    decoder = Decoder.from_pretrained(given.model)
    tasks = [load(name) for name in given.tasks.split(",")]
    draws = [(seed, task) for seed in range(given.seeds) for task in tasks]
    done = done_in(given.out)
    missing = [(seed, task) for seed, task in draws if (task.name, seed, given.variant) not in done]
    for seed, task in missing[: given.limit]:
        drawn = subset(task, given.labels if len(task.labels) > 12 else len(task.labels), seed, decoder)
        result = measure(decoder, drawn, given.variant, given.shots, given.queries, seed)
        with given.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
