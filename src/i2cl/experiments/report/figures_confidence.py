"""Figures of probabilities: whether confidence is accuracy, and what it gains to answer only when sure."""

from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from i2cl.experiments import confidence
from i2cl.experiments.report.figures_base import FAINT, MARKERS, SIZES, colour_of, counted, panels
from i2cl.experiments.report.results import Line, Results
from i2cl.experiments.report.trust import Scored, scored
from i2cl.experiments.store import Vectors

COVERAGES = np.arange(5, 101) / 100  # shares of answered queries that are drawn; below, single ones decide


def reliability(results: Results, _vectors: Vectors) -> Figure | None:
    """Accuracy against confidence in bins of equal number, all tasks and seeds of a row together."""
    held = _held(results)
    if not held:
        return None
    figure, (left, right) = panels(2, 5.0, 4.8, shared=True)
    for axes, title in ((left, "as it is"), (right, "at the best temperature of each task")):
        axes.plot([0, 100], [0, 100], ls="--", lw=1, color=FAINT)
        for line, tasks in held.items():
            each = [one.at(1.0 if axes is left else one.temperature) for one in tasks.values()]
            sure = np.concatenate([np.exp(scores.max(2)).ravel() for scores in each])
            hits = np.concatenate([(one.answers == one.gold).ravel() for one in tasks.values()])
            x, y = confidence.reliability(sure, hits)
            _draw(axes, results, line, 100 * x, 100 * y, markers=True)
        axes.set(title=title, xlabel="confidence (%)")
    left.set(xlim=(0, 102), ylim=(0, 102), ylabel="accuracy (%)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    return figure


def risk_coverage(results: Results, _vectors: Vectors) -> Figure | None:
    """Errors among the surest queries against how many are answered: means over tasks and seeds."""
    held = _held(results)
    if not held:
        return None
    figure, (axes,) = panels(1, 8.0, 4.6)
    for line, tasks in held.items():
        risk = np.mean([_risk(one) for one in tasks.values()], axis=0)
        _draw(axes, results, line, 100 * COVERAGES, 100 * risk, markers=False)
    axes.set(xlim=(0, 100), ylim=(0, None))
    axes.set(xlabel="queries answered, the surest first (%)", ylabel="errors among them (%)")
    figure.legend(loc="outside right upper")
    return figure


def _held(results: Results) -> dict[Line, dict[str, Scored]]:
    each = {line: scored(results, line) for line in results.lines}
    return {line: tasks for line, tasks in each.items() if tasks}


def _risk(one: Scored) -> Float[np.ndarray, " coverages"]:
    """Mean over seeds of the share of errors at each of `COVERAGES`."""
    curves = [
        confidence.risk_coverage(confidence.highest(scores), answers == gold)
        for scores, answers, gold in zip(one.scores, one.answers, one.gold, strict=True)
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
    """A line's curve in the colour and with the marker that it has in the other figures."""
    number = results.lines.index(line)
    marker = MARKERS[number % len(MARKERS)]
    look: Any = {"marker": marker if markers else None, "ms": 5 * SIZES.get(marker, 1)}
    look |= {"lw": 1.8, "zorder": 4} if line.row is results.default else {"lw": 1.2, "zorder": 3}
    name = counted(line.name, len(results.tasks_of(line)), results)
    axes.plot(x, y, color=colour_of(results, line.row, number), label=name, **look)
