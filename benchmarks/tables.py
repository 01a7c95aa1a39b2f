"""Shared parts of the benchmarks: the machine, resumable measurements, and the tables of `run.py`.

python benchmarks/tables.py docs/performance/cpu.json     prints a result of `run.py` as Markdown
"""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """Describe the machine and the software."""
    lines = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure_missing(
    output: Path, tasks: Iterable[str], seeds: int, measure: Callable[[str, int], dict[str, Any]]
) -> None:
    """Append a line of JSON to a file for each task and seed that it does not have yet."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.is_file() else []
    done = {(row["task"], row["seed"]) for row in map(json.loads, lines)}
    for seed, task in product(range(seeds), tasks):
        if (task, seed) not in done:
            row = {"task": task, "seed": seed} | measure(task, seed)
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(task, seed, flush=True)


def show(results: dict[str, Any]) -> None:
    """Print both tables on stdout."""
    out = Console()
    rows = Table("what", "measured", "to reach", "peak memory", title=results["model"])
    for row in results["rows"]:
        peak = row["detail"].get("peak_memory_bytes")
        memory = f"{peak / 1e6:,.0f} MB" if peak else ""
        rows.add_row(row["name"], f"{row['value']:.3g} {row['unit']}", row.get("target", ""), memory)
    out.print(rows)
    against = results["against_cached_prefix"]
    names = [name.replace("_", " ") for name in against[0]] if against else []
    prefix = Table(*names, title="I2CL against few-shot with a cached prefix")
    for row in against:
        values = row.values()
        prefix.add_row(*(f"{value:.4g}" if isinstance(value, float) else f"{value:,}" for value in values))
    if against:
        out.print(prefix)


def markdown(results: dict[str, Any]) -> str:
    """Format both tables and the extraction results for docs/performance.md."""
    on = results["machine"]
    lines = [
        (
            f"`make bench`, {results['minutes']:.0f} minutes on {on['cores']} cores ({on['processor']}), "
            f"torch {on['torch']}, {on['date']}:"
        ),
        "",
        "| what | measured | to reach | reached |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['value']:.3g} {row['unit']} | {row['target']} | {reached(row)} |"
        for row in results["rows"]
    ]
    extraction = next(row for row in results["rows"] if row["name"].startswith("extraction"))
    each = [
        f"{row['demonstrations']:,} demonstrations {row['ms_each']:.0f} ms each, "
        f"peak {row['peak_memory_bytes'] / 1e9:.2f} GB"
        for row in extraction["detail"]["rows"]
    ]
    lines += ["", f"Extraction: {'; '.join(each)} (the process, model included).", ""]
    names = {name: name.replace("_", " ") for name in results["against_cached_prefix"][0]}
    lines += [f"| {' | '.join(names.values())} |", "|" + "---:|" * len(names)]
    for row in results["against_cached_prefix"]:
        cells = (f"{value:.3g}" if isinstance(value, float) else f"{value:,}" for value in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reached(row: dict[str, Any]) -> str:
    """Return whether a result reaches its target; empty if the target is not a bound."""
    words = row["target"].split()
    if words[0] not in {">=", "<="}:
        return ""
    above = row["value"] >= float(words[1])
    return "yes" if above == (words[0] == ">=") else "**no**"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
