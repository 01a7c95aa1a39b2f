"""Names with markup for HTML, spreadsheets or YAML are escaped."""

import csv
import io
import re

import pytest
from huggingface_hub import ModelCard

from experiments.report.synthetic import LLAMA, Page, always_right, failed, grid
from i2cl.experiments.report.document import build, csv_text, render, write
from i2cl.storage.layout import CARD
from i2cl.tasks import Task, Template
from storage.test_hub import METRICS, make_injection

NAMES = {
    "script": "<script>alert(1)</script>",
    "attribute": "\"><img src=x onerror='alert(1)'>",
    "link": "[x](javascript:alert(1)) <http://evil.example>",
    "image": "![x](http://evil.example/x.png)",
    "code": "`<script>`` ![x](y.png)",
    "formula": "=cmd|' /C calc'!A0",
    "sum": "@SUM(1+1)",
    "minus": "-2+3",
    "tab": "\t=1+1",
    "YAML": "x\n---\nlicense: mit\n- &a [*a]",
    "tag": "!!python/object/apply:os.system ['ls']",
    "template": "{{ 7 * 7 }}{% for x in y %}",
    "fence": "````",
    "heading": "# not a heading\nbut two lines",
}


@pytest.fixture(params=NAMES)
def name(request):
    return NAMES[request.param]


@pytest.fixture
def report(name):
    return report_of(name)


def report_of(name, *views, figures=False):
    """Use the name for a task, row, title, experiment and model, and in an error."""
    views = ("tasks", "average", "comparison", *views)
    asked = grid(("Few-shot (ICL)", "I2CL"), title=name, views=views)
    rows = (asked.rows[0].model_copy(update={"name": name}), asked.rows[1])
    asked = asked.model_copy(update={"name": name, "measures": name, "rows": rows})
    records = always_right(tasks=(name, "sst2"), wrong=("i2cl",))
    changes = {"model": f"{LLAMA} {name}"}
    records = [one.model_copy(update={"cell": one.cell.model_copy(update=changes)}) for one in records]
    return build([asked], [*records, failed("i2cl", name, 1, name)], {}, figures=figures)


def test_html(report, name):
    text = render(report, "html")
    page = Page(text)  # fails on a script
    assert " ".join(name.split()) in {" ".join(cell.split()) for row in page.rows for cell in row}
    assert all(address.startswith("#") for address in page.addresses)
    assert "<img" not in text
    assert "49" not in re.sub(r"\d*\.\d+|&#\d+;", "", text.split("</style>")[1])


def test_csv(report):
    cells = [cell for row in csv.reader(io.StringIO(csv_text(report))) for cell in row]
    formulas = [cell for cell in cells if cell[:1] in {"=", "+", "-", "@", "\t", "\r"}]
    assert [cell for cell in formulas if not re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell)] == []


def test_figures_are_written_inside_their_folder(tmp_path):
    named = report_of("../../../x y.z", "bars", figures=True)
    written = write(named, tmp_path / "out" / "report", ("md",))
    assert all(path.is_relative_to(tmp_path / "out" / "report") for path in written)
    assert sorted(path.suffix for path in written) == [".md", ".png", ".svg"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_model_card(name, tmp_path):
    labels = (name.strip(), "good")
    task = Task(name, labels, Template("{text}\n{label}"), title=name)
    make_injection(task=task, metrics=METRICS, command=f"i2cl fit {name}").save_pretrained(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / CARD)
    assert card.data.license is None
    assert {one.dataset_type for one in card.data.eval_results} == {name}
    assert next(line for line in card.text.splitlines() if line.startswith("# ")).startswith("# I2CL: ")
    prose = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<(script|img)|(?<!\\)\]\((javascript|http://evil)", prose)
    assert "49" not in prose
