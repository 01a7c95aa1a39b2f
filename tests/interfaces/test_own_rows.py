"""`i2cl fit` and `eval` on a user's file: what they report about its rows, and how they use them."""

import csv
import json
import re
from unittest.mock import Mock

import pytest
from rich.console import Console

from commands import jsonl
from i2cl import Injection, load_task
from i2cl.injections.temperature import TYPICAL_TEMPERATURE
from i2cl.interfaces.cli import console
from tiny import tiny_folder

ARABIC = [("لم يصل الطرد أبدا", "delivery"), ("تم خصم المبلغ مرتين", "billing")]
ROWS = [(f"ticket {number} about {word}", word) for number in range(12) for word in ("price", "login")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("home") / "model")


def write(path, rows):
    path.write_text(
        "".join(f"{text},{label}\n" for text, label in [("text", "label"), *rows]), encoding="utf-8"
    )
    return path


@pytest.fixture
def at_80(monkeypatch):
    monkeypatch.setattr(console, "out", Console(highlight=False, width=80))


def fitted(call, model, path, output, *more):
    quick = ("--set", "steps=1", "--set", "say_label=false")
    code, out, err = call("fit", model, path, "-o", output, *quick, *more)
    assert code == 0, err
    return out, err


def test_row_summary_is_part_of_json(call, model, tmp_path):
    path = write(tmp_path / "mine.csv", ROWS)
    out, _ = fitted(call, model, path, tmp_path / "new", "--json", "--evaluate", "4")
    record = json.loads(out)["rows"]
    assert record["labels"] == {"login": 12, "price": 12}
    assert (record["rows"], record["used"], record["kept_back"], record["shots"]) == (24, 18, 4, 9)
    assert record["estimated_seconds"] > 0
    assert record["estimated_evaluation_seconds"] > 0
    assert "--shots 9 --seed 0 --keep-back 5" in Injection.from_pretrained(tmp_path / "new").command


def test_rows_are_held_out_unless_all_are_requested(call, model, tmp_path, at_80):
    path = write(tmp_path / "mine.csv", ROWS)
    out, _ = fitted(call, model, path, tmp_path / "a")
    times = r"about \d+ s to fit, then about \d+ s to evaluate"
    used = rf"18 of 24 rows used, 6 held out to evaluate on: {times}; --shots 12 uses all, about \d+ s to fit"
    assert re.search(used, " ".join(out.split()))
    assert "on 6 training rows that are not demonstrations" in out
    out, _ = fitted(call, model, path, tmp_path / "b", "--shots", "12")
    assert "All 24 rows used: about 1 s to fit, then" in out
    out, _ = fitted(call, model, path, tmp_path / "d", "--shots", "all", "--evaluate", "0")
    assert re.search(r"^All 24 rows used: about \d+ s\.", out, re.M)
    assert "--shots all " in Injection.from_pretrained(tmp_path / "d").command
    out, _ = fitted(call, model, path, tmp_path / "c", "--keep-back", "3", "--evaluate", "0")
    assert "16 of 24 rows used" in out


def test_ctrl_c_during_evaluation_keeps_the_artefact(call, model, tmp_path, monkeypatch):
    scoring = "i2cl.experiments.fitting.evaluate_fit"
    monkeypatch.setattr(scoring, Mock(side_effect=KeyboardInterrupt))
    path = write(tmp_path / "mine.csv", ROWS)
    code, _, err = call("fit", model, path, "-o", tmp_path / "new", "--set", "steps=1")
    assert (code, f"{tmp_path / 'new'} is saved but not evaluated" in err) == (130, True)
    assert not Injection.from_pretrained(tmp_path / "new").evaluation


def test_cross_validation_time_is_announced(call, model, tmp_path):
    path = write(tmp_path / "mine.csv", ROWS[:12])
    out, _ = fitted(call, model, path, tmp_path / "a")
    times = r"about \d+ s to fit, then about \d+ s to cross-validate"
    assert re.search(rf"^All 12 rows used: {times}\.$", out, re.M)
    out, _ = fitted(call, model, path, tmp_path / "b", "--evaluate", "0")
    assert re.search(r"^All 12 rows used: about \d+ s\.$", out, re.M)


def test_shots_beyond_the_rows_of_a_class_are_reported(call, model, tmp_path):
    path = write(tmp_path / "mine.csv", ROWS[:-1])
    _, err = fitted(call, model, path, tmp_path / "new", "--evaluate", "0", "--shots", "12")
    assert "fewer than 12 rows, all of which are used: login (11)" in err


def test_a_fit_without_evaluation_gets_the_typical_temperature(call, model, tmp_path):
    path = write(tmp_path / "mine.csv", ROWS)
    fitted(call, model, path, tmp_path / "new", "--evaluate", "0")
    assert Injection.from_pretrained(tmp_path / "new").temperature == TYPICAL_TEMPERATURE
    path = write(tmp_path / "one.csv", ROWS[:2])
    fitted(call, model, path, tmp_path / "one", "--evaluate", "0")
    assert Injection.from_pretrained(tmp_path / "one").temperature == 1


def test_unknown_language_is_reported(call, model, tmp_path):
    rows = [(f"{text} {number}", label) for number in range(6) for text, label in ARABIC]
    path = write(tmp_path / "mine.csv", rows)
    _, err = fitted(call, model, path, tmp_path / "new", "--evaluate", "0")
    assert re.search(r"needs \d\.\d tokens per character of these texts", err)


def test_class_weights_reach_the_fit_and_the_recorded_command(call, model, tmp_path):
    path = write(tmp_path / "mine.csv", [*ROWS[:6], ROWS[7]])
    more = ("--class-weight", "balanced", "--evaluate", "0")
    fitted(call, model, path, tmp_path / "weighted", *more)
    fitted(call, model, path, tmp_path / "plain", "--evaluate", "0")
    weighted, plain = (Injection.from_pretrained(tmp_path / name) for name in ("weighted", "plain"))
    assert weighted.settings["class_weight"] == "balanced"
    assert "--class-weight balanced" in weighted.command
    assert not weighted.context.equal(plain.context)


@pytest.mark.parametrize("weights", ["even", ""])
def test_invalid_class_weights_are_rejected(refused, model, tmp_path, weights):
    path = write(tmp_path / "mine.csv", ROWS)
    message = refused("fit", model, path, "-o", tmp_path / "new", "--class-weight", weights)
    assert "give 'balanced', or a number for each label" in message


def test_bad_rows_are_reported_or_skipped(call, refused, model, tmp_path):
    path = write(tmp_path / "mine.csv", [*ROWS, ("", "price"), ("x", ""), (" ", "login")])
    line = refused("fit", model, path, "-o", tmp_path / "new")
    empty = "3 of 27 rows cannot be used: rows 26 and 28: the text is empty"
    for part in (empty, "row 27: the label is empty", "--skip-bad-rows"):
        assert part in line
    out, err = fitted(call, model, path, tmp_path / "new", "--skip-bad-rows", "--evaluate", "0")
    assert err.startswith(f"note: {path}: 3 of 27 rows are skipped")
    assert "All 24 rows used" in out


@pytest.mark.parametrize("first", [-1, 0, 1])
def test_numeric_labels_can_be_named(call, model, tmp_path, first):
    rows = [(text, str(first + place % 2)) for place, (text, _) in enumerate(ROWS)]
    path = write(tmp_path / "stars.csv", rows)
    out, _ = fitted(call, model, path, tmp_path / "a", "--evaluate", "0")
    line = f"The labels are numbers: name them for the model with --labels 'NAME={first},NAME={first + 1}'."
    assert line in " ".join(out.split())
    named = ("--labels", f"poor={first},good={first + 1}")
    out, _ = fitted(call, model, path, tmp_path / "b", "--evaluate", "0", *named)
    assert "Labels: poor 12, good 12." in out
    assert "The labels are numbers" not in out


BOOLEANS = [(text, str(place % 2 == 0)) for place, (text, _) in enumerate(ROWS)]


def test_boolean_labels_are_named_by_name_code_pairs(call, model, tmp_path):
    path = write(tmp_path / "bools.csv", BOOLEANS)
    pairs = ["--labels", "good=True, bad=False"]
    out, _ = fitted(call, model, path, tmp_path / "new", "--evaluate", "0", *pairs)
    assert "Labels: good 12, bad 12." in out
    assert Injection.from_pretrained(tmp_path / "new").task.labels == ("good", "bad")


def test_test_rows_among_the_demonstrations_are_reported(call, model, tmp_path):
    path = write(tmp_path / "mine.csv", ROWS)
    test = write(tmp_path / "test.csv", [*ROWS[:3], ("a new price", "price"), ("a new login", "login")])
    _, err = fitted(call, model, path, tmp_path / "new", "--test", test)
    assert "3 of 5 rows of --test have the text of a demonstration: they are not evaluated" in err


def test_suggested_labels_merge_spellings_in_other_case(call, model, tmp_path):
    rows = [(f"text {number}", ("good", "bad")[number % 2]) for number in range(8)]
    path = write(tmp_path / "case.csv", [*rows, ("one", "GOOD")])
    out, _ = fitted(call, model, path, tmp_path / "new", "--evaluate", "0")
    assert "! To merge labels that differ in case only: --labels bad,good." in out
    out, _ = fitted(call, model, path, tmp_path / "new", "--evaluate", "0", "--labels", "bad,good")
    assert "Labels: bad 4, good 5." in out
    assert "!" not in out


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("True=good,False=bad", "write NAME=CODE, such as --labels good=True,bad=False"),
        ("good=True,False", "'False' is not NAME=CODE: write all as NAME=CODE"),
        ("good=True,bad=", "'bad=' is not NAME=CODE"),
        ("good=True,bad=True", "'good' and 'bad' have the same code 'True': choose one"),
        ("good=True,good=False", "give at least two"),
    ],
)
def test_invalid_name_code_pairs_are_rejected(refused, model, tmp_path, labels, message):
    path = write(tmp_path / "bools.csv", BOOLEANS)
    assert message in refused("fit", model, path, "-o", tmp_path / "new", "--labels", labels)


def test_unknown_suffix_is_reported_before_column_options(refused, tmp_path):
    path = tmp_path / "tweets.txt"
    path.write_text("Tweet\tMood\nx\tgood\n")
    message = refused("fit", "reference", path, "-o", tmp_path / "new", "--text-column", "Tweet")
    assert f"{path}: cannot read files ending in '.txt': use one of .toml, .csv, .tsv" in message


def test_single_further_contradiction_is_singular(call, model, tmp_path):
    rows = [(f"text {row}", label) for row in range(6) for label in ("good", "bad")]
    path = write(tmp_path / "mine.csv", rows)
    out, _ = fitted(call, model, path, tmp_path / "new", "--evaluate", "0")
    assert "! 1 more text has several labels." in out


def test_name_code_pairs_are_rejected_for_built_in_tasks(refused, tmp_path):
    words = ["fit", "reference", "mood-colour-1", "-o", tmp_path / "new", "--labels", "good=True,bad=False"]
    assert "apply only to a file of rows" in refused(*words)


def test_sizes_are_checked_before_the_model_is_loaded(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("i2cl.interfaces.cli.load.decoder", lambda *_: pytest.fail("the model was read"))
    path = write(tmp_path / "many.csv", [(f"text {row}", "ab"[row % 2]) for row in range(17000)])
    bundled = "fit", "reference", "mood-colour-1", "-o", tmp_path / "new"
    assert "--keep-back needs rows from a file" in refused(*bundled, "--keep-back", "3")
    assert "leave them out" in refused(*bundled, "--text-column", "body")
    assert "it needs {text}" in refused("fit", "reference", path, "--template", "", "-o", tmp_path / "new")
    for shots in ("0", "-1", "2.5", "every"):
        err = refused("fit", "reference", path, "-o", tmp_path / "new", "--shots", shots)
        assert f"'{shots}' is neither a positive integer nor 'all'" in err
    assert "give fewer of each" in refused("fit", "reference", path, "-o", tmp_path / "new", "--shots", "all")
    err = refused("fit", "reference", path, "-o", tmp_path / "new", "--shots", "8500")
    assert "takes up to 16384 examples, not 17000: give fewer of each class (--shots)" in err
    path = write(tmp_path / "labels.csv", [(f"text {row}", f"label {row}") for row in range(5000)])
    message = refused("fit", "reference", path, "-o", tmp_path / "new")
    assert "anchored calibration takes up to 4096 labels, not 5000" in message
    assert "use sentence_embeddings" in message


def test_eval_continues_if_a_method_cannot_run(call, model, tmp_path, at_80):
    path = write(tmp_path / "mine.csv", ROWS)
    words = ["eval", model, path, "--test", path, "--workers", "1", "--shots", "2", "--limit", "4"]
    code, out, err = call(*words, "--method", "cepe,zero_shot", "--seeds", "2")
    assert (code, err) == (0, "")
    assert re.search(r"^ mine +zero_shot +[\d.]+ ± [\d.]+ ", out, re.M)
    assert re.search(r"^ mine +cepe +not run ", out, re.M)
    assert "cepe was not run on mine: " in out
    code, out, _ = call(*words, "--method", "cepe,zero_shot", "--json")
    ran, lacking = json.loads(out)
    assert (code, ran["method"], lacking["method"]) == (0, "zero_shot", "cepe")
    assert "not_run" in lacking
    code, out, err = call(*words, "--method", "cepe")
    assert (code, out, err.count("error: ")) == (2, "", 1), "with nothing to show it is an error"


def test_unknown_model_without_hub_is_a_one_line_error(refused, monkeypatch, tmp_path):
    asked = Mock(side_effect=ConnectionError("Name or service not known"))
    again = Mock(side_effect=AssertionError("the client, which retries, was called"))
    monkeypatch.setattr("i2cl.storage.hub.get_hf_file_metadata", asked)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", again)
    line = refused("fit", "smollm3", "mood-colour-1", "-o", tmp_path / "new", "--shots", "1")
    assert asked.call_count == 1
    assert line.startswith("error: model 'smollm3' is not a folder")
    assert "did you mean 'smollm2'?" in line


FIGURES = {"accuracy (95 %)": "0.381 (0.310\u20130.458)", "fit s": "0.0", "ms/query": "123.74"}
METHODS = ("zero_shot", "zero_shot+batch_calibration", "few_shot")
TABLE = [{"method": name} | FIGURES | {"bytes": 35896320} for name in METHODS]
LONG = [{"task": "mood-colour-1", "method": "zero_shot+contextual_calibration"} | FIGURES]


@pytest.mark.parametrize("rows", [TABLE, LONG, [{"name": "a", "what": "many words " * 20}]])
@pytest.mark.parametrize("width", [120, 80, 60])
def test_no_cell_of_a_table_breaks_a_word(capsys, monkeypatch, rows, width):
    monkeypatch.setattr(console, "out", Console(highlight=False, width=width))
    console.print_table("", rows)
    shown = set(capsys.readouterr().out.replace("+", "+ ").split())
    for row in rows:
        for name, cell in row.items():
            assert {*name.split(), *str(cell).replace("+", "+ ").split()} <= shown


def test_table_of_a_fit_fits_into_80_columns(capsys, monkeypatch, at_80):
    console.print_table("", TABLE)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.strip()]) == 2 + len(TABLE), "each row is one line"


def test_texts_are_printed_literally_and_paths_are_quoted(call, model, tmp_path):
    path = write(tmp_path / "a.csv", [(f"text {row}", (":joy:", ":100:")[row % 2]) for row in range(6)])
    folder = tmp_path / "my task"
    code, out, _ = call("fit", model, path, "-o", folder, "--evaluate", "0")
    assert (code, ":100: 3, :joy: 3" in out) == (0, True), out
    assert f"Next: i2cl predict '{folder}' FILE" in out.replace("\n", " ")
    assert "--output 'my task'" in (folder / "README.md").read_text()


@pytest.mark.parametrize("prior", [False, True])
def test_order_of_labels_changes_no_answer(call, model, tmp_path, prior):
    """Real tickets, whose label ids are in two orders; with ``--unlabelled``, also unequal shares."""
    tickets = load_task("tickets")
    shown, texts = tickets.sample(3, 0), [row.text for row in tickets.test[:32]]
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    shares, answers = (0.4, 0.3, 0.2, 0.1), []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        folder = tmp_path / "".join(map(str, order))
        rows = [{"text": row.text, "label": order.index(row.label)} for row in shown]
        path = jsonl(folder.with_suffix(".jsonl"), rows)
        options = ["--labels", ",".join(tickets.labels[label] for label in order), "--shots", "all"]
        if prior:
            options += ["--unlabelled", tmp_path / "texts.txt"]
            options += ["--prior", ",".join(str(shares[label]) for label in order)]
        code, _, err = call("fit", model, path, "-o", folder, "--set", "steps=3", "--evaluate", "0", *options)
        assert code == 0, err
        assert (Injection.from_pretrained(folder).label_bias is not None) is prior
        code, out, err = call("predict", folder, tmp_path / "texts.txt")
        assert code == 0, err
        answers.append(list(csv.DictReader(out.splitlines(), delimiter="\t")))
    for first, second in zip(*answers, strict=True):
        assert first["label"] == second["label"]
        for word in tickets.labels:
            assert float(first[word]) == pytest.approx(float(second[word]), abs=2e-4)
