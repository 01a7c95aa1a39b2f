"""Write a report as Markdown, LaTeX, HTML and CSV. LaTeX and HTML are generated from the Markdown."""

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

FORMATS = ("md", "tex", "csv", "html")  # file extensions
OWN_FILES = frozenset({FIGURE_FOLDER, *(f"report.{extension}" for extension in FORMATS)})
MAX_SVG_BYTES = 1_000_000  # the HTML page embeds larger figures as PNG

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

# titles of tables that contain only accuracies, which are shaded
_SHADED = re.compile(r"^Accuracy by task|^Average accuracy by|: from the task of the line")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # first characters of cells that spreadsheets evaluate

_TEX_SIGNS = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)

_NO_TEX = re.compile(
    "[^ -~\u00a0-\u0125\u0128-\u0137\u0139-\u013e\u0141-\u0148\u014a-\u0165\u0168-\u017e–—‘’‚“”„†‡•…‰€™−▲▼]"
)
"""Characters that pdfLaTeX fails on: not in its Latin fonts, and not declared in the preamble."""

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
"""LaTeX for Markdown tokens by type, and for headings by tag. Other tokens have no output."""


def markdown(report: Report) -> str:
    """Render the report as GitHub Markdown, which links to figures in the folder ``figures``."""
    parts = [_facts(report), *map(section_markdown, report.sections), _failures(report)]
    return "\n\n".join(part for part in (f"# {TITLE}", *parts) if part) + "\n"


def _facts(report: Report) -> str:
    return "\n".join(f"- {name}: {_md(listing(values))}" for name, values in report.provenance)


def _failures(report: Report) -> str:
    if report.failures is None:
        return ""
    return "\n".join((f"## {report.failures.title}", "", *_table(report.failures)))


def section_markdown(section: Section) -> str:
    """Render one section as Markdown."""
    experiment = section.experiment
    name = f"`{' '.join(experiment.name.replace('`', ' ').split())}`"
    origin = f"{_md(section.source)}. Experiment {name}: {_md(section.setting_words)}."
    lines = [f"## {_md(section.heading)}", "", _md(experiment.measures), "", origin]
    if section.missing:
        lines += ["", "Missing:", "", *(f"- {_md_with_code(line)}" for line in section.missing)]
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
    """Escape Markdown. Underscores within words have no meaning there, and are left readable."""
    special = r"[\\`*|\[\]]|<(?=[\w/!?])|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(special, r"\\\g<0>", re.sub(r"\s+", " ", text))


def _md_with_code(text: str) -> str:
    """Escape Markdown except for code in backticks."""
    parts = enumerate(text.split("`"))
    return "".join(f"`{part}`" if index % 2 else _md(part) for index, part in parts)


def latex(report: Report) -> str:
    """Render the report as a LaTeX document, which includes figures from the folder ``figures``."""
    return "".join((_PREAMBLE, *_tex(_PARSER.parse(markdown(report))), "\\end{document}\n"))


def _tex(tokens: Sequence[Token]) -> Iterator[str]:
    for index, token in enumerate(tokens):
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
            head = takewhile(lambda one: one.type != "thead_close", tokens[index:])
            styles = (str(one.attrs.get("style")) for one in head if one.type == "th_open")
            columns = "".join("r" if "right" in style else "l" for style in styles)
            yield "\\resizebox{\\ifdim\\width>\\textwidth\\textwidth\\else\\width\\fi}{!}{"
            yield f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
        elif token.type in {"th_open", "td_open"}:
            yield "" if tokens[index - 1].type == "tr_open" else " & "
        elif not token.hidden:
            yield _TEX.get(token.tag if token.type == "heading_open" else token.type, "")


def _tex_text(text: str) -> str:
    """Escape LaTeX; characters that pdfLaTeX cannot print become their code point, such as ``<U+4F60>``."""
    return _NO_TEX.sub(lambda match: f"<U+{ord(match[0]):04X}>", text).translate(_TEX_SIGNS)


def html(report: Report, images: Mapping[str, str]) -> str:
    """Render the report as a self-contained HTML page; ``images`` are data URIs by figure stem."""
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
    """Convert Markdown to HTML, with row headers in tables, shaded accuracies, and embedded figures."""
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
    """Return the raw numbers of all tables in long format: one line per section, view, row and task."""
    setting_columns = ("model", "revision", "dtype", "limit", "skew")
    file = io.StringIO()
    writer = csv.DictWriter(file, ("experiment", *setting_columns, *VALUES), lineterminator="\n")
    writer.writeheader()
    for section in report.sections:
        fixed = {name: getattr(section.setting, name, None) for name in setting_columns}
        for table in section.tables:
            for values in table.values:
                row = {"experiment": section.experiment.name, **fixed, **values}
                writer.writerow({name: _escape_formula(value) for name, value in row.items()})
    return file.getvalue()


def _escape_formula(value: object) -> object:
    """Quote text that spreadsheets would evaluate, https://owasp.org/www-community/attacks/CSV_Injection."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write(report: Report, folder: str | Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write all files of a report or none of them, and return their paths.

    Empties the figures, so a report can be written only once.

    Args:
        report: the report.
        folder: new or empty folder, or one with an older report, which is replaced.
        formats: some of `FORMATS`.

    Raises:
        I2CLError: for an unknown format, or if the folder has other files or cannot be written.
    """
    chosen = dict.fromkeys(formats)
    unknown = [name for name in chosen if name not in FORMATS]
    if unknown or not chosen:
        raise I2CLError(f"unknown format {', '.join(unknown)!r}: use one or more of {', '.join(FORMATS)}")
    path = Path(folder).resolve()
    with new_folder(path, OWN_FILES) as new:
        images = _save_figures(report, new / FIGURE_FOLDER)
        texts: dict[str, Callable[[Report], str]] = {
            "md": markdown,
            "tex": latex,
            "csv": csv_text,
            "html": lambda one: html(one, images),
        }
        for extension in chosen:
            content = texts[extension](report)
            (new / f"report.{extension}").write_text(content, encoding="utf-8", newline="\n")
        if images and not {"md", "tex"} & chosen.keys():
            shutil.rmtree(new / FIGURE_FOLDER)  # HTML has embedded copies
        names = sorted(file.relative_to(new) for file in new.rglob("*") if file.is_file())
    return [path / name for name in names]


def _save_figures(report: Report, folder: Path) -> dict[str, str]:
    """Write all figures, and return them as data URIs by stem."""
    images = {}
    for section in report.sections:
        for view, figure in section.figures:
            from i2cl.experiments.report.figures import save

            png, svg = save(figure, folder / section.stem(view))
            small = svg.stat().st_size <= MAX_SVG_BYTES
            content = base64.b64encode((svg if small else png).read_bytes()).decode()
            images[section.stem(view)] = f"data:image/{'svg+xml' if small else 'png'};base64,{content}"
    return images
