"""Synthetic records and reports whose numbers are known."""

import csv
import io
from html.parser import HTMLParser

import numpy as np

from i2cl.experiments.grid import Cell, Experiment, GridRow, Scale
from i2cl.experiments.records import COUNTS, Record, Run
from i2cl.experiments.report.document import build, csv_text

LLAMA = "meta-llama/Llama-2-7b-hf"
METHODS = {"Zero-shot": "zero_shot", "Few-shot (ICL)": "few_shot", "ICV": "icv", "I2CL": "i2cl"}


def grid(rows=("Zero-shot", "I2CL"), *, seeds=3, **fields):
    named = {name: GridRow(name=name, method=method) for name, method in METHODS.items()}
    named["Zero-shot"] = GridRow(name="Zero-shot", method="zero_shot", seeds=1)
    made = [row if isinstance(row, GridRow) else named[row] for row in rows]
    fields = {"views": ("tasks", "average", "comparison", "cost"), "title": "Trial", **fields}
    scale = Scale(seeds=seeds, limit=40)
    return Experiment(name="trial", measures="Accuracy.", rows=tuple(made), full=scale, **fields)


def record(method, task, seed, answers, model="reference", **more):
    """Build a record; ``answers`` is a string of 1 (correct) and 0, or booleans."""
    right = np.array([answer == "1" for answer in answers] if isinstance(answers, str) else answers)
    outcome = {name: more.pop(name) for name in tuple(more) if name in {*Run.model_fields, *COUNTS}}
    provenance = more.pop("provenance", {"i2cl": "0.1.0", "torch": "2.9", "device": "cpu"})
    cell = Cell(**{"model": model, "task": task, "method": method, "seed": seed, "limit": 40, **more})
    gold = tuple(place % 2 for place in range(len(right)))
    answers = tuple(int(place % 2 == ok) for place, ok in enumerate(right))
    result = {"accuracy": float(right.mean()), "macro_f1": 0.5, "gold": gold, "predictions": answers}
    result |= {"labels": ("a", "b"), "demonstrations": (0, 1), "fit_seconds": 1.0, "predict_seconds": 2.0}
    return message(cell, status="done", outcome=result | outcome, provenance=provenance)


def message(cell, **fields):
    return Record(key=cell.key, cell=cell, started="2025-01-02T03:04:05+00:00", **fields)


def failed(method, task, seed, error):
    cell = Cell(model="reference", task=task, method=method, seed=seed, limit=40)
    return message(cell, status="failed", error=error)


def changed(record, **update):
    """Return a record with fields of its outcome replaced."""
    return record.model_copy(update={"outcome": record.outcome.model_copy(update=update)})


def csv_lines(asked, made):
    """Rows of the report's CSV file."""
    return list(csv.DictReader(io.StringIO(csv_text(build([asked], made, {}, figures=False)))))


SEEDS = ("1111111000", "1111100000", "1111111111")
"""70, 50 and 100 % correct: mean 73.3, standard deviation 25.2."""


def trial():
    """Zero-shot: 40 % and 20 %. I2CL: 73.3 ± 25.2 and 50 ± 0, on average 61.7 ± 12.6."""
    made = [record("zero_shot", "sst2", 0, "1111000000"), record("zero_shot", "trec", 0, "1100000000")]
    for seed, answers in enumerate(SEEDS):
        made.append(record("i2cl", "sst2", seed, answers))
        made.append(record("i2cl", "trec", seed, "1111100000"))
    return made


def numbers(table, column):
    """Raw numbers of one column by row."""
    at = table.columns.index(column)
    return {row[0].text: row[at].numbers for row in table.rows if row[at].numbers}


def section(experiment, records):
    (only,) = build([experiment], records, {}, figures=False).sections
    return only


def table(view, experiment, records, place=0):
    """Build one of a view's tables, without computing the other views."""
    return section(experiment.model_copy(update={"views": (view,)}), records).tables[place].narrow


def texts(table):
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def cells(table):
    return {row[0].text: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}


def noted(table, part):
    result = [note for note in table.notes if part in note]
    assert len(result) == 1, table.notes
    return result[0]


def random(share, seed, queries=40):
    return np.random.default_rng(seed).random(queries) < share


def always_right(method="few_shot", tasks=("sst2", "trec"), wrong=("i2cl", "icv")):
    answers = {method: "1" * 40, **dict.fromkeys(wrong, "0" * 40)}
    return [record(one, task, seed, answers[one]) for one in answers for task in tasks for seed in range(4)]


def llama(method="i2cl", model=LLAMA, shares=(0.5, 0.5), tasks=("sst2", "trec"), **more):
    return [
        record(method, task, seed, random(share, [seed, len(task)]), model=model, **more)
        for task, share in zip(tasks, shares, strict=True)
        for seed in range(3)
    ]


class Page(HTMLParser):
    """Parse the tables of a page; fails on mismatched tags and scripts."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.addresses, self.ids, self.strong = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
        if "strong" in self.open:
            self.strong.append(data)
        assert "script" not in self.open
