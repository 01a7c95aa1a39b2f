"""Run the commands of the pages that use the real model; the model is loaded only once."""

import pytest

from i2cl import Decoder
from pages import blocks, pages, play
from real.test_smollm2 import pytestmark as pytestmark

PAGES = [page for page in pages() if any(one.mark == "real" for one in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_runs_and_says_what_the_page_shows(page, tmp_path, monkeypatch):
    read, kept = Decoder.from_pretrained, {}

    def once(name, **options):
        key = name, repr(sorted(options.items()))
        if key not in kept:
            kept[key] = read(name, **options)
        return kept[key]

    monkeypatch.setattr(Decoder, "from_pretrained", once)
    play([one for one in blocks(page) if one.mark == "real"], tmp_path, monkeypatch)
