"""Shared parts of the report's figures: colours, labels, and empty figures."""

import math
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from i2cl.experiments.grid import GridRow
from i2cl.experiments.report.results import Results
from i2cl.experiments.store import Vectors

Drawing = Callable[[Results, Vectors], Figure | None]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours without yellow, which is faint on white. With seven colours and eight markers,
cycling through both gives 56 different pairs."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

MARKER_SCALE = {"s": 0.95, "D": 0.85, "P": 1.15, "X": 1.15, "*": 1.45}  # for equal visual sizes
REFERENCE, OTHERS, FAINT = "#D55E00", "#0072B2", "#595959"
"""Colours of the reference row, of other rows, and of auxiliary lines."""


def label_of(name: str, tasks: int, results: Results) -> str:
    """Return a row's name, with its number of tasks if some are missing."""
    return name if tasks == len(results.tasks) else f"{name} ({tasks} of {len(results.tasks)} tasks)"


def colour_of(results: Results, row: GridRow, number: int) -> str:
    """Return the colour of a row's line; the reference row has one of its own."""
    others = [colour for colour in COLOURS if colour != REFERENCE]
    return REFERENCE if row is results.reference_row else others[number % len(others)]


def accuracy_label(results: Results) -> str:
    """Return the axis label for means over tasks, or for the only task."""
    count = len(results.tasks)
    what = f"mean accuracy over {count} tasks" if count > 1 else f"accuracy on {results.tasks[0]}"
    return f"{what} (%)"


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure with constrained layout, without pyplot. Sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(count: int, width: float, height: float, *, shared: bool = False) -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` panels in up to four columns.

    Args:
        count: number of panels.
        width: of a panel in inches.
        height: of a panel in inches.
        shared: whether all panels share their axes.
    """
    columns = min(4, math.ceil(math.sqrt(count)))
    rows = math.ceil(count / columns)
    figure = new_figure(columns * width, rows * height)
    panel_axes: list[Axes] = []
    for number in range(count):
        first = panel_axes[0] if shared and panel_axes else None
        axes = figure.add_subplot(rows, columns, number + 1, sharex=first, sharey=first)
        if shared:
            axes.tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= count)
        panel_axes.append(axes)
    return figure, panel_axes
