"""Draw and save the figures of a report in a common style. Importing this module loads matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from i2cl.experiments.grid import View
from i2cl.experiments.report import figures_confidence, figures_maps, figures_scores
from i2cl.experiments.report.figures_base import FAINT, Drawing

_STYLE: Any = {
    **dict.fromkeys(("font.size", "axes.titlesize"), 10),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 9),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.edgecolor": FAINT,
    "grid.color": "#e4e4e4",
    "svg.fonttype": "none",
    "svg.hashsalt": "i2cl",
    "text.parse_math": False,  # task names and label words may contain dollar signs
}


_styled = style.context(["default", _STYLE])
"""Decorator: run a drawing function in the report's style, and restore matplotlib's settings."""

FIGURES: Mapping[View, Drawing] = {
    "efficiency": _styled(figures_scores.efficiency),
    "shots": _styled(figures_scores.shots),
    "bars": _styled(figures_scores.bars),
    "reliability": _styled(figures_confidence.reliability),
    "risk-coverage": _styled(figures_confidence.risk_coverage),
    "matrix": _styled(figures_maps.matrix),
    "vectors": _styled(figures_maps.context_vectors),
    "coefficient-map": _styled(figures_maps.coefficient_map),
    "class-vectors": _styled(figures_maps.class_vectors),
    "coefficients": _styled(figures_maps.coefficients),
}
"""Drawing functions by view. They return None if there are no results for the view."""


@_styled
def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG, return the two paths, and clear the figure.

    The output is deterministic: equal figures give equal bytes.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    figure.savefig(png, dpi=150, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None})
    figure.clear()
    return [png, svg]
