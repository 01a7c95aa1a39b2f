"""Build the technical report from the committed stores: tables and figures of the pages.

python scripts/report_pdf.py results/report.pdf
"""

import json
import re
import sys
from pathlib import Path

import matplotlib as mpl

from results_claims import MAIN_MODEL, OTHER_MODELS, claims
from results_figures import FIGURES, INK
from results_pages import PARTS
from results_tables import ROOT, average, on_task, results, table

TEMPLATE = ROOT / "scripts" / "report.typ"


def build() -> bytes:
    """Return the report as PDF. Needs the extra ``report``."""
    import typst

    text = TEMPLATE.read_text(encoding="utf-8")
    makers = PARTS | {
        "table-1-by-task": table_1_by_task,
        "claims-tested": lambda: claims([MAIN_MODEL, *OTHER_MODELS], tested=True),
    }
    names = re.findall(r'#(?:part|tab)\("([\w-]+)"', text)
    parts = {name: convert(makers[name]()) for name in names if name in makers}
    figures = {
        name: light(FIGURES[f"docs/_static/{name}.svg"]()) for name in re.findall(r'#fig\("([\w-]+)"', text)
    }
    return typst.compile(
        text.encode(),
        font_paths=[Path(mpl.get_data_path(), "fonts", "ttf")],
        sys_inputs={"parts": json.dumps(parts), "figures": json.dumps(figures)},
    )


def table_1_by_task() -> str:
    """Tabulate the paper's Table 1 by task."""
    result = results("main-real")
    rows = [
        [line.name, *(on_task(result, line, task) for task in result.tasks), average(result, line)]
        for line in result.lines
    ]
    return table(["Row", *result.tasks, "mean"], rows)


def light(svg: str) -> str:
    """Replace the variables of an SVG for pages by their colours on light ones."""
    colours = {name: colour for name, colour, _ in INK.values()}
    svg = re.sub(r"<style>svg .*?</style>\n", "", svg, count=1)
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], svg)


def convert(markdown: str) -> str | dict[str, list]:
    """Convert a Markdown table to a head, alignments and rows of Typst markup, and other text to markup."""
    if not markdown.startswith("|"):
        return markup(markdown)
    head, rule, *rows = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in markdown.splitlines())
    return {
        "head": [markup(cell) for cell in head],
        "align": ["right" if one.endswith(":") else "left" for one in rule[0].strip("|").split("|")],
        # a row with nothing but its first cell is a heading
        "rows": [[markup(cell) for cell in (row if any(row[1:]) else row[:1])] for row in rows],
    }


def markup(text: str) -> str:
    """Convert inline Markdown to Typst markup."""
    text = re.sub(r"([\\#$@<>_~])", r"\\\1", text)
    return re.sub(r"\*\*(.+?)\*\*", r"*\1*", text).replace(" ± ", " ± ")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build())
