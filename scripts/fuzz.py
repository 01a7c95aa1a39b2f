"""Fuzz inputs, kills and full disks, and print a table (`make fuzz`). Exit code 1 on any failure.

Inputs use the strategies of tests/test_fuzz.py with a new seed; kills and full disks run existing tests.
"""

import argparse
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import randrange
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import Phase, given, seed, settings

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))

import test_fuzz  # noqa: E402
from fuzzing import refused, targets  # noqa: E402

KILLED = {
    "tests/interfaces/test_predict.py::test_killed_again_and_again_it_ends_with_the_same_bytes": 3,
    "tests/experiments/test_commands.py::test_run_resumes_after_kill": 6,
}
"""Tests with their numbers of kills."""

WORDS = {"PASSED", "FAILED", "ERROR"}
FULL = "tests/interfaces/test_full_disk.py"
MAX_TRACEBACKS = 3  # per kind of input


def tried(inputs: Any, read: Callable[[Path, Any], None], count: int, drawn: int) -> Counter[str]:
    """Read ``count`` generated inputs, and count the outcomes."""
    outcomes: Counter[str] = Counter()

    @seed(drawn)
    @settings(max_examples=count, phases=[Phase.generate], **test_fuzz.QUIET)
    @given(inputs)
    def try_one(result: Any) -> None:
        try:
            outcomes["refused" if refused(lambda: read(folder, result)) else "read"] += 1
        except Exception:  # noqa: BLE001 - unexpected errors are the findings
            outcomes["wrong"] += 1
            if outcomes["wrong"] <= MAX_TRACEBACKS:
                print(f"{result!r:.2000}\n{traceback.format_exc()}", file=sys.stderr)

    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try_one()
    return outcomes


def passed(*tests: str) -> Counter[str]:
    """Run tests, and count the outcomes."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "--no-header", *tests]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    result = Counter(word for line in printed.splitlines() if (word := line.partition(" ")[0]) in WORDS)
    if result["FAILED"] + result["ERROR"] or not result["PASSED"]:
        print(printed, file=sys.stderr)
    return Counter({"refused": result["PASSED"], "wrong": result["FAILED"] + result["ERROR"] + (not result)})


def show(name: str, outcomes: Counter[str]) -> int:
    """Print a line of the table, and return the number of failures."""
    cells = (outcomes.total(), outcomes["read"], outcomes["refused"], outcomes["wrong"])
    print(f"| {name:<42} |" + "".join(f" {cell:>7,} |" for cell in cells), flush=True)
    return outcomes["wrong"]


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--artefacts", type=int, default=1_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=randrange(2**32))
    asked = parser.parse_args()
    print(f"seed {asked.seed}\n\n| {'what':<42} |   tried |    read | refused |   wrong |")
    print(f"| {'-' * 42} | ------: | ------: | ------: | ------: |")
    wrong = 0
    with TemporaryDirectory() as home:
        kinds = targets(test_fuzz.good_folders(Path(home)))
        for name, (inputs, read) in kinds.items():
            count = asked.artefacts if name == "artefacts" else asked.inputs // (len(kinds) - 1)
            wrong += show(name, tried(inputs, read, count, asked.seed))
    kills: Counter[str] = Counter()
    while kills["refused"] < asked.kills and not kills["wrong"]:
        result = passed(*KILLED)
        kills["wrong"] += result["wrong"]
        kills["refused"] += 0 if result["wrong"] else sum(KILLED.values())
    wrong += show("kills without loss", kills)
    wrong += show("full disks with a clean error", passed(FULL))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
