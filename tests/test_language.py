"""Terms of the documentation: the glossary stays short, and phrases that readers stumbled over stay out."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_TERMS = 40

# A phrase that readers misunderstood, and the usual way to say it.
BANNED = {
    r"\banew\b": "again, from scratch",
    r"\b(descended|descends)\b": "fitted with AdamW",
    r"\bso (many|much|few|often)\b(?! that\b| as\b|,)": "name the number or the quantity",
    r"\bat (most|least) so (many|much)\b": "the maximum or minimum number of",
    r"\b(is|are|was|were|be) told\b|\btold (of|by|apart)\b": "receives, distinguished by",
    r"\b(whoever|everybody|somebody)\b": "name the user or the program",
    r"\b(likewise|thereby|whereof|hereof|therein)\b": "also, so",
    r"\b(set|sets|stands|put) beside\b": "compared with, next to",
    r"\bby (itself|themselves)\b": "alone, separately",
    r"\bnot shown (better|worse)\b": "not significantly better or worse",
}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("phrase", BANNED)
def test_phrases_that_readers_misunderstood_stay_out(phrase):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*PAGES, *SOURCES)
        if path.name != "log.md"  # a dated record
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert not found, f"write instead: {BANNED[phrase]}"


def test_the_glossary_is_short_and_sorted():
    text = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8").split("## Terms")[1]
    terms = [term.casefold() for term in re.findall(r"^(\S.*)\n: ", text, re.MULTILINE)]
    assert terms == sorted(terms)
    assert 0 < len(terms) <= MAX_TERMS


def test_the_architecture_page_names_the_modules_of_the_main_classes():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    classes = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", text, re.MULTILINE)
    assert len(classes) == 7
    for name, module in classes:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_files_that_the_architecture_page_names_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+/[\w/]+\.py)`", text):
        assert (ROOT / name if name.startswith("tests/") else ROOT / "src/i2cl" / name).is_file(), name
