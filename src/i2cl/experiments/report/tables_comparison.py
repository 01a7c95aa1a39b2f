"""Every row tested against I2CL, on average and by task."""

from i2cl.experiments.report.tables_lines import Comparisons, Line
from i2cl.experiments.report.tables_model import (
    AVERAGE,
    INCOMPLETE,
    NOTHING,
    WIDE,
    TableCell,
    TableData,
    Values,
    interval,
    points,
    probability,
    raw,
)
from i2cl.experiments.report.tables_notes import incomplete_notes
from i2cl.experiments.statistics import ALPHA, Comparison, holm

HIGHER, LOWER, ALIKE = "▲", "▼", "·"

Pairs = list[tuple[Line, Line]]
"""A line, and the one that it is tested against."""


def comparison_tables(found: Comparisons) -> list[TableData]:
    """Differences of averages; and with several tasks, differences on each."""
    pairs = [(line, other) for line in found.lines if (other := found.reference(line)) is not None]
    if not pairs:
        return []
    return [_overall(found, pairs), *([_by_task(found, pairs)] if len(found.tasks) > 1 else [])]


def _overall(found: Comparisons, pairs: Pairs) -> TableData:
    tested = _corrected(found, [(line, other, None) for line, other in pairs])
    rows, values = [], []
    for line, other in pairs:
        comparison = tested.get((line, other, None))
        lacking = found.lacking(line) or found.lacking(other)
        rows.append((TableCell(line.name, "text", note=INCOMPLETE if lacking else None), *_cells(comparison)))
        if comparison is not None:
            values.append(_values(found, line, other, AVERAGE, comparison))
    title = f"Difference from {_against(found)}" + (", average over tasks" if len(found.tasks) > 1 else "")
    what = (
        f"Row minus {_against(found)} in percentage points, on the same queries and seeds; "
        "the interval is for other demonstrations and other queries."
    )
    how = (
        f"p: sign-flip test over queries; q: p, corrected (Holm) over {_all(tested)} of this table. "
        f"A difference is shown where q < {ALPHA} and the interval excludes 0."
    )
    columns = ("Row", "Difference", "95 % interval", "p", "q", "Verdict")
    return TableData(title, columns, tuple(rows), (what, how, *_incomplete(found)), tuple(values))


def _cells(comparison: Comparison | None) -> tuple[TableCell, ...]:
    if comparison is None:
        return (*(TableCell(NOTHING) for _ in range(4)), TableCell("nothing shared to compare", "text"))
    got = comparison.difference
    verdict = "no difference shown" if got.seeds > 1 else "one seed cannot tell"
    if comparison.distinguishable:
        verdict = "higher" if got.mean > 0 else "lower"
    return (
        TableCell(points(got.mean)),
        TableCell(interval(got, signed=True)),
        TableCell(probability(got.p)),
        TableCell(probability(comparison.q)),
        TableCell(verdict, "text"),
    )


def _by_task(found: Comparisons, pairs: Pairs) -> TableData:
    tested = _corrected(found, [(line, other, task) for line, other in pairs for task in found.tasks])
    rows, values = [], []
    for line, other in pairs:
        cells = [TableCell(line.name, "text")]
        for task in found.tasks:
            comparison = tested.get((line, other, task))
            cells.append(TableCell(_marked(comparison)))
            if comparison is not None:
                values.append(_values(found, line, other, task, comparison))
        rows.append(tuple(cells))
    legend = (
        f"Row minus {_against(found)} in percentage points. {HIGHER} higher, {LOWER} lower "
        f"(q < {ALPHA}, corrected over {_all(tested)} of this table, and a 95 % interval that excludes 0); "
        f"{ALIKE} no difference shown."
    )
    notes = (legend, *_incomplete(found))
    title = f"Difference from {_against(found)} by task"
    table = TableData(title, ("Row", *found.tasks), tuple(rows), notes, tuple(values))
    return table.transposed("Task") if len(found.tasks) > WIDE else table


def _marked(comparison: Comparison | None) -> str:
    if comparison is None:
        return NOTHING
    mark = ALIKE
    if comparison.distinguishable:
        mark = HIGHER if comparison.difference.mean > 0 else LOWER
    return f"{points(comparison.difference.mean)} {mark}"


Tested = dict[tuple[Line, Line, str | None], Comparison]


def _corrected(found: Comparisons, asked: list[tuple[Line, Line, str | None]]) -> Tested:
    """Differences of those that share results, corrected over all of them."""
    pairs = ((key, found.difference(*key)) for key in asked)
    got = {key: difference for key, difference in pairs if difference is not None}
    corrected = holm([difference.p for difference in got.values()]).tolist()
    return {
        key: Comparison(difference, q) for (key, difference), q in zip(got.items(), corrected, strict=True)
    }


def _all(tested: Tested) -> str:
    return f"all {len(tested)} comparisons" if len(tested) > 1 else "the one comparison"


def _against(found: Comparisons) -> str:
    return found.results.default.name if found.results.default is not None else ""


def _incomplete(found: Comparisons) -> list[str]:
    said = incomplete_notes(found, found.lines)
    return [*said, "Incomplete rows are compared on the tasks and seeds that both have."] if said else []


def _values(found: Comparisons, line: Line, other: Line, task: str, comparison: Comparison) -> Values:
    got = comparison.difference
    return {
        "view": "comparison",
        "row": line.name,
        "task": task,
        "origin": "measured",
        "against": other.name,
        "unit": "percentage points",
        "mean": raw(got.mean),
        "low": raw(got.low),
        "high": raw(got.high),
        "p": got.p,
        "q": comparison.q,
        "lacking": "; ".join(dict.fromkeys((*found.lacking(line), *found.lacking(other)))) or None,
    }
