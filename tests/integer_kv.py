"""The integer types that K and V can have here, for tests that run the native kernels."""

from __future__ import annotations

import torch

from minisgl.kernel.native_attention import KV_KINDS

INTEGERS = [dtype for dtype in (torch.int8, torch.int16) if dtype in KV_KINDS]
