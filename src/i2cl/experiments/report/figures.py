"""Draw and save the figures of a report in a common style. Importing this module loads matplotlib."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import textalloc
from jaxtyping import Float
from matplotlib import colormaps, style, ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from i2cl.experiments import confidence
from i2cl.experiments.grid import GridRow, View
from i2cl.experiments.report.results import Line, Results, TaskScores, mean_times, outcome, scores_by_task
from i2cl.experiments.statistics import Accuracy
from i2cl.experiments.store import Vectors

Drawing = Callable[[Results, Vectors], Figure | None]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours without yellow, which is faint on white. With seven colours and eight markers,
cycling through both gives 56 different pairs."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

MARKER_SCALE = {"s": 0.95, "D": 0.85, "P": 1.15, "X": 1.15, "*": 1.45}  # for equal visual sizes
REFERENCE, OTHERS, FAINT = "#D55E00", "#0072B2", "#595959"
"""Colours of the reference row, of other rows, and of auxiliary lines."""


_STYLE: Any = {
    **dict.fromkeys(("font.size", "axes.titlesize"), 10),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 9),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.edgecolor": FAINT,
    "grid.color": "#e4e4e4",
    "svg.fonttype": "none",
    "svg.hashsalt": "i2cl",
    "text.parse_math": False,  # task names and label words may contain dollar signs
}

_styled = style.context(["default", _STYLE])
"""Decorator: run a drawing function in the report's style, and restore matplotlib's settings."""


def _label_of(name: str, tasks: int, results: Results) -> str:
    """Return a row's name, with its number of tasks if some are missing."""
    return name if tasks == len(results.tasks) else f"{name} ({tasks} of {len(results.tasks)} tasks)"


def _colour_of(results: Results, row: GridRow, number: int) -> str:
    """Return the colour of a row's line; the reference row has one of its own."""
    others = [colour for colour in COLOURS if colour != REFERENCE]
    return REFERENCE if row is results.reference_row else others[number % len(others)]


def _accuracy_label(results: Results) -> str:
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


# Figures of mean accuracies


class _Entry(NamedTuple):
    name: str
    line: Line
    accuracy: Accuracy
    colour: str


def _entries(results: Results) -> list[_Entry]:
    """Return the lines with a mean over their tasks, except ``move`` lines."""
    return [
        _Entry(
            _label_of(line.name, len(results.tasks_of(line)), results),
            line,
            accuracy,
            REFERENCE if line.row is results.reference_row else OTHERS,
        )
        for line in results.lines
        if (accuracy := results.accuracy(line)) is not None
    ]


def bars(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot the mean accuracy of each row as a bar, with the standard deviation over seeds."""
    entries = _entries(results)
    if not entries:
        return None
    names = [textwrap.fill(entry.name, 44) for entry in entries]
    pitch = 0.36 + 0.18 * max(name.count("\n") for name in names)
    figure, (axes,) = panels(1, 8.0, 0.9 + pitch * len(entries))
    positions = np.arange(len(entries))
    means, sds = 100 * np.array([(entry.accuracy.mean, entry.accuracy.sd) for entry in entries]).T
    axes.barh(positions, means, color=[entry.colour for entry in entries], height=0.25 / pitch)
    several = np.array([entry.accuracy.seeds > 1 for entry in entries])
    line: Any = {"fmt": "none", "ecolor": "black", "elinewidth": 1.2, "capsize": 3}
    axes.errorbar(means[several], positions[several], xerr=sds[several], **line)
    for position, mean, sd, has_sd in zip(positions, means, sds, several, strict=True):
        text = f"{mean:.1f}" + (f" ± {sd:.1f}" if has_sd else "")
        offset: Any = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(text, (mean + sd, position), **offset)
    axes.set_yticks(positions, names, fontsize=10)
    axes.invert_yaxis()
    axes.set(xlim=(0, 122), xlabel=_accuracy_label(results))  # leaves room for the numbers
    axes.set_xticks(range(0, 101, 20))
    axes.spines["bottom"].set_bounds(0, 100)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return figure


def shots(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot the mean accuracy against demonstrations per class, as a curve per row.

    Rows without numbers of demonstrations are dashed horizontal lines. All points of a curve are means over
    the tasks that its row has at every number of demonstrations with results.
    """
    counts = sorted({count for row in results.rows if len(row.shots) > 1 for count in row.shots})
    if not counts:
        return None
    figure, (axes,) = panels(1, 8.0, 4.6)
    axes.set_xscale("log")
    for number, row in enumerate(results.rows):
        colour = _colour_of(results, row, number)
        lines = [line for line in results.lines if line.row is row]
        if row.shots:
            _curve(axes, results, lines, colour, MARKERS[number % len(MARKERS)])
        elif lines and (mean := results.accuracy(lines[0])) is not None:
            label = _label_of(row.name, len(results.tasks_of(lines[0])), results)
            axes.axhline(100 * mean.mean, ls="--", lw=1.5, color=colour, label=label)
    if not axes.lines:
        return None
    axes.xaxis.set_major_locator(ticker.FixedLocator(_ticks(counts)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    axes.set(xlabel="demonstrations per class", ylabel=_accuracy_label(results))
    figure.legend(loc="outside right upper")
    return figure


def _curve(axes: Axes, results: Results, lines: Sequence[Line], colour: str, marker: str) -> None:
    tasks = tuple(task for task in results.tasks if all(task in results.tasks_of(line) for line in lines))
    means = [(line.shots, results.accuracy(line, over=tasks)) for line in lines if tasks]
    points = [(count, 100 * mean.mean, 100 * mean.sd) for count, mean in means if mean is not None]
    if points:
        x, y, sd = np.array(points, dtype=float).T
        axes.fill_between(x, y - sd, y + sd, color=colour, alpha=0.15, lw=0)
        label = _label_of(lines[0].row.name, len(tasks), results)
        axes.plot(x, y, color=colour, marker=marker, label=label)


def _ticks(counts: Sequence[int]) -> list[int]:
    """Choose the numbers whose tick labels do not overlap on a logarithmic axis."""
    span = math.log(counts[-1] / counts[0])
    ticks = [counts[0]]
    for count in counts[1:]:
        if math.log(count / ticks[-1]) > 0.05 * span:
            ticks.append(count)
    return ticks


def efficiency(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot the mean accuracy against milliseconds per query, and against stored bytes."""
    entries = _entries(results)
    if not entries:
        return None
    figure = new_figure(11.0, 5.4)
    time = figure.add_subplot(1, 2, 1)
    memory = figure.add_subplot(1, 2, 2, sharey=time)
    memory.tick_params(labelleft=False)
    heights = np.array([100 * entry.accuracy.mean for entry in entries])
    milliseconds = np.array(
        [mean_times(results, entry.line, results.tasks_of(entry.line))[1] for entry in entries]
    )
    size = np.array([_stored_bytes(results, entry.line) for entry in entries])
    _time_axis(time, milliseconds)
    _memory_axis(memory, size)
    time.set_ylabel(_accuracy_label(results))
    low, high = heights.min(), heights.max()
    time.set_ylim(low - 0.08 * (high - low) - 1, high + 0.15 * (high - low) + 1)
    time.yaxis.set_major_locator(ticker.FixedLocator([tick for tick in time.get_yticks() if tick <= 100]))
    for axes, cost in ((time, milliseconds), (memory, size)):
        for x, y, entry in zip(cost, heights, entries, strict=True):
            zorder = 4 if entry.colour == REFERENCE else 3  # the reference row is drawn on top
            axes.plot(x, y, "o", ms=7, color=entry.colour, mec="white", mew=0.6, zorder=zorder)
        _label_points(axes, cost, heights, entries)
    return figure


def _label_points(
    axes: Axes, x: Float[np.ndarray, " rows"], y: Float[np.ndarray, " rows"], entries: Sequence[_Entry]
) -> None:
    """Label each point without overlaps. The limits of the axes must be final."""
    names, colours = [textwrap.fill(entry.name, 30) for entry in entries], [entry.colour for entry in entries]
    look: Any = {"textsize": 9, "textcolor": colours, "linecolor": "#8a8a8a", "linewidth": 0.8}
    look |= {"avoid_label_lines_overlap": True, "avoid_crossing_label_lines": True, "in_layout": False}
    search: Any = {"max_distance": 0.6, "nbr_candidates": 1000}
    textalloc.allocate(axes, x, y, names, x_scatter=x, y_scatter=y, **look, **search)


def _stored_bytes(results: Results, line: Line) -> float:
    """Return the bytes that a line stores per task: mean over seeds, then over tasks."""
    tasks = (results.outcomes(line, task) for task in results.tasks_of(line))
    return float(
        np.mean([np.mean([outcome.cost.cached_bytes for outcome in outcomes]) for outcomes in tasks])
    )


def _time_axis(axes: Axes, milliseconds: Float[np.ndarray, " rows"]) -> None:
    axes.set_xscale("log")
    low, high = milliseconds.min(), milliseconds.max()
    margin = 1.3 * (high / low) ** 0.08
    axes.set_xlim(low / margin, high * margin)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("time per query (ms)")


def _memory_axis(axes: Axes, size: Float[np.ndarray, " rows"]) -> None:
    """Set a logarithmic axis with a linear part for 0: methods that store nothing."""
    positive = size[size > 0] if size.any() else np.ones(1)
    low, high = math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()))
    axes.set_xscale("symlog", linthresh=10**low, linscale=0.5)
    axes.set_xlim(-(10**low) * 0.4, positive.max() * 4)
    axes.xaxis.set_major_locator(ticker.FixedLocator([0, *(10**power for power in range(low, high + 1))]))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    in_bytes = ticker.EngFormatter("B")
    axes.xaxis.set_major_formatter(lambda x, _: in_bytes(x) if x else "0")
    axes.set_xlabel("memory stored for prediction")


# Figures of calibration


COVERAGES = np.arange(5, 101) / 100  # below 5 %, single queries dominate the curve


def reliability(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot accuracy against confidence in equal-mass bins over all tasks and seeds of a row."""
    scores_of = _scores_by_line(results)
    if not scores_of:
        return None
    figure, (left, right) = panels(2, 5.0, 4.8, shared=True)
    for axes, title in ((left, "as predicted"), (right, "at the best temperature of each task")):
        axes.plot([0, 100], [0, 100], ls="--", lw=1, color=FAINT)
        for line, tasks in scores_of.items():
            each = [
                calibration.at(1.0 if axes is left else calibration.temperature)
                for calibration in tasks.values()
            ]
            confidences = np.concatenate([np.exp(scores.max(2)).ravel() for scores in each])
            correct = np.concatenate(
                [(calibration.predictions == calibration.gold).ravel() for calibration in tasks.values()]
            )
            x, y = confidence.reliability(confidences, correct)
            _draw(axes, results, line, 100 * x, 100 * y, markers=True)
        axes.set(title=title, xlabel="confidence (%)")
    left.set(xlim=(0, 102), ylim=(0, 102), ylabel="accuracy (%)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    return figure


def risk_coverage(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot the error rate of the most confident queries against coverage: means over tasks and seeds."""
    scores_of = _scores_by_line(results)
    if not scores_of:
        return None
    figure, (axes,) = panels(1, 8.0, 4.6)
    for line, tasks in scores_of.items():
        risk = np.mean([_risk(calibration) for calibration in tasks.values()], axis=0)
        _draw(axes, results, line, 100 * COVERAGES, 100 * risk, markers=False)
    axes.set(xlim=(0, 100), ylim=(0, None))
    axes.set(xlabel="coverage, most confident queries first (%)", ylabel="error rate (%)")
    figure.legend(loc="outside right upper")
    return figure


def _scores_by_line(results: Results) -> dict[Line, dict[str, TaskScores]]:
    by_line = {line: scores_by_task(results, line) for line in results.lines}
    return {line: tasks for line, tasks in by_line.items() if tasks}


def _risk(task: TaskScores) -> Float[np.ndarray, " coverages"]:
    """Return the error rate at each of `COVERAGES`, averaged over seeds."""
    curves = [
        confidence.risk_coverage(confidence.highest(scores), predictions == gold)
        for scores, predictions, gold in zip(task.scores, task.predictions, task.gold, strict=True)
    ]
    return np.asarray(np.mean([np.interp(COVERAGES, *curve) for curve in curves], axis=0))


def _draw(
    axes: Axes,
    results: Results,
    line: Line,
    x: Float[np.ndarray, " points"],
    y: Float[np.ndarray, " points"],
    *,
    markers: bool,
) -> None:
    """Draw a line's curve in its colour and with its marker, which are the same in all figures."""
    number = results.lines.index(line)
    marker = MARKERS[number % len(MARKERS)]
    look: Any = {"marker": marker if markers else None, "ms": 5 * MARKER_SCALE.get(marker, 1)}
    look |= {"lw": 1.8, "zorder": 4} if line.row is results.reference_row else {"lw": 1.2, "zorder": 3}
    label = _label_of(line.name, len(results.tasks_of(line)), results)
    axes.plot(x, y, color=_colour_of(results, line.row, number), label=label, **look)


# Figures of fits


MAX_ANNOTATED_TASKS = 16  # in a larger matrix, values would not be readable
MIN_POINTS = 5  # of a t-SNE map
MAX_LEGEND_CLASSES = 28  # more would make the legend larger than its panel

_SYMBOLS = {
    1: (r"$\lambda$ (context vector)", r"$\beta$ (own output)"),
    2: (
        r"$\lambda^a$ (attention, context vector)",
        r"$\beta^a$ (attention, own output)",
        r"$\lambda^m$ (MLP, context vector)",
        r"$\beta^m$ (MLP, own output)",
    ),
}
"""Labels of the coefficients by the number of modules per block."""


def matrix(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot the accuracy on each task (columns) with the fit on another (rows), minus zero-shot."""
    tasks, gains = _gains(results)
    if not np.isfinite(gains).any():
        return None
    annotated = len(tasks) <= MAX_ANNOTATED_TASKS
    side = max(2.5, len(tasks) * (0.46 if annotated else 0.24))
    label_width = 0.08 * max(map(len, tasks))
    figure, (axes,) = panels(1, side + label_width + 1.7, side + 0.75 * label_width + 0.6)
    limit = max(float(np.nanmax(np.abs(gains))), 1.0)  # differences below a point stay pale
    colours, scale = colormaps["RdBu_r"], Normalize(-limit, limit)
    image = axes.imshow(np.ma.masked_invalid(gains), cmap=colours, norm=scale)
    axes.set_facecolor("#d9d9d9")  # for missing values
    axes.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(tasks)), tasks)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="target task (tested on)", ylabel="source task (fitted on)")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("accuracy minus zero-shot\n(percentage points)")
    bar.outline.set_visible(False)
    if annotated:
        for (source, target), gain in np.ndenumerate(gains):
            if np.isfinite(gain):
                red, green, blue, _ = colours(scale(gain))
                ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
                text = f"{round(gain):+d}".replace("-", "\N{MINUS SIGN}") if round(gain) else "0"
                axes.text(target, source, text, ha="center", va="center", fontsize=9, color=ink)
    return figure


def _gains(results: Results) -> tuple[tuple[str, ...], Float[np.ndarray, "sources targets"]]:
    """Return the tasks of all moves, and the gains over zero-shot in percentage points; NaN if missing."""
    zero_shot = (
        line for line in results.lines if (line.row.method, line.row.study) == ("zero_shot", "method")
    )
    base = next(zero_shot, None)
    moves = [move for move in results.moves if move.index == results.moves[0].index]
    if base is None or not moves:
        return (), np.empty((0, 0))
    lines = {(line.source or "", task): line for line in moves for task in results.tasks_of(line)}
    names = dict.fromkeys([*results.tasks, *(source for source, _ in lines)])
    tasks = tuple(name for name in names if any(name in pair for pair in lines))
    gains = np.full((len(tasks), len(tasks)), np.nan)
    for (source, target), line in lines.items():
        moved, zero = ([outcome.accuracy for outcome in results.outcomes(of, target)] for of in (line, base))
        if zero:
            gains[tasks.index(source), tasks.index(target)] = 100 * (np.mean(moved) - np.mean(zero))
    return tasks, gains


def coefficients(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot the coefficients by layer, in a panel per task: mean and standard deviation over seeds."""
    by_task = {task: values for task in results.tasks if len(values := _coefficients(results, task))}
    if not by_task:
        return None
    wide = min(len(by_task), 4)
    figure, cells = panels(len(by_task), 3.1 if wide > 2 else 4.5, 2.3 if wide > 2 else 3.2, shared=True)
    for axes, (task, values) in zip(cells, by_task.items(), strict=True):
        _layers(axes, values)
        axes.set_title(task)
    cells[0].xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
    figure.supxlabel("layer", fontsize=10)
    figure.supylabel("coefficient", fontsize=10)
    handles, names = cells[0].get_legend_handles_labels()
    legend = figure.legend(handles, names, loc="outside upper center", ncols=4 if wide > 2 else 2)
    for text in legend.get_texts():
        text.set_parse_math(True)
    return figure


def _coefficients(results: Results, task: str) -> Float[np.ndarray, "seeds ..."]:
    """Return coefficients [seeds, layers, sublayers, 2] of the reference row; empty if it has none."""
    outcomes = map(outcome, results.reference_records(task))
    return np.array(
        [outcome.coefficients for outcome in outcomes if outcome.coefficients is not None], dtype=float
    )


def _layers(axes: Axes, values: Float[np.ndarray, "seeds layers sublayers 2"]) -> None:
    layers = np.arange(values.shape[1])
    flat = values.reshape(*values.shape[:2], -1)
    for number, name in enumerate(_SYMBOLS[values.shape[2]]):
        lines = flat[:, :, number]
        mean = lines.mean(0)
        colour, line = COLOURS[number], "--" if number % 2 else "-"
        marker = "o" if len(layers) <= 8 else None
        axes.plot(layers, mean, label=name, color=colour, ls=line, marker=marker, ms=4)
        if len(lines) > 1:
            sd = lines.std(0, ddof=1)
            axes.fill_between(layers, mean - sd, mean + sd, color=colour, alpha=0.2, lw=0)


Points = dict[str, Float[np.ndarray, "_points ..."]]  # points of each task or class, by name


def context_vectors(results: Results, vectors: Vectors) -> Figure | None:
    """Map the context vectors, one point per task and seed."""
    return _map_tasks({task: _stored(results, vectors, task, "context_vector") for task in results.tasks})


def coefficient_map(results: Results, _vectors: Vectors) -> Figure | None:
    """Map the coefficients, one point per task and seed."""
    return _map_tasks({task: _coefficients(results, task) for task in results.tasks})


def class_vectors(results: Results, vectors: Vectors) -> Figure | None:
    """Map the context vectors of single classes, in a panel per task with a point per class and seed."""
    maps: dict[str, Points] = {}
    for task in results.tasks:
        stored = _stored(results, vectors, task, "class_vectors")
        if len(stored):
            labels = outcome(results.reference_records(task)[0]).labels
            embedded = _embed(dict(zip(labels, stored.swapaxes(0, 1), strict=True)))
            maps |= {task: embedded} if embedded is not None else {}
    if not maps:
        return None
    figure, cells = panels(len(maps), 3.6, 3.0 if max(map(len, maps.values())) > 9 else 2.3)
    for axes, (task, points) in zip(cells, maps.items(), strict=True):
        handles = _scatter(axes, points, size=5.0)
        axes.set_title(task)
        if len(points) <= MAX_LEGEND_CLASSES:
            position: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "labelspacing": 0.25}
            axes.legend(handles=handles, ncols=math.ceil(len(points) / 14), handletextpad=0.2, **position)
        else:
            axes.set_xlabel(f"{len(points)} classes")
    return figure


def _stored(results: Results, vectors: Vectors, task: str, name: str) -> Float[np.ndarray, "_seeds ..."]:
    """Return the stored arrays of default I2CL by seed; empty if there are none."""
    records = (record for record in results.reference_records(task) if record.cell.method == "i2cl")
    stored = [vectors[record.key] for record in records if record.key in vectors]
    return np.array([arrays[name] for arrays in stored if name in arrays], dtype=np.float32)


def _map_tasks(by_task: Points) -> Figure | None:
    nonempty = {task: points for task, points in by_task.items() if len(points)}
    embedded = _embed(nonempty) if len(nonempty) > 1 else None
    if embedded is None:
        return None
    figure, (axes,) = panels(1, 8.0, 5.0)
    handles = _scatter(axes, embedded, size=7.0)
    axes.set(xlabel="t-SNE, first axis", ylabel="t-SNE, second axis")
    figure.legend(handles=handles, loc="outside right center", ncols=math.ceil(len(embedded) / 20))
    return figure


def _scatter(axes: Axes, groups: Points, size: float) -> list[Line2D]:
    """Draw all groups in order, and return their legend handles. There are no ticks: t-SNE has no unit."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    handles: list[Line2D] = []
    for number, (name, points) in enumerate(groups.items()):
        marker = MARKERS[number % len(MARKERS)]
        look: Any = {"ls": "", "marker": marker, "mec": "white", "mew": 0.4, "label": name}
        colour, scaled = COLOURS[number % len(COLOURS)], size * MARKER_SCALE.get(marker, 1)
        handles += axes.plot(points[:, 0], points[:, 1], color=colour, ms=scaled, **look)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    return handles


def _embed(groups: Points) -> Points | None:
    """Map all points to the plane, or return None if fewer than `MIN_POINTS` are distinct."""
    points = np.concatenate([part.reshape(len(part), -1) for part in groups.values()]).astype(np.float32)
    if len({row.tobytes() for row in points}) < MIN_POINTS:
        return None
    ends = np.cumsum([len(part) for part in groups.values()])[:-1]
    return dict(zip(groups, np.split(_tsne(points), ends), strict=True))


def _tsne(points: Float[np.ndarray, "n features"]) -> Float[np.ndarray, "n 2"]:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30, (len(points) - 1) / 3)
    with threadpool_limits(1):  # the result depends on the order of sums
        plane = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return np.asarray(plane)


# Figures by view

FIGURES: Mapping[View, Drawing] = {
    "efficiency": _styled(efficiency),
    "shots": _styled(shots),
    "bars": _styled(bars),
    "reliability": _styled(reliability),
    "risk-coverage": _styled(risk_coverage),
    "matrix": _styled(matrix),
    "vectors": _styled(context_vectors),
    "coefficient-map": _styled(coefficient_map),
    "class-vectors": _styled(class_vectors),
    "coefficients": _styled(coefficients),
}
"""Drawing functions by view. They return None if there are no results for the view."""


@_styled
def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG, return the two paths, and clear the figure.

    The output is deterministic: equal figures give equal bytes.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    figure.savefig(png, dpi=150, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None})
    figure.clear()
    return [png, svg]
