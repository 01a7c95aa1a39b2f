"""The committed pages and figures are what scripts/results_pages.py generates from the committed stores."""

import importlib
import re
import runpy
from dataclasses import replace

import pytest

from pages import ROOT

pytest.importorskip("matplotlib")
SCRIPT = ROOT / "scripts" / "results_pages.py"
CURE = "run `python scripts/results_pages.py`"


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(SCRIPT))


PAGES = ["docs/results.md", "docs/ablations.md", "docs/guide/confidence.md", "docs/does_it_hold.md"]


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_stores(made, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "begin -->" in text
    assert made["fill"](text) == text, CURE


@pytest.mark.parametrize("name", ["averages", "shots", "learning", "reliability"])
def test_figures_are_those_of_the_stores(made, name):
    """Figures have the same bytes or, with another version of matplotlib, the same text."""
    name = f"docs/_static/{name}.svg"
    kept, drawn = (ROOT / name).read_text(encoding="utf-8"), made["FIGURES"][name]()
    version = r"Matplotlib v[\d.]+"
    if re.search(version, kept)[0] == re.search(version, drawn)[0]:
        assert drawn == kept, CURE
    else:
        assert words(drawn) == words(kept), CURE


def words(figure):
    """Return the text in a figure."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", figure)


def test_every_table_is_on_a_page_and_empty_rows_are_left_out(made):
    shown = "".join((ROOT / page).read_text(encoding="utf-8") for page in made["PAGES"])
    assert [name for name in made["PARTS"] if f"<!-- {name}: begin -->" not in shown] == []
    result = made["results"]("real")
    assert list(made["find_lines"](result, ("Zero-shot", "no such row"))) == ["Zero-shot"]
    assert made["find_line"](result, "zero_shot").name == "Zero-shot", "found by the method's name"


def test_verdicts_follow_from_intervals_and_q():
    judged = importlib.import_module("results_claims")
    difference = judged.Difference(0.05, 0.01, 0.09, 0.001, 0.001, seeds=5)
    claims = {margin: judged.Claim("", "", margin=margin) for margin in (0.0, 0.02)}

    def verdict(low, high, q=0.01, seeds=5, margin=0.0):
        one = replace(difference, mean=(low + high) / 2, low=low, high=high, seeds=seeds)
        comparison = judged.Comparison(one, q)
        return judged.Judged(claims[margin], judged.Measurement("", one), comparison).verdict

    assert verdict(0.01, 0.09) == judged.HOLDS
    assert verdict(-0.09, -0.01) == judged.FAILS
    assert verdict(0.01, 0.09, q=0.06) == verdict(-0.01, 0.09) == judged.UNDECIDED
    assert verdict(0.01, 0.09, seeds=3) == judged.UNTESTED, "too few seeds for a test"
    assert verdict(-0.01, 0.01, q=1.0, margin=0.02) == judged.HOLDS, "no worse by more than the margin"
    assert verdict(-0.03, 0.01, q=1.0, margin=0.02) == judged.UNDECIDED
    assert verdict(-0.03, -0.01, margin=0.02) == judged.UNDECIDED, "worse, but perhaps within the margin"
    assert verdict(-0.09, -0.03, margin=0.02) == judged.FAILS
    assert judged.Judged(claims[0.0], None, None).verdict == judged.UNTESTED


def test_the_report_is_built_from_the_stores():
    pytest.importorskip("typst", reason="the technical report needs typst: pip install 'i2cl[report]'")
    report = importlib.import_module("report_pdf")
    assert report.build().startswith(b"%PDF")
    template = report.TEMPLATE.read_text(encoding="utf-8")
    prose = re.sub(r"^(#|//|  ).*|\$[^$]*\$", "", template, flags=re.MULTILINE)
    assert re.findall(r"[+−]\d|\d\.\d", prose) == [], "a result in the template: take it from a store"
