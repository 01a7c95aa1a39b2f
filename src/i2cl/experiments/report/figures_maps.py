"""Figures of fits: transfer between tasks, coefficients by layer, and t-SNE maps of vectors."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from i2cl.errors import require_packages
from i2cl.experiments.report.figures_base import COLOURS, MARKER_SCALE, MARKERS, panels
from i2cl.experiments.report.results import Results, outcome
from i2cl.experiments.store import Vectors

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
    zero_shot = (one for one in results.lines if (one.row.method, one.row.study) == ("zero_shot", "method"))
    base = next(zero_shot, None)
    moves = [one for one in results.moves if one.index == results.moves[0].index]
    if base is None or not moves:
        return (), np.empty((0, 0))
    lines = {(line.source or "", task): line for line in moves for task in results.tasks_of(line)}
    names = dict.fromkeys([*results.tasks, *(source for source, _ in lines)])
    tasks = tuple(name for name in names if any(name in pair for pair in lines))
    gains = np.full((len(tasks), len(tasks)), np.nan)
    for (source, target), line in lines.items():
        moved, zero = ([one.accuracy for one in results.outcomes(of, target)] for of in (line, base))
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
    cells[0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    figure.supxlabel("layer", fontsize=10)
    figure.supylabel("coefficient", fontsize=10)
    handles, names = cells[0].get_legend_handles_labels()
    legend = figure.legend(handles, names, loc="outside upper center", ncols=4 if wide > 2 else 2)
    for text in legend.get_texts():
        text.set_parse_math(True)
    return figure


def _coefficients(results: Results, task: str) -> Float[np.ndarray, "seeds ..."]:
    """Return coefficients [seeds, layers, sites, 2] of the reference row; empty if it has none."""
    outcomes = map(outcome, results.reference_records(task))
    return np.array([one.coefficients for one in outcomes if one.coefficients is not None], dtype=float)


def _layers(axes: Axes, values: Float[np.ndarray, "seeds layers sites 2"]) -> None:
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
    records = (one for one in results.reference_records(task) if one.cell.method == "i2cl")
    stored = [vectors[one.key] for one in records if one.key in vectors]
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
    require_packages("the map", "experiments", "sklearn")
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30, (len(points) - 1) / 3)
    with threadpool_limits(1):  # the result depends on the order of sums
        plane = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return np.asarray(plane)
