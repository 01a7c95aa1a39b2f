"""The figures of docs/_static that show the committed stores, as SVG."""

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
from i2cl.experiments.report.figures_base import new_figure
from i2cl.experiments.report.results import Results
from i2cl.experiments.statistics import Accuracy
from i2cl.injections.temperature import normalised
from results_stores import OURS, SHOWN, STORES, confidence_fits, enough, line_of, lines_of, results

INK = {
    "#010101": ("ink", "#1f2328", "#f0f6fc"),
    "#020202": ("faint", "#59636e", "#9198a1"),
    "#030303": ("ours", "#d55e00", "#ff9a4d"),
    "#040404": ("other", "#4f76a8", "#6d93c4"),
    "#050505": ("second", "#009e73", "#3ddbb0"),
    "#060606": ("third", "#0072b2", "#56b4e9"),
    "#070707": ("back", "#ffffff", "#0d1117"),
}
"""Colours that matplotlib is given, and what stands for them on light and on dark pages."""


def reliability() -> str:
    """Accuracy against confidence, as probabilities are and at the temperature that refits choose."""
    _, fits = confidence_fits()
    figure = new_figure(4.8, 4.0)
    axes = figure.add_subplot()
    axes.plot([0, 100], [0, 100], linestyle="--", color="#020202", label="as sure as right")
    for rule, colour, marker in (("as it is", "#040404", "s"), ("at the temperature", "#030303", "o")):
        chosen = [fit.chosen if marker == "o" else 1.0 for fit in fits]
        pairs = [(normalised(fit.scores, one), fit) for fit, one in zip(fits, chosen, strict=True)]
        sure = np.concatenate([highest(scores) for scores, _ in pairs])
        right = np.concatenate([scores.argmax(1) == fit.gold for scores, fit in pairs])
        means, shares = curve(sure, right)
        axes.plot(100 * means, 100 * shares, color=colour, marker=marker, label=rule)
    axes.set_xlabel("highest probability among the labels, %", color="#010101")
    axes.set_ylabel("accuracy, %", color="#010101")
    axes.legend(frameon=False, labelcolor="#010101", fontsize=9, loc="upper left")
    plain(axes)
    return svg(figure, "Accuracy against confidence, before and after the temperature")


def bars() -> str:
    """Mean accuracy of the listed rows on both models, with 95 % intervals, as SVG."""
    figure = new_figure(8.6, 6.0)
    panels = figure.subplots(1, 2, width_ratios=(1, 1))
    for axes, store, model in zip(panels, STORES, ("SmolLM2-135M", "Gemma 3 270M"), strict=True):
        result = results("real", store)
        lines = {name: line for name, line in lines_of(result, tuple(SHOWN)).items() if enough(result, line)}
        got = {name: result.accuracy(line) for name, line in lines.items()}
        order = sorted((one.mean, name) for name, one in got.items() if one is not None)
        for place, (mean, name) in enumerate(order):
            one = got[name]
            assert one is not None
            colour = "#030303" if name == OURS else "#040404"
            axes.barh(place, 100 * mean, color=colour, height=0.72)
            ends = [[100 * (mean - one.low)], [100 * (one.high - mean)]]
            axes.errorbar(100 * mean, place, xerr=ends, color="#010101", elinewidth=1, capsize=2.5)
            axes.text(2, place, f"{100 * mean:.1f}", va="center", color="#070707", fontsize=9)
        axes.set_yticks(range(len(order)), [fill(SHOWN[name], LABEL_WIDTH) for _, name in order])
        axes.set_xlim(0, 80)
        # ends at the right edge of the axes, beyond which a browser's wider font would be cut off
        axes.set_title(f"{model}, {len(result.tasks)} tasks", fontsize=11, color="#010101", loc="right")
        axes.set_xlabel("mean accuracy, %", color="#010101")
        plain(axes)
    title = "Mean accuracy of each row, with 95 % intervals"
    return svg(figure, title)


LABEL_WIDTH = 26  # characters of a line of a row's name: browsers' fonts are wider than matplotlib's

CURVES = {
    OURS: ("#030303", "o"),
    "sentence_embeddings": ("#010101", "D"),
    "Linear probe": ("#050505", "s"),
    "LoRA": ("#060606", "P"),
    "Few-shot, label prior": ("#060606", "^"),
    "Few-shot (ICL)": ("#040404", "v"),
}
"""Colour and marker of a row in a figure of accuracy by demonstrations a class."""

SAME = {"LoRA": ("LoRA, words", "LoRA, 5 passes of 8", "LoRA, words, 5 passes of 8")}
"""Rows that belong to one line, where the row itself has no point."""


def draw_curves(axes: Axes, result: Results, task: str | None = None) -> None:
    """Accuracy by demonstrations a class, on one task or on average, with intervals where there are seeds."""
    every = sorted({line.shots for line in result.lines if line.shots is not None})
    for name, (colour, marker) in CURVES.items():
        by_shots: dict[int, Accuracy] = {}
        for line in result.lines:
            named = not {name, *SAME.get(name, ())}.isdisjoint({line.row.name, line.row.method})
            whole = set(result.tasks if task is None else [task]) <= set(result.tasks_of(line))
            if named and line.shots and whole and (got := result.accuracy(line, task)):
                by_shots.setdefault(line.shots, got)
        if not by_shots:
            continue
        counts, means = list(by_shots), [100 * one.mean for one in by_shots.values()]
        ends = [
            [100 * (one.mean - one.low) for one in by_shots.values()],
            [100 * (one.high - one.mean) for one in by_shots.values()],
        ]
        bars = ends if task is None else None
        axes.errorbar(counts, means, yerr=bars, color=colour, marker=marker, capsize=3, label=SHOWN[name])
    level = line_of(result, "Zero-shot, label prior")
    got = result.accuracy(level, task) if level is not None else None
    if got is not None:
        axes.axhline(100 * got.mean, color="#020202", linestyle="--", label=level.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, map(str, every))
    axes.minorticks_off()
    axes.set_xlabel("demonstrations a class", color="#010101")
    axes.set_ylim(0, 100 if task else 90)
    plain(axes)


def curves() -> str:
    """Mean accuracy by demonstrations a class, as SVG."""
    result = results("anchored-shots")
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    draw_curves(axes, result)
    axes.set_ylabel(f"mean accuracy over {len(result.tasks)} tasks, %", color="#010101")
    axes.legend(frameon=False, labelcolor="#010101", fontsize=9, ncols=2, loc="lower right")
    return svg(figure, "Mean accuracy by demonstrations a class, with 95 % intervals")


def learning() -> str:
    """Accuracy by demonstrations a class on four tasks, and with 77 and 150 labels, as SVG."""
    grids = map(results, ("curves", "curves-tickets", "many-labels"))
    panels = [(result, task) for result in grids for task in result.tasks]
    figure = new_figure(10.4, 3.2)
    for axes, (result, task) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        draw_curves(axes, result, task)
        axes.set_title(task, fontsize=10, color="#010101")
    figure.axes[0].set_ylabel("accuracy, %", color="#010101")
    shown = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    lines = {name: handle for pairs in shown for handle, name in pairs}
    look: dict[str, Any] = {"frameon": False, "labelcolor": "#010101", "fontsize": 9, "ncols": 3}
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", **look)
    return svg(figure, "Accuracy by demonstrations a class, up to eighty, and with 77 and 150 labels")


def plain(axes: Axes) -> None:
    """No frame, quiet ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#020202")
    axes.tick_params(colors="#020202", labelcolor="#010101", labelsize=9)


def svg(figure: Figure, title: str) -> str:
    """A figure as text, the same bytes each time, in colours that follow the reader's light or dark mode."""
    out = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "i2cl"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    text = out.getvalue()
    for given, (name, _, _) in INK.items():
        text = text.replace(given, f"var(--{name})")
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
