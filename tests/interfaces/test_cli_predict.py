"""`i2cl predict`, run in process: what it reads, and what it writes."""

import io
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from commands import jsonl
from i2cl import Decoder, Injection
from interfaces.test_cli import make_home, parsed
from processes import COMMAND, Program

TEXTS = [f"a{' very' * (number % 4)} long film, number {number}" for number in range(10)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def expected(home):
    """What the Python API says about the texts: labels and probabilities."""
    decoder = Decoder.from_pretrained(str(home / "model"), device="cpu")
    injection = Injection.from_pretrained(home / "artefact")
    return injection.predict(decoder, TEXTS), injection.scores(decoder, TEXTS).softmax(-1).float()


def written_as(kind, path):
    if kind == "lines":
        path.write_text("\n".join(TEXTS), encoding="utf-8")
    else:
        jsonl(path, [{"id": number, "text": text} for number, text in enumerate(TEXTS)])
    return path


@pytest.mark.parametrize(("kind", "ending"), [("lines", "txt"), ("jsonl", "data")])
def test_predictions_are_those_of_the_api_for_every_format(call, home, expected, tmp_path, kind, ending):
    path = written_as(kind, tmp_path / f"texts.{ending}")
    told = ["--input-format", kind] if ending == "data" else []
    code, out, err = call("predict", home / "artefact", path, *told)
    assert (code, err) == (0, "")
    labels, probabilities = parsed(out)
    assert labels == expected[0]
    assert torch.allclose(probabilities, expected[1], atol=2e-6)
    assert torch.allclose(probabilities.sum(-1), torch.ones(len(TEXTS)), atol=1e-5)


def test_texts_come_from_stdin_or_another_column(call, home, expected, monkeypatch, tmp_path):
    path = jsonl(tmp_path / "texts.jsonl", [{"review": text} for text in TEXTS])
    _, out, _ = call("predict", home / "artefact", path, "--text-column", "review")
    assert parsed(out)[0] == expected[0]
    for source in (["-"], []):
        stdin = SimpleNamespace(buffer=io.BytesIO("\n".join(TEXTS).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        _, out, _ = call("predict", home / "artefact", *source)
        assert parsed(out)[0] == expected[0]


def test_input_longer_than_a_chunk_and_an_output_file_give_the_same_lines(call, home, tmp_path):
    path = written_as("lines", tmp_path / "texts.txt")
    _, whole, _ = call("predict", home / "artefact", path)
    code, nothing, told = call("predict", home / "artefact", path, "-o", tmp_path / "out.tsv")
    assert (code, nothing) == (0, "")
    saved = rf"Saved {re.escape(str(tmp_path))}/out.tsv: {len(TEXTS)} rows in \d+\.\d s\.\n"
    assert re.fullmatch(saved, told)
    assert (tmp_path / "out.tsv").read_text(encoding="utf-8") == whole
    _, parts, _ = call("predict", home / "artefact", path, "--chunk", "3")
    (labels, values), (wanted, close) = parsed(parts), parsed(whole)
    assert labels == wanted
    assert torch.allclose(values, close, atol=2e-6)  # other batches round the last digit otherwise
    assert len(parts.splitlines()) == 1 + len(TEXTS)


def test_a_reader_that_stops_early_gets_no_traceback(home, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a film\n" * 400, encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    program = Program(COMMAND, "predict", home / "artefact", path, "--chunk", "50", out=tmp_path / "pipe")
    with (tmp_path / "pipe").open() as pipe:
        assert pipe.readline().startswith("label")
    program.process.join()
    told = program.err.read_text(encoding="utf-8")
    assert ("Traceback" in told, "Error" in told) == (False, False)
