"""Write the tables of docs/results.md and docs/ablations.md, and two figures, from the committed stores.

    python scripts/results_pages.py            # what stands between the markers, and docs/_static/*.svg

Between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` stands what the function of that name returns.
A row that no cell of a store belongs to is left out, so a row may be listed here before it is measured.
"""

import json
import re
import runpy
from collections.abc import Callable, Sequence
from functools import cache, partial
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from i2cl.experiments.confidence import highest
from i2cl.experiments.confidence import reliability as curve
from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.library import load_experiment
from i2cl.experiments.records import Record
from i2cl.experiments.report.figures_base import new_figure
from i2cl.experiments.report.results import Line, Results, mean_times, results_of
from i2cl.experiments.statistics import ALPHA, Difference
from i2cl.experiments.store import Store
from i2cl.injections.temperature import normalised

ROOT = Path(__file__).resolve().parents[1]
STORES = {"real": "docs/experiments/real/store", "gemma": "docs/experiments/gemma/store"}
PAGES = ("docs/results.md", "docs/ablations.md", "docs/guide/confidence.md")

OURS = "Anchored"
FORMER = {OURS: "Anchored, all anew"}
"""What stands for a row in a store that was made before its default changed."""

SHOWN = {
    "Zero-shot": "Zero-shot",
    "Zero-shot, label prior": "Zero-shot, label prior",
    "Zero-shot, batch calibration": "Zero-shot, batch calibration",
    "Few-shot (ICL)": "Few-shot",
    "Few-shot, label prior": "Few-shot, label prior",
    "TF-IDF": "TF-IDF + logistic regression",
    "Linear probe": "Linear probe of the LLM",
    "Linear probe, last layer and token": "Linear probe, last layer",
    "I2CL": "I2CL, fast recipe",
    "IA3": "IA3",
    "LoRA": "LoRA",
    "sentence_embeddings": "Sentence embeddings + logistic regression",
    "setfit": "SetFit",
    OURS: "Anchored calibration",
}
"""Rows of the grid ``real`` by name, or by method, and what the pages call them."""

COLUMNS = (
    OURS,
    "LoRA",
    "setfit",
    "sentence_embeddings",
    "Few-shot, label prior",
    "Linear probe",
    "I2CL",
    "Zero-shot",
    "Few-shot (ICL)",
)
"""Rows that the table by task has as columns."""

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


def main() -> None:
    """Write every page and figure."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, draw in FIGURES.items():
        (ROOT / name).write_text(draw(), encoding="utf-8")


def filled(text: str) -> str:
    """A page with its generated parts made anew.

    Args:
        text: of the page.

    Raises:
        KeyError: for a marker that no function has the name of.
    """
    part = re.compile(r"(<!-- ([\w-]+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
    return part.sub(lambda result: f"{result[1]}{PARTS[result[2]]()}\n{result[3]}", text)


@cache
def records(store: str) -> tuple[Record, ...]:
    """All cells of a committed store."""
    return tuple(Store.open(ROOT / STORES[store]).records.values())


@cache
def results(grid: str, store: str = "real", limit: int | None = None, skew: int = 1) -> Results:
    """What a store has of a grid, with the most queries where no limit is given."""
    result = results_of(load_experiment(grid), records(store))
    return next(one for one in result if limit in (None, one.setting.limit) and one.setting.skew == skew)


def line_of(result: Results, wanted: str) -> Line | None:
    """The line of a row's name, or else of a method's."""
    named = [one for one in result.lines if one.name == wanted]
    former = [one for one in result.lines if one.name == FORMER.get(wanted)]
    method = [one for one in result.lines if one.row.method == wanted]
    return next(iter(named or former or method), None)


def lines_of(result: Results, wanted: Sequence[str]) -> dict[str, Line]:
    """Those that the store has, in the order asked for."""
    return {name: line for name in wanted if (line := line_of(result, name)) is not None}


# Parts of docs/results.md


def measured() -> str:
    """How much was measured, and of which task which number of queries."""
    parts = []
    for store, name in (("real", "SmolLM2-135M-Instruct"), ("gemma", "Gemma 3 270M")):
        result = results("real", store)
        cells, most = len(records(store)), result.setting.limit
        days = sorted(str(one.provenance["time"])[:10] for one in records(store) if "time" in one.provenance)
        when = f", {days[0]} to {days[-1]}" if days else ""
        parts.append(
            f"- {name}: {len(result.tasks)} tasks, {result.most_seeds} seeds, at most {most} queries a task; "
            f"the store has {cells:,} cells{when}."
        )
    return "\n".join(parts)


def by_task() -> str:
    """Accuracy on every task."""
    result = results("real")
    lines = lines_of(result, COLUMNS)
    head = ["Task", *(SHOWN[name] for name in lines)]
    rows = [["**mean**", *(average(result, line) for line in lines.values())]]
    rows += [[task, *(shown(result, line, task) for line in lines.values())] for task in result.tasks]
    return table(head, rows)


def verdicts() -> str:
    """The default against every other row, on both models."""
    rows: list[list[str]] = []
    for store, model in (("real", "SmolLM2-135M"), ("gemma", "Gemma 3 270M")):
        result = results("real", store)
        ours = found_line(result, OURS)
        lines = {name: line for name, line in lines_of(result, tuple(SHOWN)).items() if name != OURS}
        lines = {name: line for name, line in lines.items() if enough(result, line)}
        message = differences(result, {name: (ours, line) for name, line in lines.items()})
        rows.append([f"**{model}**: {SHOWN[OURS]}", average(result, ours), "", "", "", kept(result, ours)])
        rows += [
            [SHOWN[name], average(result, line), *message[name], kept(result, line)]
            for name, line in lines.items()
        ]
    return table(["Row", "Mean", "Anchored minus it", "95 % interval", "q", "Numbers kept a task"], rows)


def losses() -> str:
    """Where others have a higher mean than the default, by row."""
    result, lost = results("real"), []
    ours = found_line(result, OURS)
    for name, line in lines_of(result, tuple(SHOWN)).items():
        ahead = {
            task: 100 * (theirs.mean - own.mean)
            for task in result.tasks
            if (theirs := result.accuracy(line, task)) and (own := result.accuracy(ours, task))
        }
        ahead = {task: gap for task, gap in sorted(ahead.items(), key=lambda one: -one[1]) if gap >= 0.05}
        if ahead:
            where = ", ".join(f"{task} {gap:.1f}" for task, gap in ahead.items())
            lost.append(f"- {SHOWN[name]}: {where}.")
    return "\n".join(lost) or "No row is ahead of it on any task."


# Parts of docs/ablations.md


def choices() -> str:
    """One choice of the default changed a row."""
    return against_first(results("anchored-ablations"), OURS)


def i2cl_choices() -> str:
    """One choice of I2CL changed a row."""
    return against_first(results("real-ablations"), "I2CL")


def texts() -> str:
    """Zero-shot's label prior by its number of texts."""
    return against_first(results("unlabelled"), "64 texts")


def texts_on_top() -> str:
    """The same on top of the default."""
    return against_first(results("anchored-unlabelled"), "No prior")


def shots(grid: str = "anchored-shots") -> str:
    """Accuracy by demonstrations a class, by task, and on average where no task is missing."""
    result = results(grid)
    counts = sorted({line.shots for line in result.lines if line.shots is not None})
    rows = []
    for row in result.rows:
        lines = {line.shots: line for line in result.lines if line.row is row}
        own = [lines.get(count, lines.get(None)) for count in counts]
        there = [set(result.tasks_of(line)) for line in own if line is not None]
        whole = len(result.tasks) > 1 and all(tasks == set(result.tasks) for tasks in there)
        for task in (
            *([None] if whole else []),
            *(one for one in result.tasks if any(one in tasks for tasks in there)),
        ):
            cells = [
                "–" if line is None else average(result, line) if task is None else shown(result, line, task)
                for line in own
            ]
            if None in lines:  # it takes no demonstrations
                cells = [cells[0], *["–"] * (len(counts) - 1)]
            rows.append([row.name, task or "**mean**", *cells])
    return table(["Row", "Task", *map(str, counts)], rows, 2)


def second_model() -> str:
    """Accuracy on every task of the second model."""
    result = results("real", "gemma")
    lines = {
        name: line for name, line in lines_of(result, tuple(SHOWN)[::-1]).items() if enough(result, line)
    }
    rows = [["**mean**", *(average(result, line) for line in lines.values())]]
    rows += [[task, *(shown(result, line, task) for line in lines.values())] for task in result.tasks]
    return table(["Task", *(SHOWN[name] for name in lines)], rows)


def adapters() -> str:
    """Trained adapters against the default."""
    wanted = ("LoRA", "LoRA, label prior", "IA3", "IA3, label prior", "Prefix tuning, from newlines")
    return beside(results("real"), wanted)


def rivals() -> str:
    """What the paper compares I2CL with, one seed."""
    wanted = (
        "Task-vector",
        "ICV",
        "Label-anchor",
        "kNN prompting",
        "Noise vector",
        "I2CL",
        "I2CL, the paper's recipe",
        "I2CL, loss among labels, from the plain model",
        "Anchored, label prior",
        "Anchored, all anew",
    )
    return beside(results("real"), wanted)


def fewer_queries() -> str:
    """Rows that were run on 100 queries a task alone."""
    result = results("real", limit=100)
    return beside(result, ("Prefix tuning", "Prompt tuning"))


def frequent() -> str:
    """Classes in equal numbers, and 3 : 1."""
    even, odd = results("skewed", limit=100), results("skewed", limit=100, skew=3)
    full = results("skewed")
    rows = []
    for line in odd.lines:
        same = line_of(full, line.name) or line_of(even, line.name)
        where = full if line_of(full, line.name) else even
        before, after = (where.accuracy(same) if same else None), odd.accuracy(line)
        if same is None or before is None or after is None or before.seeds != after.seeds:
            continue
        lost = 100 * (before.mean - after.mean)
        limit = str(where.setting.limit)
        rows.append([line.name, average(where, same), limit, average(odd, line), f"{lost:.1f}"])
    return table(["Row", "Equal numbers", "Queries", "3 : 1", "Lost"], rows)


def chat() -> str:
    """The plain prompt and the model's own chat template."""
    result, rows = results("chat", limit=100), []
    for line in result.lines:
        if ", chat" in line.name or line.name.endswith("chat"):
            plain = line_of(result, line.name.replace(", chat", "", 1))
            got = result.difference(line, plain) if plain is not None else None
            if plain is not None and got is not None:
                message = [f"{points(got.mean)}", interval(got), str(got.seeds)]
                rows.append([plain.name, average(result, line), *message])
    return table(["Row", "In its chat template", "Minus the plain prompt", "95 % interval", "Seeds"], rows)


@cache
def confidence_fits() -> tuple[dict[str, Any], Any]:
    """The functions of benchmarks/confidence.py, and the fits that it reads."""
    functions, folder = runpy.run_path(str(ROOT / "benchmarks/confidence.py")), ROOT / "docs/experiments/real"
    return functions, functions["read"](folder / "refits.jsonl", folder / "scores.safetensors")


def temperatures() -> str:
    """The four numbers of confidence, by rule for the temperature."""
    functions, fits = confidence_fits()
    return str(functions["temperature_table"](fits))


def thresholds() -> str:
    """How often a threshold is shown, and breaks its promise."""
    functions, fits = confidence_fits()
    return str(functions["threshold_table"](fits, np.random.default_rng(0)))


def greedy() -> str:
    """How often plain greedy decoding says a label."""
    path = ROOT / "docs/experiments/real/greedy.jsonl"
    message = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    names = {
        "accuracy": "Accuracy among the labels",
        "greedy_right": "Greedy token right",
        "greedy_is_a_label": "Greedy token is a label",
        "label_mass": "Labels' probability",
    }
    tasks = sorted({one["task"] for one in message})
    means = {
        task: [100 * fmean(one[name] for one in message if one["task"] == task) for name in names]
        for task in tasks
    }
    rows = [["**mean**", *(f"{fmean(column):.1f}" for column in zip(*means.values(), strict=True))]]
    rows += [[task, *(f"{value:.1f}" for value in means[task])] for task in tasks]
    return table(["Task", *names.values()], rows)


# Entries


def found_line(result: Results, name: str) -> Line:
    """A line that has to be there.

    Raises:
        LookupError: where it is not.
    """
    line = line_of(result, name)
    if line is None:
        raise LookupError(f"the store has no row {name!r}")
    return line


def enough(result: Results, line: Line) -> bool:
    """Whether a row has all seeds and nearly all tasks, so that a verdict means something."""
    got = result.accuracy(line)
    seeds = got is not None and (line.fixed or got.seeds == result.most_seeds)
    return seeds and 3 * len(result.tasks_of(line)) > 2 * len(result.tasks)


def seeds_of(result: Results, line: Line) -> int:
    """Most seeds that it has on any task."""
    return max(len(result.records(line, task)) for task in result.tasks_of(line))


def average(result: Results, line: Line) -> str:
    """Mean over tasks, with the number of tasks where it lacks some."""
    got, tasks = result.accuracy(line), len(result.tasks_of(line))
    if got is None:
        return "–"
    lacking = "" if tasks == len(result.tasks) else f" ({tasks} of {len(result.tasks)} tasks)"
    return written(got.mean, got.sd, got.seeds) + lacking


def shown(result: Results, line: Line, task: str) -> str:
    """Accuracy on one task."""
    got = result.accuracy(line, task) if task in result.tasks_of(line) else None
    return "–" if got is None else written(got.mean, got.sd, got.seeds)


def written(mean: float, sd: float, seeds: int) -> str:
    """In percent, with the standard deviation over seeds where there are several."""
    return f"{100 * mean:.1f}" + (f" ± {100 * sd:.1f}" if seeds > 1 else "")


def points(value: float) -> str:
    """Percentage points, signed."""
    return f"{100 * value:+.1f}".replace("-", "−")


def differences(result: Results, pairs: dict[str, tuple[Line, Line]]) -> dict[str, list[str]]:
    """First minus second line of each pair, its interval, and its verdict; Holm over the pairs."""
    got = {name: result.difference(*pair) for name, pair in pairs.items()}
    tested = {name: one.p for name, one in got.items() if one is not None and one.decidable}
    q = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {
        name: ["–"] * 3 if one is None else [points(one.mean), interval(one), verdict(one, q.get(name))]
        for name, one in got.items()
    }


def interval(got: Difference) -> str:
    """Of a difference, in points."""
    return f"{points(got.low)} to {points(got.high)}"


def verdict(got: Difference, q: float | None) -> str:
    """Corrected p, and what it shows."""
    if q is None:
        return "one seed" if got.seeds == 1 else f"{got.seeds} seeds"
    message = f"{q:.3f}" if q >= 0.001 else "< 0.001"
    beyond = q < ALPHA and (got.low > 0 or got.high < 0)
    return message if beyond else f"{message}, not shown"


def kept(result: Results, line: Line) -> str:
    """Numbers that it keeps for a task: a range where tasks differ."""
    counts = [one.cost.cached_values for task in result.tasks_of(line) for one in result.outcomes(line, task)]
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def against_first(result: Results, name: str) -> str:
    """Every row of a grid against one, on average and by task."""
    first = found_line(result, name)
    others = [line for line in result.lines if line != first]
    message = differences(result, {line.name: (line, first) for line in others})
    rows = [
        [
            line.name if line != first else f"**{line.name}**",
            average(result, line),
            *(message[line.name] if line != first else [""] * 3),
            *(shown(result, line, task).split(" ")[0] for task in result.tasks),
        ]
        for line in (first, *others)
    ]
    return table(["Row", "Mean", "Difference", "95 % interval", "q", *result.tasks], rows)


def beside(result: Results, wanted: Sequence[str], against: str = OURS) -> str:
    """Some rows: mean, numbers kept, difference from one row on the tasks that both have."""
    ours, lines = found_line(result, against), lines_of(result, wanted)
    message = differences(result, {name: (line, ours) for name, line in lines.items()})
    rows = [
        [
            name,
            average(result, line),
            str(seeds_of(result, line)),
            kept(result, line),
            fit_beside(result, line, ours),
            *message[name],
        ]
        for name, line in lines.items()
    ]
    last = [average(result, ours), str(seeds_of(result, ours)), kept(result, ours), "1", *[""] * 3]
    rows.append([f"**{against}**", *last])
    head = ["Row", "Mean", "Seeds", "Numbers kept", "Fit, ratio", "Difference", "95 % interval", "q"]
    return table(head, rows)


def fit_beside(result: Results, line: Line, ours: Line) -> str:
    """A row's time of fits against another's, on the tasks that both have."""
    both = [task for task in result.tasks_of(line) if task in result.tasks_of(ours)]
    theirs, own = (mean_times(result, one, both)[0] for one in (line, ours))
    return f"{theirs / own:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Markdown; columns behind the first ones stand to the right."""
    rule = "|" + "---|" * words + "---:|" * (len(head) - words)
    return "\n".join([f"| {' | '.join(row)} |" if row is not None else rule for row in (head, None, *rows)])


PARTS: dict[str, Callable[[], str]] = {
    "measured": measured,
    "temperatures": temperatures,
    "thresholds": thresholds,
    "by-task": by_task,
    "verdicts": verdicts,
    "losses": losses,
    "choices": choices,
    "i2cl-choices": i2cl_choices,
    "texts": texts,
    "texts-on-top": texts_on_top,
    "shots": shots,
    "curves": partial(shots, "curves"),
    "many-labels": partial(shots, "many-labels"),
    "second-model": second_model,
    "adapters": adapters,
    "rivals": rivals,
    "fewer-queries": fewer_queries,
    "frequent": frequent,
    "chat": chat,
    "greedy": greedy,
}


# Figures


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
    figure = new_figure(8.6, 5.2)
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
        axes.set_yticks(range(len(order)), [SHOWN[name] for _, name in order])
        axes.set_xlim(0, 80)
        axes.set_title(f"{model}, {len(result.tasks)} tasks", fontsize=11, color="#010101")
        axes.set_xlabel("mean accuracy, %", color="#010101")
        plain(axes)
    title = "Mean accuracy of each row, with 95 % intervals"
    return svg(figure, title)


CURVES = {
    OURS: ("#030303", "o"),
    "sentence_embeddings": ("#010101", "D"),
    "Linear probe": ("#050505", "s"),
    "LoRA": ("#060606", "P"),
    "Few-shot, label prior": ("#060606", "^"),
    "Few-shot (ICL)": ("#040404", "v"),
}
"""Colour and marker of a row in a figure of accuracy by demonstrations a class."""


def draw_curves(axes: Axes, result: Results, task: str | None = None) -> None:
    """Accuracy by demonstrations a class, on one task or on average, with intervals where there are seeds."""
    every = sorted({line.shots for line in result.lines if line.shots is not None})
    for name, (colour, marker) in CURVES.items():
        message = {
            line.shots: got
            for line in result.lines
            if name in {line.row.name, line.row.method}
            and line.shots
            and set(result.tasks if task is None else [task]) <= set(result.tasks_of(line))
            and (got := result.accuracy(line, task))
        }
        if not message:
            continue
        counts, means = list(message), [100 * one.mean for one in message.values()]
        ends = [
            [100 * (one.mean - one.low) for one in message.values()],
            [100 * (one.high - one.mean) for one in message.values()],
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
    """Accuracy by demonstrations a class on three tasks, and with 77 and 150 labels, as SVG."""
    few, many = results("curves"), results("many-labels")
    panels = [*((few, task) for task in few.tasks), *((many, task) for task in many.tasks)]
    figure = new_figure(9.6, 3.2)
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


if __name__ == "__main__":
    main()
