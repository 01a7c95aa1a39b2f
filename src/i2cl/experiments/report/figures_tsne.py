"""Figures of high-dimensional results in the plane: which tasks, and which classes, lie together."""

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from i2cl.errors import I2CLError
from i2cl.experiments.records import Record
from i2cl.experiments.report.figures_base import (
    COLOURS,
    MARKERS,
    SIZES,
    new_figure,
    panels,
    styled,
)
from i2cl.experiments.report.results import Results, outcome
from i2cl.experiments.store import Vectors

FEWEST = 5
"""Different points below which nothing is drawn."""

MOST_NAMED = 28
"""Classes of a task beyond which a legend would be larger than its panel."""

Cloud = list[tuple[str, Float[np.ndarray, "_points _features"]]]  # points of each task or class, by name


@styled
def context_vectors(results: Results, vectors: Vectors) -> Figure | None:
    """Context vectors, one point per task and seed."""
    return _by_task(
        (
            task,
            [vectors[one.key]["context_vector"] for one in _with(vectors, "context_vector", records)],
        )
        for task, records in _plain(results)
    )


@styled
def coefficient_map(results: Results, vectors: Vectors) -> Figure | None:  # noqa: ARG001 - called alike
    """Calibrated coefficients, one point per task and seed."""
    return _by_task(
        (task, [np.array(out.coefficients) for out in map(outcome, records) if out.coefficients is not None])
        for task, records in _plain(results)
    )


@styled
def class_vectors(results: Results, vectors: Vectors) -> Figure | None:
    """Context vectors of single classes, a panel for each task with one point per class and seed."""
    found = []
    for task, records in _plain(results):
        held = _with(vectors, "class_vectors", records)
        if held:
            stacked = np.stack([vectors[one.key]["class_vectors"] for one in held], axis=1)
            flat = stacked.reshape(*stacked.shape[:2], -1).astype(np.float32)
            cloud = list(zip(outcome(held[0]).labels, flat, strict=True))
            if (places := _embedded(cloud)) is not None:
                found.append((task, places))
    if not found:
        return None
    most = max(len(cloud) for _, cloud in found)
    figure, cells = panels(len(found), 3.6, 3.0 if most > 9 else 2.3)
    for axes, (task, cloud) in zip(cells, found, strict=True):
        handles = _scatter(axes, cloud, size=5.0)
        axes.set_title(task)
        if len(cloud) <= MOST_NAMED:
            axes.legend(
                handles=handles,
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
                ncols=math.ceil(len(cloud) / 14),
                labelspacing=0.25,
                handletextpad=0.2,
            )
        else:
            axes.set_xlabel(f"{len(cloud)} classes")
    return figure


def _plain(results: Results) -> Iterable[tuple[str, list[Record]]]:
    """Records of I2CL as it is, by task."""
    row = results.default
    return [(task, results.of(row, task)) for task in results.tasks] if row else []


def _with(vectors: Vectors, name: str, records: Iterable[Record]) -> list[Record]:
    return [one for one in records if one.key in vectors and name in vectors[one.key]]


def _by_task(found: Iterable[tuple[str, list[Float[np.ndarray, "..."]]]]) -> Figure | None:
    held = [(task, np.stack(arrays).astype(np.float32)) for task, arrays in found if arrays]
    cloud = [(task, arrays.reshape(len(arrays), -1)) for task, arrays in held]
    places = _embedded(cloud) if len(cloud) > 1 else None
    if places is None:
        return None
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    handles = _scatter(axes, places, size=7.0)
    axes.set_xlabel("t-SNE, first axis")
    axes.set_ylabel("t-SNE, second axis")
    figure.legend(handles=handles, loc="outside right center", ncols=math.ceil(len(places) / 20))
    return figure


def _scatter(axes: Axes, cloud: Cloud, size: float) -> list[Line2D]:
    """Draw all points, names in order; distances have no unit, so there are no ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)
    handles: list[Line2D] = []
    for number, (name, points) in enumerate(cloud):
        marker = MARKERS[number % len(MARKERS)]
        handles += axes.plot(
            points[:, 0],
            points[:, 1],
            ls="",
            marker=marker,
            color=COLOURS[number % len(COLOURS)],
            ms=size * SIZES.get(marker, 1),
            mec="white",
            mew=0.4,
            label=name,
        )
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    return handles


def _embedded(cloud: Cloud) -> Cloud | None:
    """All points in the plane, or None if too few differ."""
    points = np.concatenate([part for _, part in cloud])
    if len({row.tobytes() for row in points}) < FEWEST:
        return None
    places = _tsne(points)
    ends = np.cumsum([len(part) for _, part in cloud])[:-1]
    return [(name, part) for (name, _), part in zip(cloud, np.split(places, ends), strict=True)]


def _tsne(points: Float[np.ndarray, "n features"]) -> Float[np.ndarray, "n 2"]:
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError:
        raise I2CLError("needs the package scikit-learn: pip install 'i2cl[experiments]'") from None
    perplexity = min(30, (len(points) - 1) / 3)
    with threadpool_limits(1):  # sums in another order end in another map
        found = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return np.asarray(found)
