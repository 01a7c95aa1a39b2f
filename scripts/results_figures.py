"""Draw the figures of docs/_static that show the committed stores, as SVG."""

import re
from collections.abc import Callable
from io import StringIO
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from i2cl.experiments.confidence import highest, reliability as curve
from i2cl.experiments.report.figures import new_figure
from i2cl.experiments.report.results import Results
from i2cl.experiments.statistics import Accuracy
from i2cl.injections.temperature import log_softmax
from results_confidence import confidence_fits
from results_tables import LABELS, MODELS, OURS, find_line, find_lines, is_complete, results

INK = {
    "#010101": ("ink", "#1f2328", "#f0f6fc"),
    "#020202": ("faint", "#59636e", "#9198a1"),
    "#030303": ("ours", "#d55e00", "#ff9a4d"),
    "#040404": ("other", "#4f76a8", "#6d93c4"),
    "#050505": ("second", "#009e73", "#3ddbb0"),
    "#060606": ("third", "#0072b2", "#56b4e9"),
    "#070707": ("back", "#ffffff", "#0d1117"),
}
"""Placeholder colours for matplotlib, with their names and their values on light and dark pages."""


def reliability() -> str:
    """Plot accuracy against confidence, as predicted and at the temperature fitted by cross-validation."""
    fits = confidence_fits()
    figure = new_figure(4.8, 4.0)
    axes = figure.add_subplot()
    axes.plot([0, 100], [0, 100], linestyle="--", color="#020202", label="perfect calibration")
    for label, colour, marker in (("as predicted", "#040404", "s"), ("at the temperature", "#030303", "o")):
        temperatures = [fit.chosen if marker == "o" else 1.0 for fit in fits]
        scores = [log_softmax(fit.scores, one) for fit, one in zip(fits, temperatures, strict=True)]
        confidences = np.concatenate([highest(one) for one in scores])
        correct = np.concatenate([one.argmax(1) == fit.gold for one, fit in zip(scores, fits, strict=True)])
        means, accuracies = curve(confidences, correct)
        axes.plot(100 * means, 100 * accuracies, color=colour, marker=marker, label=label)
    axes.set_xlabel("highest probability among the labels, %", color="#010101")
    axes.set_ylabel("accuracy, %", color="#010101")
    axes.legend(frameon=False, labelcolor="#010101", fontsize=9, loc="upper left")
    plain(axes)
    return svg(figure, "Accuracy against confidence, before and after temperature scaling")


def bars() -> str:
    """Plot the mean accuracy of the rows of `LABELS` on both models, with 95 % intervals."""
    figure = new_figure(4.9, 9.6)  # narrow, for phones
    panels = figure.subplots(len(MODELS), 1)
    for axes, (model, (experiment, store)) in zip(panels, MODELS.items(), strict=True):
        result = results(experiment, store)
        lines = find_lines(result, tuple(LABELS))
        accuracies = {
            name: accuracy
            for name, line in lines.items()
            if is_complete(result, line) and (accuracy := result.accuracy(line)) is not None
        }
        names = sorted(accuracies, key=lambda name: (accuracies[name].mean, name))
        for position, name in enumerate(names):
            accuracy = accuracies[name]
            mean, low, high = 100 * accuracy.mean, 100 * accuracy.low, 100 * accuracy.high
            axes.barh(position, mean, color="#030303" if name == OURS else "#040404", height=0.72)
            interval = [[mean - low], [high - mean]]
            axes.errorbar(mean, position, xerr=interval, color="#010101", elinewidth=1, capsize=2.5)
            axes.text(2, position, f"{mean:.1f}", va="center", color="#070707", fontsize=9)
        axes.set_yticks(range(len(names)), [fill(LABELS[name], LABEL_WIDTH) for name in names])
        axes.set_xlim(0, 80)
        # right-aligned, because browsers use a wider font and would cut off the end
        axes.set_title(f"{model}, {len(result.tasks)} tasks", fontsize=11, color="#010101", loc="right")
        axes.set_xlabel("mean accuracy, %", color="#010101")
        plain(axes)
    title = "Mean accuracy of each row, with 95 % intervals"
    return svg(figure, title)


LABEL_WIDTH = 26  # characters per line of a label; browsers' fonts are wider than matplotlib's

CURVES = {
    OURS: ("#030303", "o"),
    "sentence_embeddings": ("#010101", "D"),
    "Linear probe": ("#050505", "s"),
    "LoRA": ("#060606", "P"),
    "Few-shot, label prior": ("#060606", "^"),
    "Few-shot (ICL)": ("#040404", "v"),
}
"""Colours and markers of rows in the figures by number of demonstrations."""

VARIANTS = {"LoRA": ("LoRA, words", "LoRA, 5 passes of 8", "LoRA, words, 5 passes of 8")}
"""Rows that extend a curve where its own row has no point."""


def draw_curves(axes: Axes, result: Results, task: str | None = None) -> None:
    """Plot the accuracy by demonstrations per class: on one task, or on average with intervals."""
    counts = sorted({line.shots for line in result.lines if line.shots is not None})
    for name, (colour, marker) in CURVES.items():
        by_shots: dict[int, Accuracy] = {}
        for line in result.lines:
            matches = not {name, *VARIANTS.get(name, ())}.isdisjoint({line.row.name, line.row.method})
            complete = set(result.tasks if task is None else [task]) <= set(result.tasks_of(line))
            if matches and line.shots and complete and (accuracy := result.accuracy(line, task)):
                by_shots.setdefault(line.shots, accuracy)
        if not by_shots:
            continue
        means = [100 * one.mean for one in by_shots.values()]
        intervals = [
            [100 * (one.mean - one.low) for one in by_shots.values()],
            [100 * (one.high - one.mean) for one in by_shots.values()],
        ]
        axes.errorbar(
            list(by_shots),
            means,
            yerr=intervals if task is None else None,
            color=colour,
            marker=marker,
            capsize=3,
            label=LABELS[name],
        )
    zero_shot = find_line(result, "Zero-shot, label prior")
    accuracy = result.accuracy(zero_shot, task) if zero_shot is not None else None
    if accuracy is not None:
        axes.axhline(100 * accuracy.mean, color="#020202", linestyle="--", label=zero_shot.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.minorticks_off()
    axes.set_xlabel("demonstrations per class", color="#010101")
    axes.set_ylim(0, 100 if task else 90)
    plain(axes)


def curves() -> str:
    """Plot the mean accuracy by demonstrations per class."""
    result = results("anchored-shots")
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    draw_curves(axes, result)
    axes.set_ylabel(f"mean accuracy over {len(result.tasks)} tasks, %", color="#010101")
    axes.legend(frameon=False, labelcolor="#010101", fontsize=9, ncols=2, loc="lower right")
    return svg(figure, "Mean accuracy by demonstrations per class, with 95 % intervals")


def learning() -> str:
    """Plot the accuracy by demonstrations per class on four tasks, and with 77 and 150 labels."""
    experiments = map(results, ("curves", "curves-tickets", "many-labels"))
    panels = [(result, task) for result in experiments for task in result.tasks]
    figure = new_figure(10.4, 3.2)
    for axes, (result, task) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        draw_curves(axes, result, task)
        axes.set_title(task, fontsize=10, color="#010101")
        axes.set_xlabel("")  # one label for all panels, because six would overlap
    figure.supxlabel("demonstrations per class", fontsize=10, color="#010101")
    figure.axes[0].set_ylabel("accuracy, %", color="#010101")
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    style: dict[str, Any] = {"frameon": False, "labelcolor": "#010101", "fontsize": 9, "ncols": 3}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", **style)
    return svg(figure, "Accuracy by demonstrations per class, up to 80, and with 77 and 150 labels")


def plain(axes: Axes) -> None:
    """Remove the frame, and set the colours of the axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#020202")
    axes.tick_params(colors="#020202", labelcolor="#010101", labelsize=9)


def svg(figure: Figure, title: str) -> str:
    """Convert a figure to deterministic SVG with colours that follow the reader's light or dark mode."""
    out = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "i2cl"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    text = out.getvalue()
    for placeholder, (name, _, _) in INK.items():
        text = text.replace(placeholder, f"var(--{name})")
    light, dark = (" ".join(f"--{name}: {pair[which]};" for name, *pair in INK.values()) for which in (0, 1))
    style = (
        f"<style>svg {{ {light} background: var(--back); }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>\n"
    )
    text = re.sub(r"( <defs>)", lambda result: " " + style + result[1], text, count=1)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


FIGURES: dict[str, Callable[[], str]] = {
    "docs/_static/averages.svg": bars,
    "docs/_static/shots.svg": curves,
    "docs/_static/learning.svg": learning,
    "docs/_static/reliability.svg": reliability,
}
