"""The command line, run in process: fit, predict, eval, check, ls."""

import io
import json
import os
import re
import sys
import warnings
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from commands import jsonl, listed, run
from i2cl import METHODS, Decoder, Injection, with_label_prior, with_temperature
from i2cl.experiments.confidence import NAMES
from i2cl.experiments.evidence.fit_evaluation import BASELINES
from i2cl.interfaces.cli import console
from i2cl.models.memory import MemoryWarning
from processes import COMMAND, Program, start
from tiny import tiny_folder

TEMPLATE = r"Review: {text}\nSentiment:{label}"
LABELS = ("negative", "positive")


def rows(count, start=0):
    numbers = range(start, start + count)
    return [{"text": f"film {n} is {('bad', 'good')[n % 2]}", "label": LABELS[n % 2]} for n in numbers]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, training and test rows, and an artefact fitted by the command line."""
    folder = tmp_path_factory.mktemp("home")
    tiny_folder(folder / "model")
    jsonl(folder / "films.jsonl", rows(16))
    jsonl(folder / "test.jsonl", rows(12, start=16))
    assert run(*fit_arguments(folder, folder / "artefact", "--seed", "3")) == 0
    return folder


def fit_arguments(home, output, *more):
    task = ["fit", str(home / "model"), str(home / "films.jsonl"), "-o", str(output)]
    return [*task, "--template", TEMPLATE, "--shots", "2", "--set", "epochs=2", *more]


def eval_arguments(home, *more, task=None):
    task = [str(task or home / "films.jsonl"), "--test", str(home / "test.jsonl"), "--template", TEMPLATE]
    return ["eval", str(home / "model"), *task, "--shots", "2", "--workers", "1", *more]


def parsed(out):
    """Return labels and probabilities from tab-separated output."""
    header, *lines = [line.split("\t") for line in out.splitlines()]
    assert header == ["label", *LABELS]
    return [line[0] for line in lines], torch.tensor([[float(value) for value in line[1:]] for line in lines])


@pytest.mark.parametrize("text", [r"C:\dir\[bold]x", "[red]x[/red]", "[/]", "a [1] b", "ends with \\"])
def test_markup_in_text_is_printed_literally(text, capsys):
    console.print_error(text)
    with console.plain_warnings():
        warnings.warn(MemoryWarning(text), stacklevel=1)
    assert capsys.readouterr().err == f"error: {text}\nwarning: {text}\n"
    console.print_table("", [{text: text}])
    assert capsys.readouterr().out.count(text) == 2


def test_fit_json_describes_the_artefact(call, home, tmp_path):
    code, out, err = call(*fit_arguments(home, tmp_path / "new", "--json", "--set", "formula=add"))
    assert (code, err) == (0, "")
    record = json.loads(out)
    injection = Injection.from_pretrained(tmp_path / "new")
    assert record["method"] == "i2cl"
    assert record["labels"] == list(injection.task.labels) == list(LABELS)
    assert record["demonstrations"] == injection.demonstrations == 4
    assert (record["first_loss"], record["last_loss"]) == injection.history
    assert record["cached_values"] == injection.context.numel()
    assert injection.settings["formula"] == "add"
    assert listed(tmp_path) == ["new"]


def test_fit_prints_evaluation_and_verdict(call, home, tmp_path):
    arguments = fit_arguments(home, tmp_path / "new")
    message, out = (call(*arguments, *more)[1] for more in (["--json"], []))
    record = json.loads(message)
    evaluation = record["evaluation"]
    assert (evaluation["rows"], evaluation["split"]) == (12, "train")  # of 16 rows, 4 are demonstrations
    assert list(evaluation["methods"]) == [*BASELINES, "i2cl", "ensemble"]
    assert evaluation["methods"]["ensemble"]["accuracy"] == record["metrics"]["accuracy"]
    assert evaluation["methods"]["i2cl"]["fit_seconds"] == record["fit_seconds"]
    kept = Injection.from_pretrained(tmp_path / "new").evaluation
    assert kept["verdict"] == evaluation["verdict"]  # what is timed differs
    saved = f"Saved {tmp_path / 'new'}: films by i2cl with tfidf, 4 demonstrations, loss "
    assert out.split("\n\n")[1].startswith(saved)
    words = out.split()
    assert set(words) >= evaluation["methods"].keys()
    score = evaluation["methods"]["few_shot"]
    for part in (
        f"{score['accuracy']:.3f} ({score['low']:.3f}–{score['high']:.3f})",
        *("on 12 training rows that are not demonstrations", "needs the whole batch"),
        f"Verdict: {evaluation['verdict']}.\nAdvice: {evaluation['advice']}.",
    ):
        assert part in out
    card = (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    assert kept["verdict"] in card
    assert f"| {evaluation['methods']['few_shot']['cached_bytes']} |" in card
    assert f"Advice: {kept['advice']}." in card
    arguments = fit_arguments(home, tmp_path / "new", "--test", str(home / "test.jsonl"), "--json")
    evaluation = json.loads(call(*arguments, "--evaluate", "6")[1])["evaluation"]
    assert (evaluation["rows"], evaluation["split"]) == (6, "test")  # where there are some


@pytest.mark.parametrize("folds", [(), ("--shots", "8")])
def test_fit_compares_with_further_methods(call, home, tmp_path, folds):
    arguments = fit_arguments(home, tmp_path / "new", "--json", *folds)
    compared = ["menu", "menu_few_shot", "few_shot+contextual_calibration"]
    code, out, err = call(*arguments, "--compare", ", ".join(compared))
    assert code == 0, err
    evaluation = json.loads(out)["evaluation"]
    compared[-1] = "contextual_calibration"
    assert set(compared) | set(BASELINES) | {"i2cl"} <= set(evaluation["methods"])
    assert "--compare" in Injection.from_pretrained(tmp_path / "new").command
    card = (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in card for name in compared)
    assert ("16 labelled rows by cross-validation" in card) == bool(folds)
    assert ("no held-out rows of every label: running 3-fold cross-validation" in err) == bool(folds)


def test_fit_lists_compared_methods_that_fail(call, home, tmp_path):
    arguments = fit_arguments(home, tmp_path / "new", "--compare", "menu+label_prior")
    code, out, err = call(*arguments)
    assert code == 0, err
    assert "menu+label_prior was not run: label_prior needs 32 training texts" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "menue"], "unknown method 'menue': did you mean 'menu'"),
        (["--compare", "few_shot"], "--compare: the table already has a row 'few_shot': leave it out"),
        (["--compare", "i2cl"], "--compare: the table already has a row 'i2cl': leave it out"),
        (["--compare", "menu,menu"], "--compare: the table already has a row 'menu': leave it out"),
        (["--compare", "menu", "--evaluate", "0"], "--compare needs an evaluation: leave out --evaluate 0"),
    ],
)
def test_fit_refuses_methods_that_it_cannot_compare_with(refused, home, tmp_path, options, message):
    assert message in refused(*fit_arguments(home, tmp_path / "new", *options))
    assert not (tmp_path / "new").exists()


def test_fit_without_evaluation_rows_says_how_to_add_some(call, home, tmp_path):
    arguments = fit_arguments(home, tmp_path / "new", "--shots", "1")
    single = [{"text": word, "label": word} for word in ("positive", "negative")]
    arguments[2] = str(jsonl(tmp_path / "single.jsonl", single))
    why = "a refit would not know the label 'negative' or 'positive': give two texts per label"
    (line,) = [line for line in call(*arguments)[1].splitlines() if line.startswith("Not evaluated")]
    assert line == f"Not evaluated: {why}, or give rows with --test FILE."
    assert json.loads(call(*arguments, "--json")[1])["evaluation"] is None
    assert Injection.from_pretrained(tmp_path / "new").evaluation == {}


def test_evaluate_0_skips_evaluation(call, home, tmp_path):
    arguments = fit_arguments(home, tmp_path / "new", "--evaluate", "0")
    assert "Verdict" not in call(*arguments)[1]
    record = json.loads(call(*arguments, "--json")[1])
    assert (record["evaluation"], record["metrics"]) == (None, {})


def test_fit_continues_if_few_shot_exceeds_the_context(stdout, home, tmp_path):
    tiny_folder(tmp_path / "short", max_position_embeddings=40)
    task = ["fit", tmp_path / "short", home / "films.jsonl", "-o", tmp_path / "new", "--template", TEMPLATE]
    out = stdout(*task, "--shots", "2", "--set", "epochs=1")
    assert "not run" in next(line for line in out.splitlines() if line.startswith(" few_shot"))
    assert "few_shot was not run: one demonstration per class" in out
    assert "holds 40" in Injection.from_pretrained(tmp_path / "new").evaluation["not_run"]["few_shot"]


def test_terminal_shows_each_stage_of_a_fit(call, home, tmp_path, monkeypatch):
    seen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=seen, force_terminal=True, width=500))
    assert call(*fit_arguments(home, tmp_path / "new", "--evaluate", "0"))[0] == 0
    words = ("PyTorch", f"loading {home / 'model'}", "extracting", "loss")
    value = [seen.getvalue().find(one) for one in words]
    assert -1 < value[0] < value[1] < value[2] < value[3]


def test_unlabelled_texts_may_come_from_stdin(call, home, tmp_path, monkeypatch):
    lines = "".join(f"film {number}\n" for number in range(40)) + "\nlast\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines.encode())))
    quick = ("--set", "epochs=1", "--evaluate", "0", "--skip-bad-rows")
    code, _, err = call(*fit_arguments(home, tmp_path / "new", *quick, "--unlabelled", "-"))
    assert code == 0, err
    assert "skipped 1 rows without a usable text" in err
    assert Injection.from_pretrained(tmp_path / "new").settings["label_prior"]["texts"] == 41


def test_label_prior_is_fitted_saved_and_used_by_predict(call, home, tmp_path):
    texts = tmp_path / "texts.csv"
    texts.write_text("text,mark\n" + "".join(f"film {number},x\n" for number in range(40)), encoding="utf-8")
    arguments = fit_arguments(home, tmp_path / "new", "--seed", "3", "--unlabelled", texts)
    code, out, err = call(*arguments, "--prior", "0.75, 0.25", "--experts", "llm")
    assert code == 0, err
    assert "unlabelled texts, assuming that classes are as frequent as negative 0.75, positive 0.25." in out
    injection = Injection.from_pretrained(tmp_path / "new")
    decoder = Decoder.from_pretrained(str(home / "model"), device="cpu")
    plain = Injection.from_pretrained(home / "artefact").llm_alone()
    wanted = with_label_prior(plain, decoder, [f"film {number}" for number in range(40)], (0.75, 0.25))
    torch.testing.assert_close(torch.tensor(injection.label_bias), torch.tensor(wanted.label_bias))
    assert list(injection.evaluation["methods"])[-1] == "i2cl+label_prior"
    assert "--unlabelled texts.csv --prior '0.75, 0.25'" in injection.command
    _, result = parsed(call("predict", tmp_path / "new", texts)[1])
    wanted = with_temperature(wanted, injection.temperature)  # chosen behind the prior
    shifted = wanted.log_probs(decoder, [f"film {number}" for number in range(40)]).softmax(-1).float()
    torch.testing.assert_close(result, shifted, atol=2e-6, rtol=1e-4)


def test_text_experts_are_fitted_saved_and_used_by_predict(call, home, tmp_path, words_encoder):
    arguments = [
        "fit",
        str(home / "model"),
        str(home / "films.jsonl"),
        "--template",
        TEMPLATE,
        "--shots",
        "2",
    ]
    arguments += ["--set", "encoder=words", "--set", "steps=1", "--json", "--evaluate"]
    record = json.loads(call(*arguments, "8", "-o", str(tmp_path / "new"))[1])
    assert record["method"] == "anchored"
    names = ["char_tfidf", "sentence_embeddings", "anchored", "ensemble"]
    assert list(record["evaluation"]["methods"])[-4:] == names
    injection = Injection.from_pretrained(tmp_path / "new")
    assert record["ensemble"] == injection.ensemble
    assert injection.head.members == ("llm", "embeddings", "tfidf")
    decoder = Decoder.from_pretrained(str(home / "model"), device="cpu")
    texts = [row["text"] for row in rows(12, start=16)]
    _, result = parsed(call("predict", tmp_path / "new", home / "test.jsonl")[1])
    torch.testing.assert_close(
        result, injection.log_probs(decoder, texts).softmax(-1).float(), atol=2e-6, rtol=1e-4
    )
    moved = ["predict", tmp_path / "new", home / "test.jsonl", "--encoder", "others"]
    torch.testing.assert_close(parsed(call(*moved)[1])[1], result)
    named = [*arguments, "0", "--experts", "llm,embeddings", "-o", str(tmp_path / "named")]
    assert call(*named)[0] == 0
    again = Injection.from_pretrained(tmp_path / "named").head
    assert again.members == ("llm", "embeddings")
    assert torch.equal(again.embeddings.weights, injection.head.embeddings.weights)


def test_recipe_and_options_reach_the_calibration(call, stdout, home, tmp_path):
    call(*fit_arguments(home, tmp_path / "new", "--recipe", "released", "--set", "warmup=0.5"))
    settings = Injection.from_pretrained(tmp_path / "new").settings
    assert (settings["draw"], settings["noise_place"], settings["lr_final"]) == ("step", "sublayer", 0.0)
    assert (settings["warmup"], settings["epochs"]) == (0.5, 2)
    stdout(*fit_arguments(home, tmp_path / "new", "--set", "loss=labels"))
    result, paper = (Injection.from_pretrained(where) for where in (tmp_path / "new", home / "artefact"))
    assert (result.settings["loss"], paper.settings["loss"]) == ("labels", "vocabulary")
    assert max(result.history) < min(paper.history)


RECORD = {"model", "task", "method", "seed", "accuracy", "macro_f1", "n"}
RECORD |= {"fit_seconds", "predict_seconds", "cached_values"}


def test_eval_json_has_a_record_per_task_method_and_seed(stdout, home):
    tasks = ["eval", home / "model", "synthetic, mood-letter-1", "--shots", "1", "--limit", "6"]
    methods = ["--method", "zero_shot, i2cl", "--seeds", "2", "--seed", "5", "--set", "epochs=1"]
    records = json.loads(stdout(*tasks, *methods, "--workers", "1", "--json"))
    assert all(set(record) >= RECORD for record in records)
    cells = [(record["task"], record["method"], record["seed"]) for record in records]
    assert cells == [*product(("synthetic", "mood-letter-1"), ("zero_shot", "i2cl"), (5, 6))]
    assert all(record["n"] == 6 and 0 <= record["accuracy"] <= 1 for record in records)
    assert all(record[name] >= 0 for record in records for name in NAMES)
    kept = {(record["method"], record["cached_values"]) for record in records}
    assert kept == {("zero_shot", 0), ("i2cl", 2 * 2 * 32)}


def measured(out):
    return [{key: record[key] for key in ("seed", "accuracy", "macro_f1")} for record in json.loads(out)]


def test_eval_is_deterministic_in_several_processes(call, home, monkeypatch):
    # As `spawn`, but fast.
    monkeypatch.setattr("i2cl.experiments.workers.get_context", start)
    options = ("--method", "few_shot,i2cl", "--seeds", "2", "--set", "epochs=3", "--json")
    arguments = eval_arguments(home, *options)
    _, first, _ = call(*arguments)
    code, second, err = call(*arguments, "--workers", "2")
    assert (code, err) == (0, "")
    assert measured(first) == measured(second)


def test_eval_options_change_the_cost_and_print_a_table(call, stdout, home):
    arguments = eval_arguments(home, "--method", "i2cl", "--recipe", "released", "--json")
    _, out, _ = call(*arguments, "--set", "epochs=1", "--set", "formula=add", "--limit", "4")
    (record,) = json.loads(out)
    assert (record["trainable_parameters"], record["n"], record["task"]) == (2 * 2, 4, "films")
    out = stdout(*eval_arguments(home, "--method", "zero_shot,few_shot_uncached", "--seeds", "2"))
    assert [name for name in ("few_shot_uncached", "±", *NAMES) if name not in out] == []


def test_eval_all_lists_methods_that_need_another_model(call, home, monkeypatch):
    few = {name: METHODS[name] for name in ("zero_shot", "cepe")}
    monkeypatch.setattr("i2cl.methods.METHODS", few)
    code, out, err = call(*eval_arguments(home, "--method", "all", "--json"))
    assert (code, err, [one["method"] for one in json.loads(out)]) == (0, "", ["zero_shot", "cepe"])
    assert "no cepe compressor" in json.loads(out)[1]["not_run"]


def test_check_exits_with_1_if_a_model_fails(call, home, monkeypatch):
    code, out, _ = call("check", home / "model", "--json")
    record = json.loads(out)
    assert (code, record["passed"], record["layers"], record["d_model"]) == (0, True, 2, 32)
    monkeypatch.setattr("i2cl.models.residual_check.TOLERANCE", -1.0)
    code, out, _ = call("check", home / "model", "--json")
    assert (code, json.loads(out)["passed"]) == (1, False)


TEXTS = [f"a{' very' * (number % 4)} long film, number {number}" for number in range(10)]


@pytest.fixture(scope="module")
def expected(home):
    """Return labels and probabilities from the Python API."""
    decoder = Decoder.from_pretrained(str(home / "model"), device="cpu")
    injection = Injection.from_pretrained(home / "artefact")
    return injection.predict(decoder, TEXTS), injection.log_probs(decoder, TEXTS).softmax(-1).float()


def written_as(kind, path):
    if kind == "lines":
        path.write_text("\n".join(TEXTS), encoding="utf-8")
    else:
        jsonl(path, [{"id": number, "text": text} for number, text in enumerate(TEXTS)])
    return path


@pytest.mark.parametrize(("kind", "ending"), [("lines", "txt"), ("jsonl", "data")])
def test_predict_equals_python_api_for_every_format(call, home, expected, tmp_path, kind, ending):
    path = written_as(kind, tmp_path / f"texts.{ending}")
    value = ["--input-format", kind] if ending == "data" else []
    code, out, err = call("predict", home / "artefact", path, *value)
    assert (code, err) == (0, "")
    labels, probabilities = parsed(out)
    assert labels == expected[0]
    assert torch.allclose(probabilities, expected[1], atol=2e-6)
    assert torch.allclose(probabilities.sum(-1), torch.ones(len(TEXTS)), atol=1e-5)


def test_predict_reads_stdin_or_another_column(call, home, expected, monkeypatch, tmp_path):
    path = jsonl(tmp_path / "texts.jsonl", [{"review": text} for text in TEXTS])
    _, out, _ = call("predict", home / "artefact", path, "--text-column", "review")
    assert parsed(out)[0] == expected[0]
    for source in (["-"], []):
        stdin = SimpleNamespace(buffer=io.BytesIO("\n".join(TEXTS).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        _, out, _ = call("predict", home / "artefact", *source)
        assert parsed(out)[0] == expected[0]


def test_chunks_and_output_file_give_the_same_lines(call, home, tmp_path):
    path = written_as("lines", tmp_path / "texts.txt")
    _, whole, _ = call("predict", home / "artefact", path)
    code, nothing, message = call("predict", home / "artefact", path, "-o", tmp_path / "out.tsv")
    assert (code, nothing) == (0, "")
    saved = rf"Saved {re.escape(str(tmp_path))}/out.tsv: {len(TEXTS)} rows in \d+\.\d s\.\n"
    assert re.fullmatch(saved, message)
    assert (tmp_path / "out.tsv").read_text(encoding="utf-8") == whole
    _, parts, _ = call("predict", home / "artefact", path, "--chunk", "3")
    (labels, values), (wanted, close) = parsed(parts), parsed(whole)
    assert labels == wanted
    assert torch.allclose(values, close, atol=2e-6)  # other batches round the last digit otherwise
    assert len(parts.splitlines()) == 1 + len(TEXTS)


def test_closed_pipe_causes_no_traceback(home, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a film\n" * 400, encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    program = Program(COMMAND, "predict", home / "artefact", path, "--chunk", "50", out=tmp_path / "pipe")
    with (tmp_path / "pipe").open() as pipe:
        assert pipe.readline().startswith("label")
    program.process.join()
    message = program.err.read_text(encoding="utf-8")
    assert ("Traceback" in message, "Error" in message) == (False, False)
