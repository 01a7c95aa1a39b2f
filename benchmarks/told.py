"""What machine a benchmark ran on, and its tables on a terminal."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """What ran it."""
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


def show(results: dict[str, Any]) -> None:
    """The two tables, on stdout."""
    out = Console()
    rows = Table("what", "measured", "to reach", title="make bench")
    for row in results["rows"]:
        rows.add_row(row["name"], f"{row['value']:.3g} {row['unit']}", row["target"])
    out.print(rows)
    against = results["against_cached_prefix"]
    names = [name.replace("_", " ") for name in against[0]]
    prefix = Table(*names, title="I2CL against few-shot with a cached prefix")
    for row in against:
        values = row.values()
        prefix.add_row(*(f"{value:.4g}" if isinstance(value, float) else f"{value:,}" for value in values))
    out.print(prefix)
