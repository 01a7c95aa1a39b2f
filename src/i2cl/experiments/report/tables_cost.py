"""What a row costs: numbers trained and kept, time, labelled examples."""

from collections.abc import Callable

import numpy as np

from i2cl.experiments.printed import PrintedRow
from i2cl.experiments.records import Record, Run
from i2cl.experiments.report.results import outcome
from i2cl.experiments.report.tables_lines import Comparisons, Line
from i2cl.experiments.report.tables_model import (
    INCOMPLETE,
    TableCell,
    TableData,
    Values,
    count_range,
    duration,
)
from i2cl.experiments.report.tables_notes import Paper, incomplete_notes

COUNTS: dict[str, tuple[str, Callable[[Run], int]]] = {
    "trainable_parameters": ("Trained parameters", lambda one: one.cost.trained),
    "cached_values": ("Values kept", lambda one: one.cost.cached_values),
    "cached_bytes": ("Bytes kept", lambda one: one.cost.cached_bytes),
    "held_out": ("Held-out examples", lambda one: one.cost.held_out),
}
"""Whole numbers by name in files, with the column's name."""

WHERE = ("machine", "accelerator", "device", "dtype", "threads")
"""Parts of a record's provenance that times depend on."""


def cost_table(found: Comparisons) -> list[TableData]:
    """Numbers trained and kept, held-out examples and times of every row."""
    if not found.lines:
        return []
    paper = Paper(found)
    shown = [row for row in map(paper.row, found.lines) if row is not None]
    extra = {name: write for name, write in PRINTED.items() if any(write(row) is not None for row in shown)}
    rows = []
    values: list[Values] = []
    for line in found.lines:
        outcomes = [outcome(record) for record in _records(found, line)]
        counts = (TableCell(count_range(map(read, outcomes))) for _, read in COUNTS.values())
        times = (TableCell(duration(value)) for value in _times(found, line, found.tasks_of(line)))
        printed = (TableCell(_written(paper.row(line), write), printed=True) for write in extra.values())
        name = TableCell(line.name, "text", note=INCOMPLETE if found.lacking(line) else None)
        rows.append((name, *counts, *times, *printed))
        values += [_values(found, line, task) for task in found.tasks_of(line)]
    columns = ("Row", *(name for name, _ in COUNTS.values()), "Fit, s", "Query, ms", *extra)
    notes = [
        "Times are means over tasks and seeds; whole numbers that differ between tasks or seeds are ranges.",
        *_place_notes([record for line in found.lines for record in _records(found, line)]),
        *incomplete_notes(found, found.lines),
    ]
    if extra and paper.table is not None:
        notes.append(f"(paper): as printed in {paper.table.paper}, {paper.table.model}. {SYMBOLS}")
    return [TableData("Cost", columns, tuple(rows), tuple(notes), tuple(values))]


SYMBOLS = "M demonstration tokens, D width, L layers, 1/K compression rate."

PRINTED: dict[str, Callable[[PrintedRow], str | None]] = {
    "Trained, thousands (paper)": lambda row: (
        None if row.trainable_thousands is None else f"{row.trainable_thousands:,.2f}"
    ),
    "Values kept (paper)": lambda row: row.cached,
}
"""Columns of costs that the paper prints, if it does."""


def _written(row: PrintedRow | None, write: Callable[[PrintedRow], str | None]) -> str:
    return (write(row) if row is not None else None) or ""


def _records(found: Comparisons, line: Line) -> list[Record]:
    return [record for task in found.tasks_of(line) for record in found.records(line, task).values()]


def _times(found: Comparisons, line: Line, tasks: tuple[str, ...]) -> tuple[float, float]:
    """Seconds to fit and milliseconds per query: mean over seeds, then over tasks."""
    each = []
    for task in tasks:
        outcomes = [outcome(record) for record in found.records(line, task).values()]
        fits = [one.fit_seconds for one in outcomes]
        queries = [1000 * one.predict_seconds / len(one.predictions) for one in outcomes]
        each.append((np.mean(fits), np.mean(queries)))
    fit, query = np.mean(each, axis=0)
    return float(fit), float(query)


def _values(found: Comparisons, line: Line, task: str) -> Values:
    outcomes = [outcome(record) for record in found.records(line, task).values()]
    fit, query = _times(found, line, (task,))
    return {
        "view": "cost",
        "row": line.name,
        "task": task,
        "origin": "measured",
        **{name: _mean([read(one) for one in outcomes]) for name, (_, read) in COUNTS.items()},
        "fit_seconds": round(fit, 6),
        "ms_per_query": round(query, 6),
        "seeds": len(outcomes),
        "queries": len(outcomes[0].predictions),
        "lacking": "; ".join(found.lacking(line)) or None,
    }


def _mean(counts: list[int]) -> int | float:
    """Mean of whole numbers, whole where they are equal."""
    return counts[0] if len(set(counts)) == 1 else float(np.mean(counts))


def _place_notes(records: list[Record]) -> list[str]:
    """Where times were measured; a warning if not all in the same place."""
    places = list(
        dict.fromkeys(
            ", ".join(f"{part} {got}" for part in WHERE if (got := record.provenance.get(part)) is not None)
            for record in records
        )
    )
    if len(places) > 1:
        told = "; ".join(places)
        return [f"Times from different places cannot be compared; these are from {len(places)}: {told}."]
    return [f"Measured on: {places[0]}."] if places[0] else []
