"""What scripts/results_pages.py writes from the committed stores is what the pages and figures show."""

import re
import runpy

import pytest

from pages import ROOT

pytest.importorskip("matplotlib")
SCRIPT = ROOT / "scripts" / "results_pages.py"
CURE = "run `python scripts/results_pages.py`"


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("page", ["docs/results.md", "docs/ablations.md", "docs/guide/confidence.md"])
def test_tables_are_those_of_the_stores(made, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "begin -->" in text
    assert made["fill"](text) == text, CURE


@pytest.mark.parametrize("name", ["averages", "shots", "learning", "reliability"])
def test_figures_are_those_of_the_stores(made, name):
    """The same bytes; under another version of matplotlib, the same words and numbers."""
    name = f"docs/_static/{name}.svg"
    kept, drawn = (ROOT / name).read_text(encoding="utf-8"), made["FIGURES"][name]()
    version = r"Matplotlib v[\d.]+"
    if re.search(version, kept)[0] == re.search(version, drawn)[0]:
        assert drawn == kept, CURE
    else:
        assert words(drawn) == words(kept), CURE


def words(figure):
    """What is written in it."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", figure)


def test_every_part_stands_on_a_page_and_rows_that_no_cell_has_are_left_out(made):
    shown = "".join((ROOT / page).read_text(encoding="utf-8") for page in made["PAGES"])
    assert [name for name in made["PARTS"] if f"<!-- {name}: begin -->" not in shown] == []
    result = made["results"]("real")
    assert list(made["find_lines"](result, ("Zero-shot", "no such row"))) == ["Zero-shot"]
    assert made["find_line"](result, "zero_shot").name == "Zero-shot", "found by the method's name"
