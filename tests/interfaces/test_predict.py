"""`i2cl predict`: resuming after a kill, bounded memory, and output files, which are complete or absent."""

import io
import json
import os
import signal
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commands import jsonl, listed, run
from fitting import raises
from i2cl import I2CLError, Injection, load_task, with_temperature
from i2cl.interfaces.batch_prediction import (
    Table,
    digest,
    open_output,
    output_format,
    read_chunks,
    require_not_input,
    require_writable_file,
    source_state,
)
from i2cl.interfaces.cli import main
from i2cl.tasks.files import RowError
from i2cl.tasks.rows import read_queries
from processes import COMMAND, Program, until

ROWS, CHUNK = 60, 10
MANY_ROWS = 600  # enough to kill a process while it predicts them


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A fitted injection, few texts with the output of an uninterrupted run, and many texts."""
    folder = tmp_path_factory.mktemp("home")
    task = "mood-colour-1"
    options = ("--shots", "2", "--set", "epochs=1", "--evaluate", "0")
    assert run("fit", "reference", task, "-o", folder / "mood", *options) == 0
    texts = [example.text for example in load_task(task).test]
    for source, count in (("texts.txt", ROWS), ("many.txt", MANY_ROWS)):
        lines = [texts[row % len(texts)] + " " * (row % 3) + "\n" for row in range(count)]
        (folder / source).write_text("".join(lines), encoding="utf-8")
    assert run(*arguments(folder, folder / "whole.tsv")) == 0
    return folder


def arguments(home, output, *more, source="texts.txt"):
    return ["predict", home / "mood", home / source, "-o", output, "--chunk", CHUNK, *more]


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_predict_resumes_after_kill_with_identical_output(home, tmp_path, call):
    output, part = tmp_path / "out.tsv", tmp_path / ".out.tsv.part"
    kept = []
    for more in (1, MANY_ROWS // 5, MANY_ROWS // 3):
        program = Program(COMMAND, *arguments(home, output, source="many.txt"))
        wanted = lines_of(part) + more
        until(lambda wanted=wanted: lines_of(part) >= wanted, program=program)
        program.process.kill()
        code, _, message = program.wait()
        assert code == -signal.SIGKILL, message
        assert not output.exists()
        if kept:
            assert message == f"resuming after {kept[-1]} rows of an earlier run\n"
        kept.append((lines_of(part) - 1) // CHUNK * CHUNK)
    assert kept[0] < kept[1] < kept[2] < MANY_ROWS
    with part.open("a") as handle:
        handle.write("ha")  # a torn line
    code, out, message = call(*arguments(home, output, source="many.txt"))
    assert (code, out) == (0, "")
    first, last = message.splitlines()
    assert first == f"resuming after {kept[-1]} rows of an earlier run"
    assert last.startswith(f"Saved {output}: {MANY_ROWS} rows in ")
    assert last.endswith(f" s, {kept[-1]} of them from an earlier run.")
    assert run(*arguments(home, home / "many.tsv", source="many.txt")) == 0
    assert output.read_bytes() == (home / "many.tsv").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} <= {"out.tsv", ".out.tsv.part.lock"}


@pytest.fixture
def stop_fifth_chunk(monkeypatch):
    """Raise an error once, when the fifth chunk has been scored."""

    def at_the_fifth(error):
        seen, lines = [], Table.lines

        def call(self, *chunk):
            seen.append(chunk)
            if len(seen) == 5:
                raise error
            return lines(self, *chunk)

        monkeypatch.setattr(Table, "lines", call)

    return at_the_fifth


def test_resuming_a_crashed_run_with_other_settings_is_refused(
    home, tmp_path, stop_fifth_chunk, capsys, refused
):
    stop_fifth_chunk(RuntimeError("a bug"))
    output = tmp_path / "out.tsv"
    with pytest.raises(RuntimeError):
        main([str(word) for word in arguments(home, output)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    (home / "other.txt").write_text("one\n")
    changed = {"output_format": "--output-format jsonl", "chunk": "--chunk 20", "dtype": "--dtype bfloat16"}
    changed |= {"keep": "--keep text", "row_number": "--row-number", "source": ""}
    changed |= {"min_confidence": "--min-confidence 0.9"}
    for name, more in changed.items():
        source = "texts.txt" if more else "other.txt"
        line = refused(*arguments(home, output, *more.split(), source=source))
        assert (f"run with another {name} " in line, "--restart" in line) == (True, True)
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(*arguments(home, output, "--restart")) == 0
    assert capsys.readouterr().err.startswith("Saved ")
    assert output.read_bytes() == (home / "whole.tsv").read_bytes()


def test_run_killed_after_the_last_row_only_renames(home, tmp_path, stop_fifth_chunk):
    stop_fifth_chunk(KeyboardInterrupt())
    output = tmp_path / "out.tsv"
    run(*arguments(home, output))
    (tmp_path / ".out.tsv.part").write_bytes((home / "whole.tsv").read_bytes())
    assert run(*arguments(home, output)) == 0
    assert output.read_bytes() == (home / "whole.tsv").read_bytes()


def test_digest_depends_on_everything_that_changes_predictions(home, tmp_path):
    injection = Injection.from_pretrained(home / "mood")
    again = Injection.from_pretrained(home / "mood")
    assert digest(injection) == digest(again)
    again.coefficients[0, 0, 0] += 0.5
    assert digest(injection) != digest(again)
    biased = [injection.with_head(bias=(shift, 0.0, 0.0, 0.0)) for shift in (0.0, 1.0)]
    assert len({digest(one) for one in [injection, *biased]}) == 3
    assert digest(with_temperature(injection, 2.0)) != digest(injection)
    words = injection.with_head(scoring="words")
    weighted = [words.with_head(word_weights=torch.full((4, 4), size)) for size in (0.25, 0.5)]
    assert len({digest(one) for one in (words, *weighted)}) == 3


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_labels_below_min_confidence_are_empty(home, tmp_path, kind):
    pandas = pytest.importorskip("pandas")
    injection = with_temperature(Injection.from_pretrained(home / "mood"), 20.0)
    injection.save_pretrained(tmp_path / "mood")
    plain, sure = tmp_path / f"plain.{kind}", tmp_path / f"sure.{kind}"
    words = ["predict", tmp_path / "mood", home / "texts.txt", "-o"]
    assert run(*words, plain) == 0
    before = READERS[kind](pandas, plain)
    numbers = before.select_dtypes("number")
    threshold = round(float(numbers.max(axis=1).median()), 6) + 5e-7  # no rounded probability equals this
    assert run(*words, sure, "--min-confidence", threshold) == 0
    result = READERS[kind](pandas, sure)
    below = numbers.max(axis=1) < threshold
    assert 0 < below.sum() < len(below)
    assert result["label"].fillna("").tolist() == before["label"].mask(below, "").tolist()
    pandas.testing.assert_frame_equal(result.select_dtypes("number"), numbers)


TEXTS = ["plain", 'commas, "quotes" and;', "two\nlines", "=1+1", "\u00fcber @ 5", " padded "]


@pytest.fixture
def tricky(tmp_path):
    """Rows with texts that need quoting in CSV, and ids with leading zeros."""
    rows = [{"id": f"00{row}", "text": TEXTS[row % len(TEXTS)]} for row in range(100)]
    return jsonl(tmp_path / "in.jsonl", rows)


READERS = {
    "csv": lambda pandas, path: pandas.read_csv(path, dtype={"id": str}),
    "tsv": lambda pandas, path: pandas.read_csv(path, sep="\t", dtype={"id": str}),
    "parquet": lambda pandas, path: pandas.read_parquet(path),
    "jsonl": lambda pandas, path: pandas.json_normalize(list(map(json.loads, path.open(encoding="utf-8")))),
}


@pytest.mark.parametrize("kind", READERS)
def test_pandas_reads_every_format_after_an_interrupt(home, tmp_path, tricky, stop_fifth_chunk, kind, capsys):
    pandas = pytest.importorskip("pandas")
    output = tmp_path / f"out.{kind}"
    words = [
        "predict",
        home / "mood",
        tricky,
        "-o",
        output,
        "--keep",
        "id,text",
        "--row-number",
        "--chunk",
        7,
    ]
    stop_fifth_chunk(KeyboardInterrupt())
    assert run(*words) == 130
    assert run(*words) == 0
    message = capsys.readouterr().err
    assert "resuming after 28 rows of an earlier run" in message
    assert ("begin with =, +, - or @: 17." in message) is (kind in {"csv", "tsv"})
    assert listed(tmp_path) == ["in.jsonl", output.name]
    table = READERS[kind](pandas, output).rename(columns=lambda name: name.removeprefix("input."))
    labels = load_task("mood-colour-1").labels
    flat = [text.replace("\n", " ") if kind == "tsv" else text for text in TEXTS]
    assert list(table["row"]) == list(range(1, 101))
    assert list(table["id"]) == [f"00{row}" for row in range(100)]
    assert list(table["text"]) == [flat[row % len(TEXTS)] for row in range(100)]
    chances = table[[f"probabilities.{label}" if kind == "jsonl" else label for label in labels]]
    assert chances.sum(axis=1).between(0.99999, 1.00001).all()
    assert [labels[best] for best in chances.to_numpy().argmax(1)] == list(table["label"])


def test_kept_column_named_row_is_text(home, tmp_path):
    pandas = pytest.importorskip("pandas")
    path, output = jsonl(tmp_path / "in.jsonl", [{"row": "a", "text": "one"}]), tmp_path / "out.parquet"
    assert run("predict", home / "mood", path, "-o", output, "--keep", "row") == 0
    assert list(pandas.read_parquet(output)["row"]) == ["a"]


def test_bad_row_is_reported_before_the_model_is_loaded(home, tmp_path, refused, monkeypatch):
    source, output = tmp_path / "texts.txt", tmp_path / "out.tsv"
    source.write_text("warm\n\ncold\n\n \n", encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr("i2cl.interfaces.cli.load.decoder", lambda *_: pytest.fail("the model was read"))
        assert "texts.txt line 2: the text is empty" in refused(
            "predict", home / "mood", source, "-o", output
        )
    assert not output.exists()
    source.write_text("warm\ncold\n\n \n", encoding="utf-8")
    assert run("predict", home / "mood", source, "-o", output) == 0
    assert len(output.read_text(encoding="utf-8").splitlines()) == 3, "blank lines at the end are ignored"


def with_gaps(path):
    """Write five rows; the second and fourth have no visible text."""
    texts = ["warm", "", "cold", "\u200b\ufeff", "damp"]
    return jsonl(path, [{"id": f"n{row}", "text": text} for row, text in enumerate(texts)])


@pytest.mark.parametrize("kind", READERS)
def test_skipped_rows_have_empty_predictions(home, tmp_path, capsys, kind):
    pandas = pytest.importorskip("pandas")
    whole, output = tmp_path / f"whole.{kind}", tmp_path / f"out.{kind}"
    usable = jsonl(
        tmp_path / "usable.jsonl", [{"id": "x", "text": text} for text in ("warm", "cold", "damp")]
    )
    assert run("predict", home / "mood", usable, "-o", whole) == 0
    gaps, options = with_gaps(tmp_path / "gaps.jsonl"), ["--keep", "id", "--skip-bad-rows", "--chunk", 2]
    capsys.readouterr()
    assert run("predict", home / "mood", gaps, "-o", output, *options) == 0
    assert "2 of 5 rows have no label: lines 2 and 4: the text is empty" in capsys.readouterr().err
    expected, result = (READERS[kind](pandas, path) for path in (whole, output))
    result = result.rename(columns=lambda name: name.removeprefix("input."))
    assert list(result["id"]) == ["n0", "n1", "n2", "n3", "n4"]
    assert result["label"].fillna("")[[1, 3]].tolist() == ["", ""]
    numbers = result.select_dtypes("number")
    assert numbers.loc[[1, 3]].isna().all(axis=None)
    usable_rows = numbers.loc[[0, 2, 4]].reset_index(drop=True)
    # Rows of other batches may differ by rounding, in the last of six digits.
    pandas.testing.assert_frame_equal(usable_rows, expected.select_dtypes("number"), atol=2e-6)


def test_json_lines_contain_the_error_of_a_skipped_row(home, tmp_path):
    output = tmp_path / "out.jsonl"
    assert (
        run("predict", home / "mood", with_gaps(tmp_path / "a.jsonl"), "-o", output, "--skip-bad-rows") == 0
    )
    record = json.loads(output.read_text().splitlines()[1])
    assert record["label"] == ""
    assert record["probabilities"] == {}
    assert record["error"].startswith("the text is empty")


def test_file_without_usable_rows_is_refused_when_skipping(home, tmp_path, refused):
    path = jsonl(tmp_path / "a.jsonl", [{"txt": "one"}, {"txt": "two"}])
    line = refused("predict", home / "mood", path, "-o", tmp_path / "out.tsv", "--skip-bad-rows")
    assert "no text column 'text', the columns are txt" in line
    assert "no row is left" in line


def test_bad_rows_of_stdin_are_skipped_and_counted(home, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"warm\n \ncold\n")))
    assert run("predict", home / "mood", "--skip-bad-rows") == 0
    out, err = capsys.readouterr()
    assert [line.split("\t")[0] == "" for line in out.splitlines()] == [False, False, True, False]
    assert "1 of 3 rows have no label: line 2: the text is empty" in err


def test_interrupted_run_that_skips_rows_resumes(home, tmp_path, stop_fifth_chunk, capsys):
    texts = ["" if row % 3 == 1 else f"text {row}" for row in range(40)]
    path = jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    whole, output = tmp_path / "whole.tsv", tmp_path / "out.tsv"
    words = ["predict", home / "mood", path, "--skip-bad-rows", "--chunk", 4, "-o"]
    assert run(*words, whole) == 0
    stop_fifth_chunk(KeyboardInterrupt())
    capsys.readouterr()
    assert run(*words, output) == 130
    message = "error: interrupted: 16 rows are saved; run the same command to resume"
    assert capsys.readouterr().err.splitlines()[-1] == message
    assert run(*words, output) == 0
    assert "13 of 40 rows have no label" in capsys.readouterr().err
    assert output.read_bytes() == whole.read_bytes()


def test_renamed_column_is_announced(home, tmp_path, capsys):
    path = jsonl(tmp_path / "in.jsonl", [{"label": "a", "text": "one"}])
    assert run("predict", home / "mood", path, "-o", tmp_path / "out.tsv", "--keep", "label,text") == 0
    message = capsys.readouterr().err
    assert "the kept column 'label' is renamed to 'input.label': the output has its own 'label'" in message
    assert message.count("is renamed to") == 1


def test_csv_has_bom_quotes_and_crlf_for_excel(home, tmp_path, tricky):
    output = tmp_path / "out.csv"
    assert run("predict", home / "mood", tricky, "-o", output, "--output-format", "jsonl") == 0
    assert set(json.loads(output.read_text().splitlines()[0])) == {"label", "probabilities"}
    assert run("predict", home / "mood", tricky, "-o", output, "--keep", "text") == 0
    content = output.read_bytes()
    assert content.startswith(b"\xef\xbb\xbftext,label,")
    assert b'\r\n"commas, ""quotes"" and;",' in content
    assert content.count(b"\r\n") == 101


def peak_memory(folder, rows):
    """Return the peak memory of Python objects in bytes; ``rows``: number of rows, of 100 characters each."""
    (folder / "texts.txt").write_text("".join(f"{row:0100}\n" for row in range(rows)))
    tracemalloc.start()
    with open_output(folder / "out.tsv", "length\n", {}, chunk=256) as out:
        for queries in read_chunks(read_queries(str(folder / "texts.txt")), 256):
            out.write("".join(f"{len(query.text)}\n" for query in queries), len(queries))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines_of(folder / "out.tsv") == rows + 1
    return peak


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    peak_memory(tmp_path, 1000)  # import and fill caches first
    peak = peak_memory(tmp_path, 20_000)
    # room for a chunk and for other threads; all rows as str would take more than the size of the file
    assert peak < (tmp_path / "texts.txt").stat().st_size / 4


def test_truncated_texts_are_counted_over_all_chunks(home, tmp_path, capsys):
    long = "word " * 2000
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in (long, "short", long, "short")])
    assert run("predict", home / "mood", rows, "--chunk", 2) == 0
    warning, total = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: 1 of 2 texts were cut to fit ")
    assert total == "2 texts were truncated in total"


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


def test_resuming_with_other_settings_is_refused_until_restart(tmp_path):
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
        raises(r"is also an input: choose another output", require_not_input, output, str(texts))
    with texts.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        raises("is also an input", require_not_input, Path("link"), "-")
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
        ("a.xlsx", None, False, "cannot write files ending in '.xlsx': use .tsv, .csv"),
        ("a.csv.gz", None, False, "cannot write files ending in '.gz': use .tsv, .csv"),
    ],
)
def test_contradictory_formats_are_refused(tmp_path, name, named, as_json, message):
    raises(message, output_format, name and tmp_path / name, named, as_json=as_json)


def test_missing_output_folder_is_created(tmp_path):
    require_writable_file(tmp_path / "none" / "out.csv")
    assert listed(tmp_path / "none") == []


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
