"""A report's files on disk."""

import base64
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from i2cl.errors import I2CLError
from i2cl.experiments.report.document import FIGURE_FOLDER, Report, build
from i2cl.experiments.report.render import csv_text, html, latex, markdown
from i2cl.storage.atomic import new_folder

FORMATS = ("md", "tex", "csv", "html")  # endings of the files of a report
# Names of what `write` leaves in its folder.
OWNED = frozenset({FIGURE_FOLDER, *(f"report.{ending}" for ending in FORMATS)})
LARGEST_SVG = 1_000_000  # bytes of a drawing above which the page holds its pixels instead
__all__ = ["FORMATS", "build", "write"]


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
