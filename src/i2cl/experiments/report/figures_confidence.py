"""Figures of calibration: reliability diagrams and risk-coverage curves."""

from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from i2cl.experiments import confidence
from i2cl.experiments.report.figures_base import FAINT, MARKER_SCALE, MARKERS, colour_of, label_of, panels
from i2cl.experiments.report.results import Line, Results
from i2cl.experiments.report.trust import TaskScores, scores_by_task
from i2cl.experiments.store import Vectors

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
            each = [one.at(1.0 if axes is left else one.temperature) for one in tasks.values()]
            confidences = np.concatenate([np.exp(scores.max(2)).ravel() for scores in each])
            correct = np.concatenate([(one.predictions == one.gold).ravel() for one in tasks.values()])
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
        risk = np.mean([_risk(one) for one in tasks.values()], axis=0)
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
    label = label_of(line.name, len(results.tasks_of(line)), results)
    axes.plot(x, y, color=colour_of(results, line.row, number), label=label, **look)
