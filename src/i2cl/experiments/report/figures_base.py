"""What the report's figures share: colours, names of rows and axes, and empty figures."""

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
"""Okabe and Ito's colours without yellow, which is faint on white. Seven, and eight markers, so that
stepping through both gives 56 pairs, of which neighbours differ in colour and shape."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

SIZES = {"s": 0.95, "D": 0.85, "P": 1.15, "X": 1.15, "*": 1.45}  # makes markers look as large as a circle
OURS, OTHERS, FAINT = "#D55E00", "#0072B2", "#595959"
"""Colours of the row that others are tested against, of other rows, and of notes."""


def counted(name: str, tasks: int, results: Results) -> str:
    """A row's name; where it lacks tasks, with how many its mean is of."""
    return name if tasks == len(results.tasks) else f"{name} ({tasks} of {len(results.tasks)} tasks)"


def colour_of(results: Results, row: GridRow, number: int) -> str:
    """The colour of a row among lines: its own for the one that others are tested against."""
    others = [colour for colour in COLOURS if colour != OURS]
    return OURS if row is results.default else others[number % len(others)]


def accuracy_label(results: Results) -> str:
    """Name of the axis for means over tasks, or for the only task."""
    count = len(results.tasks)
    what = f"mean accuracy over {count} tasks" if count > 1 else f"accuracy on {results.tasks[0]}"
    return f"{what} (%)"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that arranges itself and belongs to no window; inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(count: int, width: float, height: float, *, shared: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of panels of a size in inches, in at most four columns; if shared, all have the same axes."""
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
