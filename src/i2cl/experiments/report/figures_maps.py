"""Figures of what was fitted: where it works when moved, and the coefficients of each layer."""

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

from i2cl.errors import needs
from i2cl.experiments.report.figures_base import COLOURS, MARKERS, SIZES, panels
from i2cl.experiments.report.results import Results, outcome
from i2cl.experiments.store import Vectors

MOST_PRINTED = 16  # tasks up to which the matrix has its values printed
FEWEST = 5  # different points below which nothing is drawn
MOST_NAMED = 28  # classes of a task beyond which a legend would be larger than its panel

_SYMBOLS = {
    1: (r"$\lambda$ (context vector)", r"$\beta$ (own output)"),
    2: (
        r"$\lambda^a$ (attention, context vector)",
        r"$\beta^a$ (attention, own output)",
        r"$\lambda^m$ (MLP, context vector)",
        r"$\beta^m$ (MLP, own output)",
    ),
}
"""Names of the coefficients by the number of sites."""


def matrix(results: Results, _vectors: Vectors) -> Figure | None:
    """Accuracy on each task (columns) with what was fitted on another (rows), minus zero-shot."""
    tasks, gains = _gains(results)
    if not np.isfinite(gains).any():
        return None
    printed = len(tasks) <= MOST_PRINTED
    side = max(2.5, len(tasks) * (0.46 if printed else 0.24))
    name = 0.08 * max(map(len, tasks))
    figure, (axes,) = panels(1, side + name + 1.7, side + 0.75 * name + 0.6)
    most = max(float(np.nanmax(np.abs(gains))), 1.0)  # never a colour for less than a point
    colours, scale = colormaps["RdBu_r"], Normalize(-most, most)
    image = axes.imshow(np.ma.masked_invalid(gains), cmap=colours, norm=scale)
    axes.set_facecolor("#d9d9d9")  # what was not run
    axes.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(tasks)), tasks)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="target task (tested on)", ylabel="source task (fitted on)")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("accuracy minus zero-shot\n(percentage points)")
    bar.outline.set_visible(False)
    if printed:
        for (source, target), gain in np.ndenumerate(gains):
            if np.isfinite(gain):
                red, green, blue, _ = colours(scale(gain))
                ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
                text = f"{round(gain):+d}".replace("-", "\N{MINUS SIGN}") if round(gain) else "0"
                axes.text(target, source, text, ha="center", va="center", fontsize=9, color=ink)
    return figure


def _gains(results: Results) -> tuple[tuple[str, ...], Float[np.ndarray, "sources targets"]]:
    """Percentage points, NaN where either is lacking; tasks are those that anything was moved from or to."""
    plain = (one for one in results.lines if (one.row.method, one.row.study) == ("zero_shot", "method"))
    base = next(plain, None)
    moves = [one for one in results.moves if one.place == results.moves[0].place]
    if base is None or not moves:
        return (), np.empty((0, 0))
    held = {(line.source or "", task): line for line in moves for task in results.tasks_of(line)}
    names = dict.fromkeys([*results.tasks, *(source for source, _ in held)])
    tasks = tuple(name for name in names if any(name in pair for pair in held))
    gains = np.full((len(tasks), len(tasks)), np.nan)
    for (source, target), line in held.items():
        moved, zero = ([one.accuracy for one in results.outcomes(of, target)] for of in (line, base))
        if zero:
            gains[tasks.index(source), tasks.index(target)] = 100 * (np.mean(moved) - np.mean(zero))
    return tasks, gains


def coefficients(results: Results, _vectors: Vectors) -> Figure | None:
    """Calibrated coefficients by layer, a panel for each task: mean and standard deviation over seeds."""
    by_task = {task: values for task in results.tasks if len(values := _of_task(results, task))}
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


def _of_task(results: Results, task: str) -> Float[np.ndarray, "seeds ..."]:
    """Coefficients [seeds, layers, sites, 2]; nothing where none were calibrated."""
    outcomes = map(outcome, results.of_default(task))
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


Cloud = dict[str, Float[np.ndarray, "_points ..."]]  # points of each task or class, by name


def context_vectors(results: Results, vectors: Vectors) -> Figure | None:
    """Context vectors, one point per task and seed."""
    return _by_task({task: _stored(results, vectors, task, "context_vector") for task in results.tasks})


def coefficient_map(results: Results, _vectors: Vectors) -> Figure | None:
    """Calibrated coefficients, one point per task and seed."""
    return _by_task({task: _of_task(results, task) for task in results.tasks})


def class_vectors(results: Results, vectors: Vectors) -> Figure | None:
    """Context vectors of single classes, a panel for each task with one point per class and seed."""
    clouds: dict[str, Cloud] = {}
    for task in results.tasks:
        stored = _stored(results, vectors, task, "class_vectors")
        if len(stored):
            labels = outcome(results.of_default(task)[0]).labels
            places = _embedded(dict(zip(labels, stored.swapaxes(0, 1), strict=True)))
            clouds |= {task: places} if places is not None else {}
    if not clouds:
        return None
    figure, cells = panels(len(clouds), 3.6, 3.0 if max(map(len, clouds.values())) > 9 else 2.3)
    for axes, (task, cloud) in zip(cells, clouds.items(), strict=True):
        handles = _scatter(axes, cloud, size=5.0)
        axes.set_title(task)
        if len(cloud) <= MOST_NAMED:
            beside: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "labelspacing": 0.25}
            axes.legend(handles=handles, ncols=math.ceil(len(cloud) / 14), handletextpad=0.2, **beside)
        else:
            axes.set_xlabel(f"{len(cloud)} classes")
    return figure


def _stored(results: Results, vectors: Vectors, task: str, name: str) -> Float[np.ndarray, "_seeds ..."]:
    """Arrays of I2CL as it is that a store kept; nothing where there are none."""
    records = (one for one in results.of_default(task) if one.cell.method == "i2cl")
    held = [vectors[one.key] for one in records if one.key in vectors]
    return np.array([arrays[name] for arrays in held if name in arrays], dtype=np.float32)


def _by_task(points_of: Cloud) -> Figure | None:
    cloud = {task: points for task, points in points_of.items() if len(points)}
    places = _embedded(cloud) if len(cloud) > 1 else None
    if places is None:
        return None
    figure, (axes,) = panels(1, 8.0, 5.0)
    handles = _scatter(axes, places, size=7.0)
    axes.set(xlabel="t-SNE, first axis", ylabel="t-SNE, second axis")
    figure.legend(handles=handles, loc="outside right center", ncols=math.ceil(len(places) / 20))
    return figure


def _scatter(axes: Axes, cloud: Cloud, size: float) -> list[Line2D]:
    """Draw all points, names in order; distances have no unit, so there are no ticks."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    handles: list[Line2D] = []
    for number, (name, points) in enumerate(cloud.items()):
        marker = MARKERS[number % len(MARKERS)]
        look: Any = {"ls": "", "marker": marker, "mec": "white", "mew": 0.4, "label": name}
        colour, wide = COLOURS[number % len(COLOURS)], size * SIZES.get(marker, 1)
        handles += axes.plot(points[:, 0], points[:, 1], color=colour, ms=wide, **look)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    return handles


def _embedded(cloud: Cloud) -> Cloud | None:
    """All points in the plane, or None if too few differ."""
    points = np.concatenate([part.reshape(len(part), -1) for part in cloud.values()]).astype(np.float32)
    if len({row.tobytes() for row in points}) < FEWEST:
        return None
    ends = np.cumsum([len(part) for part in cloud.values()])[:-1]
    return dict(zip(cloud, np.split(_tsne(points), ends), strict=True))


def _tsne(points: Float[np.ndarray, "n features"]) -> Float[np.ndarray, "n 2"]:
    needs("the map", "experiments", "sklearn")
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30, (len(points) - 1) / 3)
    with threadpool_limits(1):  # sums in another order end in another map
        plane = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return np.asarray(plane)
