"""Build a report, with a section for each experiment and setting, and write it in several formats.

The templates ``report.*.j2`` define the document; this module fills them.
"""

import base64
import csv
import io
import itertools
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape as escape_html

from i2cl.errors import I2CLError, require_packages
from i2cl.experiments.grid import Experiment, View
from i2cl.experiments.records import Record
from i2cl.experiments.report.printed import Paper, printed_for
from i2cl.experiments.report.results import Results, Setting, listing, outcome, results_of
from i2cl.experiments.report.tables import Entry, Table, markdown_table, tables_of
from i2cl.experiments.store import Vectors
from i2cl.storage.atomic import new_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Report of experiments"
FORMATS = ("md", "csv", "html")  # file extensions
FIGURE_FOLDER = "figures"
OWN_FILES = frozenset({FIGURE_FOLDER, *(f"report.{extension}" for extension in FORMATS)})
MAX_ANCHOR = 60  # characters of an anchor, which file names of figures begin with
MAX_ERROR = 300  # characters of an error message in the report
MAX_SVG_BYTES = 1_000_000  # the HTML page embeds larger figures as PNG

CAPTIONS: Mapping[View, str] = {
    "bars": "Mean accuracy of each row, with the standard deviation over seeds.",
    "reliability": "Accuracy by confidence, as predicted and at the best temperature of each task.",
    "risk-coverage": "Error rate among the most confident queries, by coverage.",
    "efficiency": "Mean accuracy against time per query and stored bytes.",
    "shots": "Mean accuracy by demonstrations per class.",
    "matrix": "Accuracy on every task with the fit on every other task.",
    "vectors": "t-SNE of context vectors.",
    "coefficient-map": "t-SNE of calibrated coefficients.",
    "class-vectors": "t-SNE of the context vectors of each class.",
    "coefficients": "Calibrated coefficients by layer.",
}
"""Captions of the views with a figure, here because missing figures are listed without matplotlib."""

PROVENANCE = {
    "i2cl": "i2cl",
    "commit": "Commit",
    "python": "Python",
    "torch": "PyTorch",
    "transformers": "Transformers",
    "machine": "Machine",
    "accelerator": "Accelerator",
    "device": "Device",
    "dtype": "Precision",
    "threads": "Threads",
    "weights": "Weights",
}
"""Headings for parts of a record's provenance, in order; other parts follow under their own names."""


@dataclass(frozen=True)
class Section:
    """One experiment in one setting.

    Attributes:
        experiment: the experiment.
        setting: model and queries; None without results.
        anchor: unique name for links and files.
        tables: its tables.
        figures: its figures by view. Writing the report empties them.
        missing: notes on rows, tasks and views without results.
    """

    experiment: Experiment
    setting: Setting | None
    anchor: str
    tables: tuple[Table, ...] = ()
    figures: tuple[tuple[View, "Figure"], ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The paper's table or figure."""
        return f"Paper: {self.experiment.paper}" if self.experiment.paper != "-" else "Not in the paper"

    @property
    def heading(self) -> str:
        """Title, with the model."""
        return self.experiment.title + (f" ({self.setting.model})" if self.setting is not None else "")

    @property
    def name(self) -> str:
        """Name of the experiment, on one line and without backticks, so that it can be shown as code."""
        return " ".join(self.experiment.name.replace("`", " ").split())

    @property
    def setting_words(self) -> str:
        """Description of the setting."""
        return self.setting.words if self.setting is not None else "no results"

    def stem(self, view: View) -> str:
        """Return the file name of a figure without its extension."""
        return f"{self.anchor}-{view}"


@dataclass(frozen=True)
class Report:
    """Content of a report, independent of its output format."""

    sections: tuple[Section, ...]
    failures: Table | None
    provenance: tuple[tuple[str, tuple[str, ...]], ...]


def build(
    experiments: Sequence[Experiment], records: Iterable[Record], vectors: Vectors, *, figures: bool = True
) -> Report:
    """Compute every table and, unless ``figures`` is False, draw every figure.

    Args:
        experiments: experiments to report.
        records: records of a store.
        vectors: vectors of the store.
        figures: whether to draw figures, which needs the ``experiments`` extra.
    """
    records = tuple(records)
    sections: list[Section] = []
    used: dict[str, Record] = {}
    for experiment in experiments:
        settings, notes = _main_settings(results_of(experiment, records))
        used |= {record.key: record for results in settings for record in results.cells}
        if not settings:
            hint = f"no results in this store: run `{experiment.command}`"
            anchor = _anchor(experiment.name, sections)
            sections.append(Section(experiment, None, anchor, missing=(hint,)))
        for results in settings:
            anchor = _anchor(experiment.name, sections)
            section = _section(results, records, vectors, anchor, draw=figures)
            sections.append(replace(section, missing=(*section.missing, *notes)))
            notes = []
    rows = [row for experiment in experiments for row in experiment.rows]
    failed = [
        record
        for record in records
        if record.status == "failed" and any(row.holds(record.cell) for row in rows)
    ]
    return Report(tuple(sections), _failures(failed), _provenance(list(used.values()), len(failed)))


def _anchor(name: str, sections: Sequence[Section]) -> str:
    """Return a unique anchor without characters that are special in paths or Markdown."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:MAX_ANCHOR]
    used = {section.anchor for section in sections}
    numbered = (f"{plain}-{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([plain], numbered) if candidate not in used)


def _section(
    results: Results, records: Sequence[Record], vectors: Vectors, anchor: str, *, draw: bool
) -> Section:
    tables: list[Table] = []
    figures: list[tuple[View, Figure]] = []
    empty: dict[str, list[View]] = {}
    experiment, skipped = results.experiment, _skipped(results, records)
    missing = _missing_rows(results, skipped)
    missing += [f"{name} was skipped: {error}" for name, error in skipped.items()]
    try:
        results.check_comparable()
        name = experiment.printed
        paper = Paper(results, printed_for(name, results.setting.model) if name else None)
    except I2CLError as error:
        return Section(experiment, results.setting, anchor, missing=(*missing, str(error)))
    for view in experiment.views:
        view_tables = tables_of(view, results, paper)
        tables += view_tables
        try:
            figure = _draw(results, vectors, view) if draw and view in CAPTIONS else None
        except I2CLError as error:
            missing.append(f"figure {view}: {error}")
            continue
        if figure is not None:
            figures.append((view, figure))
        elif not view_tables:
            empty.setdefault(_reason(view, experiment.against, draw=draw), []).append(view)
    missing += [f"{', '.join(views)}: {reason}" for reason, views in empty.items()]
    return Section(experiment, results.setting, anchor, tuple(tables), tuple(figures), tuple(missing))


def _main_settings(settings: Sequence[Results]) -> tuple[list[Results], list[str]]:
    """Leave out settings with less than half the rows of another: those were run for other experiments."""
    most = max((len(results.rows) for results in settings), default=0)
    main = [
        setting
        for setting in settings
        if most == 1 or (len(setting.rows) > 1 and 2 * len(setting.rows) >= most)
    ]
    return main, [
        f"section for {results.setting.words}: it has only {'; '.join(row.name for row in results.rows)}"
        for results in settings
        if results not in main
    ]


def _missing_rows(results: Results, skipped: Collection[str]) -> list[str]:
    present = [*skipped, *(row.name for row in results.rows)]
    experiment, model, limit = results.experiment, results.setting.model, results.setting.limit
    missing = [row.name for row in experiment.rows if row.name not in present]
    command = experiment.command + (f" --model {model}" if model != "reference" else "")
    command += f" --limit {limit}" if limit not in (None, experiment.full.limit) else ""
    lines = [f"rows without results: {'; '.join(missing)} (run `{command}`)"] if missing else []
    if results.left_out:
        lines.append(f"tasks with results for at most half of the rows: {', '.join(results.left_out)}")
    return lines


def _skipped(results: Results, records: Sequence[Record]) -> dict[str, str | None]:
    """Return the names of rows that were skipped on this model, with the reason."""
    skipped = [
        record
        for record in records
        if record.status == "skipped" and record.cell.model == results.setting.model
    ]
    rows = results.experiment.rows
    return {row.name: record.error for record in skipped for row in rows if row.holds(record.cell)}


def _reason(view: View, against: str, *, draw: bool) -> str:
    if view == "comparison":
        return f"it needs results of the row {against} and of another row"
    if view in {"confidence", "reliability", "risk-coverage"} and (draw or view not in CAPTIONS):
        return "no row has stored scores for all of its cells (runs of an older version)"
    return "figures are disabled" if view in CAPTIONS and not draw else "no results for this view"


def _draw(results: Results, vectors: Vectors, view: View) -> "Figure | None":
    require_packages("a figure", "experiments", "matplotlib", "textalloc")
    from i2cl.experiments.report.figures import FIGURES

    return FIGURES[view](results, vectors)


def _failures(records: Sequence[Record]) -> Table | None:
    columns = ("Model", "Task", "Method", "Seed", "Error")
    rows = []
    for cell, error in ((record.cell, " ".join((record.error or "unknown").split())) for record in records):
        options = ", ".join(f"{name}={value}" for name, value in cell.options.items())
        method = f"{cell.method} ({options})" if options else cell.method
        shortened = error if len(error) <= MAX_ERROR else f"{error[:MAX_ERROR]} ..."
        rows.append([*map(Entry, (cell.model, cell.task, method, str(cell.seed), shortened))])
    return Table("Failed cells", columns, rows, words=columns) if rows else None


def _provenance(records: Sequence[Record], failed: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return facts on the records: their number, time, software and hardware, as headings with values."""
    values: dict[str, dict[str, None]] = {name: {} for name in PROVENANCE}  # dicts as ordered sets
    for record in records:
        for name, value in record.provenance.items():
            if value is not None:
                values.setdefault(name, {})[str(value)] = None
    outcomes = [outcome(record) for record in records]
    hours = [
        sum(outcome.fit_seconds for outcome in outcomes),
        sum(outcome.predict_seconds for outcome in outcomes),
    ]
    days = sorted(record.started[:10] for record in records)
    cells = f"{len(records):,} done" + (f", {failed:,} failed" if failed else "")
    lines = [
        ("Cells", (cells,)),
        ("Hours", (f"{hours[0] / 3600:.2f} fitting, {hours[1] / 3600:.2f} predicting",)),
        ("Run", (" to ".join(dict.fromkeys((days[0], days[-1]))),) if days else ()),
        *((PROVENANCE.get(name, name), tuple(distinct)) for name, distinct in values.items()),
    ]
    return tuple((name, facts) for name, facts in lines if facts)


@dataclass(frozen=True)
class Markup:
    """Syntax of a text format.

    Attributes:
        escape: returns plain text such that it has no special meaning.
        bold: format of bold text.
        italic: format of italic text.
        code: format of code.
    """

    escape: Callable[[str], str]
    bold: str
    italic: str
    code: str

    def cell(self, entry: Entry) -> str:
        """Format a cell of a table."""
        text = self.escape(entry.text)
        if text and (entry.bold or entry.printed):
            text = (self.bold if entry.bold else self.italic).format(text)
        return f"{text} {entry.mark}" if entry.mark else text

    def with_code(self, text: str) -> str:
        """Escape text, except for code in backticks."""
        parts = enumerate(text.split("`"))
        return "".join(
            self.code.format(part if self.code == "`{}`" else self.escape(part))
            if index % 2
            else self.escape(part)
            for index, part in parts
        )

    def grid(self, table: Table) -> str:
        """Format a table as Markdown."""
        table = table.narrow
        rows = [[self.cell(entry) for entry in row] for row in table.rows]
        return markdown_table([self.escape(name) for name in table.columns], rows, table.numeric)


def _escape_markdown(text: str) -> str:
    """Escape Markdown. Underscores within words have no meaning there, and are left readable."""
    special = r"[\\`*|\[\]]|<(?=[\w/!?])|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(special, r"\\\g<0>", re.sub(r"\s+", " ", text))


MARKUP = {
    "md": Markup(_escape_markdown, "**{}**", "*{}*", "`{}`"),
    "html": Markup(escape_html, "<strong>{}</strong>", "<em>{}</em>", "<code>{}</code>"),
}
"""Text formats by file extension."""


def render(report: Report, extension: str, images: Mapping[str, str] | None = None) -> str:
    """Render a report as Markdown or HTML.

    Args:
        report: the report.
        extension: one of `MARKUP`. Markdown refers to figures in the folder ``figures``.
        images: data URIs of the figures by stem, for HTML.
    """
    markup = MARKUP[extension]
    pages = Environment(
        loader=PackageLoader("i2cl.experiments.report", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - the templates escape in the syntax of their format
    )
    pages.filters |= {"e": markup.escape, "listing": listing}
    pages.filters |= {"cell": markup.cell, "with_code": markup.with_code, "grid": markup.grid}
    values = {"title": TITLE, "captions": CAPTIONS, "folder": FIGURE_FOLDER, "images": images or {}}
    return pages.get_template(f"report.{extension}.j2").render(report=report, **values)


CSV_COLUMNS = """experiment model revision dtype limit skew table row column mean sd low high p q seeds
queries gaps"""


def csv_text(report: Report) -> str:
    """Return the raw numbers of all tables in long format, with a line for each cell of a table.

    Accuracies and differences are in percent. ``gaps`` describes the missing tasks and seeds of a row.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS.split(), lineterminator="\n")
    writer.writeheader()
    for section in report.sections:
        common = {"experiment": section.experiment.name, **(vars(section.setting) if section.setting else {})}
        for table in section.tables:
            for name, *entries in table.rows:
                for column, entry in zip(table.columns[1:], entries, strict=True):
                    if entry.numbers:
                        place = {"table": table.title, "row": name.text, "column": column}
                        values = common | place | dict(entry.numbers)
                        writer.writerow({key: _escape_formula(value) for key, value in values.items()})
    return file.getvalue()


def _escape_formula(value: object) -> object:
    """Quote text that spreadsheets would evaluate, https://owasp.org/www-community/attacks/CSV_Injection."""
    evaluated = ("=", "+", "-", "@", "\t", "\r", "\n")
    return f"'{value}" if isinstance(value, str) and value.startswith(evaluated) else value


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
        for extension in chosen:
            content = csv_text(report) if extension == "csv" else render(report, extension, images)
            (new / f"report.{extension}").write_text(content, encoding="utf-8", newline="\n")
        if images and "md" not in chosen:
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
