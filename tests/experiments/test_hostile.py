"""Names that mean something to a browser, a spreadsheet, LaTeX or YAML are shown and do nothing."""

import csv
import io
import re

import pytest
from huggingface_hub import ModelCard

from experiments.test_report import LLAMA, Page, always_right, experiment, failed
from i2cl.experiments.report.document import build
from i2cl.experiments.report.render import csv_text, html, latex
from i2cl.storage.card import CARD
from i2cl.tasks import Task, Template
from storage.test_hub import METRICS, made

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
    "TeX": r"\input{/etc/passwd}\write18{ls} $\frac{",
    "YAML": "x\n---\nlicense: mit\n- &a [*a]",
    "tag": "!!python/object/apply:os.system ['ls']",
    "template": "{{ 7 * 7 }}{% for x in y %}",
}


@pytest.fixture(params=NAMES)
def name(request):
    return NAMES[request.param]


@pytest.fixture
def report(name):
    """The name as a task's, a row's, a title, an experiment's, a model's and part of an error."""
    asked = experiment(("Few-shot (ICL)", "I2CL"), title=name, views=("tasks", "average", "comparison"))
    rows = (asked.rows[0].model_copy(update={"name": name}), asked.rows[1])
    asked = asked.model_copy(update={"name": name, "measures": name, "rows": rows})
    records = always_right(tasks=(name, "sst2"), wrong=("i2cl",))
    changes = {"model": f"{LLAMA} {name}"}
    records = [one.model_copy(update={"cell": one.cell.model_copy(update=changes)}) for one in records]
    return build([asked], [*records, failed("i2cl", name, 1, name)], {}, figures=False)


def test_html(report, name):
    text = html(report, {})
    page = Page(text)  # fails on a script
    assert " ".join(name.split()) in {" ".join(cell.split()) for row in page.rows for cell in row}
    assert all(address.startswith("#") for address in page.addresses)
    assert "<img" not in text
    assert "49" not in re.sub(r"\d*\.\d+|&#\d+;", "", text.split("</style>")[1])


def test_csv(report):
    cells = [cell for row in csv.reader(io.StringIO(csv_text(report))) for cell in row]
    wrong = [cell for cell in cells if cell[:1] in {"=", "+", "-", "@", "\t", "\r"} and not is_number(cell)]
    assert wrong == []


def is_number(cell):
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell) is not None


def test_latex(report):
    body = latex(report).split(r"\begin{document}")[1]
    allowed = r"section\*?|subsection\*?|textbf|textit|texttt|item|small|begin|end|toprule|midrule|bottomrule"
    signs = r"text(backslash|asciitilde|asciicircum)"
    commands = set(re.findall(r"\\([A-Za-z]+\*?)", body)) - {"textwidth", "textheight", "includegraphics"}
    assert {one for one in commands if not re.fullmatch(f"{allowed}|{signs}", one)} == set()
    assert not re.search(r"(?<!\\)[$%#^~]", body)
    unescaped = re.sub(r"\\[{}]", "", body)
    assert unescaped.count("{") == unescaped.count("}")


def test_model_card(name, tmp_path):
    labels = (name.strip(), "good")
    task = Task(name, labels, Template("{text}\n{label}"), title=name)
    made(task=task, metrics=METRICS, command=f"i2cl fit {name}").save_pretrained(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / CARD)
    assert card.data.license is None
    assert {one.dataset_type for one in card.data.eval_results} == {name}
    prose = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<(script|img)|(?<!\\)\]\((javascript|http://evil)", prose)
    assert "49" not in prose
