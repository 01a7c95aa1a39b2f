"""Reports as Markdown, CSV and HTML, and their files."""

import re
import sys
from html import unescape
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.report.synthetic import (
    LLAMA,
    Page,
    always_right,
    csv_lines,
    failed,
    grid,
    llama,
    record,
    trial,
)
from fitting import raises
from i2cl.errors import I2CLError
from i2cl.experiments.report.document import CAPTIONS, build, render, write


def odd():
    """A report with names that need escaping, a bold cell and a failed cell."""
    title = "50 % of A & B_c <b>x</b> | {y} #1"
    asked = grid(("Few-shot (ICL)", "ICV", "I2CL"), title=title, printed="main")
    made = always_right(tasks=("hate_speech18", "sst2"))
    made = [
        *(one.model_copy(update={"cell": one.cell.model_copy(update={"model": LLAMA})}) for one in made),
        failed("icv", "trec", 1, "I2CLError: 100 % <script>alert(1)</script>\nof $memory_"),
    ]
    return build([asked], made, {}, figures=False)


def test_every_format_shows_the_same_numbers():
    report = build([grid()], trial(), {}, figures=False)
    page = render(report, "html")
    assert ["I2CL", "61.7 ± 12.6", "73.3 ± 25.2", "50.0 ± 0.0"] in Page(page).rows
    assert '<th scope="row">I2CL</th>' in page
    text = render(report, "md")
    lines = [[part.strip(" *") for part in line.split("|")] for line in text.splitlines()]
    assert ["", "I2CL", "61.7 ± 12.6", "73.3 ± 25.2", "50.0 ± 0.0", ""] in lines
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = block.splitlines()
        assert len({len(line) for line in lines}) == 1
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_markdown_escapes_and_marks_bold_and_printed_cells():
    text = render(odd(), "md")
    for part in (
        *(r"50 % of A & B_c \<b>x\</b> \| {y} #1", "**100.0 ± 0.0**", "*94.44 ± 1.44* ‡"),
        *("| hate_speech18 |", r"\<script>alert(1)"),
    ):
        assert part in text
    assert set(Page(render(odd(), "html")).strong) == {"100.0 ± 0.0"}


def test_csv_has_raw_measured_and_printed_numbers():
    rows = csv_lines(grid(), trial())
    cells = {(one["table"], one["row"], one["column"]): one for one in rows}
    ours = cells["Accuracy by task", "I2CL", "sst2"]
    assert float(ours["mean"]) == pytest.approx(220 / 3)
    assert float(ours["sd"]) == pytest.approx(np.std([70, 50, 100], ddof=1))
    assert (ours["seeds"], ours["queries"], ours["model"], ours["limit"]) == ("3", "10", "reference", "40")
    assert float(cells["Average accuracy over tasks", "I2CL", "Average"]["mean"]) == pytest.approx(185 / 3)
    assert float(cells["Cost", "I2CL", "Query, ms"]["mean"]) == 200
    difference = cells["Difference from I2CL, average over tasks", "Zero-shot", "Difference"]
    assert float(difference["mean"]) == pytest.approx(30 - 185 / 3)
    rows = csv_lines(grid(["I2CL"], printed="main"), llama())
    printed = {one["column"]: one for one in rows if one["row"] == "I2CL (paper)"}
    assert (float(printed["sst2"]["mean"]), float(printed["sst2"]["sd"])) == (87.68, 2.47)
    assert float(printed["Average"]["mean"]) == 75.12


def test_headings_are_escaped():
    title = "a &lt; b_ *c* `d` [e](f) ~ ^ \\g"
    report = build([grid(title=title)], trial(), {}, figures=False)
    assert unescape(re.search("<h2>(.*) .reference.</h2>", render(report, "html"))[1]) == title


def test_failed_cells_and_provenance_are_listed():
    made = [*trial(), failed("lora", "mr", 1, "elsewhere")]
    made += [failed("i2cl", "mr", 1, "I2CLError: too few\nrows")]
    report = build([grid()], made, {}, figures=False)
    assert len(report.failures.rows) == 1
    row = ["reference", "mr", "i2cl", "1", "I2CLError: too few rows"]
    assert row in Page(render(report, "html")).rows
    assert all(part in render(report, "md") for part in row)
    assert dict(report.provenance)["Cells"] == ("8 done, 1 failed",)
    made = [
        record("i2cl", "sst2", seed, "10", fit_seconds=3600.0, provenance=provenance)
        for seed, provenance in enumerate(({"torch": "2.9", "extra": 1}, {"torch": "2.10", "commit": None}))
    ]
    result = dict(build([grid()], made, {}, figures=False).provenance)
    assert (result["PyTorch"], result["extra"], result["Run"]) == (("2.9", "2.10"), ("1",), ("2025-01-02",))
    assert result["Hours"] == ("2.00 fitting, 0.00 predicting",)
    assert "Commit" not in result


@pytest.fixture
def drawn(monkeypatch):
    """Replace every figure by a single line."""

    def draw(*_):
        figure = Figure()
        figure.add_subplot().plot([0, 1], [1, 0])
        return figure

    monkeypatch.setattr("i2cl.experiments.report.document._draw", draw)


@pytest.mark.usefixtures("drawn")
def test_write_creates_all_files(tmp_path):
    paths = write(build([grid(views=("tasks", "bars"))], trial(), {}), tmp_path / "out")
    names = [str(path.relative_to(tmp_path / "out")) for path in paths]
    written = [f"report.{end}" for end in ("csv", "html", "md")]
    assert names == ["figures/trial-bars.png", "figures/trial-bars.svg", *written]
    _, text, md = ((tmp_path / "out" / name).read_text() for name in written)
    addresses, caption = Page(text).addresses, CAPTIONS["bars"]
    assert f'alt="{caption}"><figcaption>{caption}</figcaption></figure>' in text
    assert next(one for one in addresses if one[0] != "#").startswith("data:image/svg+xml;base64,")
    assert "(figures/trial-bars.svg)" in md
    assert caption in md


@pytest.mark.usefixtures("drawn")
def test_write_replaces_an_older_report_atomically(tmp_path, monkeypatch):
    write(build([grid()], trial(), {}, figures=False), tmp_path / "out")
    paths = write(build([grid(views=("bars",))], trial(), {}), tmp_path / "out", ["html"])
    assert [path.name for path in paths] == ["report.html"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    monkeypatch.setattr("i2cl.experiments.report.document.MAX_SVG_BYTES", 10)  # a large drawing as pixels
    (path,) = write(build([grid(views=("bars",))], trial(), {}), tmp_path / "out", ["html"])
    assert 'src="data:image/png;base64,' in path.read_text()
    write(build([grid()], trial(), {}), tmp_path / "out", ["md"])
    before = (tmp_path / "out" / "report.md").read_text()
    monkeypatch.setattr("i2cl.experiments.report.document.render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(build([grid(("I2CL", "ICV"), views=("bars",))], trial(), {}), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.md"]
    assert (tmp_path / "out" / "report.md").read_text() == before


@pytest.mark.parametrize("error", [ImportError(name="matplotlib"), I2CLError("no such map")])
def test_figure_that_cannot_be_drawn_is_listed_as_missing(monkeypatch, error):
    if isinstance(error, ImportError):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        monkeypatch.setattr("i2cl.experiments.report.document._draw", Mock(side_effect=error))
    (only,) = build([grid(views=("tasks", "bars"))], trial(), {}).sections
    assert only.figures == ()
    assert only.missing[0].startswith("figure bars: ")
    assert only.tables


@pytest.mark.parametrize("formats", [["pdf"], []])
def test_write_rejects_unknown_formats_and_foreign_files(tmp_path, formats):
    report = build([grid()], trial(), {}, figures=False)
    raises("use one or more of md, csv, html", write, report, tmp_path / "out", formats)
    assert not (tmp_path / "out").exists()
    (tmp_path / "thesis.txt").write_text("mine")
    raises("holds other files", write, report, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
