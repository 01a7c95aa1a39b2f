"""The tables of a report: which views have one, and who makes it."""

from collections.abc import Callable, Mapping

from i2cl.experiments.grid import View
from i2cl.experiments.report.tables_accuracy import average_table, matrix_table, shots_table, tasks_table
from i2cl.experiments.report.tables_comparison import comparison_tables
from i2cl.experiments.report.tables_cost import cost_table
from i2cl.experiments.report.tables_lines import Comparisons, Line
from i2cl.experiments.report.tables_model import VALUES, TableCell, TableData

TABLES: Mapping[View, Callable[[Comparisons], list[TableData]]] = {
    "tasks": tasks_table,
    "average": average_table,
    "cost": cost_table,
    "comparison": comparison_tables,
    "shots": shots_table,
    "matrix": matrix_table,
}
"""Views that have tables: each gives a list, empty where there is no data."""

__all__ = ["TABLES", "VALUES", "Comparisons", "Line", "TableCell", "TableData"]
