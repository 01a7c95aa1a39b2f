"""Figures of mean accuracies: what they cost, how they grow with demonstrations, side by side."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from i2cl.experiments.grid import GridRow
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
from i2cl.experiments.report.results import Results, outcome
from i2cl.experiments.store import Vectors


@dataclass(frozen=True)
class _Entry:
    """A row with one number of demonstrations, and its mean."""

    name: str
    row: GridRow
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


def _curve(axes: Axes, results: Results, row: GridRow, colour: str, marker: str) -> None:
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
        [(1000 * out.predict_seconds / len(out.gold), out.cost.cached_bytes) for out in map(outcome, records)]
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


Point = Float[np.ndarray, "2"]
Points = Float[np.ndarray, "_points 2"]
Boxes = Float[np.ndarray, "_boxes 4"]  # left, bottom, right, top

_WIDEST = 30  # letters on a line
_MARKER = 5.0  # half the side of a marker's box
_CLEAR = 2.0  # around what is not a name's own marker, so that nobody takes it for that one's name
_SAME = 3.0  # markers as near as this look like one
_LEADER = 10.0  # names further away get a line to their point
_ORDERS = 24  # in which names are placed; the one that keeps them closest is taken
_CROSSED, _CROWDED = 100.0, 1000.0  # what a line over others, and a name over others, cost as a distance
_BATCH = 96  # places tried at once

_DEGREES = np.array(sorted(range(-165, 181, 15), key=lambda one: min(abs(one), 180 - abs(one))))
_DIRECTIONS = np.stack([np.cos(np.radians(_DEGREES)), np.sin(np.radians(_DEGREES))], axis=1)
_DISTANCES = np.arange(7.0, 160.0, 4.0)
_OFFSETS = (_DISTANCES[:, None, None] * _DIRECTIONS + [0, 3] * np.sign(_DIRECTIONS)).reshape(-1, 2)
"""Where a name may go from its point: the nearest first, and right beside it before above and below."""

_FAR = np.hypot(*_OFFSETS.T) > _LEADER
_ANCHORS = np.tile(
    np.where(np.abs(_DEGREES) == 90, 0.5, np.where(np.abs(_DEGREES) < 90, 0.0, 1.0)), len(_DISTANCES)
)
"""Which end of a name is there: the share of its width that lies to the left."""

_ALIGNMENT = {0.0: "left", 0.5: "center", 1.0: "right"}


def name_points(axes: Axes, points: Points, names: Sequence[str], colours: Sequence[str]) -> None:
    """Write each name next to its point, where it covers nothing, with a line where that is far.

    Call it last: the figure must have its final scales and margins.

    Args:
        axes: with the points drawn.
        points: in the units of the axes.
        names: one a point.
        colours: of the names.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("the axes belong to no figure")
    figure.draw_without_rendering()  # settles the layout, on which distances depend
    scale = 72 / figure.dpi
    lines = [textwrap.fill(name, _WIDEST) for name in names]
    frame = np.asarray(axes.get_window_extent().extents) * scale
    found = _arranged(axes.transData.transform(points) * scale, _sizes(axes, lines) * scale, frame)
    for point, line, colour, place in zip(points, lines, colours, found, strict=True):
        leader = {"arrowstyle": "-", "color": "#8a8a8a", "lw": 0.8, "shrinkB": 3}
        axes.annotate(
            line,
            (float(point[0]), float(point[1])),
            (float(_OFFSETS[place, 0]), float(_OFFSETS[place, 1])),
            textcoords="offset points",
            ha=_ALIGNMENT[float(_ANCHORS[place])],
            va="center",
            fontsize=9,
            color=colour,
            in_layout=False,
            arrowprops={**leader, "relpos": (_ANCHORS[place], 0.5)} if _FAR[place] else None,
        )


def _sizes(axes: Axes, lines: Sequence[str]) -> Points:
    """Width and height in pixels, with a little room."""
    found = []
    for line in lines:
        text = axes.text(0, 0, line, fontsize=9)
        box = text.get_window_extent()
        found.append((box.width + 4, box.height + 1))
        text.remove()
    return np.array(found)


@dataclass(frozen=True)
class _Name:
    """What a name and its line cover at each place; lines begin where their own marker ends."""

    at: Point
    boxes: Boxes
    lines: Float[np.ndarray, "places samples 2"]


def _name(at: Point, size: Point) -> _Name:
    corners = at + _OFFSETS - size * np.stack([_ANCHORS, np.full(len(_ANCHORS), 0.5)], axis=1)
    start = (_MARKER + _CLEAR + 1) / np.hypot(*_OFFSETS.T)
    shares = start[:, None] + (0.95 - start[:, None]) * np.linspace(0, 1, 20)
    return _Name(
        at, np.concatenate([corners, corners + size], axis=1), at + shares[..., None] * _OFFSETS[:, None]
    )


def _arranged(at: Points, sizes: Points, frame: Float[np.ndarray, "4"]) -> list[int]:
    """Number of the place of each name."""
    names = [_name(*one) for one in zip(at, sizes, strict=True)]
    rng = np.random.default_rng(0)
    orders = [np.argsort(-at[:, 1], kind="stable"), *(rng.permutation(len(at)) for _ in range(_ORDERS - 1))]
    _, found = min((_placed(order, names, frame) for order in orders), key=lambda one: one[0])
    return [found[number] for number in range(len(at))]


def _placed(
    order: Int[np.ndarray, " n"], names: Sequence[_Name], frame: Float[np.ndarray, "4"]
) -> tuple[float, dict[int, int]]:
    """Give each name in turn the nearest free place; also, what all of it costs."""
    at = np.stack([name.at for name in names])
    taken = np.concatenate([at - _MARKER, at + _MARKER], axis=1)
    lines = np.empty((0, 2))
    found: dict[int, int] = {}
    cost = 0.0
    for number in order.tolist():
        name = names[number]
        place = _nearest(name, taken, lines, frame)
        if place is None:
            place = _nearest(name, taken, np.empty((0, 2)), frame, crossing=True)
            cost += _CROWDED if place is None else _CROSSED
        found[number] = place = place or 0
        cost += float(np.hypot(*_OFFSETS[place]))
        taken = np.concatenate([taken, name.boxes[place, None]])
        if _FAR[place]:
            lines = np.concatenate([lines, name.lines[place]])
    return cost, found


def _nearest(
    name: _Name, taken: Boxes, lines: Points, frame: Float[np.ndarray, "4"], *, crossing: bool = False
) -> int | None:
    """The first place that is free, also of a line across others unless ``crossing``."""
    own = np.hypot(*((taken[:, :2] + taken[:, 2:]) / 2 - name.at).T) < _SAME
    wide = taken + np.where(own, 0, _CLEAR)[:, None] * [-1, -1, 1, 1]
    for first in range(0, len(_OFFSETS), _BATCH):
        batch = slice(first, first + _BATCH)
        boxes, samples = name.boxes[batch], name.lines[batch]
        free = (boxes[:, :2] >= frame[:2]).all(1) & (boxes[:, 2:] <= frame[2:]).all(1)
        free &= ~_overlap(boxes, wide).any(1) & ~_overlap(boxes, np.tile(lines, 2)).any(1)
        if free.any() and not crossing:
            crossed = _overlap(np.tile(samples.reshape(-1, 2), 2), wide[~own]).any(1)
            free &= ~(_FAR[batch] & crossed.reshape(len(boxes), -1).any(1))
        if free.any():
            return first + int(free.argmax())
    return None


def _overlap(boxes: Boxes, taken: Boxes) -> Bool[np.ndarray, "_boxes _taken"]:
    apart = (boxes[:, None, :2] >= taken[None, :, 2:]) | (boxes[:, None, 2:] <= taken[None, :, :2])
    return np.asarray(~apart.any(2))
