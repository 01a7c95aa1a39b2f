"""Markdown tables of `i2cl eval ... --json`: accuracy in percent (mean ± sd over seeds), and cost.

python scripts/results_table.py results.json [more.json ...]
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]
COUNTS = ("trainable_parameters", "cached_values", "cached_bytes", "held_out")
WIDEST = 6
"""Methods in one table; more make several tables."""


def main(paths: list[str]) -> None:
    """Print accuracy of every task and method, a few methods to a table, then what each method costs."""
    records: Records = [
        record for path in paths for record in json.loads(Path(path).read_text(encoding="utf-8"))
    ]
    methods = list(dict.fromkeys(record["method"] for record in records))
    for start in range(0, len(methods), WIDEST):
        _accuracies(records, methods[start : start + WIDEST])
        print()
    _costs(records, methods)


def _accuracies(records: Records, methods: list[str]) -> None:
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        cells[record["task"], record["method"]].append(100 * record["accuracy"])
    tasks = list(dict.fromkeys(record["task"] for record in records))
    _row("task", *methods)
    print("|---" * (1 + len(methods)) + "|")
    for task in tasks:
        _row(task, *(_shown(cells[task, method]) for method in methods))
    means = [statistics.fmean(statistics.fmean(cells[task, name]) for task in tasks) for name in methods]
    _row("**mean**", *(f"**{mean:.1f}**" for mean in means))


def _costs(records: Records, methods: list[str]) -> None:
    _row("method", "mean", "trained", "cached values", "cached bytes", "held out", "fit s", "ms/query")
    print("|---" + "|---:" * 7 + "|")
    for method in methods:
        own = [record for record in records if record["method"] == method]
        _row(
            method,
            f"{100 * statistics.fmean(record['accuracy'] for record in own):.1f}",
            *(_range(own, name) for name in COUNTS),
            f"{statistics.fmean(record['fit_seconds'] for record in own):.2f}",
            f"{statistics.fmean(1000 * record['predict_seconds'] / record['n'] for record in own):.2f}",
        )


def _range(records: Records, name: str) -> str:
    values = sorted(record[name] for record in records)
    low, high = f"{values[0]:,}", f"{values[-1]:,}"
    return low if low == high else f"{low} to {high}"


def _shown(values: list[float]) -> str:
    if not values:
        return "-"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.1f} ± {spread:.1f}"


def _row(*values: str) -> None:
    print(f"| {' | '.join(values)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
