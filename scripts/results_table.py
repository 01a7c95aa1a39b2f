"""Markdown table of `i2cl eval ... --json`: accuracy in percent, mean ± standard deviation over seeds.

python scripts/results_table.py results.json [more.json ...]
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def main(paths: list[str]) -> None:
    """Print one row per task and one column per method, then the mean over tasks."""
    records: list[dict[str, Any]] = [
        record for path in paths for record in json.loads(Path(path).read_text(encoding="utf-8"))
    ]
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        cells[record["task"], record["method"]].append(100 * record["accuracy"])
    tasks = list(dict.fromkeys(record["task"] for record in records))
    methods = list(dict.fromkeys(record["method"] for record in records))
    print(f"| task | {' | '.join(methods)} |")
    print("|---" * (1 + len(methods)) + "|")
    for task in tasks:
        print(f"| {task} | {' | '.join(_shown(cells[task, method]) for method in methods)} |")
    means = [statistics.fmean(statistics.fmean(cells[task, name]) for task in tasks) for name in methods]
    print(f"| **mean** | {' | '.join(f'**{mean:.1f}**' for mean in means)} |")


def _shown(values: list[float]) -> str:
    if not values:
        return "-"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.1f} ± {spread:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
