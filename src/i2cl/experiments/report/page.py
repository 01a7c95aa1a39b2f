"""A report as one HTML page without scripts or requests, and a report's files on disk."""

import base64
import shutil
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

import jinja2

from i2cl.errors import I2CLError
from i2cl.experiments.report.document import FIGURES as CAPTIONS
from i2cl.experiments.report.document import Report, build
from i2cl.experiments.report.render import TITLE, code_parts, csv_text, failures_table, latex, markdown
from i2cl.experiments.report.tables_model import listing
from i2cl.storage.atomic import new_folder

FIGURES = "figures"

FORMATS = ("md", "tex", "csv", "html")
"""Endings of the files of a report."""

OWNED = frozenset({FIGURES, *(f"report.{ending}" for ending in FORMATS)})
"""Names of what `write` leaves in its folder."""

LARGEST_SVG = 1_000_000
"""Bytes of a drawing above which the page holds its pixels instead."""

__all__ = ["FORMATS", "build", "html", "write"]


def html(report: Report, images: Mapping[str, str]) -> str:
    """The report as one page.

    Args:
        report: what to show.
        images: data URI of each figure, by its stem.
    """
    source = (resources.files("i2cl.experiments.report") / "page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"listing": listing, "code_parts": code_parts}
    failed = failures_table(report)
    return environment.from_string(source).render(
        title=TITLE, report=report, images=images, failed=failed, captions=CAPTIONS
    )


def write(report: Report, folder: str | Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write a report, all of its files or none; an older report in the folder is replaced.

    Args:
        report: its figures are used up, so it can be written once.
        folder: new, empty or of an older report.
        formats: some of `FORMATS`.

    Returns:
        The files written.

    Raises:
        I2CLError: on another format, or a folder that holds other files or cannot be written.
    """
    chosen = dict.fromkeys(formats)
    unknown = [name for name in chosen if name not in FORMATS]
    if unknown or not chosen:
        raise I2CLError(f"unknown format {', '.join(unknown)!r}: use some of {', '.join(FORMATS)}")
    path = Path(folder).resolve()
    with new_folder(path, OWNED) as fresh:
        images = _save_figures(report, fresh / FIGURES)
        texts = {
            "md": lambda: markdown(report),
            "tex": lambda: latex(report),
            "csv": lambda: csv_text(report),
            "html": lambda: html(report, images),
        }
        for ending in chosen:
            (fresh / f"report.{ending}").write_text(texts[ending](), encoding="utf-8", newline="\n")
        if images and not {"md", "tex"} & chosen.keys():
            shutil.rmtree(fresh / FIGURES)  # the page holds its own copies, and nothing else shows them
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
