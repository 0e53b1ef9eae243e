"""Number formats of weights: the `Weight` seam, dequantising, packing.

May import `kernel` and `utils`.
"""

from __future__ import annotations

from .weight import (
    Experts,
    ExpertWeights,
    FloatWeight,
    Matrix,
    StackedWeight,
    Weight,
    as_weight,
)

__all__ = [
    "ExpertWeights",
    "Experts",
    "FloatWeight",
    "Matrix",
    "StackedWeight",
    "Weight",
    "as_weight",
]
