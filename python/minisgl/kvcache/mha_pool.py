"""The KV pool of ordinary attention: one K and one V vector per token, layer and KV head.

The buffer is `(2, layers, pages, page_size, kv_heads, head_dim)`: K before V, and one layer's pages
next to each other. On a CPU it is anonymous memory that the system hands out zeroed when it is
first written: a pool costs what is used of it, and a slot that was never written reads as 0, so it
can poison no masked sum. A slot that was freed still holds its last token, whatever that was:
attention must not read past a request's length. With an integer type it holds codes, and a second
buffer `(2, layers, pages, page_size, kv_heads)` their scales in float32: value = code * scale. A
page's bytes are both. May import `distributed`, `kernel`, `utils`.

Invariant: nothing but `store_kv`, `write_pages` and a holder of a layer's tensors writes here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.distributed import current_tp_info
from minisgl.kernel.torch_ops import store_cache
from minisgl.utils import div_even, zeros_as_used

from .base import BaseKVCachePool


class MHAKVCache(BaseKVCachePool):
    """This rank's share of K and V.

    num_kv_heads: of the whole model; where there are fewer than ranks, each rank keeps a copy of
    one. num_pages: the dummy page included.
    """

    def __init__(
        self,
        num_kv_heads: int,
        num_layers: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        tp_size = current_tp_info().size
        self.num_kv_heads = div_even(num_kv_heads, tp_size, allow_replicate=True)
        self.num_layers = num_layers
        self.head_dim = head_dim
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (2, num_layers, num_pages, page_size, self.num_kv_heads, head_dim)
        self._kv_buffer = zeros_as_used(shape, dtype, self.device)
        self._scales = None
        if not dtype.is_floating_point:
            self._scales = zeros_as_used(shape[:-1], torch.float32, self.device)

    def k_cache(self, index: int) -> torch.Tensor:
        """K of one layer, `(pages, page_size, heads, dim)`."""
        return self._kv_buffer[0, index]

    def v_cache(self, index: int) -> torch.Tensor:
        """V of one layer, `(pages, page_size, heads, dim)`."""
        return self._kv_buffer[1, index]

    def k_scale(self, index: int) -> torch.Tensor | None:
        """Scales of one layer's K, float32 `(pages * page_size, heads)`; None for floats."""
        return None if self._scales is None else self._scales[0, index].flatten(0, 1)

    def v_scale(self, index: int) -> torch.Tensor | None:
        """Scales of one layer's V, float32 `(pages * page_size, heads)`; None for floats."""
        return None if self._scales is None else self._scales[1, index].flatten(0, 1)

    def store_kv(
        self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int
    ) -> None:
        """Store n tokens' K and V, flat or `(n, heads, dim)`, in the pool's dtype."""
        shape = (len(out_loc), self.num_kv_heads, self.head_dim)
        k_cache, v_cache = self._kv_buffer[:, layer_id]
        scales = self.k_scale(layer_id), self.v_scale(layer_id)
        store_cache(k_cache, v_cache, out_loc, k.reshape(shape), v.reshape(shape), *scales)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V of all layers and their scales."""
        return sum(_page_bytes(part) for part in self._parts())

    def read_pages(self, pages: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """A copy of whole pages, uint8 `(len(pages), page_bytes)`, on the pool's device."""
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        parts = [
            part.movedim(2, 0)[index].contiguous().flatten(1).view(torch.uint8)
            for part in self._parts()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def write_pages(self, pages: torch.Tensor | Sequence[int], data: torch.Tensor) -> None:
        """Write back what `read_pages` gave; `ValueError` where the size is another one."""
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        expected = (len(index), self.page_bytes)
        if data.dtype != torch.uint8 or tuple(data.shape) != expected:
            raise ValueError(f"expected uint8 {expected}, got {data.dtype} {tuple(data.shape)}")
        parts = self._parts()
        pieces = torch.split(data.to(self.device), [_page_bytes(part) for part in parts], 1)
        for part, piece in zip(parts, pieces, strict=True):
            by_page = part.movedim(2, 0)
            values = piece.contiguous().view(part.dtype)
            by_page[index] = values.view(len(index), *by_page.shape[1:])

    def _parts(self) -> list[torch.Tensor]:
        """What a page consists of, each `(2, layers, pages, ...)`.

        Scales come first, and as bytes, so that each part lies where its type may lie.
        """
        if self._scales is None:
            return [self._kv_buffer]
        return [self._scales.view(torch.uint8), self._kv_buffer]


def _page_bytes(part: torch.Tensor) -> int:
    return part[:, :, 0].numel() * part.itemsize
