"""What the report's figures share: style, panels, means over tasks, and files of equal bytes every time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from i2cl.experiments.grid import GridRow
from i2cl.experiments.report.results import Results, outcome
from i2cl.experiments.store import Vectors

Drawing = Callable[[Results, Vectors], Figure | None]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours without yellow, which is faint on white. Seven, and eight markers, so that
stepping through both gives 56 pairs, of which neighbours differ in colour and shape."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

SIZES = {"s": 0.95, "D": 0.85, "P": 1.15, "X": 1.15, "*": 1.45}
"""What makes markers look as large as a circle."""

OURS, OTHERS, FAINT = "#D55E00", "#0072B2", "#595959"
"""Colours of the row that others are tested against, of other rows, and of notes."""

_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "grid.color": "#e4e4e4",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.parse_math": False,  # names of tasks and label words may hold dollars
    "svg.fonttype": "none",
    "svg.hashsalt": "i2cl",
}


@dataclass(frozen=True)
class Mean:
    """Accuracy of a row over the tasks that it has.

    Attributes:
        mean: a share between 0 and 1; tasks count equally, with the seeds that all of them have.
        sd: standard deviation over seeds (n - 1) of the mean over tasks; None for one seed.
        tasks: how many it has.
    """

    mean: float
    sd: float | None
    tasks: int


def mean_over_tasks(
    results: Results, row: GridRow, shots: int | None = None, tasks: tuple[str, ...] | None = None
) -> Mean | None:
    """Mean accuracy of a row, or None where no seed has a result on all of the row's tasks.

    Args:
        results: of the experiment.
        row: one of its rows, which does not move.
        shots: demonstrations per class, where the row has several.
        tasks: only these.
    """
    held = [results.of(row, task, shots) for task in (results.tasks if tasks is None else tasks)]
    found = [{one.cell.seed: outcome(one).accuracy for one in records} for records in held if records]
    shared = set.intersection(*map(set, found)) if found else ()
    if not shared:
        return None
    per_seed = [np.mean([seeds[seed] for seeds in found]) for seed in sorted(shared)]
    sd = float(np.std(per_seed, ddof=1)) if len(per_seed) > 1 else None
    return Mean(float(np.mean(per_seed)), sd, len(found))


def counted(name: str, tasks: int, results: Results) -> str:
    """A row's name; where it lacks tasks, with how many its mean is of."""
    return name if tasks == len(results.tasks) else f"{name} ({tasks} of {len(results.tasks)} tasks)"


def accuracy_label(results: Results) -> str:
    """Name of the axis for means over tasks, or for the only task."""
    count = len(results.tasks)
    what = f"mean accuracy over {count} tasks" if count > 1 else f"accuracy on {results.tasks[0]}"
    return f"{what} (%)"


def styled(draw: Drawing) -> Drawing:
    """The same figure in the report's style, whatever matplotlib's settings, which are left as found."""

    @wraps(draw)
    def within(results: Results, vectors: Vectors) -> Figure | None:
        with style.context(["default", _STYLE]):
            return draw(results, vectors)

    return within


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that arranges itself and belongs to no window; inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(count: int, width: float, height: float, *, shared: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels in at most four columns, the last row possibly shorter.

    Args:
        count: of panels.
        width: of one, in inches.
        height: of one.
        shared: whether all have the same axes, with ticks named at the left and where no panel is below.
    """
    columns = min(4, math.ceil(math.sqrt(count)))
    rows = math.ceil(count / columns)
    figure = new_figure(columns * width, rows * height)
    found: list[Axes] = []
    for number in range(count):
        first = found[0] if shared and found else None
        axes = figure.add_subplot(rows, columns, number + 1, sharex=first, sharey=first)
        if shared:
            axes.tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= count)
        found.append(axes)
    return figure, found


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG and empty it; equal figures give equal bytes.

    Args:
        figure: drawn by this package; it cannot be used afterwards.
        stem: path without an ending; its folder is made if need be.

    Returns:
        The two paths.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with style.context(["default", _STYLE]):
        figure.savefig(png, dpi=150, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None})
    figure.clear()
    return [png, svg]
