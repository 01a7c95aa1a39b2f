"""Names with markup for HTML, spreadsheets, LaTeX or YAML are escaped."""

import csv
import io
import re
import shutil
import subprocess

import pytest
from huggingface_hub import ModelCard

from experiments.report.synthetic import LLAMA, Page, always_right, failed, grid
from i2cl.experiments.report.document import build, csv_text, render, write
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


def test_latex(report):
    body = render(report, "tex").split(r"\begin{document}")[1]
    allowed = r"section\*?|subsection\*?|textbf|textit|texttt|item|small|begin|end|toprule|midrule|bottomrule"
    signs = r"text(backslash|asciitilde|asciicircum)"
    ours = {"textwidth", "resizebox", "ifdim", "width", "else", "fi"}
    commands = set(re.findall(r"\\([A-Za-z]+\*?)", body)) - ours
    assert {one for one in commands if not re.fullmatch(f"{allowed}|{signs}", one)} == set()
    assert not re.search(r"(?<!\\)[$%#^~]", body)
    unescaped = re.sub(r"\\[{}]", "", body)
    assert unescaped.count("{") == unescaped.count("}")
    assert sorted(re.findall(r"\\begin{(\w+)}", body)) == sorted(re.findall(r"\\end{(\w+)}", body)[:-1])
    for row in re.findall(r"\\midrule\n(.*?)\n\\bottomrule", body, re.DOTALL):
        assert len({len(re.findall(r"(?<!\\)&", line)) for line in row.splitlines()}) == 1


def test_figures_are_written_inside_their_folder(tmp_path):
    named = report_of("../../../x y.z", "bars", figures=True)
    written = write(named, tmp_path / "out" / "report", ("md",))
    assert all(path.is_relative_to(tmp_path / "out" / "report") for path in written)
    assert sorted(path.suffix for path in written) == [".md", ".png", ".svg"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdfLaTeX")
@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")  # matplotlib's font has no glyph for some letters
def test_latex_compiles(tmp_path):
    name = " ".join((*NAMES.values(), "é ß Ŧ 你好 🎉 \a \u202e"))
    write(report_of(name, "bars", figures=True), tmp_path / "out", ("tex",))
    command = ["pdflatex", "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", "report.tex"]
    done = subprocess.run(command, check=False, cwd=tmp_path / "out", capture_output=True)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    assert (tmp_path / "out" / "report.pdf").read_bytes().startswith(b"%PDF")


def test_model_card(name, tmp_path):
    labels = (name.strip(), "good")
    task = Task(name, labels, Template("{text}\n{label}"), title=name)
    made(task=task, metrics=METRICS, command=f"i2cl fit {name}").save_pretrained(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / CARD)
    assert card.data.license is None
    assert {one.dataset_type for one in card.data.eval_results} == {name}
    assert next(line for line in card.text.splitlines() if line.startswith("# ")).startswith("# I2CL: ")
    prose = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<(script|img)|(?<!\\)\]\((javascript|http://evil)", prose)
    assert "49" not in prose
