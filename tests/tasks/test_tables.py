"""Rows from Parquet and Excel files, compressed files, and JSON in the orientations of pandas."""

import bz2
import gzip
import io
import json
import lzma
import sys
import zipfile
from datetime import date
from types import SimpleNamespace

import pytest

from fitting import one_line
from i2cl import Example, load_task
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.rows import Query, read_labelled, read_queries

TEXT = 'text,label\n"fine, \u00fcber",good\nawful,bad\n'
EXPECTED = (Example("fine, \u00fcber", 1), Example("awful", 0))
COLUMNS = {"text": ["fine, \u00fcber", "awful"], "label": ["good", "bad"]}


def zipped(content, **members):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, more in {"a.csv": content, **members}.items():
            archive.writestr(name, more)
    return data.getvalue()


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def parquet(path, columns):
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(arrow.table(columns), path)
    return path


def excel(path, *sheets):
    book = pytest.importorskip("openpyxl").Workbook()
    book.remove(book.active)
    for number, rows in enumerate(sheets, start=1):
        sheet = book.create_sheet(f"Sheet{number}")
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def failure(path, **options):
    return one_line("", read_labelled, path, **options)


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zip": zipped}


@pytest.mark.parametrize("ending", PACKED)
def test_compressed_files_are_read_as_the_file_inside(tmp_path, ending):
    path = write(tmp_path, f"mails.csv{ending}", PACKED[ending](TEXT.encode()))
    assert read_labelled(path)[0] == EXPECTED
    assert [query.text for query in read_queries(str(path))] == COLUMNS["text"]


def test_a_compressed_file_is_recognized_without_its_ending(tmp_path):
    path = write(tmp_path, "mails.csv", gzip.compress(TEXT.encode()))
    assert read_labelled(path)[0] == EXPECTED


def test_the_task_of_a_compressed_file_has_its_name_without_endings(tmp_path):
    path = write(tmp_path, "mails.csv.gz", gzip.compress(TEXT.encode()))
    assert load_task(path, template="{text}: {label}").name == "mails"


def test_compressed_json_lines_are_read(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in COLUMNS["text"]).encode()
    path = write(tmp_path, "a.jsonl.xz", lzma.compress(lines))
    assert [query.text for query in read_queries(str(path))] == COLUMNS["text"]


def test_rows_of_a_compressed_file_are_named_in_errors(tmp_path):
    path = write(tmp_path, "a.csv.gz", gzip.compress(b"text,label\nx,good\n,bad\n"))
    assert f"{path} row 3: the text is empty" in failure(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv.gz", gzip.compress(TEXT.encode() * 100)[:-20], "is a damaged archive"),
        ("a.csv.xz", lzma.compress(TEXT.encode() * 100)[:-20], "is a damaged archive"),
        ("a.csv.zip", zipped(TEXT)[:-20], "is a damaged archive"),
        ("a.csv.zip", zipped(TEXT, **{"b.csv": TEXT}), "holds 2 files: unpack it and name one"),
    ],
)
def test_archives_that_cannot_be_read_are_refused(tmp_path, name, content, message):
    assert message in failure(write(tmp_path, name, content))


BINARY = {
    "Excel or Word": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    "OpenDocument": zipped("", mimetype="application/vnd.oasis.opendocument.spreadsheet"),
    "Word document": zipped("", **{"word/document.xml": ""}),
    "Arrow or Feather": b"ARROW1\0\0",
    "SQLite": b"SQLite format 3\0",
    "PDF": b"%PDF-1.7\n",
    "image": b"\x89PNG\r\n",
    "zstd": b"\x28\xb5\x2f\xfd",
    "binary file": b"\x01\x02\xe9\0\0",
}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl"])
def test_a_binary_file_is_called_what_it_is(tmp_path, kind, name):
    path = write(tmp_path, name, BINARY[kind])
    with pytest.raises(RowError, match=f" is an? .*{kind}"):  # a ReadAsWarning would be an error
        list(read_queries(str(path)))


def test_control_characters_are_not_taken_for_windows_text(tmp_path):
    path = write(tmp_path, "a.csv", b"text,label\n\xe9\x01,good\n")
    assert "line 2 is not UTF-8" in failure(path)


def test_a_binary_file_in_a_pipe_is_called_what_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(TEXT.encode()))))
    with pytest.raises(RowError, match="stdin is a compressed file, not text: decompress it first"):
        list(read_queries("-", "csv"))


ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
ORIENTS = {
    "records": ROWS,
    "columns": {name: {"0": first, "7": second} for name, (first, second) in COLUMNS.items()},
    "index": {"0": ROWS[0], "7": ROWS[1]},
    "split": {"columns": list(COLUMNS), "index": [0, 7], "data": [list(row.values()) for row in ROWS]},
    "table": {"schema": {"fields": []}, "data": ROWS},
    "lists": COLUMNS,
}


@pytest.mark.parametrize("orient", ORIENTS)
def test_json_is_read_in_the_orientations_of_pandas(tmp_path, orient):
    path = write(tmp_path, "a.json", json.dumps(ORIENTS[orient]).encode())
    assert read_labelled(path)[0] == EXPECTED


@pytest.mark.parametrize("orient", ["records", "columns", "index", "split", "table"])
def test_json_that_pandas_writes_is_read(tmp_path, orient):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(COLUMNS).to_json(tmp_path / "a.json", orient=orient)
    assert read_labelled(tmp_path / "a.json")[0] == EXPECTED


def test_values_without_names_say_which_orientation_is_read(tmp_path):
    path = write(tmp_path, "a.json", b'{"rows": [1]}')
    assert "write a list of objects, as pandas does with orient='records'" in failure(path)


def test_a_wrong_column_of_column_oriented_json_is_named(tmp_path):
    path = write(tmp_path, "a.json", json.dumps(ORIENTS["columns"]).encode())
    message = failure(path, text_column="body")
    assert "no text column 'body', the columns are text, label" in message


@pytest.mark.parametrize("name", ["a.parquet", "a.dat"])
def test_parquet_is_read_whatever_its_name(tmp_path, name):
    path = parquet(tmp_path / name, {"id": [7, None], "day": [date(2024, 5, 1)] * 2, **COLUMNS})
    queries = list(read_queries(str(path), kept=("id", "day")))
    assert queries == [Query(COLUMNS["text"][0], (7, "2024-05-01")), Query("awful", (None, "2024-05-01"))]


def test_labels_of_parquet_are_words_numbers_or_booleans(tmp_path):
    path = parquet(tmp_path / "a.parquet", COLUMNS)
    assert read_labelled(path)[0] == EXPECTED
    for labels in ([1.0, 0.0], [True, False], [1, 0]):
        path = parquet(tmp_path / "b.parquet", COLUMNS | {"label": labels})
        assert read_labelled(path, ("bad", "good"))[0] == EXPECTED


def test_rows_of_parquet_are_named_in_errors(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"text": ["x", None, "z"], "label": ["good", "bad", None]})
    message = failure(path)
    assert "row 2: the text is empty" in message
    assert "row 3: label None is not a word" in message


def test_a_wrong_column_of_parquet_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", COLUMNS)
    assert "no text column 'txt', the columns are text, label: did you mean 'text'?" in failure(
        path, text_column="txt"
    )


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"text,label\nx,good\n", b""])
def test_a_file_that_only_claims_to_be_parquet_is_refused(tmp_path, content):
    pytest.importorskip("pyarrow")
    message = failure(write(tmp_path, "a.parquet", content))
    assert "damaged Parquet file" in message or "is no Parquet file, in spite of its name" in message


SHEET = [["text", "label"], ["fine, \u00fcber", "good"], [None, None], ["awful", "bad"]]


def test_excel_is_read_from_its_first_sheet(tmp_path):
    assert read_labelled(excel(tmp_path / "a.xlsx", SHEET))[0] == EXPECTED
    with pytest.warns(ReadAsWarning, match="from the first of its 2 sheets, 'Sheet1'"):
        assert read_labelled(excel(tmp_path / "b.xlsx", SHEET, [["x"]]))[0] == EXPECTED


def test_rows_of_excel_are_named_as_in_the_sheet(tmp_path):
    path = excel(tmp_path / "a.xlsx", [*SHEET, ["  ", "good"], ["x", None]])
    message = failure(path)
    assert "row 5: the text is empty" in message
    assert "row 6: label None is not a word" in message


def test_cells_of_excel_are_texts_numbers_and_dates(tmp_path):
    path = excel(tmp_path / "a.xlsx", [["text", "day", "n"], [12, date(2024, 5, 1), 7], ["x", None, 1.5]])
    first, second = read_queries(str(path), kept=("day", "n"))
    assert first == Query("12", ("2024-05-01 00:00:00", 7))
    assert second == Query("x", (None, 1.5))


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda name: None)
    path = write(tmp_path, "a.parquet", b"PAR1")
    assert "needs the package pyarrow: pip install 'i2cl[tables]', or save it as CSV" in failure(path)
