"""Figures of mean accuracies: what they cost, how they grow with demonstrations, side by side."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from i2cl.experiments.grid import Row
from i2cl.experiments.report.figures_base import (
    COLOURS,
    MARKERS,
    OTHERS,
    OURS,
    Mean,
    accuracy_label,
    counted,
    mean_over_tasks,
    new_figure,
    styled,
)
from i2cl.experiments.report.figures_labels import name_points
from i2cl.experiments.report.results import Results, outcome
from i2cl.experiments.store import Vectors


@dataclass(frozen=True)
class _Entry:
    """A row with one number of demonstrations, and its mean."""

    name: str
    row: Row
    shots: int | None
    mean: Mean
    colour: str


def _entries(results: Results) -> list[_Entry]:
    found = []
    for row in (row for row in results.rows if row.study != "move"):  # a mean over sources says little
        for shots in row.shots or (None,):
            mean = mean_over_tasks(results, row, shots)
            if mean is not None:
                name = f"{row.name}, {shots} per class" if len(row.shots) > 1 else row.name
                colour = OURS if row == results.default else OTHERS
                found.append(_Entry(counted(name, mean.tasks, results), row, shots, mean, colour))
    return found


@styled
def bars(results: Results, vectors: Vectors) -> Figure | None:  # noqa: ARG001 - all figures are called alike
    """Mean accuracy of each row as a bar, with the standard deviation over seeds."""
    entries = _entries(results)
    if not entries:
        return None
    names = [textwrap.fill(one.name, 44) for one in entries]
    pitch = 0.36 + 0.18 * max(name.count("\n") for name in names)
    figure = new_figure(8.0, 0.9 + pitch * len(entries))
    axes = figure.add_subplot()
    places = np.arange(len(entries))
    means = np.array([100 * one.mean.mean for one in entries])
    spreads = np.array([100 * (one.mean.sd or 0) for one in entries])
    axes.barh(places, means, color=[one.colour for one in entries], height=0.25 / pitch)
    known = [number for number, one in enumerate(entries) if one.mean.sd is not None]
    axes.errorbar(
        means[known],
        places[known],
        xerr=spreads[known],
        fmt="none",
        ecolor="black",
        elinewidth=1.2,
        capsize=3,
    )
    for place, one in enumerate(entries):
        text = f"{means[place]:.1f}" + ("" if one.mean.sd is None else f" ± {spreads[place]:.1f}")
        end = means[place] + spreads[place]
        axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(places, names, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 122)  # room for the numbers behind full bars
    axes.set_xticks(range(0, 101, 20))
    axes.spines["bottom"].set_bounds(0, 100)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(accuracy_label(results))
    return figure


@styled
def shots(results: Results, vectors: Vectors) -> Figure | None:  # noqa: ARG001 - all figures are called alike
    """Mean accuracy against demonstrations per class, a line for each row that has several numbers of them.

    Other rows are dashed horizontal lines. A line's points are means over the same tasks: those that its
    row has at every number of demonstrations where it has any.
    """
    rows = [row for row in results.rows if len(row.shots) > 1]
    if not rows:
        return None
    figure = new_figure(8.0, 4.6)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    others = [colour for colour in COLOURS if colour != OURS]
    for number, row in enumerate(results.rows):
        colour = OURS if row == results.default else others[number % len(others)]
        if row in rows:
            _curve(axes, results, row, colour, MARKERS[number % len(MARKERS)])
        elif row.study != "move" and (mean := mean_over_tasks(results, row)):
            name = counted(row.name, mean.tasks, results)
            axes.axhline(100 * mean.mean, ls="--", lw=1.5, color=colour, label=name)
    if not axes.lines:
        return None
    wanted = sorted({count for row in rows for count in row.shots})
    axes.xaxis.set_major_locator(FixedLocator(_apart(wanted)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    axes.set_xlabel("demonstrations per class")
    axes.set_ylabel(accuracy_label(results))
    figure.legend(loc="outside right upper")
    return figure


def _curve(axes: Axes, results: Results, row: Row, colour: str, marker: str) -> None:
    held = {
        count: {task for task in results.tasks if results.of(row, task, count)} for count in sorted(row.shots)
    }
    held = {count: tasks for count, tasks in held.items() if tasks}
    shared = set.intersection(*held.values())
    tasks = tuple(task for task in results.tasks if task in shared)
    found = [(count, mean_over_tasks(results, row, count, tasks)) for count in held]
    points = [(count, mean) for count, mean in found if mean is not None]
    if not points:
        return
    x = np.array([count for count, _ in points])
    y = np.array([100 * mean.mean for _, mean in points])
    sd = np.array([100 * (mean.sd or 0) for _, mean in points])
    axes.fill_between(x, y - sd, y + sd, color=colour, alpha=0.15, lw=0)
    axes.plot(x, y, color=colour, marker=marker, label=counted(row.name, len(tasks), results))


def _apart(counts: Sequence[int]) -> list[int]:
    """Those numbers whose ticks do not run into each other on a logarithmic axis."""
    span = math.log(counts[-1] / counts[0])
    kept = [counts[0]]
    for count in counts[1:]:
        if math.log(count / kept[-1]) > 0.05 * span:
            kept.append(count)
    return kept


@styled
def efficiency(results: Results, vectors: Vectors) -> Figure | None:  # noqa: ARG001 - as above
    """Mean accuracy against milliseconds per query, and against bytes kept for prediction."""
    entries = _entries(results)
    if not entries:
        return None
    figure = new_figure(11.0, 5.4)
    time = figure.add_subplot(1, 2, 1)
    memory = figure.add_subplot(1, 2, 2, sharey=time)
    memory.tick_params(labelleft=False)
    heights = [100 * one.mean.mean for one in entries]
    costs = np.array([_costs(results, one) for one in entries])
    _time_axis(time, costs[:, 0])
    _memory_axis(memory, costs[:, 1])
    time.set_ylabel(accuracy_label(results))
    low, high = min(heights), max(heights)
    time.set_ylim(low - 0.08 * (high - low) - 1, high + 0.15 * (high - low) + 1)
    time.yaxis.set_major_locator(FixedLocator([tick for tick in time.get_yticks() if tick <= 100]))
    colours = [one.colour for one in entries]
    for axes, cost in ((time, costs[:, 0]), (memory, costs[:, 1])):
        for x, y, colour in zip(cost, heights, colours, strict=True):  # ours on top where several coincide
            axes.plot(x, y, "o", ms=7, color=colour, mec="white", mew=0.6, zorder=4 if colour == OURS else 3)
    names = [one.name for one in entries]
    for axes, cost in ((time, costs[:, 0]), (memory, costs[:, 1])):
        name_points(axes, np.column_stack([cost, heights]), names, colours)
    return figure


def _costs(results: Results, entry: _Entry) -> tuple[float, float]:
    """Milliseconds per query and bytes, means over tasks of means over seeds."""
    found = [
        [(1000 * out.predict_seconds / len(out.gold), out.cached_bytes) for out in map(outcome, records)]
        for task in results.tasks
        if (records := results.of(entry.row, task, entry.shots))
    ]
    milliseconds, size = np.mean([np.mean(seeds, axis=0) for seeds in found], axis=0)
    return float(milliseconds), float(size)


def _time_axis(axes: Axes, milliseconds: Float[np.ndarray, " rows"]) -> None:
    axes.set_xscale("log")
    low, high = milliseconds.min(), milliseconds.max()
    margin = 1.3 * (high / low) ** 0.08
    axes.set_xlim(low / margin, high * margin)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time per query (ms)")


def _memory_axis(axes: Axes, size: Float[np.ndarray, " rows"]) -> None:
    """Powers of ten, and 0 for methods that keep nothing."""
    kept = size[size > 0]
    low = math.floor(math.log10(kept.min())) if len(kept) else 0
    high = math.ceil(math.log10(kept.max())) if len(kept) else 1
    axes.set_xscale("symlog", linthresh=10**low, linscale=0.5)
    axes.set_xlim(-(10**low) * 0.4, (kept.max() if len(kept) else 1) * 4)
    axes.xaxis.set_major_locator(FixedLocator([0, *(10**power for power in range(low, high + 1))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _bytes(float(x))))
    axes.set_xlabel("memory kept for prediction")


def _bytes(count: float) -> str:
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:g} {unit}"
    return f"{count:g}" + (" B" if count else "")
