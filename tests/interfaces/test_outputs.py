"""Writing predictions: files are complete or absent, and runs resume after a kill."""

import json
import os
from pathlib import Path

import pytest

from commands import listed
from fitting import one_line
from i2cl import I2CLError
from i2cl.interfaces.batch_prediction import (
    Table,
    open_output,
    output_format,
    require_not_input,
    source_state,
)
from i2cl.tasks.files import RowError

HEADER = "label\n"


def output_to(path, *, chunk=2, **options):
    return open_output(path, HEADER, {"model": "one"} | options.pop("settings", {}), chunk=chunk, **options)


def interrupted(path, error=KeyboardInterrupt, **options):
    """Write rows 0 to 4, two at a time, and raise an error."""

    def fail():
        with output_to(path, **options) as out:
            out.write("0\n1\n", 2)
            out.write("2\n3\n", 2)
            out.write("4\n", 1)
            raise error("why")

    with pytest.raises(error):
        fail()


def test_file_is_created_when_the_block_ends(tmp_path):
    path = tmp_path / "out.tsv"
    with output_to(path) as out:
        out.write("0\n1\n", 2)
        assert not path.exists()
        assert (tmp_path / ".out.tsv.part").read_text() == HEADER + "0\n1\n"
    assert path.read_text() == HEADER + "0\n1\n"
    assert listed(tmp_path) == ["out.tsv"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, I2CLError])
def test_run_resumes_after_the_last_complete_chunk(tmp_path, error):
    path = tmp_path / "out.tsv"
    interrupted(path, error)
    assert listed(tmp_path) == [".out.tsv.part", ".out.tsv.part.json"]
    with output_to(path) as out:
        assert (out.kept, out.rows) == (4, 4)
        out.write("4\n5\n", 2)
    assert path.read_text() == HEADER + "0\n1\n2\n3\n4\n5\n"
    assert listed(tmp_path) == ["out.tsv"]


def test_nothing_is_left_if_the_run_cannot_resume(tmp_path):
    path = tmp_path / "out.tsv"
    interrupted(path, RowError)
    assert listed(tmp_path) == []
    interrupted(path, resumes=False)
    assert listed(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), output_to(path):
        raise KeyboardInterrupt
    assert listed(tmp_path) == []


def test_rows_of_other_settings_are_refused_until_restart(tmp_path):
    path = tmp_path / "out.tsv"
    interrupted(path)
    there = (tmp_path / ".out.tsv.part").read_text()
    message, settings = r"another model, dtype \(see .out.tsv.part.json\).*--restart", {"dtype": "float16"}
    with pytest.raises(I2CLError, match=message), output_to(path, settings=settings | {"model": "two"}):
        pass
    assert (tmp_path / ".out.tsv.part").read_text() == there
    for damaged in ("5", "[]", "{"):
        (tmp_path / ".out.tsv.part.json").write_text(damaged)
        with pytest.raises(I2CLError, match="another model"), output_to(path):
            pass
    (tmp_path / ".out.tsv.part.json").unlink()
    with pytest.raises(I2CLError, match="another model"), output_to(path):
        pass
    with output_to(path, restart=True) as out:
        assert out.kept == 0
        out.write("new\n", 1)
    assert path.read_text() == HEADER + "new\n"
    assert listed(tmp_path) == ["out.tsv"]


@pytest.mark.parametrize("resumes", [True, False])
def test_old_output_stays_until_the_new_one_is_complete(tmp_path, resumes):
    path = tmp_path / "out.tsv"
    path.write_text("older\n")
    interrupted(path, resumes=resumes)
    assert path.read_text() == "older\n"
    with output_to(path, resumes=resumes) as out:
        out.write("".join(f"{row}\n" for row in range(out.kept, 6)), 6 - out.kept)
        assert path.read_text() == "older\n"
    assert path.read_text() == HEADER + "0\n1\n2\n3\n4\n5\n"
    assert listed(tmp_path) == ["out.tsv"]


@pytest.mark.parametrize("there", [True, False])
def test_symbolic_link_is_followed(tmp_path, there):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "out.tsv", tmp_path / "link"
    link.symlink_to(target)
    if there:
        target.write_text("older\n")
    with output_to(link) as out:
        with pytest.raises(I2CLError, match="another process is writing"), output_to(target):
            pass
        out.write("0\n", 1)
    assert link.is_symlink()
    assert target.read_text() == HEADER + "0\n"
    assert listed(tmp_path) + listed(tmp_path / "far") == ["far", "link", "out.tsv"]


def test_input_is_refused_as_output(tmp_path, monkeypatch):
    texts, other = tmp_path / "texts.txt", tmp_path / "other.txt"
    texts.write_text("one\n")
    other.write_text("two\n")
    (tmp_path / "link").symlink_to(texts)
    (tmp_path / "hard").hardlink_to(texts)
    monkeypatch.chdir(tmp_path)
    for output in (texts, *map(Path, ("texts.txt", "link", "hard", f"../{tmp_path.name}/texts.txt"))):
        one_line(r"is also an input: choose another output", require_not_input, output, str(texts))
    with texts.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        one_line("is also an input", require_not_input, Path("link"), "-")
        require_not_input(other, "-")
    for output, source in ((None, "texts.txt"), (other, "texts.txt"), (Path("new"), "none"), (other, "-")):
        require_not_input(output, source)


def test_source_state_changes_with_the_file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("one\n")
    before = source_state(str(path))
    assert before == json.loads(json.dumps(source_state(str(path))))
    os.utime(path, ns=(0, 0))
    assert source_state(str(path)) != before
    assert source_state("-") == ["-"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_is_written_to(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with output_to(path) as out:
        out.write("through\n", 1)
    assert os.read(reader, 100) == b"label\nthrough\n"
    os.close(reader)
    assert path.is_fifo()
    assert listed(tmp_path) == ["pipe"]


def test_stdout_gets_the_header_with_the_first_row(capsys):
    with output_to(None):
        pass
    assert capsys.readouterr().out == ""
    with output_to(None) as out:
        out.write("0\n", 1)
    assert capsys.readouterr().out == HEADER + "0\n"


def test_predictions_as_tsv_and_json_lines():
    rows = [[0.25, 0.75], [0.5, 0.5]]
    assert Table(("a", "b")).header == "label\ta\tb\n"
    assert Table(("a", "b")).lines(rows) == "b\t0.250000\t0.750000\na\t0.500000\t0.500000\n"
    table = Table(("\u00e9", "b"), "jsonl")
    assert table.header == ""
    first, second = map(json.loads, table.lines([[0.25, 0.75], [1.0, 0.0]]).splitlines())
    assert first == {"label": "b", "probabilities": {"\u00e9": 0.25, "b": 0.75}}
    assert second["label"] == "\u00e9"
    assert Table(("label", "b")).columns == ("label", "probability.label", "b")
    same = Table(("label", "probability.label")).columns
    assert same == ("label", "probability.probability.label", "probability.label")
    assert Table(("a\tb", "c\nd")).header == "label\ta b\tc d\n"
    assert Table(("a", "c\nd")).lines([[0.0, 1.0]]) == "c d\t0.000000\t1.000000\n"


NAMES, KEPT = ("id", "label"), [["a\tb", 7], ["c", None]]


def test_kept_columns_come_before_the_label():
    rows = [[1.0, 0.0], [0.0, 1.0]]
    assert Table(("x", "id"), kept=NAMES).header == "input.id\tinput.label\tlabel\tx\tid\n"
    lines = Table(("x", "y"), kept=NAMES).lines(rows, KEPT)
    assert lines == "a b\t7\tx\t1.000000\t0.000000\nc\tnull\ty\t0.000000\t1.000000\n"
    first, _ = Table(("x", "y"), "jsonl", NAMES).lines(rows, KEPT).splitlines()
    answer = {"label": "x", "probabilities": {"x": 1.0, "y": 0.0}}
    assert json.loads(first) == {"input": {"id": "a\tb", "label": 7}} | answer
    table = Table(("x", "y"), "csv", NAMES)
    assert table.header == "id,input.label,label,x,y\r\n"
    lines = '"a ""b""\nc",7,x,1.000000,0.000000\r\nd,,y,0.000000,1.000000\r\n'
    assert table.lines([[1.0, 0.0], [0.0, 1.0]], [['a "b"\nc', 7], ["d", None]]) == lines


@pytest.mark.parametrize(
    ("name", "named", "as_json", "kind"),
    [
        *((f"a.{kind}", None, kind == "jsonl", kind.lower()) for kind in ("csv", "CSV", "jsonl", "parquet")),
        *(("a.txt", None, False, "tsv"), ("a.txt", None, True, "jsonl"), (None, None, True, "jsonl")),
        *(("a.parquet", "tsv", False, "tsv"), ("a.csv", "jsonl", True, "jsonl"), (None, "csv", False, "csv")),
    ],
)
def test_format_follows_the_suffix_unless_named(tmp_path, name, named, as_json, kind):
    assert output_format(name and tmp_path / name, named, as_json=as_json) == kind


@pytest.mark.parametrize(
    ("name", "named", "as_json", "message"),
    [
        ("a.csv", None, True, "the suffix of .* means csv"),
        ("a.txt", "parquet", True, "--output-format means parquet"),
        (None, "parquet", False, "give one with -o"),
    ],
)
def test_contradictory_formats_are_refused(tmp_path, name, named, as_json, message):
    one_line(message, output_format, name and tmp_path / name, named, as_json=as_json)


def test_converted_file_is_complete_or_absent(tmp_path):
    path = tmp_path / "out.csv"

    def fail(waiting, new):
        new.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(I2CLError, match="No space left"), output_to(path, finish=fail) as out:
        out.write("0\n1\n", 2)
    assert listed(tmp_path) == [".out.csv.part", ".out.csv.part.json"]

    def join(waiting, new):
        new.write_text(waiting.read_text().replace("\n", ";"))
        return "joined"

    with output_to(path, finish=join) as out:
        assert out.kept == 2
        out.write("2\n", 1)
    assert (path.read_text(), out.note, listed(tmp_path)) == ("label;0;1;2;", "joined", ["out.csv"])
