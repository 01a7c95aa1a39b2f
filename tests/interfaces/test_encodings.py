"""Terminals, pipes and file names that cannot hold every character: nothing ends in a UnicodeEncodeError."""

import io
import json
import os
import shutil
import sys
from itertools import product

import pytest

from commands import jsonl, run
from tiny import tiny_folder

LABELS = ["sch\u00f6n", "\U0001f600"]
ODD = os.fsdecode(b"caf\xe9")  # a file name that is not UTF-8
HALF = "\ud83d"  # lone surrogate


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, rows with labels outside ASCII, and an artefact."""
    folder = tmp_path_factory.mktemp("home")
    tiny_folder(folder / "model")
    rows = [{"text": f"film {number}", "label": LABELS[number % 2]} for number in range(8)]
    jsonl(folder / "\u00f6.jsonl", rows)
    (folder / "t.txt").write_text("one\ntwo\n")
    assert run(*fit(folder, folder / "artefact")) == 0
    return folder


def fit(home, output, *more, model="model", task="\u00f6.jsonl"):
    words = ["fit", home / model, home / task, "-o", output, "--template", r"{text}\n{label}", "--shots", "1"]
    return [*words, "--set", "epochs=1", *more]


@pytest.fixture
def narrow(monkeypatch):
    """Run a command whose stdout and stderr are of an encoding; exit code, stdout and stderr."""

    def ran(*arguments, encoding="ascii"):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        code = run(*arguments)
        for stream in streams:
            stream.flush()
        return code, *(stream.buffer.getvalue().decode(encoding) for stream in streams)

    return ran


COMMANDS = {
    "fit": "fit {home}/model {home}/\u00f6.jsonl -o {new} --template {text}:{label} --shots 2 --set epochs=1",
    "predict": "predict {home}/artefact {home}/t.txt",
    "eval": "eval {home}/model {home}/\u00f6.jsonl --test {home}/\u00f6.jsonl --template {text}:{label} "
    "--shots 1 --method zero_shot --workers 1",
    "ls": "ls tasks",
    "export": "export {home}/artefact {new}\u00f6",
    "help": "fit --help",
}


@pytest.mark.parametrize(("command", "encoding"), [("predict", "cp1252"), *product(COMMANDS, ["ascii"])])
def test_what_a_terminal_cannot_show_is_escaped(narrow, home, tmp_path, command, encoding):
    places = {"{home}": str(home), "{new}": str(tmp_path / "new")}
    words = COMMANDS[command]
    for name, place in places.items():
        words = words.replace(name, place)
    code, out, _ = narrow(*words.split(), encoding=encoding)
    assert code == 0
    if command == "predict":
        assert out.splitlines()[0].isascii() is (encoding == "ascii")
        assert r"\ud83d\ude00" in out


def test_json_stays_json(narrow, home):
    code, out, _ = narrow("predict", home / "artefact", home / "t.txt", "--json")
    assert code == 0
    assert list(json.loads(out.splitlines()[0])["probabilities"]) == LABELS
    code, out, _ = narrow("ls", "tasks", "--json")
    assert (code, type(json.loads(out))) == (0, list)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_errors_are_one_line_in_any_encoding(narrow, home, tmp_path, encoding):
    for name in ("\u00f6\u2192", ODD):
        for words in (
            ["predict", home / "artefact", tmp_path / name],
            ["predict", name, home / "t.txt"],
            ["fit", home / "model", name, "-o", tmp_path / "new"],
            ["eval", home / "model", "synthetic", "--method", name],
            ["predict", home / "artefact", home / "t.txt", "--input-format", name],
            ["report", tmp_path / name],
            [name],
        ):
            code, out, err = narrow(*words, encoding=encoding)
            assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
            assert err.startswith("error: ")


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes")
def test_file_names_that_are_not_utf_8(narrow, home, tmp_path):
    odd = tmp_path / ODD
    texts, output = odd.with_name(f"{ODD}.txt"), odd.with_name(f"{ODD}.tsv")
    shutil.copy(home / "t.txt", texts)
    assert narrow("predict", home / "artefact", texts, "-o", output)[0] == 0
    assert output.read_bytes().count(b"\n") == 3
    assert narrow(*fit(home, tmp_path / "fit", "--data-dir", odd))[0] == 0  # which the card repeats
    model, rows = tmp_path / f"{ODD}-model", tmp_path / f"{ODD}.jsonl"
    model.symlink_to(home / "model")
    rows.symlink_to(home / "\u00f6.jsonl")
    before = sorted(tmp_path.iterdir())
    for words in (
        fit(home, tmp_path / "new", model=model),
        fit(home, tmp_path / "new", task=rows),
        fit(home, odd),
        ["export", tmp_path / "fit", odd],
        ["export", tmp_path / "fit", odd.with_suffix(".gguf"), "--to", "gguf"],
    ):
        code, out, err = narrow(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
        assert "is not UTF-8: rename it" in err
    assert sorted(tmp_path.iterdir()) == before


def test_lone_surrogates_in_labels_and_templates_are_refused(narrow, home, tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "label": HALF}, {"text": "b", "label": "good"}] * 2)
    for words in (
        fit(home, tmp_path / "new", task=rows),
        fit(home, tmp_path / "new", "--labels", f"good,{HALF}"),
        fit(home, tmp_path / "new", "--template", f"{HALF}{{text}}\\n{{label}}"),
        fit(home, tmp_path / "new", "--instruction", HALF),
    ):
        code, out, err = narrow(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "lone surrogate" in err or "is not one of" in err
    assert not (tmp_path / "new").exists()
