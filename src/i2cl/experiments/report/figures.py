"""Figures of the report by view. Importing it loads matplotlib, so it is imported late."""

from collections.abc import Mapping
from types import MappingProxyType

from i2cl.experiments.grid import View
from i2cl.experiments.report.figures_base import Drawing, save
from i2cl.experiments.report.figures_maps import (
    class_vectors,
    coefficient_map,
    coefficients,
    context_vectors,
    matrix,
)
from i2cl.experiments.report.figures_scores import bars, efficiency, shots

FIGURES: Mapping[View, Drawing] = MappingProxyType(
    {
        "efficiency": efficiency,
        "shots": shots,
        "bars": bars,
        "matrix": matrix,
        "vectors": context_vectors,
        "coefficient-map": coefficient_map,
        "class-vectors": class_vectors,
        "coefficients": coefficients,
    }
)
"""What draws each view from results and vectors; None where the results hold nothing for it. Read-only."""

__all__ = ["FIGURES", "Drawing", "save"]
