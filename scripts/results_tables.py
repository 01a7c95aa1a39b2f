"""Entries of the pages' tables: differences with their verdicts, numbers kept, and whole tables of them."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.report.results import Line, Results, mean_times
from i2cl.experiments.statistics import ALPHA, Difference
from results_stores import OURS, average, lines_of, named_line, points, seeds_of, shown

Name = TypeVar("Name")


def differences(result: Results, pairs: dict[str, tuple[Line, Line]]) -> dict[str, list[str]]:
    """First minus second line of each pair, as `decided` writes it."""
    return decided({name: result.difference(*pair) for name, pair in pairs.items()})


def decided(gaps: Mapping[Name, Difference | None]) -> dict[Name, list[str]]:
    """Each difference, its interval, and its verdict; Holm over all of them."""
    tested = {name: one.p for name, one in gaps.items() if one is not None and one.decidable}
    q = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {
        name: ["–"] * 3 if one is None else [points(one.mean), interval(one), verdict(one, q.get(name))]
        for name, one in gaps.items()
    }


def interval(got: Difference) -> str:
    """Of a difference, in points."""
    return f"{points(got.low)} to {points(got.high)}"


def verdict(got: Difference, q: float | None) -> str:
    """Corrected p, and what it shows."""
    if q is None:
        return "one seed" if got.seeds == 1 else f"{got.seeds} seeds"
    number = f"{q:.3f}" if q >= 0.001 else "< 0.001"
    beyond = q < ALPHA and (got.low > 0 or got.high < 0)
    return number if beyond else f"{number}, not shown"


def kept(result: Results, line: Line) -> str:
    """Numbers that it keeps for a task: a range where tasks differ."""
    counts = [one.cost.cached_values for task in result.tasks_of(line) for one in result.outcomes(line, task)]
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def against_first(result: Results, name: str) -> str:
    """Every row of a grid against one, on average and by task."""
    first = named_line(result, name)
    others = [line for line in result.lines if line != first]
    gaps = differences(result, {line.name: (line, first) for line in others})
    rows = [
        [
            line.name if line != first else f"**{line.name}**",
            average(result, line),
            *(gaps[line.name] if line != first else [""] * 3),
            *(shown(result, line, task).split(" ")[0] for task in result.tasks),
        ]
        for line in (first, *others)
    ]
    return table(["Row", "Mean", "Difference", "95 % interval", "q", *result.tasks], rows)


def beside(result: Results, wanted: Sequence[str], against: str = OURS) -> str:
    """Some rows: mean, numbers kept, difference from one row on the tasks that both have."""
    ours, lines = named_line(result, against), lines_of(result, wanted)
    gaps = differences(result, {name: (line, ours) for name, line in lines.items()})
    rows = [
        [
            name,
            average(result, line),
            str(seeds_of(result, line)),
            kept(result, line),
            fit_beside(result, line, ours),
            *gaps[name],
        ]
        for name, line in lines.items()
    ]
    last = [average(result, ours), str(seeds_of(result, ours)), kept(result, ours), "1", *[""] * 3]
    rows.append([f"**{against}**", *last])
    head = ["Row", "Mean", "Seeds", "Numbers kept", "Fit, ratio", "Difference", "95 % interval", "q"]
    return table(head, rows)


def fit_beside(result: Results, line: Line, ours: Line) -> str:
    """A row's time of fits against another's, on the tasks that both have."""
    both = [task for task in result.tasks_of(line) if task in result.tasks_of(ours)]
    theirs, own = (mean_times(result, one, both)[0] for one in (line, ours))
    return f"{theirs / own:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Markdown; columns behind the first ones stand to the right."""
    rule = "|" + "---|" * words + "---:|" * (len(head) - words)
    return "\n".join([f"| {' | '.join(row)} |" if row is not None else rule for row in (head, None, *rows)])
