"""Number formats of weights: the `Weight` seam, dequantising, packing.

May import `kernel` and `utils`.
"""

from __future__ import annotations

from .weight import FloatWeight, StackedWeight, Weight, as_weight

__all__ = ["FloatWeight", "StackedWeight", "Weight", "as_weight"]
