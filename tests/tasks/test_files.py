import codecs
import csv
import json

import pytest

from i2cl.errors import I2CLError
from i2cl.tasks.files import read_examples
from i2cl.tasks.types import Example

WORDS = ("bad", "good")


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def failure(path, labels=WORDS, **columns):
    limit = csv.field_size_limit()
    with pytest.raises(I2CLError) as caught:
        read_examples(path, labels, **columns)
    assert csv.field_size_limit() == limit, "the csv module is left as it was"
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,label\n"fine, really",good\nawful,0\n'),
        ("a.tsv", "label\ttext\nGOOD\tfine, really\nbad\tawful\n"),
        ("a.jsonl", '{"text": "fine, really", "label": "good"}\n\n{"text": "awful", "label": 0}\n'),
        ("a.json", '[{"text": "fine, really", "label": 1}, {"text": "awful", "label": "bad"}]'),
        ("A.CSV", codecs.BOM_UTF8 + b'text,label\r\n"fine, really",good\r\n\r\nawful,bad\r\n'),
    ],
)
def test_every_format_gives_the_same_examples(tmp_path, name, content):
    examples, words = read_examples(write(tmp_path, name, content), WORDS)
    assert examples == (Example("fine, really", 1), Example("awful", 0))
    assert words == WORDS


def test_columns_by_name(tmp_path):
    path = write(tmp_path, "a.csv", "id,review,stars\n1,fine,good\n")
    examples, _ = read_examples(path, WORDS, "review", "stars")
    assert examples == (Example("fine", 1),)


def test_exact_words_win_over_other_case_and_over_ids(tmp_path):
    cased = write(tmp_path, "a.csv", "text,label\nx,A\ny,a\n")
    assert [example.label for example in read_examples(cased, ("a", "A"))[0]] == [1, 0]
    stars = write(tmp_path, "b.jsonl", '{"text": "x", "label": 1}\n{"text": "y", "label": "2"}\n')
    assert [example.label for example in read_examples(stars, ("1", "2"))[0]] == [0, 1]


def test_words_that_differ_only_in_case_need_the_right_case(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nx,yEs\n")
    assert "'yEs' is not one of" in failure(path, ("yes", "Yes"))


def test_labels_are_derived_from_words(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nx,ham\ny,spam\nz,egg\n")
    examples, words = read_examples(path)
    assert words == ("egg", "ham", "spam")
    assert [example.label for example in examples] == [1, 2, 0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "text,label\nx,0\ny,1\n", "pass the label words"),
        ("a.jsonl", '{"text": "x", "label": 0}', "pass the label words"),
        ("a.csv", "text,label\nx,ham\ny,ham\n", "every label is 'ham'"),
        ("a.csv", "text,label\nx,ham\ny,\n", "row 3: label '' is not a word"),
    ],
)
def test_labels_that_cannot_be_derived(tmp_path, name, content, said):
    assert said in failure(write(tmp_path, name, content), labels=None)


def test_a_field_of_a_megabyte_and_the_csv_limit_afterwards(tmp_path):
    before = csv.field_size_limit()
    long = "word " * 200_000 + "{end}"
    path = write(tmp_path, "a.csv", f'text,label\n"{long}",good\n')
    assert read_examples(path, WORDS)[0][0].text == long
    assert csv.field_size_limit() == before
    failure(write(tmp_path, "b.csv", f"text,label\n{long},good,more\n"))


def test_line_separators_inside_json_strings_do_not_cut_lines(tmp_path):
    text = "one\u2028two\u0085three"
    path = write(tmp_path, "a.jsonl", json.dumps({"text": text, "label": 0}, ensure_ascii=False))
    assert read_examples(path, WORDS)[0] == (Example(text, 0),)


def test_newlines_inside_csv_cells_survive(tmp_path):
    path = write(tmp_path, "a.csv", b'text,label\r\n"one\r\ntwo",good\r\n')
    assert read_examples(path, WORDS)[0] == (Example("one\r\ntwo", 1),)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", "is empty"),
        ("a.jsonl", " \n", "is empty"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.txt", "text,label\nx,good\n", "cannot read files ending in '.txt': use one of .csv"),
        ("a.csv", "sentence,label\nx,good\n", "no text column 'text', the columns are sentence, label"),
        ("a.csv", "text,class\nx,good\n", "no label column 'label', the columns are text, class"),
        ("a.jsonl", '{"text": "x", "label": 0}\n{"text": "x"}', "line 2: no label column 'label'"),
        ("a.csv", "text,label,text\nx,good,y\n", "names column 'text' twice"),
        ("a.csv", "text,label\nfine, really,good\n", "row 2: 3 cells but the header has 2"),
        ("a.csv", 'text,label\nx,good\n"y,good\n', "row 3: unexpected end of data"),
        (
            "a.csv",
            "text,label\nx,good\ny,great\n",
            "row 3: label 'great' is not one of bad, good (or the ids 0 to 1)",
        ),
        ("a.csv", "text,label\nx,2\n", "row 2: label '2' is not one of"),
        ("a.csv", "text,label\nx,-1\n", "row 2: label '-1' is not one of"),
        ("a.jsonl", '{"text": "x", "label": true}', "line 1: label True is not one of"),
        ("a.json", '[{"text": "x", "label": 1.0}]', "item 1: label 1.0 is not one of"),
        ("a.csv", "text,label\nx,good\n,good\n", "row 3: the text is empty"),
        ("a.csv", 'text,label\n" \t",good\n', "row 2: the text is empty"),
        ("a.jsonl", '{"text": 5, "label": 0}', "line 1: the text is 5, not a string"),
        ("a.jsonl", '{"text": "\\ud83d", "label": 0}', "line 1: the text holds half a surrogate pair"),
        ("a.jsonl", '{"text": "x", "label": 0}\n{"text": ', "line 2: bad JSON"),
        ("a.jsonl", "[1]", "line 1: [1] is not an object"),
        ("a.json", '{"text": "x"}\n{"text": "y"}', "name the file .jsonl"),
        ("a.json", '{"rows": []}', "holds a JSON dict: write a list of objects"),
    ],
)
def test_errors_name_the_place_and_the_cure(tmp_path, name, content, said):
    assert said in failure(write(tmp_path, name, content))


def test_bytes_that_are_not_utf8(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nfine,good\ncaf\xe9,good\n".encode("latin-1"))
    assert "byte 24 (line 3) is not UTF-8" in failure(path)
    path = write(tmp_path, "b.csv", codecs.BOM_UTF8 + b"ab\xff")
    assert "byte 5 (line 1) is not UTF-8" in failure(path)


def test_missing_file_and_folder(tmp_path):
    assert "does not exist" in failure(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in failure(tmp_path / "folder.csv")


def test_a_long_bad_label_is_shown_short(tmp_path):
    message = failure(write(tmp_path, "a.csv", f"text,label\nx,{'y' * 5000}\n"))
    assert len(message) < 400
