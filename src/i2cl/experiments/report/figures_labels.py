"""Names beside the points of a scatter, none on top of another. Distances are in typographic points."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes

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
