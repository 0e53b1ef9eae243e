"""The integer types that K and V can have."""

from __future__ import annotations

import torch

INTEGERS = [torch.int8, torch.int16]
