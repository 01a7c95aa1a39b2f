"""Write the generated tables of the documentation, and its figures, from the committed stores.

    python scripts/results_pages.py

The text between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` is the result of ``PARTS[NAME]``.
Rows without results in the store are omitted, so they can be listed here before they are measured.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import fmean

import numpy as np
from jaxtyping import Bool

from i2cl.experiments.report.printed import printed_tables
from i2cl.experiments.report.results import Line, Results, outcome
from i2cl.experiments.report.tables import NO_RESULT, format_accuracy, format_interval, format_points
from i2cl.experiments.statistics import Difference, accuracy, difference
from i2cl.injections.temperature import TYPICAL_TEMPERATURE, log_softmax
from results_claims import OTHER_MODELS, claims, few_shot_with_prior, summary
from results_confidence import temperatures, thresholds
from results_figures import FIGURES
from results_tables import (
    LABELS,
    LARGER,
    MODELS,
    OURS,
    ROOT,
    against_first,
    against_ours,
    average,
    by_task,
    differences,
    find_line,
    find_lines,
    format_differences,
    is_complete,
    line_of,
    on_task,
    records,
    results,
    seeds,
    stored_values,
    table,
)

PAGES = ("docs/results.md", "docs/ablations.md", "docs/guide/confidence.md", "docs/does_it_hold.md")

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
"""Columns of the table by task."""

OTHERS = {
    "sentence_embeddings": "Sentence embeddings",
    "setfit": "SetFit",
    "Linear probe": "Linear probe of the LLM",
}
EMBEDDINGS = "sentence_embeddings"
LARGER_COLUMNS = (OURS, "Few-shot, label prior", "Zero-shot, label prior", "Zero-shot", EMBEDDINGS)
"""Columns of the larger model's table by task."""

ADAPTERS = ("LoRA", "LoRA, label prior", "IA3", "IA3, the paper's rate", "Prefix tuning, from newlines")
RIVALS = (
    "Task-vector",
    "ICV",
    "Label-anchor",
    "kNN prompting",
    "Noise vector",
    "I2CL",
    "I2CL, the paper's recipe",
    "I2CL, loss among labels, from the plain model",
    "Anchored, label prior",
    "Anchored, recompute all",
)
"""Rows of the tables of trained adapters and of the paper's baselines."""


def main() -> None:
    """Write every page and figure."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, draw in FIGURES.items():
        (ROOT / name).write_text(draw(), encoding="utf-8")


def fill(text: str) -> str:
    """Replace the generated parts of a page. Raises KeyError for an unknown marker."""
    part = re.compile(r"(<!-- ([\w-]+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
    return part.sub(lambda result: f"{result[1]}{PARTS[result[2]]()}\n{result[3]}", text)


# Parts of docs/results.md


def measured() -> str:
    """List the numbers of tasks, seeds, queries and cells of each model."""
    parts = []
    for model, (experiment, store) in (MODELS | {LARGER: ("larger", "qwen")}).items():
        result = results(experiment, store)
        parts.append(
            f"- {model}: {len(result.tasks)} tasks, {seeds(result, line_of(result, OURS))} seeds, at most "
            f"{result.setting.limit} queries per task; the store has {len(records(store)):,} cells."
        )
    return "\n".join(parts)


def verdicts() -> str:
    """Compare anchored calibration with every other row, on both models."""
    rows: list[list[str]] = []
    for model, (experiment, store) in MODELS.items():
        result = results(experiment, store)
        ours = line_of(result, OURS)
        lines = {name: line for name, line in find_lines(result, tuple(LABELS)).items() if name != OURS}
        lines = {name: line for name, line in lines.items() if is_complete(result, line)}
        cells = differences(result, {name: (ours, line) for name, line in lines.items()})
        own = [average(result, ours), "", "", "", stored_values(result, ours)]
        rows.append([f"**{model}**: {LABELS[OURS]}", *own])
        rows += [
            [LABELS[name], average(result, line), *cells[name], stored_values(result, line)]
            for name, line in lines.items()
        ]
    head = ["Row", "Mean", "Anchored minus row", "95 % interval", "q", "Stored values per task"]
    return table(head, rows)


def larger() -> str:
    """Compare anchored calibration with every other row on the larger model, whose rows differ in seeds."""
    result = results("larger", "qwen")
    ours = line_of(result, OURS)
    lines = {
        name: line
        for name, line in find_lines(result, tuple(LABELS)).items()
        if line != ours and 3 * len(result.tasks_of(line)) > 2 * len(result.tasks)
    }
    cells = differences(result, {name: (ours, line) for name, line in lines.items()})
    rows = [[f"**{LABELS[OURS]}**", average(result, ours), seeds(result, ours), "", "", ""]]
    rows += [
        [LABELS[name], average(result, line), seeds(result, line), *cells[name]]
        for name, line in lines.items()
    ]
    return table(["Row", "Mean", "Seeds", "Anchored minus row", "95 % interval", "q"], rows)


def losses() -> str:
    """List the tasks on which other rows have a higher mean than anchored calibration."""
    result, lines = results("real"), []
    ours = line_of(result, OURS)
    for name, line in find_lines(result, tuple(LABELS)).items():
        leads = {
            task: 100 * (theirs.mean - own.mean)
            for task in result.tasks
            if (theirs := result.accuracy(line, task)) and (own := result.accuracy(ours, task))
        }
        leads = {task: lead for task, lead in sorted(leads.items(), key=lambda one: -one[1]) if lead >= 0.05}
        if leads:
            where = ", ".join(f"{task} {lead:.1f}" for task, lead in leads.items())
            lines.append(f"- {LABELS[name]}: {where}.")
    return "\n".join(lines) or "No row is more accurate on any task."


@cache
def correct(
    result: Results, first: Line, second: Line | None, task: str
) -> Bool[np.ndarray, "seeds queries"]:
    """Whether a line, or its product with a second one, predicts each query correctly, for shared seeds.

    A product is computed from the stored scores, which have half precision; the first line's are tempered.
    """
    others = result.records(second or first, task)
    predictions = []
    for seed, record in result.records(first, task).items():
        if seed not in others:
            continue
        run, other = outcome(record), outcome(others[seed])
        best = np.array(run.predictions)
        if second is not None:
            if run.scores is None or other.scores is None or other.gold != run.gold:
                raise LookupError(f"{first.name} and {second.name} on {task}: no scores, or other queries")
            best = (
                log_softmax(run.scores.array, TYPICAL_TEMPERATURE) + log_softmax(other.scores.array)
            ).argmax(1)
        predictions.append(np.equal(best, run.gold))
    return np.stack(predictions)


def together() -> str:
    """Tabulate anchored calibration, sentence embeddings, and their product, by task."""
    result = results("real")
    ours, theirs = line_of(result, OURS), line_of(result, EMBEDDINGS)
    product = _product(result, ours, theirs, result.tasks)
    rows = [["**mean**", average(result, ours), average(result, theirs), product]]
    for task in result.tasks:
        product = _product(result, ours, theirs, (task,))
        rows.append([task, on_task(result, ours, task), on_task(result, theirs, task), product])
    many = results("many-labels")
    for task in many.tasks:
        for shots in (1, 5):
            ours, theirs = (
                next(line for line in many.lines if line.row.method == method and line.shots == shots)
                for method in ("anchored", EMBEDDINGS)
            )
            product = _product(many, ours, theirs, (task,))
            accuracies = (on_task(many, ours, task), on_task(many, theirs, task))
            rows.append([f"{task}, {shots} per class", *accuracies, product])
    return table(["Task", "Anchored calibration", "Sentence embeddings", "Both"], rows)


def products() -> str:
    """Compare products of anchored calibration with its factors, and with LoRA and SetFit."""
    result = results("real")
    ours = line_of(result, OURS)
    lines = {name: line_of(result, name) for name in OTHERS}
    pairs: dict[tuple[str, str], Difference | None] = {}
    for name, line in lines.items():
        pair = (ours, line), (ours, None)
        pairs[f"with {OTHERS[name]}", "Anchored calibration"] = _difference(result, *pair)
    for name, label in (("LoRA", "LoRA"), *OTHERS.items()):
        other = find_line(result, name)
        if other is not None:
            pair = (ours, lines[EMBEDDINGS]), (other, None)
            pairs[f"with {OTHERS[EMBEDDINGS]}", label] = _difference(result, *pair)
    rows = [[*names, *cells] for names, cells in format_differences(pairs).items()]
    return table(["Anchored calibration", "minus", "Difference", "95 % interval", "q"], rows, 2)


def _difference(result: Results, *pair: tuple[Line, Line | None]) -> Difference:
    ours, theirs = ([correct(result, *lines, task) for task in result.tasks] for lines in pair)
    return difference(ours, theirs)


def _product(result: Results, first: Line, second: Line, tasks: Sequence[str]) -> str:
    product = accuracy([correct(result, first, second, task) for task in tasks])
    return format_accuracy(product.mean, product.sd, product.seeds)


# Parts of docs/ablations.md


def table_1() -> str:
    """Compare the paper's Table 1 on SmolLM2 with the paper's numbers for Llama-2-7B on the same tasks."""
    result, paper = results("main-real"), printed_tables("main")[0]
    ours, rows = line_of(result, "I2CL"), []
    cells = differences(result, {line.name: (ours, line) for line in result.lines if line != ours})
    for line in result.lines:
        tasks = [paper.tasks.index(task) for task in result.tasks_of(line)]
        mean, i2cl_mean = (fmean(paper.rows[name].mean[at] for at in tasks) for name in (line.name, "I2CL"))
        in_paper = format_points((i2cl_mean - mean) / 100)
        comparison = [*cells[line.name], in_paper] if line != ours else [""] * 4
        rows.append([line.name, average(result, line), f"{mean:.1f}", *comparison])
    return table(["Row", "SmolLM2", "Paper", "I2CL minus row", "95 % interval", "q", "in the paper"], rows)


def shots(experiment: str = "anchored-shots") -> str:
    """Tabulate the accuracy by demonstrations per class; means are over all tasks or omitted."""
    result = results(experiment)
    counts = sorted({line.shots for line in result.lines if line.shots is not None})
    rows = []
    for row in result.rows:
        by_shots = {line.shots: line for line in result.lines if line.row is row}
        lines = [by_shots.get(count, by_shots.get(None)) for count in counts]
        tasks = [set() if line is None else set(result.tasks_of(line)) for line in lines]
        has_mean = [len(result.tasks) > 1 and one == set(result.tasks) for one in tasks]
        for task in (
            *([None] if any(has_mean) else []),
            *(one for one in result.tasks if any(one in present for present in tasks)),
        ):
            cells = [
                NO_RESULT
                if line is None or (task is None and not mean)
                else average(result, line)
                if task is None
                else on_task(result, line, task)
                for line, mean in zip(lines, has_mean, strict=True)
            ]
            if None in by_shots:  # the row uses no demonstrations
                cells = [cells[0], *[NO_RESULT] * (len(counts) - 1)]
            rows.append([row.name, task or "**mean**", *cells])
    return table(["Row", "Task", *map(str, counts)], rows, 2)


def second_model() -> str:
    """Tabulate the accuracy of the second model on every task."""
    result = results("real", "gemma")
    lines = find_lines(result, tuple(LABELS)[::-1])
    return by_task(result, {name: line for name, line in lines.items() if is_complete(result, line)})


def frequent() -> str:
    """Compare balanced with imbalanced (3 : 1) queries."""
    imbalanced, full = results("skewed", limit=100, skew=3), results("skewed")
    rows = []
    for line in imbalanced.lines:
        balanced = full if find_line(full, line.name) else results("skewed", limit=100)
        same = find_line(balanced, line.name)
        before, after = (balanced.accuracy(same) if same else None), imbalanced.accuracy(line)
        if same is None or before is None or after is None or before.seeds != after.seeds:
            continue
        loss, limit = 100 * (before.mean - after.mean), str(balanced.setting.limit)
        rows.append([line.name, average(balanced, same), limit, average(imbalanced, line), f"{loss:.1f}"])
    return table(["Row", "Balanced", "Queries", "3 : 1", "Loss"], rows)


def chat() -> str:
    """Compare the model's chat template with the plain prompt."""
    result, rows = results("chat", limit=100), []
    for line in result.lines:
        if ", chat" not in line.name:
            continue
        plain = find_line(result, line.name.replace(", chat", "", 1))
        difference = result.difference(line, plain) if plain is not None else None
        if plain is not None and difference is not None:
            cells = [format_points(difference.mean), format_interval(difference), str(difference.seeds)]
            rows.append([plain.name, average(result, line), *cells])
    return table(["Row", "Chat template", "Minus plain prompt", "95 % interval", "Seeds"], rows)


def greedy() -> str:
    """Tabulate how often plain greedy decoding generates a label."""
    path = ROOT / "docs/experiments/real/greedy.jsonl"
    answers = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    names = {
        "accuracy": "Accuracy among the labels",
        "greedy_right": "Greedy token correct",
        "greedy_is_a_label": "Greedy token is a label",
        "label_mass": "Probability of all labels",
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
    "by-task": lambda: by_task(results("real"), find_lines(results("real"), COLUMNS)),
    "verdicts": verdicts,
    "losses": losses,
    "larger": larger,
    "larger-by-task": lambda: by_task(
        results("larger", "qwen"), find_lines(results("larger", "qwen"), LARGER_COLUMNS)
    ),
    "together": together,
    "products": products,
    "table-1": table_1,
    "choices": lambda: against_first(results("anchored-ablations"), OURS),
    "i2cl-choices": lambda: against_first(results("real-ablations"), "I2CL"),
    "paper-ablations": lambda: against_first(results("paper-ablations"), "I2CL"),
    "texts": lambda: against_first(results("unlabelled"), "64 texts"),
    "texts-on-top": lambda: against_first(results("anchored-unlabelled"), "No prior"),
    "shots": shots,
    "curves": partial(shots, "curves"),
    "curves-tickets": partial(shots, "curves-tickets"),
    "many-labels": partial(shots, "many-labels"),
    "second-model": second_model,
    "adapters": lambda: against_ours(results("real"), ADAPTERS),
    "rivals": lambda: against_ours(results("real"), RIVALS),
    "fewer-queries": lambda: against_ours(results("real", limit=100), ("Prefix tuning", "Prompt tuning")),
    "frequent": frequent,
    "chat": chat,
    "greedy": greedy,
    "claims-summary": summary,
    "claims": claims,
    "claims-prior": few_shot_with_prior,
    "claims-elsewhere": partial(claims, OTHER_MODELS, tested=True),
}


if __name__ == "__main__":
    main()
