"""Write the tables of docs/results.md and docs/ablations.md, and two figures, from the committed stores.

    python scripts/results_pages.py            # what stands between the markers, and docs/_static/*.svg

Between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` stands what the function of that name returns.
A row that no cell of a store belongs to is left out, so a row may be listed here before it is measured.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from statistics import fmean

import numpy as np

from i2cl.experiments.report.printed import printed_tables
from results_figures import FIGURES
from results_products import products, together
from results_stores import (
    OURS,
    ROOT,
    SHOWN,
    average,
    confidence_fits,
    enough,
    line_of,
    lines_of,
    named_line,
    points,
    records,
    results,
    shown,
)
from results_tables import against_first, beside, differences, interval, kept, table

PAGES = ("docs/results.md", "docs/ablations.md", "docs/guide/confidence.md")

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
            f"- {name}: {len(result.tasks)} tasks, {result.expected_seeds} seeds, at most {most} queries per "
            f"task; the store has {cells:,} cells{when}."
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
        ours = named_line(result, OURS)
        lines = {name: line for name, line in lines_of(result, tuple(SHOWN)).items() if name != OURS}
        lines = {name: line for name, line in lines.items() if enough(result, line)}
        gaps = differences(result, {name: (ours, line) for name, line in lines.items()})
        rows.append([f"**{model}**: {SHOWN[OURS]}", average(result, ours), "", "", "", kept(result, ours)])
        rows += [
            [SHOWN[name], average(result, line), *gaps[name], kept(result, line)]
            for name, line in lines.items()
        ]
    return table(["Row", "Mean", "Anchored minus it", "95 % interval", "q", "Numbers kept a task"], rows)


def losses() -> str:
    """Where others have a higher mean than the default, by row."""
    result, lost = results("real"), []
    ours = named_line(result, OURS)
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


def table_1() -> str:
    """The paper's Table 1 on the first model, and what the paper prints for Llama-2-7B on the same tasks."""
    result, paper = results("main-real"), printed_tables("main")[0]
    ours, rows = named_line(result, "I2CL"), []
    gaps = differences(result, {line.name: (ours, line) for line in result.lines if line != ours})
    for line in result.lines:
        tasks = [paper.tasks.index(task) for task in result.tasks_of(line)]
        mean, theirs = (fmean(paper.rows[name].mean[at] for at in tasks) for name in (line.name, "I2CL"))
        gap = [*gaps[line.name], points((theirs - mean) / 100)] if line != ours else [""] * 4
        rows.append([line.name, average(result, line), f"{mean:.1f}", *gap])
    return table(["Row", "SmolLM2", "Paper", "I2CL minus it", "95 % interval", "q", "in the paper"], rows)


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
    """Accuracy by demonstrations a class, by task, and on average of numbers where no task is missing."""
    result = results(grid)
    counts = sorted({line.shots for line in result.lines if line.shots is not None})
    rows = []
    for row in result.rows:
        lines = {line.shots: line for line in result.lines if line.row is row}
        own = [lines.get(count, lines.get(None)) for count in counts]
        there = [set() if line is None else set(result.tasks_of(line)) for line in own]
        whole = [len(result.tasks) > 1 and tasks == set(result.tasks) for tasks in there]
        for task in (
            *([None] if any(whole) else []),
            *(one for one in result.tasks if any(one in tasks for tasks in there)),
        ):
            cells = [
                "–"
                if line is None or (task is None and not mean)
                else average(result, line)
                if task is None
                else shown(result, line, task)
                for line, mean in zip(own, whole, strict=True)
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
    wanted = ("LoRA", "LoRA, label prior", "IA3", "IA3, the paper's rate", "Prefix tuning, from newlines")
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
                gap = [f"{points(got.mean)}", interval(got), str(got.seeds)]
                rows.append([plain.name, average(result, line), *gap])
    return table(["Row", "In its chat template", "Minus the plain prompt", "95 % interval", "Seeds"], rows)


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
    answers = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    names = {
        "accuracy": "Accuracy among the labels",
        "greedy_right": "Greedy token right",
        "greedy_is_a_label": "Greedy token is a label",
        "label_mass": "Labels' probability",
    }
    tasks = sorted({one["task"] for one in answers})
    means = {
        task: [100 * fmean(one[name] for one in answers if one["task"] == task) for name in names]
        for task in tasks
    }
    rows = [["**mean**", *(f"{fmean(column):.1f}" for column in zip(*means.values(), strict=True))]]
    rows += [[task, *(f"{value:.1f}" for value in means[task])] for task in tasks]
    return table(["Task", *names.values()], rows)


PARTS: dict[str, Callable[[], str]] = {
    "measured": measured,
    "temperatures": temperatures,
    "thresholds": thresholds,
    "by-task": by_task,
    "verdicts": verdicts,
    "losses": losses,
    "together": together,
    "products": products,
    "table-1": table_1,
    "choices": choices,
    "i2cl-choices": i2cl_choices,
    "texts": texts,
    "texts-on-top": texts_on_top,
    "shots": shots,
    "curves": partial(shots, "curves"),
    "curves-tickets": partial(shots, "curves-tickets"),
    "many-labels": partial(shots, "many-labels"),
    "second-model": second_model,
    "adapters": adapters,
    "rivals": rivals,
    "fewer-queries": fewer_queries,
    "frequent": frequent,
    "chat": chat,
    "greedy": greedy,
}


if __name__ == "__main__":
    main()
