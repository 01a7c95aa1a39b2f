"""Pages that a person reads: short sentences, and guides of a page each.

A sentence ends at . ! or ? before a space, at a blank line, or at a new item of a list. Code, tables and
headings are left out, and an inline piece of code counts as one word.
"""

import re
from statistics import median

import pytest

from pages import ROOT, pages

CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)

LONGEST, MEDIAN = 35, 17


def sentences(text):
    """Those of a Markdown page, without code, tables, headings and addresses."""
    text = re.sub(r"<!--.*?-->", "", CODE.sub("\n", text), flags=re.DOTALL)
    text = re.sub(r"^\s*[|#].*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*:]|\d+\.) )", text)
    ended = (one for block in blocks for one in re.split(r"(?<=[.!?])[)\"*_]*\s+", " ".join(block.split())))
    return [one for one in ended if words(one)]


def words(text):
    """How many it has."""
    return len(re.findall(r"\S*[^\W\d_]\S*", text))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page):
    value = sentences(page.read_text(encoding="utf-8"))
    assert [one for one in value if words(one) > LONGEST] == []
    assert median(map(words, value)) <= MEDIAN


DOCS = ROOT / "docs"
MOST = dict.fromkeys(sorted((DOCS / "guide").glob("*.md")), 600) | {DOCS / "results.md": 1500}


@pytest.mark.parametrize("page", MOST, ids=lambda page: page.stem)
def test_a_guide_is_a_page_and_so_are_the_results(page):
    """Of so many words, tables included, code left out."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    assert len(re.findall(r"\S*\w\S*", text)) <= MOST[page]
