"""Table rows: each running request holds one row of the page table and of the token pool.

Invariant: a row has at most one owner and is given back exactly once.
"""

from __future__ import annotations

import torch

from minisgl.utils import zeros_as_used


class TableManager:
    """Hands out rows `0 ... max_running_reqs - 1`.

    page_table: int32 `(rows, tokens)` of token locations. token_pool: int32 of the same shape, the
    token ids at each position, on the engine's device.
    """

    def __init__(self, max_running_reqs: int, page_table: torch.Tensor) -> None:
        self.max_running_reqs = max_running_reqs
        self.page_table = page_table
        self.token_pool = zeros_as_used(page_table.shape, torch.int32, page_table.device)
        self._free_rows = list(reversed(range(max_running_reqs)))
        self._is_taken = [False] * max_running_reqs

    @property
    def available_size(self) -> int:
        """Number of free rows."""
        return len(self._free_rows)

    def allocate(self) -> int:
        """Take a free row; there must be one."""
        assert self._free_rows, "no free table row: check available_size first"
        row = self._free_rows.pop()
        self._is_taken[row] = True
        return row

    def free(self, slot: int) -> None:
        """Give a row back."""
        assert self._is_taken[slot], f"table row {slot} is freed twice"
        self._is_taken[slot] = False
        self._free_rows.append(slot)
