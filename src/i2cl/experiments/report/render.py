"""A report as Markdown, and from that as LaTeX and HTML; its raw numbers as CSV; and all as files on disk."""

import base64
import csv
import io
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

from jinja2 import Environment, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from i2cl.errors import I2CLError
from i2cl.experiments.report.document import CAPTIONS, FIGURE_FOLDER, Report, Section
from i2cl.experiments.report.layout import Entry, Table
from i2cl.experiments.report.results import listing
from i2cl.experiments.report.tables import VALUES
from i2cl.storage.atomic import new_folder

TITLE = "Report of experiments"

FORMATS = ("md", "tex", "csv", "html")  # endings of the files of a report
# Names of what `write` leaves in its folder.
OWNED = frozenset({FIGURE_FOLDER, *(f"report.{ending}" for ending in FORMATS)})
LARGEST_SVG = 1_000_000  # bytes of a drawing above which the page holds its pixels instead

_PARSER = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
_PARSER.add_render_rule("table_open", lambda *_: '<div class="box" tabindex="0">\n<table>\n')
_PARSER.add_render_rule("table_close", lambda *_: "</table>\n</div>\n")

_PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[a4paper,landscape,margin=2cm]{geometry}
\usepackage{amssymb,booktabs,graphicx,textcomp}
\DeclareUnicodeCharacter{2212}{$-$}
\DeclareUnicodeCharacter{25B2}{$\blacktriangle$}
\DeclareUnicodeCharacter{25BC}{$\blacktriangledown$}
\setlength{\parindent}{0pt}
\begin{document}
"""

# Titles of tables of accuracies alone: shaded by their squares, so that 95 differs from 100.
_SHADED = re.compile(r"^Accuracy by task|^Average accuracy by|: from the task of the line")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what makes a spreadsheet take a cell for a formula

_TEX_SIGNS = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)

_NO_TEX = re.compile(
    "[^ -~\u00a0-\u0125\u0128-\u0137\u0139-\u013e\u0141-\u0148\u014a-\u0165\u0168-\u017e–—‘’‚“”„†‡•…‰€™−▲▼]"
)
"""What pdfLaTeX stops at: neither in its fonts of Latin letters nor declared above."""

_TEX = {
    "h1": r"\section*{",
    "h2": r"\section{",
    "h3": r"\subsection*{",
    "heading_close": "}\n",
    "bullet_list_open": "\\begin{itemize}\\small\n",
    "bullet_list_close": "\\end{itemize}\n\n",
    "list_item_open": r"\item ",
    "list_item_close": "\n",
    "paragraph_close": "\n\n",
    "strong_open": r"\textbf{",
    "strong_close": "}",
    "em_open": r"\textit{",
    "em_close": "}",
    "thead_close": "\\midrule\n",
    "tr_close": " \\\\\n",
    "table_close": "\\bottomrule\n\\end{tabular}}\n\n",
}
"""What a token of Markdown is in LaTeX, by its type, and headings by their tag; others are nothing."""


def markdown(report: Report) -> str:
    """The report as GitHub's Markdown, with figures in the folder ``figures``."""
    parts = [_facts(report), *map(section_markdown, report.sections), _failures(report)]
    return "\n\n".join(part for part in (f"# {TITLE}", *parts) if part) + "\n"


def _facts(report: Report) -> str:
    return "\n".join(f"- {name}: {_md(listing(values))}" for name, values in report.provenance)


def _failures(report: Report) -> str:
    if report.failures is None:
        return ""
    return "\n".join((f"## {report.failures.title}", "", *_table(report.failures)))


def section_markdown(section: Section) -> str:
    """One section of the report."""
    experiment = section.experiment
    name = f"`{' '.join(experiment.name.replace('`', ' ').split())}`"
    origin = f"{_md(section.source)}. Experiment {name}: {_md(section.under)}."
    lines = [f"## {_md(section.heading)}", "", _md(experiment.measures), "", origin]
    if section.missing:
        lines += ["", "Lacking:", "", *(f"- {_keeping_code(line)}" for line in section.missing)]
    for table in section.tables:
        lines += ["", f"### {_md(table.title)}", "", *_table(table)]
        lines += ["", *(f"- {_md(note)}" for note in table.notes)]
    for view, _ in section.figures:
        lines += ["", f"![{CAPTIONS[view]}]({FIGURE_FOLDER}/{section.stem(view)}.svg)"]
    return "\n".join(lines)


def _table(table: Table) -> Iterator[str]:
    texts = [[_md(name) for name in table.columns], *([_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*texts, strict=True)]
    pads = [str.rjust if right else str.ljust for right in table.numeric]
    rule = ["-" * (width - 1) + "-:"[right] for width, right in zip(widths, table.numeric, strict=True)]
    for row in (texts[0], rule, *texts[1:]):
        cells = (pad(text, width) for pad, text, width in zip(pads, row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"


def _cell(cell: Entry) -> str:
    text = _md(cell.text)
    if text and (cell.bold or cell.printed):
        text = f"**{text}**" if cell.bold else f"*{text}*"
    return f"{text} {cell.mark}" if cell.mark else text


def _md(text: str) -> str:
    """Text that Markdown shows as it is; underscores within words are harmless and stay readable."""
    signs = r"[\\`*|\[\]]|<(?=[\w/!?])|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(signs, r"\\\g<0>", re.sub(r"\s+", " ", text))


def _keeping_code(text: str) -> str:
    parts = enumerate(text.split("`"))
    return "".join(f"`{part}`" if place % 2 else _md(part) for place, part in parts)


def latex(report: Report) -> str:
    """The report as a document of its own, with figures in the folder ``figures``."""
    return "".join((_PREAMBLE, *_tex(_PARSER.parse(markdown(report))), "\\end{document}\n"))


def _tex(tokens: Sequence[Token]) -> Iterator[str]:
    for place, token in enumerate(tokens):
        if token.type == "inline":
            yield from _tex(token.children or [])
        elif token.type in {"text", "code_inline"}:
            text = _tex_text(token.content)
            yield text if token.type == "text" else rf"\texttt{{{text}}}"
        elif token.type == "image":
            path = str(token.attrs["src"]).removesuffix(".svg")
            yield f"{_tex_text(token.content)}\n\n"
            yield rf"\includegraphics[width=\textwidth,height=0.8\textheight,keepaspectratio]{{{path}.png}}"
        elif token.type == "table_open":
            head = takewhile(lambda one: one.type != "thead_close", tokens[place:])
            sides = (str(one.attrs.get("style")) for one in head if one.type == "th_open")
            columns = "".join("r" if "right" in side else "l" for side in sides)
            yield "\\resizebox{\\ifdim\\width>\\textwidth\\textwidth\\else\\width\\fi}{!}{"
            yield f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
        elif token.type in {"th_open", "td_open"}:
            yield "" if tokens[place - 1].type == "tr_open" else " & "
        elif not token.hidden:
            yield _TEX.get(token.tag if token.type == "heading_open" else token.type, "")


def _tex_text(text: str) -> str:
    """Text that LaTeX shows as it is; a letter that it lacks by its number, such as ``<U+4F60>``."""
    return _NO_TEX.sub(lambda match: f"<U+{ord(match[0]):04X}>", text).translate(_TEX_SIGNS)


def html(report: Report, images: Mapping[str, str]) -> str:
    """The report as one page without scripts or requests; ``images`` are data URIs by a figure's stem."""
    source = (resources.files("i2cl.experiments.report") / "page.html.j2").read_text(encoding="utf-8")
    pages = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return pages.from_string(source).render(
        title=TITLE,
        report=report,
        facts=_html(_facts(report)),
        sections=[(one, _html(section_markdown(one), images)) for one in report.sections],
        failures=_html(_failures(report)),
    )


def _html(text: str, images: Mapping[str, str] = MappingProxyType({})) -> Markup:
    """Markdown as HTML: the first cell of a line names it, and figures are part of the page."""
    tokens = _PARSER.parse(text)
    shaded = False
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if before.tag == "h3" and token.type == "inline":
            shaded = bool(_SHADED.search(token.content))
        if shaded and before.tag == "td" and (number := re.match(r"\W*(\d+\.\d)", token.content)):
            before.attrs |= {
                "style": f"{before.attrs['style']};--share:{float(number[1]) ** 2 / 100:.3g}%",
                "class": "shaded",
            }
        if (before.type, token.type) == ("tr_open", "td_open"):
            token.tag = "th"
            token.attrs["scope"] = "row"
        elif (before.tag, token.type) == ("th", "inline"):
            after.tag = "th"
        for image in token.children or []:
            if image.type == "image":
                before.tag = after.tag = "figure"
                image.attrs["src"] = images[Path(str(image.attrs["src"])).stem]
                caption = [Token("text", "", 0, content=image.content)]
                token.children = [image, Token("", "figcaption", 1), *caption, Token("", "figcaption", -1)]
    return Markup(_PARSER.renderer.render(tokens, _PARSER.options, {}))  # noqa: S704 - escaped by the parser


def csv_text(report: Report) -> str:
    """The raw numbers of all tables in long format: one line per section, view, row and task."""
    setting_columns = ("model", "revision", "dtype", "limit", "skew")
    file = io.StringIO()
    writer = csv.DictWriter(file, ("experiment", *setting_columns, *VALUES), lineterminator="\n")
    writer.writeheader()
    for section in report.sections:
        fixed = {name: getattr(section.setting, name, None) for name in setting_columns}
        for table in section.tables:
            for values in table.values:
                row = {"experiment": section.experiment.name, **fixed, **values}
                writer.writerow({name: _no_formula(value) for name, value in row.items()})
    return file.getvalue()


def _no_formula(value: object) -> object:
    """Text that spreadsheets do not compute, https://owasp.org/www-community/attacks/CSV_Injection."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write(report: Report, folder: str | Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write a report, all of its files or none, and say which; an older report in the folder is replaced.
    Its figures are used up, so it can be written once. The folder is new, empty or of an older report. Raises
    I2CLError on another format, or a folder that holds other files or cannot be written.
    """
    chosen = dict.fromkeys(formats)
    unknown = [name for name in chosen if name not in FORMATS]
    if unknown or not chosen:
        raise I2CLError(f"unknown format {', '.join(unknown)!r}: use some of {', '.join(FORMATS)}")
    path = Path(folder).resolve()
    with new_folder(path, OWNED) as fresh:
        images = _save_figures(report, fresh / FIGURE_FOLDER)
        texts: dict[str, Callable[[Report], str]] = {
            "md": markdown,
            "tex": latex,
            "csv": csv_text,
            "html": lambda one: html(one, images),
        }
        for ending in chosen:
            (fresh / f"report.{ending}").write_text(texts[ending](report), encoding="utf-8", newline="\n")
        if images and not {"md", "tex"} & chosen.keys():
            shutil.rmtree(fresh / FIGURE_FOLDER)  # the page holds its own copies, and nothing else shows them
        names = sorted(file.relative_to(fresh) for file in fresh.rglob("*") if file.is_file())
    return [path / name for name in names]


def _save_figures(report: Report, folder: Path) -> dict[str, str]:
    """Write all figures; data URIs for the page by stem."""
    images = {}
    for section in report.sections:
        for view, figure in section.figures:
            from i2cl.experiments.report.figures import save

            png, svg = save(figure, folder / section.stem(view))
            small = svg.stat().st_size <= LARGEST_SVG
            content = base64.b64encode((svg if small else png).read_bytes()).decode()
            images[section.stem(view)] = f"data:image/{'svg+xml' if small else 'png'};base64,{content}"
    return images
