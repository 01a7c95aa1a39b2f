"""The site built by `make docs`: pages load no external resources, and every name is found."""

import re
from html.parser import HTMLParser

import pytest

import i2cl
from pages import ROOT, pages

SITE = ROOT / "site"
pytestmark = pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="the site is missing: make docs")


class Loaded(HTMLParser):
    """Collects the addresses that a browser requests when it shows a page."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        if tag == "link" and known.get("rel") not in {"next", "prev", "index", "search", "genindex"}:
            self.addresses.append(known["href"])
        self.addresses += [
            known[name] for name in ("src", "data", "poster") if tag != "a" and known.get(name)
        ]


def test_pages_load_nothing_from_elsewhere():
    shown = sorted(SITE.rglob("*.html"))
    assert len(shown) > len(pages()) - 2
    asked = [(page, one) for page in shown for one in Loaded(page.read_text(encoding="utf-8")).addresses]
    assert [pair for pair in asked if re.match(r"(\w+:)?//", pair[1])] == []
    lost = [
        (page, one) for page, one in asked if not (page.parent / one.split("?")[0].split("#")[0]).is_file()
    ]
    assert [pair for pair in lost if not pair[1].startswith(("#", "data:"))] == []
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_every_public_name_and_page_is_on_it():
    index = (SITE / "searchindex.js").read_text(encoding="utf-8")
    assert [name for name in i2cl.__all__ if f'"{name}"' not in index and f",{name}:" not in index] == []
    site = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in pages() if "docs" in page.parts]
    assert [page for page in site if not (SITE / page).is_file()] == []
