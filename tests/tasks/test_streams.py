"""Texts in."""

import itertools
import sys
from types import SimpleNamespace

import pytest

from i2cl import I2CLError
from i2cl.tasks.streams import TextError, chunks, read_texts


def read(tmp_path, content, name="texts.txt", **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_texts(str(path), **options))


@pytest.mark.parametrize("content", ["one\ntwo\n", "one\ntwo", "one\r\ntwo\r\n", "\ufeffone\ntwo\n"])
def test_lines(tmp_path, content):
    assert read(tmp_path, content) == ["one", "two"]


def test_a_line_keeps_its_spaces_and_its_other_line_separators(tmp_path):
    assert read(tmp_path, " one\u2028more \ntwo\tx\n") == [" one\u2028more ", "two\tx"]


def test_cells_may_hold_newlines_quotes_and_a_megabyte(tmp_path):
    long = "word " * 200_000
    content = f'id,text\n1,"two\nlines, ""quoted"""\n2,{long}\n'
    assert read(tmp_path, content, "texts.csv") == ['two\nlines, "quoted"', long]


def test_a_tab_separated_file(tmp_path):
    assert read(tmp_path, "a\tb\n1\tone\n\n2\ttwo\n", "texts.tsv", column="b") == ["one", "two"]


def test_json_lines_skip_blank_ones(tmp_path):
    assert read(tmp_path, '{"text": "one\\ntwo"}\n\n{"text": "\u00e9"}\n', "t.jsonl") == [
        "one\ntwo",
        "\u00e9",
    ]


def test_the_kind_given_wins_over_the_ending(tmp_path):
    assert read(tmp_path, "text\none\n", "texts.csv", kind="lines") == ["text", "one"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", "", "is empty"),
        ("t.csv", "", "is empty"),
        ("t.csv", "text\n", "is empty"),
        ("t.jsonl", "\n\n", "is empty"),
        ("t.txt", "one\n  \ntwo\n", "text 2 is empty"),
        ("t.csv", 'text\none\n""\n', "text 2 is empty"),
        ("t.jsonl", '{"text": ""}\n', "text 1 is empty"),
        ("t.csv", "a,b\n1,2\n", "has no column 'text' but a, b"),
        ("t.csv", "a,text\n1,one\n2\n", "line 3 has 1 of 2 columns"),
        ("t.csv", 'a,text\n1,"one\n', "line 2: unexpected end of data"),
        ("t.jsonl", '{"text": "one"}\n{"text": \n', "line 2 is no JSON"),
        ("t.jsonl", "[" * 100_000, "line 1 is no JSON"),
        ("t.jsonl", '{"txt": "one"}\n', "line 1 has no string 'text'"),
        ("t.jsonl", '{"text": 3}\n', "line 1 has no string 'text'"),
        ("t.jsonl", '["one"]\n', "line 1 has no string 'text'"),
        ("t.jsonl", '{"text": "\\ud800"}\n', "line 1 holds half a surrogate pair"),
    ],
)
def test_bad_files_are_told_with_their_place(tmp_path, name, content, message):
    with pytest.raises(TextError, match=message):
        read(tmp_path, content, name)


@pytest.mark.parametrize("name", ["t.txt", "t.csv", "t.jsonl"])
def test_bytes_that_are_not_utf8_are_told_with_their_line(tmp_path, name):
    line = {"t.txt": "one", "t.csv": "one", "t.jsonl": '{"text": "one"}'}[name].encode()
    head = b"text" if name == "t.csv" else line
    with pytest.raises(I2CLError, match=r"line 90 is not UTF-8 \(byte 0xe9\)"):
        read(tmp_path, b"\n".join([head, *[line] * 88, b"caf\xe9"]), name)


def test_a_file_that_is_not_there_or_a_folder(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(I2CLError, match="cannot read"):
            list(read_texts(str(path)))


def test_the_csv_limit_is_put_back(tmp_path):
    import csv

    before = csv.field_size_limit()
    read(tmp_path, "text\none\n", "t.csv")
    assert csv.field_size_limit() == before


def test_input_is_read_as_it_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=itertools.repeat(b"endless\n")))
    texts = read_texts("-")
    assert list(itertools.islice(texts, 3)) == ["endless"] * 3


def test_chunks():
    assert list(chunks(iter("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(chunks([], 2)) == []
