"""Multi-label accuracy on GoEmotions: `i2cl fit` beside its baselines, one line of JSON per seed.

    python benchmarks/multi_label.py results.jsonl --data DIR/goemotions --seeds 4 --rows 500

``--labels 8`` keeps the eight most frequent labels. Seeds that the file already has are not run again, so a
killed run continues. ``--table`` prints the means of the file.
"""

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from i2cl import Decoder, Example, Task, Template
from i2cl.experiments.draw import up_to
from i2cl.experiments.evidence import plan_evaluation
from i2cl.experiments.evidence.fit_evaluation import FitRequest
from i2cl.experiments.fitting import fit_task
from i2cl.methods.anchored import Anchored
from i2cl.tasks.template import DEFAULT_TEMPLATE

METRICS = (
    "micro_f1",
    "macro_f1",
    "mean_average_precision",
    "exact_match",
    "fit_seconds",
    "milliseconds_per_query",
)


def load(folder: Path, count: int) -> Task:
    """Return GoEmotions with its most frequent labels; rows of other labels only have none."""
    words = json.loads((folder / "labels.json").read_text())
    rows = {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }
    frequency = Counter(label for row in rows["train"] for label in row["labels"])
    kept = [label for label, _ in frequency.most_common(count)]
    place = {label: number for number, label in enumerate(kept)}
    train, test = (
        tuple(
            Example.multi_label(row["text"], [place[one] for one in row["labels"] if one in place])
            for row in rows[split]
        )
        for split in ("train", "test")
    )
    labels = tuple(words[label] for label in kept)
    return Task("goemotions", labels, Template(DEFAULT_TEMPLATE), train, test, multi_label=True)


def main() -> None:
    """Run the missing seeds, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON lines, one per seed")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl, test.jsonl and labels.json")
    parser.add_argument("--model", default="smollm2", help="model of i2cl")
    parser.add_argument("--labels", type=int, default=28, help="most frequent labels to keep")
    parser.add_argument("--shots", type=int, default=5, help="examples per label")
    parser.add_argument("--rows", type=int, default=500, help="test rows")
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds")
    parser.add_argument("--table", action="store_true", help="print the means and run nothing")
    given = parser.parse_args()
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    records = [json.loads(line) for line in lines]
    if given.table:
        show(records)
        return
    if given.data is None:
        parser.error("--data is missing: give the folder of GoEmotions")
    task, decoder = load(given.data, given.labels), None
    task = replace(task, test=tuple(Random(0).sample(task.test, given.rows)))
    for seed in range(given.seeds):
        settings = {"labels": given.labels, "shots": given.shots, "rows": given.rows, "seed": seed}
        if any(settings.items() <= record.items() for record in records):
            continue
        decoder = decoder or Decoder.from_pretrained(given.model)
        shown = up_to(task, given.shots, seed)
        plan = plan_evaluation(task, shown, given.rows, 0, seed)
        injection = fit_task(decoder, task, shown, FitRequest(Anchored(), seed=seed, threshold="f1"), plan)
        record = settings | {"examples": len(shown), "evaluation": injection.evaluation}
        record |= {"history": injection.history, "solver": injection.settings["solved_by"]}
        record |= {"temperature": injection.temperature}
        with given.results.open("a") as file:
            file.write(json.dumps(record) + "\n")


def show(records: list[dict]) -> None:
    """Print the mean of each metric, by number of labels and method."""
    groups = defaultdict(list)
    for record in records:
        for method, scores in record["evaluation"]["methods"].items():
            groups[record["labels"], method].append([scores[name] for name in METRICS])
    print("| labels | method | seeds |", " | ".join(METRICS), "|")
    for (labels, method), rows in groups.items():
        print(
            f"| {labels} | {method} | {len(rows)} |",
            " | ".join(f"{one:.3f}" for one in np.mean(rows, 0)),
            "|",
        )


if __name__ == "__main__":
    main()
