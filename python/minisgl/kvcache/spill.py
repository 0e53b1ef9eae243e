"""The second tier: prefixes that the pool had no room for, in host memory or a bounded file.

It is a pool of slots, one page of opaque bytes each, and a radix tree of its own that says which
tokens lie where. The tree compares tokens, keeps salts apart and forgets what was used least
recently, as the one of the pool does. A prefix is stored whole, from its first token: what another
one left here is not copied again. What comes back stays here too.

Copies are launched on the engine's stream, in the order of the calls; on a CPU they are done when a
call returns. So a page may be given away as soon as `store` has returned, and nothing here says
whether a copy has arrived: ranks that make the same calls get the same answers. If memory or
the file fails, the tier forgets everything and stays empty, with one line in the log.

May import `core` and `utils`. Invariant: every slot is free or in the tree, never both.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core import ConfigError
from minisgl.utils import init_logger, zeros_as_used

from .base import BaseCacheHandle, CachedPrefix
from .radix_cache import RadixPrefixCache

logger = init_logger(__name__)

MAX_STAGING_BYTES = 32 << 20
MAX_SLOTS = 2**31 - 1  # slots count tokens in int32, like the pool

Slots = npt.NDArray[np.int64]
FAILURES = (OSError, MemoryError, RuntimeError)  # what memory, a disk or a device can do to a copy


class PagedEngine(Protocol):
    """Where pages come from and go to; an `Engine`. Pages are numbers, not locations."""

    device: torch.device

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        ...

    def read_pages(self, pages: Any) -> torch.Tensor:
        """A copy of whole pages, uint8 `(len(pages), page_bytes)`."""
        ...

    def write_pages(self, pages: Any, data: torch.Tensor) -> None:
        """Write back what `read_pages` gave."""
        ...

    def launch_order(self) -> AbstractContextManager[None]:
        """Inside, work is launched behind everything that was launched before."""
        ...


class SpillTier:
    """Keeps up to `num_bytes` of pages.

    directory: None for host memory, else where to put a file, which is gone when the process is.
    Raises `ConfigError` if there is no room for a page, or no memory or disk for `num_bytes`.
    """

    def __init__(
        self, num_bytes: int, engine: PagedEngine, page_size: int, directory: str | None = None
    ) -> None:
        self.page_size = page_size
        self._engine = engine
        self.num_slots = min(num_bytes // engine.page_bytes, MAX_SLOTS // page_size)
        if not self.num_slots:
            raise ConfigError(
                f"kv_spill_bytes (--kv-spill) has no room for a page of {engine.page_bytes} bytes"
            )
        try:
            self._memory = (
                HostMemory(self.num_slots, engine.page_bytes, engine.device)
                if directory is None
                else HostFile(self.num_slots, engine.page_bytes, engine.device, directory)
            )
        except FAILURES as error:
            what = "there is no memory" if directory is None else f"{directory} has no place"
            raise ConfigError(
                f"kv_spill_bytes (--kv-spill): {what} for {num_bytes} bytes: {error}"
            ) from error
        self._step = max(MAX_STAGING_BYTES // engine.page_bytes, 1)
        self.clear()

    @property
    def num_free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def clear(self) -> None:
        """Forget everything."""
        self.index = RadixPrefixCache("cpu", self.page_size)
        self._free: Slots = np.arange(self.num_slots)[::-1]

    def store(self, prefix: CachedPrefix) -> None:
        """Keep a prefix of whole pages that lie in the pool, or as much of its front as fits."""
        with self.found(prefix.ids, prefix.salt) as known:
            start, index = known.cached_len, self.index
            room = len(self._free) + index.size_info.evictable_size // self.page_size
            num_new = min((len(prefix.ids) - start) // self.page_size, room)
            if not num_new:
                return
            end = start + num_new * self.page_size
            slots = self._take(num_new)
            pages = prefix.indices[start : end : self.page_size] // self.page_size
            if self._copy(pages, slots, is_out=True):
                offsets = np.arange(self.page_size)
                locations = (slots[:, None] * self.page_size + offsets).astype(np.int32)
                new = torch.from_numpy(locations.reshape(-1))
                indices = torch.cat([known.get_matched_indices(), new])
                index.insert_prefix(torch.from_numpy(prefix.ids[:end]), indices, prefix.salt)

    @contextmanager
    def found(self, ids: Any, salt: str) -> Iterator[BaseCacheHandle]:
        """The longest prefix of `ids` that is here; inside, it stays."""
        index = self.index
        handle = index.match_prefix(ids, salt).cuda_handle
        index.lock_handle(handle)
        try:
            yield handle
        finally:
            index.lock_handle(handle, unlock=True)

    def copy_back(self, handle: BaseCacheHandle, start: int, locations: torch.Tensor) -> bool:
        """Write a found prefix from token `start` on to the pool's `locations`; False if it failed.

        start, len(locations): whole pages.
        """
        indices = handle.get_matched_indices()[start : start + len(locations)]
        slots = _page_numbers(indices, self.page_size)
        return self._copy(locations[:: self.page_size] // self.page_size, slots, is_out=False)

    def read_pages(self, slots: Any) -> torch.Tensor:
        """What lies in some slots, on the host."""
        with self._engine.launch_order():
            return self._memory.read(np.asarray(slots, dtype=np.int64)).cpu()

    def check_integrity(self) -> None:
        """`RuntimeError` unless every slot is free or cached, and the tree is sound."""
        self.index.check_integrity([])
        heads = _page_numbers(self.index.resident_indices(), self.page_size)
        slots = np.sort(np.concatenate([self._free, heads]))
        if len(slots) and not np.array_equal(slots, np.arange(self.num_slots)):
            raise RuntimeError("spill integrity: a slot is lost, or used twice")

    def _take(self, num_slots: int) -> Slots:
        missing = num_slots - len(self._free)
        if missing > 0:
            evicted = self.index.evict(missing * self.page_size)
            self._free = np.concatenate([_page_numbers(evicted, self.page_size), self._free])
        first = len(self._free) - num_slots
        self._free, taken = self._free[:first], self._free[first:][::-1]
        return taken

    def _copy(self, pages: torch.Tensor, slots: Slots, *, is_out: bool) -> bool:
        """Copy between the pool's pages and slots, a few at a time; False if it failed."""
        try:
            with self._engine.launch_order():
                for i in range(0, len(pages), self._step):
                    part, where = pages[i : i + self._step], slots[i : i + self._step]
                    if is_out:
                        self._memory.write(where, self._engine.read_pages(part))
                    else:
                        self._engine.write_pages(part, self._memory.read(where))
        except FAILURES as error:
            logger.warning("the second tier of the KV cache is off from here on: %s", error)
            self.num_slots = 0
            self.clear()
            return False
        return True


class HostMemory:
    """Slots in host memory; on CUDA pinned, so that copies are ordered by their stream alone."""

    def __init__(self, num_slots: int, page_bytes: int, device: torch.device) -> None:
        self._device = device
        shape = (num_slots, page_bytes)
        if device.type == "cpu":
            self._buffer = zeros_as_used(shape, torch.uint8, device)
        else:
            self._buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def write(self, slots: Slots, data: torch.Tensor) -> None:
        """Fill slots with the rows of `data`."""
        for first, start, stop in _runs(slots):
            row = self._buffer[first : first + stop - start]
            row.copy_(data[start:stop], non_blocking=True)

    def read(self, slots: Slots) -> torch.Tensor:
        """The content of slots, on the engine's device."""
        data = torch.empty(
            (len(slots), self._buffer.shape[1]), dtype=torch.uint8, device=self._device
        )
        for first, start, stop in _runs(slots):
            row = self._buffer[first : first + stop - start]
            data[start:stop].copy_(row, non_blocking=True)
        return data


class HostFile:
    """Slots in a file without a name. All of its place is taken at the start, or it is refused."""

    def __init__(
        self, num_slots: int, page_bytes: int, device: torch.device, directory: str
    ) -> None:
        self._device = device
        self._page_bytes = page_bytes
        self._file = tempfile.TemporaryFile(dir=directory, prefix="minisgl-kv-", buffering=0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_slots * page_bytes)
        except OSError:
            self._file.close()
            raise

    def write(self, slots: Slots, data: torch.Tensor) -> None:
        """Fill slots with the rows of `data`."""
        rows = data.cpu().numpy()
        for first, start, stop in _runs(slots):
            self._file.seek(first * self._page_bytes)
            rest = rows[start:stop].reshape(-1).data
            while rest:
                rest = rest[self._file.write(rest) :]

    def read(self, slots: Slots) -> torch.Tensor:
        """The content of slots, on the engine's device."""
        data = torch.empty((len(slots), self._page_bytes), dtype=torch.uint8)
        rows = data.numpy()
        for first, start, stop in _runs(slots):
            self._file.seek(first * self._page_bytes)
            rest = rows[start:stop].reshape(-1).data
            while rest:
                num_read = self._file.readinto(rest)
                if not num_read:
                    raise OSError("the file has become shorter")
                rest = rest[num_read:]
        return data.to(self._device)


def _page_numbers(locations: torch.Tensor, page_size: int) -> Slots:
    """The pages of locations, which are runs of whole pages."""
    return locations[::page_size].cpu().numpy().astype(np.int64) // page_size


def _runs(slots: Slots) -> Iterator[tuple[int, int, int]]:
    """Neighbours in one go: (first slot, start, stop) of each run of consecutive slots."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    starts = [0, *breaks] if len(slots) else []
    for start, stop in zip(starts, [*breaks, len(slots)]):
        yield int(slots[start]), start, stop
