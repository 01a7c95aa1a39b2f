"""Reading Parquet, Excel, compressed files, and JSON in the orientations of pandas."""

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


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zip": zipped}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_csv_is_read(tmp_path, ending):
    path = write(tmp_path, f"mails.csv{ending}", COMPRESS[ending](TEXT.encode()))
    assert read_labelled(path)[0] == EXPECTED
    assert [query.text for query in read_queries(str(path))] == COLUMNS["text"]


def test_compression_is_detected_without_the_suffix(tmp_path):
    path = write(tmp_path, "mails.csv", gzip.compress(TEXT.encode()))
    assert read_labelled(path)[0] == EXPECTED


def test_task_name_omits_both_suffixes(tmp_path):
    path = write(tmp_path, "mails.csv.gz", gzip.compress(TEXT.encode()))
    assert load_task(path, template="{text}: {label}").name == "mails"


def test_compressed_json_lines_are_read(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in COLUMNS["text"]).encode()
    path = write(tmp_path, "a.jsonl.xz", lzma.compress(lines))
    assert [query.text for query in read_queries(str(path))] == COLUMNS["text"]


def test_errors_name_rows_of_a_compressed_file(tmp_path):
    path = write(tmp_path, "a.csv.gz", gzip.compress(b"text,label\nx,good\n,bad\n"))
    assert f"{path} row 3: the text is empty" in failure(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv.gz", gzip.compress(TEXT.encode() * 100)[:-20], "is a damaged archive"),
        ("a.csv.xz", lzma.compress(TEXT.encode() * 100)[:-20], "is a damaged archive"),
        ("a.csv.zip", zipped(TEXT)[:-20], "is a damaged archive"),
        ("a.csv.zip", zipped(TEXT, **{"b.csv": TEXT}), "contains 2 files: unpack it and give one of them"),
    ],
)
def test_unreadable_archive_is_refused(tmp_path, name, content, message):
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
def test_binary_file_is_refused_with_its_format(tmp_path, kind, name):
    path = write(tmp_path, name, BINARY[kind])
    with pytest.raises(RowError, match=f" is an? .*{kind}"):  # a ReadAsWarning would be an error
        list(read_queries(str(path)))


def test_control_characters_are_not_windows_1252(tmp_path):
    path = write(tmp_path, "a.csv", b"text,label\n\xe9\x01,good\n")
    assert "line 2 is not UTF-8" in failure(path)


def test_compressed_stdin_is_refused(monkeypatch):
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
def test_json_is_read_in_every_pandas_orientation(tmp_path, orient):
    path = write(tmp_path, "a.json", json.dumps(ORIENTS[orient]).encode())
    assert read_labelled(path)[0] == EXPECTED


@pytest.mark.parametrize("orient", ["records", "columns", "index", "split", "table"])
def test_json_written_by_pandas_is_read(tmp_path, orient):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(COLUMNS).to_json(tmp_path / "a.json", orient=orient)
    assert read_labelled(tmp_path / "a.json")[0] == EXPECTED


def test_unsupported_json_suggests_records(tmp_path):
    path = write(tmp_path, "a.json", b'{"rows": [1]}')
    assert "write a list of objects, as pandas does with orient='records'" in failure(path)


def test_missing_column_of_column_oriented_json_is_named(tmp_path):
    path = write(tmp_path, "a.json", json.dumps(ORIENTS["columns"]).encode())
    message = failure(path, text_column="body")
    assert "no text column 'body', the columns are text, label" in message


@pytest.mark.parametrize("name", ["a.parquet", "a.dat"])
def test_parquet_is_detected_by_content(tmp_path, name):
    path = parquet(tmp_path / name, {"id": [7, None], "day": [date(2024, 5, 1)] * 2, **COLUMNS})
    queries = list(read_queries(str(path), kept=("id", "day")))
    assert queries == [Query(COLUMNS["text"][0], (7, "2024-05-01")), Query("awful", (None, "2024-05-01"))]


def test_parquet_labels_may_be_words_numbers_or_booleans(tmp_path):
    path = parquet(tmp_path / "a.parquet", COLUMNS)
    assert read_labelled(path)[0] == EXPECTED
    for labels in ([1.0, 0.0], [True, False], [1, 0]):
        path = parquet(tmp_path / "b.parquet", COLUMNS | {"label": labels})
        assert read_labelled(path, ("bad", "good"))[0] == EXPECTED


def test_errors_name_rows_of_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"text": ["x", None, "z"], "label": ["good", "bad", None]})
    message = failure(path)
    assert "row 2: the text is empty" in message
    assert "row 3: label None is not a word" in message


def test_missing_column_of_parquet_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", COLUMNS)
    assert "no text column 'txt', the columns are text, label: did you mean 'text'?" in failure(
        path, text_column="txt"
    )


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"text,label\nx,good\n", b""])
def test_invalid_parquet_is_refused(tmp_path, content):
    pytest.importorskip("pyarrow")
    message = failure(write(tmp_path, "a.parquet", content))
    assert "damaged Parquet file" in message or "is not a valid Parquet file" in message


SHEET = [["text", "label"], ["fine, \u00fcber", "good"], [None, None], ["awful", "bad"]]


def test_first_excel_sheet_is_read(tmp_path):
    assert read_labelled(excel(tmp_path / "a.xlsx", SHEET))[0] == EXPECTED
    with pytest.warns(ReadAsWarning, match="has 2 sheets: only the first, 'Sheet1', is read"):
        assert read_labelled(excel(tmp_path / "b.xlsx", SHEET, [["x"]]))[0] == EXPECTED


def test_errors_name_excel_rows_as_the_sheet_does(tmp_path):
    path = excel(tmp_path / "a.xlsx", [*SHEET, ["  ", "good"], ["x", None]])
    message = failure(path)
    assert "row 5: the text is empty" in message
    assert "row 6: label None is not a word" in message


def test_excel_cells_may_be_texts_numbers_or_dates(tmp_path):
    path = excel(tmp_path / "a.xlsx", [["text", "day", "n"], [12, date(2024, 5, 1), 7], ["x", None, 1.5]])
    first, second = read_queries(str(path), kept=("day", "n"))
    assert first == Query("12", ("2024-05-01 00:00:00", 7))
    assert second == Query("x", (None, 1.5))


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda name: None)
    path = write(tmp_path, "a.parquet", b"PAR1")
    assert "needs the package pyarrow: pip install 'i2cl[tables]', or save it as CSV" in failure(path)
