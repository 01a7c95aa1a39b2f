"""Figures of mean accuracies: efficiency, accuracy by number of demonstrations, and bar charts."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import textalloc
from jaxtyping import Float
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from i2cl.experiments.report import figures_base as base
from i2cl.experiments.report.results import Line, Results, mean_times
from i2cl.experiments.statistics import Accuracy
from i2cl.experiments.store import Vectors


class _Entry(NamedTuple):
    name: str
    line: Line
    accuracy: Accuracy
    colour: str


def _entries(results: Results) -> list[_Entry]:
    """Return the lines with a mean over their tasks, except ``move`` lines."""
    return [
        _Entry(
            base.label_of(line.name, len(results.tasks_of(line)), results),
            line,
            accuracy,
            base.REFERENCE if line.row is results.reference_row else base.OTHERS,
        )
        for line in results.lines
        if (accuracy := results.accuracy(line)) is not None
    ]


def bars(results: Results, _vectors: Vectors) -> Figure | None:
    """Plot the mean accuracy of each row as a bar, with the standard deviation over seeds."""
    entries = _entries(results)
    if not entries:
        return None
    names = [textwrap.fill(one.name, 44) for one in entries]
    pitch = 0.36 + 0.18 * max(name.count("\n") for name in names)
    figure, (axes,) = base.panels(1, 8.0, 0.9 + pitch * len(entries))
    positions = np.arange(len(entries))
    means, sds = 100 * np.array([(one.accuracy.mean, one.accuracy.sd) for one in entries]).T
    axes.barh(positions, means, color=[one.colour for one in entries], height=0.25 / pitch)
    several = np.array([one.accuracy.seeds > 1 for one in entries])
    line: Any = {"fmt": "none", "ecolor": "black", "elinewidth": 1.2, "capsize": 3}
    axes.errorbar(means[several], positions[several], xerr=sds[several], **line)
    for position, mean, sd, has_sd in zip(positions, means, sds, several, strict=True):
        text = f"{mean:.1f}" + (f" ± {sd:.1f}" if has_sd else "")
        offset: Any = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(text, (mean + sd, position), **offset)
    axes.set_yticks(positions, names, fontsize=10)
    axes.invert_yaxis()
    axes.set(xlim=(0, 122), xlabel=base.accuracy_label(results))  # leaves room for the numbers
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
    figure, (axes,) = base.panels(1, 8.0, 4.6)
    axes.set_xscale("log")
    for number, row in enumerate(results.rows):
        colour = base.colour_of(results, row, number)
        lines = [line for line in results.lines if line.row is row]
        if row.shots:
            _curve(axes, results, lines, colour, base.MARKERS[number % len(base.MARKERS)])
        elif lines and (mean := results.accuracy(lines[0])) is not None:
            label = base.label_of(row.name, len(results.tasks_of(lines[0])), results)
            axes.axhline(100 * mean.mean, ls="--", lw=1.5, color=colour, label=label)
    if not axes.lines:
        return None
    axes.xaxis.set_major_locator(ticker.FixedLocator(_ticks(counts)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    axes.set(xlabel="demonstrations per class", ylabel=base.accuracy_label(results))
    figure.legend(loc="outside right upper")
    return figure


def _curve(axes: Axes, results: Results, lines: Sequence[Line], colour: str, marker: str) -> None:
    tasks = tuple(task for task in results.tasks if all(task in results.tasks_of(line) for line in lines))
    means = [(line.shots, results.accuracy(line, over=tasks)) for line in lines if tasks]
    points = [(count, 100 * mean.mean, 100 * mean.sd) for count, mean in means if mean is not None]
    if points:
        x, y, sd = np.array(points, dtype=float).T
        axes.fill_between(x, y - sd, y + sd, color=colour, alpha=0.15, lw=0)
        label = base.label_of(lines[0].row.name, len(tasks), results)
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
    figure = base.new_figure(11.0, 5.4)
    time = figure.add_subplot(1, 2, 1)
    memory = figure.add_subplot(1, 2, 2, sharey=time)
    memory.tick_params(labelleft=False)
    heights = np.array([100 * one.accuracy.mean for one in entries])
    milliseconds = np.array([mean_times(results, one.line, results.tasks_of(one.line))[1] for one in entries])
    size = np.array([_stored_bytes(results, one.line) for one in entries])
    _time_axis(time, milliseconds)
    _memory_axis(memory, size)
    time.set_ylabel(base.accuracy_label(results))
    low, high = heights.min(), heights.max()
    time.set_ylim(low - 0.08 * (high - low) - 1, high + 0.15 * (high - low) + 1)
    time.yaxis.set_major_locator(ticker.FixedLocator([tick for tick in time.get_yticks() if tick <= 100]))
    for axes, cost in ((time, milliseconds), (memory, size)):
        for x, y, one in zip(cost, heights, entries, strict=True):
            zorder = 4 if one.colour == base.REFERENCE else 3  # the reference row is drawn on top
            axes.plot(x, y, "o", ms=7, color=one.colour, mec="white", mew=0.6, zorder=zorder)
        _label_points(axes, cost, heights, entries)
    return figure


def _label_points(
    axes: Axes, x: Float[np.ndarray, " rows"], y: Float[np.ndarray, " rows"], entries: Sequence[_Entry]
) -> None:
    """Label each point without overlaps. The limits of the axes must be final."""
    names, colours = [textwrap.fill(one.name, 30) for one in entries], [one.colour for one in entries]
    look: Any = {"textsize": 9, "textcolor": colours, "linecolor": "#8a8a8a", "linewidth": 0.8}
    look |= {"avoid_label_lines_overlap": True, "avoid_crossing_label_lines": True, "in_layout": False}
    search: Any = {"max_distance": 0.6, "nbr_candidates": 1000}
    textalloc.allocate(axes, x, y, names, x_scatter=x, y_scatter=y, **look, **search)


def _stored_bytes(results: Results, line: Line) -> float:
    """Return the bytes that a line stores per task: mean over seeds, then over tasks."""
    tasks = (results.outcomes(line, task) for task in results.tasks_of(line))
    return float(np.mean([np.mean([one.cost.cached_bytes for one in outcomes]) for outcomes in tasks]))


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
