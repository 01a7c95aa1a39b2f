"""Reading rows of text formats: the same files are read as labelled rows and as unlabelled texts."""

import codecs
import io
import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from commands import jsonl
from fitting import raises
from i2cl import Example, I2CLError, Task, Template
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.rows import Query, read_labelled, read_queries
from i2cl.tasks.survey import kind_of_codes, likely_typos

WORDS = ("bad", "good")


def label_ids(path, *words):
    return [example.label for example in read_labelled(path, *words)[0]]


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_texts(path, **options):
    return [query.text for query in read_queries(str(path), **options)]


def set_stdin(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))


def failure(path, labels=WORDS, read=read_labelled, **columns):
    message = raises("", read, path, labels, **columns)
    assert str(path) in message
    return message


def query_failure(path, **options):
    return failure(path, read=lambda *_: read_texts(path, **options))


FORMATS = {
    "a.csv": 'text,label\n"fine, really",good\nawful,0\n',
    "a.tsv": "label\ttext\nGOOD\tfine, really\nbad\tawful\n",
    "a.jsonl": '{"text": "fine, really", "label": "good"}\n\n{"text": "awful", "label": 0}\n',
    "a.json": '[{"text": "fine, really", "label": 1},\n {"text": "awful", "label": "bad"}]\n',
    "A.CSV": codecs.BOM_UTF8 + b'text,label\r\n"fine, really",good\r\n\r\nawful,bad\r\n',
    "old.csv": b'text,label\r"fine, really",good\r\rawful,bad\r',
    "spaces.csv": "\n ,\n text , label \nfine really,good\n",
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_to_fit_and_predict(tmp_path, monkeypatch, name):
    path = write(tmp_path, name, FORMATS[name])
    examples, lookup = read_labelled(path, WORDS)
    expected = [Example("fine, really", 1), Example("awful", 0)]
    if name == "spaces.csv":
        expected = [Example("fine really", 1)]
    assert list(examples) == expected
    assert lookup.labels == WORDS
    texts = [example.text for example in expected]
    assert read_texts(path) == texts
    kind = path.suffix[1:].lower()
    assert read_texts(path.rename(tmp_path / "data"), kind=kind) == texts
    set_stdin(monkeypatch, io.BytesIO((tmp_path / "data").read_bytes()))
    assert [query.text for query in read_queries("-", kind)] == texts


def test_lines_keep_spaces_and_unicode_separators(tmp_path):
    for content in ("one\ntwo\n", "one\ntwo", "one\r\ntwo\r\n", "\ufeffone\ntwo\n"):
        assert read_texts(write(tmp_path, "t.txt", content)) == ["one", "two"]
    path = write(tmp_path, "t.txt", " one\u2028more \ntwo\tx\n")
    assert read_texts(path) == [" one\u2028more ", "two\tx"]


def test_given_format_overrides_the_suffix(tmp_path):
    assert read_texts(write(tmp_path, "t.csv", "text\none\n"), kind="lines") == ["text", "one"]


def test_stdin_is_streamed(monkeypatch):
    for kind, line in {"lines": b"endless\n", "csv": b"text\n", "jsonl": b'{"text": "endless"}\n'}.items():
        set_stdin(monkeypatch, itertools.repeat(line))
        assert len(list(itertools.islice(read_queries("-", kind), 3))) == 3


LINES = '{"id": 7, "text": "one", "n": null}\n{"n": [1], "text": "two", "id": "x"}\n'
KEPT = {
    "a.csv": ("id,text,n\n7,one,a\n,two,b\n", [("7", "a"), ("", "b")]),
    "a.jsonl": (LINES, [(7, None), ("x", [1])]),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_columns_are_unchanged(tmp_path, name):
    content, kept = KEPT[name]
    result = list(read_queries(str(write(tmp_path, name, content)), kept=("id", "n")))
    assert result == [Query(text, values) for text, values in zip(("one", "two"), kept, strict=True)]


def test_only_the_text_of_lines_can_be_kept(tmp_path):
    path = write(tmp_path, "t.txt", "one\ntwo\n")
    assert list(read_queries(str(path), kept=("text",))) == [Query("one", ("one",)), Query("two", ("two",))]
    assert "no column 'id' to keep, the columns are text: correct its name (--keep)" in query_failure(
        path, kept=("id",)
    )


def test_lone_surrogate_in_a_kept_column_is_refused(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "one", "id": ["\\ud800"]}\n')
    assert "line 1: column 'id' contains a lone surrogate" in query_failure(path, kept=("id",))


def test_columns_are_found_by_name(tmp_path):
    path = write(tmp_path, "a.csv", "id,review,stars\n1,fine,good\n")
    examples, _ = read_labelled(path, WORDS, "review", "stars")
    assert examples == (Example("fine", 1),)
    assert read_texts(path, column="review") == ["fine"]


def test_label_words_match_exactly_before_case_and_ids(tmp_path):
    cased = write(tmp_path, "a.csv", "text,label\nx,A\ny,a\n")
    assert label_ids(cased, ("a", "A")) == [1, 0]
    stars = write(tmp_path, "b.jsonl", '{"text": "x", "label": 1}\n{"text": "y", "label": "2"}\n')
    assert label_ids(stars, ("1", "2")) == [0, 1]
    path = write(tmp_path, "c.csv", "text,label\nx,yEs\n")
    assert "'yEs' is not one of" in failure(path, ("yes", "Yes"))


def test_label_words_are_derived_and_sorted(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nx,ham\ny,spam\nz,egg\n")
    examples, lookup = read_labelled(path)
    assert (lookup.labels, [example.label for example in examples]) == (("egg", "ham", "spam"), [1, 2, 0])


def test_long_csv_fields_are_read(tmp_path):
    long = "word " * 200_000 + "{end}"
    path = write(tmp_path, "a.csv", f'text,label\n"{long}",good\n')
    assert read_labelled(path, WORDS)[0][0].text == read_texts(path)[0] == long
    assert "text" in failure(write(tmp_path, "b.csv", f"{'a' * 200_000},good\n"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", '{"text": "one"}\n{"text": "two"}\n'),
        ("a.ndjson", '\ufeff{"text": "one"}\n'),
        ("a", '[{"text": "one"},\n'),
        ("a.log", "[\n"),
    ],
)
def test_json_is_not_read_as_lines(tmp_path, name, content):
    path = write(tmp_path, name, content)
    assert "name its --input-format" in query_failure(path)
    assert read_texts(path, kind="lines")[0] == content.removeprefix("\ufeff").splitlines()[0]


@pytest.mark.parametrize("line", ["{text} is not JSON", "[music] and more", "[1, 2]", '"quoted"', "{}x"])
def test_lines_that_only_start_like_json_are_texts(tmp_path, line):
    assert read_texts(write(tmp_path, "a.txt", f"{line}\n")) == [line]


def test_line_breaks_and_quotes_inside_cells_are_kept(tmp_path):
    text = "one\u2028two\u0085three\nfour"
    path = write(tmp_path, "a.jsonl", json.dumps({"text": text, "label": 0}, ensure_ascii=False))
    assert read_labelled(path, WORDS)[0] == (Example(text, 0),)
    path = write(tmp_path, "a.csv", b'text,label\r\n"one\r\ntwo\rthree ""quoted""",good\r\n')
    assert read_labelled(path, WORDS)[0] == (Example('one\r\ntwo\rthree "quoted"', 1),)


SWAPPED = "text,label\n" + "".join(f"{row % 2},review number {row}\n" for row in range(8))


def test_error_for_swapped_columns_names_the_options_to_use(tmp_path):
    message = failure(write(tmp_path, "a.csv", SWAPPED), None)
    assert "8 labels and 2 texts ('0', '1') in 8 rows: are the columns swapped?" in message
    assert "--text-column label --label-column text" in message


def test_swapped_columns_are_detected_when_a_few_labels_repeat(tmp_path):
    path = write(tmp_path, "a.csv", SWAPPED + "1,review number 1\n" + "0,review number 11\n" * 2)
    assert "are the columns swapped?" in failure(path, None)


@pytest.mark.parametrize(
    "rows",
    [
        ["one,a", "two,b", "three,c", "four,d", "five,e", "six,f"],  # every text has a different label
        ["same,a", "same,b", "same,c"],
        ["ok,good", "ok,good", "ok,bad", "ok,bad", "fine,good", "fine,bad"],
    ],
)
def test_unusual_rows_are_not_mistaken_for_swapped_columns(tmp_path, rows):
    assert read_labelled(write(tmp_path, "a.csv", "\n".join(["text,label", *rows])))[0]


CODES = {"True": "good", "False": "bad"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\nx,True\ny,False\n"),
        ("a.csv", "text,label\nx,TRUE\ny,false\n"),
        ("a.jsonl", '{"text": "x", "label": true}\n{"text": "y", "label": false}'),
    ],
)
def test_booleans_are_mapped_by_code_or_by_order(tmp_path, name, content):
    path = write(tmp_path, name, content)
    for codes in (CODES, {True: "good", False: "bad"}):
        examples, lookup = read_labelled(path, codes)
        assert [lookup.labels[one.label] for one in examples] == ["good", "bad"]
    examples, lookup = read_labelled(path, ("bad", "good"))
    assert [lookup.labels[one.label] for one in examples] == ["good", "bad"]


def test_booleans_without_label_words_are_words(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "x", "label": true}\n{"text": "y", "label": false}')
    assert read_labelled(path)[1].labels == ("false", "true")


def test_codes_may_be_numbers_and_share_a_word(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nv,5\nw,1.0\nx,2\ny,A1\nz,good\n")
    examples, lookup = read_labelled(path, {5: "good", 1.0: "bad", "2": "bad", "A1": "other"})
    assert lookup.labels == ("good", "bad", "other")
    assert [one.label for one in examples] == [0, 1, 1, 2, 0]


def test_unknown_code_is_refused_with_the_known_codes(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nx,True\ny,maybe\n")
    assert "row 3: label 'maybe' is not one of True (good), False (bad)" in failure(path, CODES)


def test_reversed_codes_are_corrected_in_the_error(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nx,True\ny,False\n")
    with pytest.raises(I2CLError, match=r"no row has the label 'good'.*--labels good=True,bad=False"):
        read_labelled(path, {"good": "True", "bad": "False"})


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (("False", "True"), "booleans"),
        (("-1", "1"), "numbers"),
        (("f", "t"), "letters"),
        (("F", "PE", "US"), "abbreviations"),
        (("US", "UK"), ""),
        (("A1", "A2", "B1"), "codes"),
        (("LABEL_0", "LABEL_1"), "codes"),
        (("no", "yes"), ""),
        (("bad", "A1"), ""),
        (("\u597d", "\u5dee"), ""),
        (("covid19", "windows11"), ""),
    ],
)
def test_kind_of_codes(labels, kind):
    assert kind_of_codes(labels) == kind


NFC, NFD = "Auditor\u00eda", "Auditori\u0301a"


def test_label_words_equal_in_nfc_are_one_class(tmp_path):
    path = write(tmp_path, "a.csv", f"text,label\na,{NFC}\nb,{NFD}\nc,Venta\n")
    examples, lookup = read_labelled(path)
    assert lookup.labels == (NFC, "Venta")
    assert [one.label for one in examples] == [0, 0, 1]
    assert label_ids(path, (NFD, "Venta")) == [0, 0, 1]


def test_label_word_in_two_normal_forms_is_refused():
    with pytest.raises(I2CLError, match="given twice"):
        Task("films", (NFC, NFD), Template("{text}: {label}"))


def test_task_normalizes_name_and_label_words():
    task = Task(NFD, (NFD, "Venta"), Template("{text}: {label}"))
    assert (task.name, task.labels) == (NFC, (NFC, "Venta"))


INVISIBLE = ["\u200b", "\ufeff\ufeff", "\u2060 \u00a0", "\u200e\u00ad", "\u0001"]


@pytest.mark.parametrize("text", INVISIBLE, ids=ascii)
def test_invisible_text_is_empty(tmp_path, text):
    path = jsonl(tmp_path / "a.jsonl", [{"text": text, "label": 0}, {"text": "x", "label": 1}])
    assert "line 1: the text is empty" in failure(path)
    assert "line 1: the text is empty" in query_failure(path)


def test_invisible_label_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": "\u200b"}, {"text": "y", "label": "b"}])
    assert "line 1: the label is empty" in failure(path, None)


REPEATED = '{"text": "x", "label": 0, "label": 1}'


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", f'{{"text": "y", "label": 0}}\n{REPEATED}\n', " line 2"),
        ("a.json", f'[{{"text": "y", "label": 0}}, {REPEATED}]', ""),
        ("a.jsonl", '{"text": "x", "label": 0, "more": [{"label": 1, "label": 2}]}', " line 1"),
    ],
)
def test_repeated_json_key_is_refused(tmp_path, name, content, place):
    path = write(tmp_path, name, content)
    assert f"{path}{place}: the key 'label' is given twice: remove" in failure(path)
    assert f"{path}{place}: the key 'label' is given twice: remove" in query_failure(path)


LONE_SURROGATE = '{"text": "\\ud83d", "label": 0}'
NO_TEXT_COLUMN = "no text column 'text', the columns are sentence, label: say which one holds the text: "
NOT_A_LABEL = "row 3: label 'great' is not one of bad, good (or the ids 0 to 1)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "has no rows"),
        ("a.csv", " \n", "has no rows"),
        ("a.json", "\n", "has no rows"),
        ("a.jsonl", " \n\n", "has no rows"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.csv", "sentence,label\nx,good\n", NO_TEXT_COLUMN),
        ("a.jsonl", '{"txt": "x", "label": 0}\n', "line 1: no text column 'text', the columns are txt"),
        ("a.csv", "text,label,text\nx,good,y\n", "names column 'text' twice"),
        ("a.csv", "text,label\nfine, really,good\n", "row 2: 3 cells but the header has 2: quote cells"),
        ("a.csv", "label,text\ngood,x\ngood\n", "row 3: 1 cells but the header has 2: complete the row"),
        (
            "a.csv",
            'text,label\nx,good\n"y,good\nz,bad\n',
            "row 3: the file ends inside a cell that begins with",
        ),
        ("a.csv", "text,label\nx,good\n,good\n", "row 3: the text is empty"),
        ("a.tsv", 'text\tlabel\n" "\tgood\n', "row 2: the text is empty"),
        ("a.jsonl", '{"text": 5, "label": 0}', "line 1: the text is 5, not a string"),
        (
            "a.json",
            f"[{LONE_SURROGATE}]",
            "item 1: the text contains a lone surrogate: correct or delete",
        ),
        ("a.jsonl", '{"text": "x", "label": 0}\n{"text": ', "line 2: bad JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: bad JSON (maximum recursion depth"),
        ("a.json", "[" * 100_000, "bad JSON (maximum recursion depth"),
        ("a.jsonl", "[1]", "line 1: [1] is not an object"),
        ("a.json", '{"text": "x"}\n{"text": "y"}', "name the file .jsonl"),
        ("a.json", '{"rows": []}', "contains an object, not a list: write a list of objects"),
        (
            "b.csv",
            codecs.BOM_UTF8 + b"ab\xff",
            "line 1 is not UTF-8 (byte 5 is 0xff): save the file as UTF-8",
        ),
        ("a.json", b"[\n\xe9]", "line 2 is not UTF-8 (byte 2 is 0xe9)"),
    ],
)
def test_unreadable_rows_are_refused_by_both_readers(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    assert message in failure(path)
    assert message in query_failure(path)
    with pytest.raises(RowError):
        read_texts(path)


# files whose label words cannot be derived
UNDERIVABLE = [
    ("a.csv", "text,label\nx,ham\ny,ham\n", "every label is 'ham'"),
    ("a.csv", "text,label\nx,ham\ny,\n", "row 3: the label is empty: fill it in or delete the row"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *UNDERIVABLE,
        ("a.txt", "text,label\nx,good\n", "cannot read files ending in '.txt': use one of .csv"),
        ("a.csv", "text,class\nx,good\n", "no label column 'label', the columns are text, class"),
        ("a.jsonl", '{"text": "x", "label": 0}\n{"text": "x"}', "line 2: no label column 'label'"),
        ("a.csv", "text,label\nx,good\ny,great\n", NOT_A_LABEL),
        ("a.csv", "text,label\nx,2\n", "row 2: label '2' is not one of"),
        ("a.csv", "text,label\nx,-1\n", "row 2: label '-1' is not one of"),
        ("a.jsonl", '{"text": "x", "label": true}\n{"text": "y", "label": 0}', "line 1: label True is not"),
        ("a.json", '[{"text": "x", "label": 1.5}]', "item 1: label 1.5 is not one of"),
    ],
)
def test_unusable_labels_are_refused(tmp_path, name, content, message):
    labels = None if (name, content, message) in UNDERIVABLE else WORDS
    assert message in failure(write(tmp_path, name, content), labels)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("one\n  \ntwo\n", "line 2: the text is empty"),
        (b"a\n\x81", "line 2 is not UTF-8"),
        (b"MZ\0", "null byte"),
    ],
)
def test_unusable_lines_are_refused(tmp_path, content, message):
    assert message in query_failure(write(tmp_path, "t.txt", content))


def test_missing_file_and_folder_are_refused(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    for tell in (failure, query_failure):
        assert "does not exist" in tell(tmp_path / "none.csv")
        assert "is a folder" in tell(tmp_path / "folder.csv")
    with pytest.raises(I2CLError) as caught:
        read_texts(tmp_path / "none.csv")
    assert not isinstance(caught.value, RowError), "a missing file is not an error of its rows"


def test_long_label_is_truncated_in_the_error(tmp_path):
    long = failure(write(tmp_path, "a.csv", f"text,label\nx,{'y' * 5000}\n"))
    assert len(long) < 400


EXCEL = "text;label\n\u00fcber, \u201esehr\u201c gut;good\n\u00e4rgerlich;bad\n"
BIG_END = codecs.BOM_UTF16_BE + EXCEL.replace("\n", "\r\n").encode("utf-16-be")
SEMICOLONS, WINDOWS = "with semicolons between its cells", "as Windows-1252: save it as UTF-8"
SPREADSHEETS = {
    "semicolons": (EXCEL.encode(), SEMICOLONS),
    "a line that names the separator": (b"sep=;\r\n" + EXCEL.encode(), SEMICOLONS),
    "bars": (codecs.BOM_UTF8 + EXCEL.replace(";", "|").encode(), "with vertical bars between its cells"),
    "Windows": (
        'text,label\n"\u00fcber, \u201esehr\u201c gut",good\n\u00e4rgerlich,bad\n'.encode("cp1252"),
        WINDOWS,
    ),
    "Windows and semicolons": (EXCEL.encode("cp1252"), WINDOWS, SEMICOLONS),
    "UTF-16": (EXCEL.replace(";", "\t").encode("utf-16"), "as UTF-16", "with tabs between its cells"),
    "UTF-16, big end first": (BIG_END, "as UTF-16", SEMICOLONS),
}


@pytest.mark.parametrize("case", SPREADSHEETS)
def test_spreadsheet_encodings_and_delimiters_are_read_with_a_warning(tmp_path, case):
    content, *messages = SPREADSHEETS[case]
    path = write(tmp_path, "a.csv", content)
    with pytest.warns(ReadAsWarning) as warned:
        examples, lookup = read_labelled(path)
    for warning, message in zip(warned, messages, strict=True):
        assert str(warning.message).startswith(f"{path} is read {message}")
    assert lookup.labels == ("bad", "good")
    assert examples == (Example("\u00fcber, \u201esehr\u201c gut", 1), Example("\u00e4rgerlich", 0))
    with pytest.warns(ReadAsWarning):
        assert read_texts(path) == [one.text for one in examples]


def test_usual_csv_is_read_without_warning(tmp_path):
    for content in ("text,label\na; b; c,good\n", "text\na; b\n", "id,text,label\n1,\u00fcber | x,bad\n"):
        assert len(read_texts(write(tmp_path, "a.csv", content))) == 1  # a warning would fail the test
    assert read_texts(write(tmp_path, "b.txt", codecs.BOM_UTF8 + b"a\n")) == ["a"]


def test_encoding_is_that_of_the_first_non_ascii_line(tmp_path):
    ascii_lines = b"plain,good\n" * 50_000
    with pytest.warns(ReadAsWarning, match="Windows-1252"):
        texts = read_texts(write(tmp_path, "a.csv", b"text,label\n" + ascii_lines + b"caf\xe9,good\n"))
    assert texts[-1] == "caf\u00e9"
    damaged = b"text,label\n" + "\u00e9,good\n".encode() + b"caf\xe9,good\n"
    assert "line 3 is not UTF-8" in failure(write(tmp_path, "b.csv", damaged))
    with pytest.warns(ReadAsWarning, match="UTF-16"):
        assert "is not valid UTF-16" in failure(write(tmp_path, "c.csv", EXCEL.encode("utf-16")[:-1]))
    with pytest.warns(ReadAsWarning, match="Windows-1252"):
        assert read_texts(write(tmp_path, "d.txt", b"a\ncaf\xe9\n")) == ["a", "caf\u00e9"]


def test_missing_column_gets_a_suggestion(tmp_path):
    path = write(tmp_path, "a.csv", "Message,topic\nx,good\n")
    value = failure(path, text_column="mesage", label_column="topic")
    problem = "no text column 'mesage', the columns are Message, topic"
    assert f"{problem}: did you mean 'Message'? name it in text_column (--text-column)" in value


@pytest.mark.parametrize("again", ["text,label", "\ufefftext, label"])
def test_repeated_header_is_refused_or_skipped(tmp_path, again):
    path = write(tmp_path, "a.csv", f"text,label\nx,good\n{again}\ny,bad\n")
    for tell in (lambda file: failure(file, labels=None), query_failure):
        assert "row 3: the header is repeated: delete the row; or skip such rows" in tell(path)
    with pytest.warns(ReadAsWarning, match="1 of 3 rows are skipped"):
        assert read_labelled(path, skip=True)[1].labels == ("bad", "good")


def test_text_equal_to_the_name_of_the_only_column_is_kept(tmp_path):
    assert read_texts(write(tmp_path, "a.csv", "text\none\ntext\n")) == ["one", "text"]


def test_error_for_a_single_label_names_its_id(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nx,bad\n")
    assert "label 'bad' is not one of good (or the id 0): correct it" in failure(path, ("good",))


def test_nan_is_a_missing_label_unless_the_labels_are_given(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nw,good\nx,nan\ny,bad\nz,NaN\n")
    assert "rows 3 and 5: the label is nan, which is a missing value in pandas" in failure(path, labels=None)
    with pytest.warns(ReadAsWarning, match="2 of 4 rows are skipped"):
        assert read_labelled(path, skip=True)[1].labels == ("bad", "good")
    assert label_ids(path, ("bad", "good", "nan")) == [1, 2, 0, 2]


def test_missing_text_and_label_columns_are_reported_together(tmp_path):
    path = write(tmp_path, "a.csv", "id,Requirement,Label\n1,x,good\n")
    value = failure(path)
    assert "no text column 'text' and no label column 'label', the columns are id, Requirement" in value
    assert "text_column (--text-column) and label_column (--label-column)" in value


def test_all_columns_of_a_usual_file_are_listed(tmp_path):
    votes = "count,hate_speech,offensive_language,neither"
    path = write(tmp_path, "a.csv", f",{votes},class,tweet\n0,3,0,0,3,2,x\n")
    assert f"the columns are '', {votes.replace(',', ', ')}, class, tweet" in failure(path)
    path = write(tmp_path, "b.csv", ",".join(f"column {number}" for number in range(40)) + "\n")
    assert "column 18 and 21 more" in failure(path)


@pytest.mark.parametrize("labels", [None, ("good", "bad")])
def test_all_rows_with_the_same_problem_are_counted_together(tmp_path, labels):
    path = write(tmp_path, "a.csv", "text,label\nx,good\ny,bad\n" + "z,\n" * 1500)
    value = failure(path, labels)
    assert "1,500 of 1,502 rows cannot be used: rows 4, 5, 6" in value
    assert "23 and 1,480 more: the label is empty: fill it in or delete the row; or skip" in value
    with pytest.raises(RowError) as caught:
        read_labelled(path, labels)
    assert len(caught.value.rows) == 1000


BAD = "text,label\nx,good\n,good\ny,bad\n ,bad\nz,\nw,good,more\n"


def test_all_unusable_rows_are_named_or_skipped(tmp_path):
    path = write(tmp_path, "a.csv", BAD)
    value = failure(path, labels=None)
    assert f"{path}: 4 of 6 rows cannot be used: " in value
    for part in ("rows 3 and 5: the text is empty", "row 6: the label is empty", "row 7: 3 cells but"):
        assert part in value
    assert "--skip-bad-rows" in value
    with pytest.warns(ReadAsWarning, match="4 of 6 rows are skipped: rows 3 and 5: the text.*row 7"):
        examples, lookup = read_labelled(path, skip=True)
    assert (examples, lookup.labels) == ((Example("x", 1), Example("y", 0)), ("bad", "good"))
    hopeless = write(tmp_path, "b.csv", "text,label\n,good\n")
    with pytest.raises(RowError, match="no row is left without them"):
        read_labelled(hopeless, skip=True)
    path = write(tmp_path, "c.csv", "text,label\nx,good\ny,bad\n" + ",good\n" * 100)
    value = failure(path)
    for part in ("rows 4, 5, 6,", "and 80 more: the text is empty"):
        assert part in value
    with pytest.raises(RowError) as caught:
        read_labelled(path)
    assert len(caught.value.rows) == 100


@pytest.mark.parametrize("ending", ["", ".0"])
@pytest.mark.parametrize("number", [0, 1, 4, -1])
def test_ids_do_not_count_label_words_that_are_numbers(tmp_path, ending, number):
    path = write(tmp_path, "a.csv", "".join(("text,label\n", *(f"x,{one}{ending}\n" for one in (2, 3, 5)))))
    _, lookup = read_labelled(path)
    assert lookup.find(3) == lookup.find("3.0") == 1
    test = write(tmp_path, "b.csv", f"text,label\nx,{number}\n")
    allowed = ", ".join(lookup.labels)
    assert f"label '{number}' is not one of {allowed}: correct it" in failure(test, lookup)


def test_numbers_from_one_are_labels(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\nx,1\ny,2\nz,10\n")
    assert read_labelled(path)[1].labels == ("1", "2", "10")
    stars = write(tmp_path, "b.jsonl", '{"text": "x", "label": 1}\n{"text": "y", "label": 3}\n')
    examples, lookup = read_labelled(stars)
    assert (lookup.labels, [one.label for one in examples]) == (("1", "3"), [0, 1])
    examples, lookup = read_labelled(stars, ("poor", "fair", "good"))
    assert [one.label for one in examples] == [0, 2]
    assert label_ids(write(tmp_path, "e.jsonl", '{"text": "x", "label": 1.0}'), ("a", "b")) == [1]
    test = write(tmp_path, "c.csv", "text,label\nx,2\n")
    assert read_labelled(test, lookup)[0] == (Example("x", 1),), (
        "the second file uses the first id of the first"
    )
    assert label_ids(write(tmp_path, "d.csv", "text,label\nx,0\ny,1\n"), ("a", "b")) == [0, 1]


@pytest.mark.parametrize(
    ("counts", "result"),
    [
        ({"Price": 18, "price": 20}, {"Price": "price"}),
        ({"price": 3, "prices": 20}, {"price": "prices"}),
        *(({slip: 1, "billing": 9}, {slip: "billing"}) for slip in ("biling", "bliling")),
        *(({"food": 20, "good": 20}, {}), ({"1": 1, "12": 20}, {}), ({"positive": 1, "negative": 20}, {})),
    ],
)
def test_likely_typos(counts, result):
    assert likely_typos(counts) == result


@pytest.mark.parametrize("ending", ["", ".0"])
def test_negative_numbers_are_labels_in_every_format(tmp_path, ending):
    cells = [f"{number}{ending}" for number in (-2, -1, 0, 1)]
    names = ("awful", "bad", "neutral", "good")
    codes = dict(zip(("-2", "-1", "0", "1"), names, strict=True))
    table = write(tmp_path, "a.csv", "text,label\n" + "".join(f"text {cell},{cell}\n" for cell in cells))
    rows = [f'{{"text": "text {cell}", "label": {cell}}}\n' for cell in cells]
    lines = write(tmp_path, "a.jsonl", "".join(rows))
    for path in (table, lines):
        examples, lookup = read_labelled(path, codes)
        assert [lookup.labels[example.label] for example in examples] == list(names)
    assert read_labelled(lines)[1].labels == ("-2", "-1", "0", "1")


def test_a_problem_of_every_row_is_named_once(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"data": {"text": "x"}}\n' * 30)
    value = failure(path)
    assert f"{path}: none of the 30 rows can be used: no text column 'text' and no label column" in value
    assert "line" not in value.removeprefix(str(path))
    assert "keys of nested objects are not read: flatten them first, such as jq -c '.[] | {text:" in value


def test_number_is_one_label_as_int_float_or_string(tmp_path):
    cells = (1, "1", 1.0, "2", 2, 2.0)
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"text {cell!r}", "label": cell} for cell in cells])
    examples, lookup = read_labelled(path)
    assert [lookup.labels[example.label] for example in examples] == ["1", "1", "1", "2", "2", "2"]
