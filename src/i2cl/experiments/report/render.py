"""A report as Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Iterator, Sequence

from i2cl.experiments.records import Record
from i2cl.experiments.report.document import FIGURES, Report, Section
from i2cl.experiments.report.tables import VALUES, TableCell, TableData
from i2cl.experiments.report.tables_model import listing

TITLE = "Report of experiments"

FAILURE_COLUMNS = ("Model", "Task", "Method", "Seed", "Error")

LONGEST_ERROR = 300
"""Characters of an error that are shown."""

_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "–": "--",
    "·": r"$\cdot$",
    "†": r"\textsuperscript{\textdagger}",
    "‡": r"\textsuperscript{\textdaggerdbl}",
    "§": r"\textsuperscript{\S}",
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
}

_PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[a4paper,landscape,margin=2cm]{geometry}
\usepackage{adjustbox,amssymb,booktabs,graphicx,textcomp}
\setlength{\parindent}{0pt}
"""


def failure_cells(record: Record) -> tuple[str, ...]:
    """One failed cell as the texts of `FAILURE_COLUMNS`."""
    cell = record.cell
    error = " ".join((record.error or "unknown").split())
    cut = error if len(error) <= LONGEST_ERROR else f"{error[:LONGEST_ERROR]} ..."
    options = ", ".join(f"{name}={value}" for name, value in cell.options.items())
    method = f"{cell.method} ({options})" if options else cell.method
    return (cell.model, cell.task, method, str(cell.seed), cut)


def failures_table(report: Report) -> TableData | None:
    """All failed cells as a table, if there are any."""
    if not report.failures:
        return None
    rows = tuple(
        tuple(TableCell(text, "text") for text in failure_cells(record)) for record in report.failures
    )
    return TableData("Failed cells", FAILURE_COLUMNS, rows)


def code_parts(text: str) -> list[tuple[str, bool]]:
    """A text in parts, and whether each stood between backticks."""
    return [(part, place % 2 == 1) for place, part in enumerate(text.split("`"))]


def markdown(report: Report) -> str:
    """The report as GitHub's Markdown, with figures in the folder ``figures``."""
    lines = [f"# {TITLE}", ""]
    lines += [f"- {name}: {_md(listing(values))}" for name, values in report.provenance]
    for section in report.sections:
        lines += ["", *_markdown_section(section)]
    failed = failures_table(report)
    if failed is not None:
        lines += ["", f"## {failed.title}", "", *_markdown_table(failed)]
    return "\n".join(lines) + "\n"


def _markdown_section(section: Section) -> Iterator[str]:
    experiment = section.experiment
    yield f"## {_md(section.heading)}"
    yield from ("", _md(experiment.measures))
    yield from ("", f"{_md(section.source)}. Experiment `{experiment.name}`: {_md(section.under)}.")
    if section.missing:
        yield from ("", "Lacking:", "", *(f"- {_md_keeping_code(line)}" for line in section.missing))
    for _, table in section.tables:
        yield from ("", f"### {_md(table.title)}", "", *_markdown_table(table))
        yield from ("", *(f"- {_md(note)}" for note in table.notes))
    for view, _ in section.figures:
        yield from ("", f"![{FIGURES[view]}](figures/{section.stem(view)}.svg)")


def _markdown_table(table: TableData) -> Iterator[str]:
    texts = [[_md(name) for name in table.columns]]
    texts += [[_markdown_cell(cell) for cell in row] for row in table.rows]
    widths = [max(3, *(len(row[place]) for row in texts)) for place in range(len(table.columns))]
    ruler = [
        f"{'-' * (width - 1)}{':' if right else '-'}"
        for width, right in zip(widths, table.numeric, strict=True)
    ]
    for row in (texts[0], ruler, *texts[1:]):
        cells = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, table.numeric, strict=True)
        )
        yield f"| {' | '.join(cells)} |"


def _markdown_cell(cell: TableCell) -> str:
    text = _md(cell.text)
    if text and (cell.bold or cell.printed):
        text = f"**{text}**" if cell.bold else f"*{text}*"
    return f"{text} {cell.note}" if cell.note else text


def _md(text: str) -> str:
    """Text that Markdown shows as it is; underscores within words are harmless and stay readable."""
    escaped = re.sub(r"\s+", " ", text)
    return re.sub(r"[\\`*|\[\]]|<(?=[\w/!?])|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", escaped)


def _md_keeping_code(text: str) -> str:
    return "".join(f"`{part}`" if code else _md(part) for part, code in code_parts(text))


def latex(report: Report) -> str:
    """The report as a document of its own, with figures in the folder ``figures``."""
    lines = [_PREAMBLE, r"\begin{document}", rf"\section*{{{TITLE}}}", r"\begin{itemize}"]
    lines += [rf"\item {_tex(name)}: {_tex(listing(values))}" for name, values in report.provenance]
    lines += [r"\end{itemize}"]
    for section in report.sections:
        lines += ["", *_latex_section(section)]
    failed = failures_table(report)
    if failed is not None:
        lines += ["", rf"\section{{{failed.title}}}", *_latex_table(failed)]
    return "\n".join([*lines, "", r"\end{document}", ""])


def _latex_section(section: Section) -> Iterator[str]:
    experiment = section.experiment
    yield rf"\section{{{_tex(section.heading)}}}"
    yield from (_tex(experiment.measures), "")
    yield f"{_tex(section.source)}. Experiment {_tex(experiment.name)}: {_tex(section.under)}."
    if section.missing:
        yield from ("", "Lacking:", *_latex_list(section.missing))
    for _, table in section.tables:
        yield from ("", rf"\subsection*{{{_tex(table.title)}}}", *_latex_table(table))
        yield from _latex_list(table.notes)
    for view, _ in section.figures:
        yield from ("", rf"\subsection*{{{_tex(FIGURES[view].rstrip('.'))}}}")
        path = f"figures/{section.stem(view)}.png"
        yield from ("", rf"\includegraphics[max width=\textwidth,max height=0.8\textheight]{{{path}}}")


def _latex_list(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from (r"\begin{itemize}\small", *map(_latex_item, lines), r"\end{itemize}")


def _latex_item(line: str) -> str:
    parts = (rf"\texttt{{{_tex(part)}}}" if code else _tex(part) for part, code in code_parts(line))
    return rf"\item {''.join(parts)}"


def _latex_table(table: TableData) -> Iterator[str]:
    columns = "".join("r" if right else "l" for right in table.numeric)
    yield r"\begin{adjustbox}{max width=\textwidth}"
    yield rf"\begin{{tabular}}{{{columns}}}"
    yield rf"\toprule {' & '.join(map(_tex, table.columns))} \\ \midrule"
    for row in table.rows:
        yield f"{' & '.join(map(_latex_cell, row))} \\\\"
    yield from (r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}")


def _latex_cell(cell: TableCell) -> str:
    text = _tex(cell.text)
    if cell.bold or (cell.printed and text):
        # Bold mathematics is another font; numbers are text, and only signs between them are not.
        text = rf"\textbf{{{text}}}" if cell.bold else rf"\textit{{{text}}}"
    return text + _tex(cell.note or "")


def _tex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in re.sub(r"\s+", " ", text))


def csv_text(report: Report) -> str:
    """The raw numbers of all tables in long format: one line per section, view, row and task."""
    setting_columns = ("model", "revision", "dtype", "limit")
    file = io.StringIO()
    writer = csv.DictWriter(file, ("experiment", *setting_columns, *VALUES), lineterminator="\n")
    writer.writeheader()
    for section in report.sections:
        fixed = {name: getattr(section.setting, name, None) for name in setting_columns}
        for _, table in section.tables:
            for values in table.values:
                writer.writerow({"experiment": section.experiment.name, **fixed, **values})
    return file.getvalue()
