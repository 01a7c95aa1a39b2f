"""`i2cl suggest` and `i2cl review`: what they read, write, print and refuse."""

import csv
import json
import re
import shlex

import pytest

from commands import jsonl, listed
from i2cl import Task, Template
from i2cl.interfaces.cli import console
from i2cl.interfaces.cli.label import _prompt_of
from i2cl.tasks.template import DEFAULT_TEMPLATE

PEOPLE, VERBS = ("cook", "baker", "singer", "nurse", "farmer", "waiter"), ("rested", "stood")
TEXTS = [f"the {mood} {who} {did}" for mood in ("sad", "glad") for who in PEOPLE for did in VERBS]
NEW = ("suggest", "reference", "texts.txt", "--labels", "blue,red", "-n", 4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in [*TEXTS, *TEXTS]), encoding="utf-8")
    return tmp_path


def table(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_label_fit_suggest_again_and_review(folder, stdout, refused):
    out = stdout(*NEW, "-o", "first.csv")
    assert out.splitlines() == [
        "Saved first.csv: 4 texts to label, chosen from 24.",
        "Next: fill in the column label, then i2cl fit reference first.csv --labels blue,red -o TASK",
    ]
    rows = table(folder / "first.csv")
    assert [set(row) for row in rows] == [{"text", "label", "suggested", "probability"}] * 4
    assert {row["label"] for row in rows} == {""}
    assert {row["suggested"] for row in rows} <= {"blue", "red"}
    assert "the label is empty" in refused("fit", "reference", "first.csv", "-o", "mood")
    for row in rows:
        row["label"] = "red" if "glad" in row["text"] else "blue"
    labels = [*rows, {"text": "a sad day", "label": "blue"}, {"text": "a glad day", "label": "red"}]
    jsonl(folder / "labelled.jsonl", [{key: row[key] for key in ("text", "label")} for row in labels])
    stdout("fit", "reference", "labelled.jsonl", "-o", "mood", "--evaluate", 0)
    again = ("suggest", "mood", "texts.txt", "--labelled", "labelled.jsonl", "-n", 3)
    out = stdout(*again, "-o", "second.csv")
    assert out.startswith("Saved second.csv: 3 texts to label after 6 labelled rows, chosen from 20.\n")
    second = table(folder / "second.csv")
    assert [row["label"] for row in second] == [row["label"] for row in labels] + [""] * 3
    assert not {row["text"] for row in second[6:]} & {row["text"] for row in labels}
    chosen = json.loads(stdout(*again, "-o", "third.csv", "--json"))["suggestions"]
    assert [one["text"] for one in chosen] == [row["text"] for row in second[6:]]
    assert (folder / "second.csv").read_bytes() == (folder / "third.csv").read_bytes()
    every = jsonl(folder / "every.jsonl", [{"text": text, "label": "red"} for text in TEXTS])
    out = refused("suggest", "mood", "texts.txt", "--labelled", every, "-n", 1, "-o", "fourth.csv")
    assert "every text of texts.txt is labelled" in out


def test_next_command_of_suggest_keeps_the_prompt_and_the_model_options(folder, stdout):
    prompt = ("--template", "Note: {text}\\nMood: {label}", "--instruction", "Sort.", "--dtype", "float32")
    out = stdout(*NEW[:4], "blue=b,red=r", *NEW[5:], *prompt, "-o", "first.csv")
    command = out.splitlines()[-1].removeprefix("Next: fill in the column label, then ")
    words = ["i2cl", "fit", "reference", "first.csv", "--labels", "blue,red", *prompt, "-o", "TASK"]
    assert shlex.split(command) == words


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (Template(DEFAULT_TEMPLATE), []),
        (
            Template("{text}\n= {label}").with_instruction("Sort."),
            ["--template", "{text}\\n= {label}", "--instruction", "Sort."],
        ),
        (
            Template("[{text}]{label}", "<end>", "Sort."),
            ["--chat", "--instruction", "Sort."],
        ),
    ],
)
def test_next_command_of_suggest_has_the_prompt_of_a_fitted_task(template, options):
    task = Task("mood", ("blue", "red"), template)
    command = "i2cl fit reference rows.csv --chat --instruction Sort. --shots 2"
    assert _prompt_of(task, command) == options


def test_review_announces_its_time_and_shows_that_it_scores_rows(folder, call, stdout, monkeypatch):
    monkeypatch.setattr(console, "SHORT_S", 0.0)
    rows = [{"text": text, "label": "red" if "glad" in text else "blue"} for text in TEXTS]
    jsonl(folder / "labelled.jsonl", rows)
    stdout("fit", "reference", "labelled.jsonl", "-o", "mood", "--evaluate", 0, "--set", "steps=1")
    stages = []
    monkeypatch.setattr(console.Bar, "advance_stage", lambda _, *stage: stages.append(stage))
    code, _, err = call("review", "mood", "labelled.jsonl", "--folds", 2)
    assert code == 0
    assert {stage[:2] for stage in stages} == {("scoring rows", len(rows))}
    assert sum(amount for *_, amount in stages) == len(rows)
    assert re.fullmatch(r"expected time: about \d+ s\n", err)


def test_labels_without_a_text_are_named(folder, stdout, refused):
    rows = [{"text": "a sad day", "label": "blue"}, {"text": "a glad day", "label": "red"}]
    jsonl(folder / "few.jsonl", rows)
    words = ("suggest", "reference", "texts.txt", "--labels", "blue,red,green,grey", "-n", 4)
    assert "No text has" not in stdout(*words, "-o", "first.csv")
    words = (*words, "--labelled", "few.jsonl")
    line = "No text has the label 'green' or 'grey' yet: label one, or fit without it."
    assert line in stdout(*words, "-o", "second.csv").splitlines()
    assert json.loads(stdout(*words, "-o", "third.csv", "--json"))["labels_without_text"] == ["green", "grey"]
    fit = ("fit", "reference", "few.jsonl", "--labels", "blue,red,green,grey", "-o", "mood")
    assert "no text has the label 'green' or 'grey': add texts with them" in refused(*fit)
    assert not (folder / "mood").exists()


def test_review_lists_the_flipped_row_and_changes_none(folder, stdout, refused, monkeypatch):
    rows = [("red" if "glad" in text else "blue", text) for text in TEXTS]
    rows[3] = ("red", rows[3][1])
    content = "label,text\n" + "".join(f"{label},{text}\n" for label, text in rows)
    (folder / "labelled.csv").write_text(content, encoding="utf-8")
    stdout("fit", "reference", "labelled.csv", "-o", "mood", "--evaluate", 0)
    out = stdout("review", "mood", "labelled.csv", "--folds", 2)
    assert out.startswith("1 of 24 labels may be wrong, worst first:\n")
    assert "row 5  red    blue" in out
    result = json.loads(stdout("review", "mood", "labelled.csv", "--folds", 2, "--json"))
    assert result["rows"] == 24
    assert [(one["row"], one["where"], one["suggested"]) for one in result["issues"]] == [
        (3, "row 5", "blue")
    ]
    assert (folder / "labelled.csv").read_text(encoding="utf-8") == content
    assert listed(folder) == ["labelled.csv", "mood", "texts.txt"]
    (folder / "one.csv").write_text("text,label\na,red\nb,red\n", encoding="utf-8")
    assert "fewer than two labels have two texts or more" in refused("review", "mood", "one.csv")
    monkeypatch.setattr("i2cl.interfaces.cli.label.rows_or_errors", lambda *_: [])
    assert "labelled.csv changed while it was read" in refused("review", "mood", "labelled.csv")


def test_review_names_each_of_two_equal_rows_and_skips_a_list(folder, stdout):
    rows = [{"text": text, "label": "red" if "glad" in text else "blue"} for text in TEXTS]
    rows[3:3] = [{"text": ["a", "list"], "label": "red"}, *[{"text": TEXTS[0], "label": "red"}] * 2]
    jsonl(folder / "labelled.jsonl", [row for row in rows if isinstance(row["text"], str)])
    quick = ("--evaluate", 0, "--experts", "tfidf")
    stdout("fit", "reference", "labelled.jsonl", "-o", "mood", *quick)
    jsonl(folder / "labelled.jsonl", rows)
    issues = json.loads(stdout("review", "mood", "labelled.jsonl", "--skip-bad-rows", "--json"))["issues"]
    assert [one["where"] for one in issues if one["label"] == "red"] == ["line 5", "line 6"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*NEW[:3], "-o", "new.csv"), "'reference' is a model, not a fitted task: name the labels"),
        ((*NEW[:4], "blue", "-o", "new.csv"), "has 1 label word(s), blue: give at least two"),
        ((*NEW[:4], "blue=b,red", "-o", "new.csv"), "'red' is not NAME=CODE"),
        ((*NEW[:4], "blue,,red", "-o", "new.csv"), "label word '' is empty"),
        ((*NEW, "-o", "texts.txt"), "'texts.txt' exists and may hold your labels"),
        ((*NEW[:-1], 25, "-o", "new.csv"), "texts.txt has 24 distinct texts without a label, fewer than 25"),
        (("suggest", "reference", "no.csv", *NEW[3:], "-o", "new.csv"), "no.csv"),
        (("suggest", "reference", "broken.csv", *NEW[3:], "-o", "new.csv"), "broken.csv row 3: 2 cells but"),
        (("review", "texts.txt", "texts.txt"), "'texts.txt' is not an artefact"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(folder, refused, monkeypatch, words, message):
    monkeypatch.setattr("i2cl.interfaces.cli.load.decoder", None)
    (folder / "broken.csv").write_text("text\na\nb,c\n", encoding="utf-8")
    assert message in refused(*words)
    assert listed(folder) == ["broken.csv", "texts.txt"]


def test_bad_rows_are_skipped_on_request(folder, call):
    (folder / "gaps.csv").write_text(
        "text\n" + "".join(f"{text}\n" for text in [*TEXTS, '""']), encoding="utf-8"
    )
    words = ("suggest", "reference", "gaps.csv", *NEW[3:], "-o", "new.csv")
    assert call(*words)[0] == 2
    code, _, err = call(*words, "--skip-bad-rows")
    assert (code, err) == (0, "gaps.csv: skipped 1 rows without a usable text\n")
