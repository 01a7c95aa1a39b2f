"""Reading Parquet, Excel, compressed files, and JSON."""

import bz2
import gzip
import io
import lzma
import sys
import zipfile
from datetime import date
from types import SimpleNamespace

import pytest

from fitting import raises
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
    return raises("", read_labelled, path, **options)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zip": zipped}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_csv_is_read(tmp_path, ending):
    path = write(tmp_path, f"mails.csv{ending}", COMPRESS[ending](TEXT.encode()))
    assert read_labelled(path)[0] == EXPECTED
    assert [query.text for query in read_queries(str(path))] == COLUMNS["text"]


def test_task_name_omits_both_suffixes(tmp_path):
    path = write(tmp_path, "mails.csv.gz", gzip.compress(TEXT.encode()))
    assert load_task(path, template="{text}: {label}").name == "mails"


def test_errors_name_rows_of_a_compressed_file(tmp_path):
    path = write(tmp_path, "a.csv.gz", gzip.compress(b"text,label\nx,good\n,bad\n"))
    assert f"{path} row 3: the text is empty" in failure(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv.gz", gzip.compress(TEXT.encode() * 100)[:-20], "cannot be decompressed"),
        ("a.csv.xz", lzma.compress(TEXT.encode() * 100)[:-20], "cannot be decompressed"),
        ("a.csv.zip", zipped(TEXT)[:-20], "cannot be decompressed"),
        ("a.csv.zip", zipped(TEXT, **{"b.csv": TEXT}), "contains 2 files: unpack it and give one of them"),
    ],
    ids=["gz", "xz", "zip", "zip of two files"],
)
def test_unreadable_archive_is_refused(tmp_path, name, content, message):
    assert message in failure(write(tmp_path, name, content))


BINARY = {
    "an old Excel file": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\x00",
    "a zip archive": zipped(""),
    "compressed with gzip": gzip.compress(TEXT.encode()),
}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl", "stdin"])
def test_binary_file_is_refused(tmp_path, monkeypatch, kind, name):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(BINARY[kind])))
    source = "-" if name == "stdin" else str(write(tmp_path, name, BINARY[kind]))
    with pytest.raises(RowError, match=f"{name} line 1 .*save"):  # a ReadAsWarning would be an error
        list(read_queries(source))


def test_control_characters_are_not_windows_1252(tmp_path):
    path = write(tmp_path, "a.csv", b"text,label\n\xe9\x01,good\n")
    assert "line 2 is not UTF-8" in failure(path)


ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]


def test_parquet_columns_are_kept(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"id": [7, None], "day": [date(2024, 5, 1)] * 2, **COLUMNS})
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
    assert "row 3: the label is empty" in message


def test_missing_column_of_parquet_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", COLUMNS)
    assert "no text column 'txt', the columns are text, label: did you mean 'text'?" in failure(
        path, text_column="txt"
    )


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"text,label\nx,good\n", b""])
def test_invalid_parquet_is_refused(tmp_path, content):
    pytest.importorskip("pyarrow")
    assert "is not a valid Parquet file" in failure(write(tmp_path, "a.parquet", content))


SHEET = [["text", "label"], ["fine, \u00fcber", "good"], [None, None], ["awful", "bad"]]


def test_first_excel_sheet_is_read(tmp_path):
    assert read_labelled(excel(tmp_path / "a.xlsx", SHEET))[0] == EXPECTED
    with pytest.warns(ReadAsWarning, match="has 2 sheets: only the first, 'Sheet1', is read"):
        assert read_labelled(excel(tmp_path / "b.xlsx", SHEET, [["x"]]))[0] == EXPECTED


def test_errors_name_excel_rows_as_the_sheet_does(tmp_path):
    path = excel(tmp_path / "a.xlsx", [*SHEET, ["  ", "good"], ["x", None]])
    message = failure(path)
    assert "row 5: the text is empty" in message
    assert "row 6: the label is empty" in message


def test_repeated_header_of_an_excel_sheet_is_refused_or_skipped(tmp_path):
    path = excel(tmp_path / "a.xlsx", [*SHEET, ["text ", "label", None], ["fine", "good"]])
    assert "row 5: the header is repeated: delete the row; or skip such rows" in failure(path)
    with pytest.warns(ReadAsWarning, match="1 of 4 rows are skipped"):
        assert read_labelled(path, skip=True)[1].labels == ("bad", "good")


def test_excel_cells_may_be_texts_numbers_or_dates(tmp_path):
    path = excel(tmp_path / "a.xlsx", [["text", "day", "n"], [12, date(2024, 5, 1), 7], ["x", None, 1.5]])
    first, second = read_queries(str(path), kept=("day", "n"))
    assert first == Query("12", ("2024-05-01 00:00:00", 7))
    assert second == Query("x", (None, 1.5))


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda name: None)
    path = write(tmp_path, "a.parquet", b"PAR1")
    assert "needs the package pyarrow: pip install 'i2cl[tables]', or save it as CSV" in failure(path)
