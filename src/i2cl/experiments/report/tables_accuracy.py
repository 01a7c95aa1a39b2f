"""Accuracy by task and on average, with what the paper prints beside it."""

from i2cl.experiments.report.tables_lines import Comparisons, Line
from i2cl.experiments.report.tables_model import (
    AVERAGE,
    INCOMPLETE,
    WIDE,
    TableCell,
    TableData,
    Values,
    interval,
    percent,
    raw,
)
from i2cl.experiments.report.tables_notes import Paper, bold_note, incomplete_notes, scale_note
from i2cl.experiments.statistics import Accuracy


def tasks_table(found: Comparisons) -> list[TableData]:
    """Accuracy of every row on every task; printed numbers stand below the row that they belong to."""
    if not found.lines:
        return []
    paper = Paper(found)
    leaders = {task: found.leader(task) for task in found.tasks}
    averaged = len(found.tasks) > 1
    overall = found.leader() if averaged else None
    rows: list[tuple[TableCell, ...]] = []
    values: list[Values] = []
    for line in found.lines:
        cells = [
            TableCell(percent(found.accuracy(line, task)), bold=leaders[task] == line) for task in found.tasks
        ]
        if averaged:
            cells.append(average_cell(found, line, bold=overall == line))
        rows.append((TableCell(line.name, "text"), *cells))
        if paper.row(line) is not None:
            rows.append(_printed_line(paper, line, averaged=averaged))
        values += [_values("tasks", found, line, task) for task in found.tasks_of(line)]
        values += [_values("tasks", found, line, None)] if averaged and found.accuracy(line) else []
        values += paper.values(line, "tasks")
    notes = [
        scale_note(found, found.lines),
        *bold_note(found, rows),
        *incomplete_notes(found, found.lines),
        *paper.notes(averaged=averaged),
    ]
    columns = ("Row", *found.tasks, *(["Average"] if averaged else []))
    table = TableData("Accuracy by task", columns, tuple(rows), tuple(notes), tuple(values))
    return [table.transposed("Task") if len(found.tasks) > WIDE else table]


def average_table(found: Comparisons) -> list[TableData]:
    """Accuracy of every row, averaged over tasks."""
    if not found.lines:
        return []
    paper = Paper(found)
    overall = found.leader()
    beside = any(row is not None and row.average is not None for row in map(paper.row, found.lines))
    rows = []
    values: list[Values] = []
    for line in found.lines:
        cells = (
            TableCell(line.name, "text"),
            average_cell(found, line, bold=overall == line),
            TableCell(interval(found.accuracy(line))),
            TableCell(str(len(found.tasks_of(line)))),
            TableCell(_seeds(found.accuracy(line))),
        )
        rows.append((*cells, paper.average_cell(line)) if beside else cells)
        values += [_values("average", found, line, None)] if found.accuracy(line) else []
        values += paper.values(line, "average")
    notes = [
        scale_note(found, found.lines),
        "The interval is for other demonstrations and other queries (bootstrap over both).",
        *bold_note(found, rows),
        *incomplete_notes(found, found.lines),
        *(paper.notes(averaged=True) if beside else []),
    ]
    columns = ("Row", "Average", "95 % interval", "Tasks", "Seeds", *(["(paper)"] if beside else []))
    return [TableData("Average accuracy over tasks", columns, tuple(rows), tuple(notes), tuple(values))]


def average_cell(found: Comparisons, line: Line, *, bold: bool = False) -> TableCell:
    """Average of a line over its tasks, marked where the line is incomplete."""
    mark = INCOMPLETE if found.lacking(line) else None
    return TableCell(percent(found.accuracy(line)), bold=bold, note=mark)


def shots_table(found: Comparisons) -> list[TableData]:
    """Average over tasks by demonstrations per class, of the rows that have several numbers of them."""
    lines = [line for line in found.lines if line.shots is not None]
    if not lines:
        return []
    counts = sorted({line.shots for line in lines if line.shots is not None})
    rows = []
    for place in dict.fromkeys(line.place for line in found.lines):
        mine = [line for line in found.lines if line.place == place]
        by_shots = {line.shots: average_cell(found, line) for line in mine}
        # A row without demonstrations is the same for every number of them.
        cells = (by_shots.get(count) or by_shots.get(None) or TableCell("–") for count in counts)
        rows.append((TableCell(mine[0].row.name, "text"), *cells))
    values = [_values("shots", found, line, None) for line in found.lines if found.accuracy(line)]
    notes = (scale_note(found, found.lines), *incomplete_notes(found, found.lines))
    columns = ("Demonstrations per class", *map(str, counts))
    return [TableData("Average accuracy by demonstrations", columns, tuple(rows), notes, tuple(values))]


def matrix_table(found: Comparisons) -> list[TableData]:
    """Accuracy on every task (columns) with what was fitted on every other (lines)."""
    tables = []
    for place in dict.fromkeys(line.place for line in found.moves):
        lines = [line for line in found.moves if line.place == place]
        rows = tuple(
            (
                TableCell(line.source or "", "text"),
                *(TableCell(percent(found.accuracy(line, task))) for task in found.tasks),
            )
            for line in lines
        )
        notes = (scale_note(found, lines), *incomplete_notes(found, lines))
        values = [_values("matrix", found, line, task) for line in lines for task in found.tasks_of(line)]
        title = f"{lines[0].row.name}: from the task of the line to that of the column"
        tables.append(TableData(title, ("From", *found.tasks), rows, notes, tuple(values)))
    return tables


def _printed_line(paper: Paper, line: Line, *, averaged: bool) -> tuple[TableCell, ...]:
    cells = [paper.task_cell(line, task) for task in paper.found.tasks]
    if averaged:
        cells.append(paper.average_cell(line))
    return (TableCell(f"{line.name} (paper)", "text", printed=True), *cells)


def _seeds(found: Accuracy | None) -> str:
    return str(found.seeds) if found is not None else "0"


def _values(view: str, found: Comparisons, line: Line, task: str | None) -> Values:
    got = found.accuracy(line, task)
    if got is None:
        raise ValueError(f"no results of {line.name} on {task}")
    return {
        "view": view,
        "row": line.name,
        "task": AVERAGE if task is None else task,
        "origin": "measured",
        "unit": "percent",
        "mean": raw(got.mean),
        "sd": raw(got.sd),
        "low": raw(got.low),
        "high": raw(got.high),
        "seeds": got.seeds,
        "queries": got.queries,
        "lacking": "; ".join(found.lacking(line)) or None,
    }
