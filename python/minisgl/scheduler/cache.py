"""The only code that moves a KV page between its three states: free, owned by a request, cached.

Invariant, checked by `check_integrity` between any two steps: free pages, cached pages and the
pages of live rows beyond their locked prefix are disjoint and together all pages. A location
is a token's slot; page `p` starts at location `p * page_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from minisgl.core import Req, Spans
from minisgl.kvcache import BaseCacheHandle, MatchResult, SpillTier, create_prefix_cache
from minisgl.utils import div_ceil

from .utils import Ints, PendingReq, cells, index_on_device, to_tensor, token_index

WritePages = Callable[[torch.Tensor, int], None]  # page numbers, first page of the data


class CacheManager:
    """Allocates, shares and frees pages.

    page_table: int32 `(rows, tokens)`, written in place; each row at least whole pages long.
    type: "radix" or "naive". spill: where evicted prefixes go, None for nowhere. Sizes are in
    tokens where their name says nothing else.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        page_table: torch.Tensor,
        type: str,
        spill: SpillTier | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_table = page_table
        self._table = cells(page_table)
        self.device = page_table.device
        self.prefix_cache = create_prefix_cache(device=self.device, type=type, page_size=page_size)
        self.spill = spill
        self._free_list = _FreeList(num_pages, page_size, self.device)
        self._owners: dict[int, tuple[Req, int]] = {}  # row -> request, pages its row covers
        self._lazy_frees = _LazyFrees(self._free_list)

    @property
    def free_slots(self) -> torch.Tensor:
        """First location of each free page, int32, in the order in which they are handed out."""
        return self._free_list.slots

    @free_slots.setter
    def free_slots(self, slots: torch.Tensor) -> None:
        self._free_list.slots = slots

    @property
    def num_free_pages(self) -> int:
        """Pages that are free now."""
        return len(self._free_list)

    @property
    def holders(self) -> list[Req]:
        """The requests that hold pages, each row's last batch, in the order of admission."""
        return [req for req, _ in self._owners.values()]

    @property
    def num_owned_pages(self) -> int:
        """Pages that live requests own alone."""
        return sum(
            num_pages - self._locked_len(req) // self.page_size
            for req, num_pages in self._owners.values()
        )

    @property
    def available_pages(self) -> int:
        """Pages that are free or could be made free by evicting."""
        return len(self._free_list) + self.prefix_cache.size_info.evictable_size // self.page_size

    @property
    def available_size(self) -> int:
        """Tokens for which there is room, evicting what can be."""
        return self.available_pages * self.page_size

    def match_req(self, req: PendingReq) -> MatchResult:
        """The longest cached prefix of a prompt without its last token: one is always computed."""
        return self.prefix_cache.match_prefix(req.input_ids[: req.match_len], req.salt)

    def lock(self, handle: BaseCacheHandle) -> None:
        """Protect a prefix from eviction."""
        self.prefix_cache.lock_handle(handle)

    def unlock(self, handle: BaseCacheHandle) -> None:
        """Take one protection back."""
        self.prefix_cache.lock_handle(handle, unlock=True)

    def restore(self, ids: torch.Tensor, handle: BaseCacheHandle, salt: str) -> BaseCacheHandle:
        """Copy back what the second tier has of `ids` beyond a locked prefix; the new, locked one.

        The pages are taken like those of tokens that are computed: what was promised to a request
        for its prompt covers them. The copy is launched before anything that reads it.
        """
        if self.spill is None:
            return handle
        with self.spill.found(ids, salt) as spilled:
            missing = (spilled.cached_len - handle.cached_len) // self.page_size
            num_pages = min(missing, self.available_pages)
            if num_pages <= 0:
                return handle
            locations = self._page_to_token(self._allocate(num_pages))
            if not self.spill.copy_back(spilled, handle.cached_len, locations):
                self._free(locations)
                return handle
        return self._lengthen(ids, handle, salt, locations)

    def adopt(self, ids: torch.Tensor, salt: str, first: int, write: WritePages) -> int:
        """Cache as much of a prefix as there is room for; returns the tokens that were missing.

        ids: whole pages. write: fills pages with the KV of `ids` from a page of it on, which is
        known from token `first` on only: nothing is taken if those before it are not cached.
        """
        handle = self.prefix_cache.match_prefix(ids, salt).cuda_handle
        self.lock(handle)
        handle = self.restore(ids, handle, salt)
        start = handle.cached_len
        num_pages = min((len(ids) - start) // self.page_size, self.available_pages)
        if start < first:
            num_pages = 0
        if num_pages:
            locations = self._page_to_token(self._allocate(num_pages))
            write(locations[:: self.page_size] // self.page_size, (start - first) // self.page_size)
            handle = self._lengthen(ids, handle, salt, locations)
        self.unlock(handle)
        return num_pages * self.page_size

    def _lengthen(
        self, ids: torch.Tensor, handle: BaseCacheHandle, salt: str, locations: torch.Tensor
    ) -> BaseCacheHandle:
        """Cache pages that were just filled behind a locked prefix; the new, locked one."""
        indices = torch.cat([handle.get_matched_indices(), locations])
        longer: BaseCacheHandle
        cached_len, longer = self.prefix_cache.insert_prefix(ids[: len(indices)], indices, salt)
        assert cached_len == handle.cached_len, "the prefix has grown meanwhile"
        self.lock(longer)
        self.unlock(handle)
        return longer

    def num_missing_pages(self, reqs: Iterable[Req]) -> int:
        """How many pages `allocate_paged` would take."""
        page = self.page_size
        return sum([div_ceil(r.device_len, page) - div_ceil(r.cached_len, page) for r in reqs])

    def allocate_paged(self, reqs: Sequence[Req], spans: Spans | None = None) -> None:
        """Give every request the pages for `[cached_len, device_len)`, all or nothing.

        spans: theirs, if they are at hand.
        """
        page_size = self.page_size
        if spans is None or len(spans.rows) != len(reqs):
            spans = Spans.of(reqs)
        rows, starts, ends, num_tokens = spans
        num_pages = ends
        if page_size > 1:
            first_pages, num_pages = -(-starts // page_size), -(-ends // page_size)
            is_short = num_pages > first_pages
            rows, starts, ends = rows[is_short], first_pages[is_short], num_pages[is_short]
            num_tokens = int((ends - starts).sum()) * page_size
            starts, ends = starts * page_size, ends * page_size
        if num_tokens > 0:
            pages = self._take(num_tokens // page_size)
            locations = pages if page_size == 1 else self._page_to_token(to_tensor(pages))
            index = token_index(rows, starts, ends, num_tokens)
            self._table[index_on_device(index, self._table)] = cells(locations)
        self._owners.update(zip(spans.rows.tolist(), zip(reqs, num_pages.tolist())))

    def cache_req(self, req: Req, *, finished: bool, length: int | None = None) -> None:
        """Hand a request's KV to the prefix cache; at its end, give back all that is left.

        length: how many of its tokens have valid KV; default `req.cached_len`. Ranges of its row:
        `[0, old)` shared and locked since it started; `[old, cached)` computed here, but meanwhile
        cached by another; `[cached, new)` newly cached; `[new, ...)` too short for a page.
        """
        length = req.cached_len if length is None else length
        row = self.page_table[req.table_idx]
        old_handle, old_len = req.cache_handle, self._locked_len(req)
        cached_len, new_handle = self.prefix_cache.insert_prefix(
            req.input_ids[:length], row[:length], req.salt
        )
        duplicates = row[old_len:cached_len].clone()
        if finished:
            self._free(row[max(new_handle.cached_len, old_len) : self._owned_end(req)])
            self._owners.pop(req.table_idx, None)
            req.cache_handle = None
        else:
            if len(duplicates):  # re-point before freeing: the row must not read freed pages
                row[old_len:cached_len] = new_handle.get_matched_indices()[old_len:cached_len]
            self.lock(new_handle)
            req.cache_handle = new_handle
        if old_handle is not None:
            self.unlock(old_handle)
        self._free(duplicates)

    def cache_chunk(self, chunk: Req) -> None:
        """Hand over what is computed of a prompt, unless it has ended.

        Under overlap its next chunk is in flight by now: that one takes over row and lock.
        """
        owner, _ = self._owners.get(chunk.table_idx, (None, 0))
        if owner is not None and owner.uid == chunk.uid and owner.finish_reason is None:
            self.cache_req(owner, finished=False, length=len(chunk.input_ids))

    def drop_req(self, req: Req) -> None:
        """Give back all that a request owns and share nothing of it: its KV cannot be trusted."""
        start = self._locked_len(req)
        self._free(self.page_table[req.table_idx, start : self._owned_end(req)])
        self._owners.pop(req.table_idx, None)
        if req.cache_handle is not None:
            self.unlock(req.cache_handle)
            req.cache_handle = None

    def lazy_free_region(self) -> AbstractContextManager[None]:
        """Inside, frees are collected; they are appended at once at the end."""
        return self._lazy_frees

    def flush(self) -> int:
        """Forget every cached prefix that no request uses, the second tier too; pages freed."""
        if self.spill is not None:
            self.spill.clear()
        freed = self.prefix_cache.reset()
        self._free(freed)
        return len(freed) // self.page_size

    def check_integrity(self, *, full: bool = True) -> None:
        """`RuntimeError` unless every page has exactly one owner; `full=False` only counts."""
        free, owned = self.num_free_pages, self.num_owned_pages
        cached = self.prefix_cache.size_info.total_size // self.page_size
        if free + cached + owned != self.num_pages:
            raise RuntimeError(
                f"KV integrity check failed: {free} free + {cached} cached + {owned} owned pages "
                f"are not the pool's {self.num_pages}"
            )
        if full:
            handles = [req.cache_handle for req, _ in self._owners.values()]
            self.prefix_cache.check_integrity([handle for handle in handles if handle is not None])
            self._check_ownership()
            if self.spill is not None:
                self.spill.check_integrity()

    def _check_ownership(self) -> None:
        """Prove that the states are disjoint and complete, page by page."""
        owned = [
            self.page_table[row, self._locked_len(req) : num_pages * self.page_size]
            for row, (req, num_pages) in sorted(self._owners.items())
        ]
        for row, (req, _) in self._owners.items():
            if req.cache_handle is None or not (locked := req.cache_handle.cached_len):
                continue
            if not torch.equal(
                self.page_table[row, :locked], req.cache_handle.get_matched_indices()
            ):
                raise RuntimeError(f"KV integrity check failed: row {row} left its locked prefix")
        heads = self._page_heads(torch.cat([*owned, self.prefix_cache.resident_indices()]))
        heads = np.concatenate([self.free_slots.cpu().numpy(), heads])
        if not np.array_equal(np.sort(heads), np.arange(self.num_pages) * self.page_size):
            raise RuntimeError(
                "KV integrity check failed: free, cached and owned pages overlap or do not cover "
                "the pool"
            )

    def _page_heads(self, locations: torch.Tensor) -> np.ndarray:
        """First location of each page; the locations must be runs of whole pages."""
        pages = locations.cpu().numpy().reshape(-1, self.page_size)
        if not np.array_equal(pages, pages[:, :1] + np.arange(self.page_size)):
            raise RuntimeError("KV integrity check failed: a page's locations are torn apart")
        return pages[:, 0]

    def _locked_len(self, req: Req) -> int:
        return 0 if req.cache_handle is None else int(req.cache_handle.cached_len)

    def _owned_end(self, req: Req) -> int:
        """The end of the row's pages, in tokens."""
        _, num_pages = self._owners.get(
            req.table_idx, (req, div_ceil(req.cached_len, self.page_size))
        )
        return num_pages * self.page_size

    def _allocate(self, needed_pages: int) -> torch.Tensor:
        """First locations of `needed_pages` pages, int32, evicting if need be; all or nothing."""
        return to_tensor(self._take(needed_pages)).clone()

    def _take(self, needed_pages: int) -> Ints:
        """The same, valid until pages are freed."""
        missing_pages = needed_pages - len(self._free_list)
        if missing_pages > 0:
            keep = None if self.spill is None else self.spill.store
            evicted = self.prefix_cache.evict(missing_pages * self.page_size, keep)
            self._free_list.push(evicted[:: self.page_size])
        return self._free_list.pop(needed_pages)

    def _free(self, indices: torch.Tensor) -> None:
        """Give back whole pages, named by the locations of all their tokens."""
        if len(indices) == 0:
            return
        heads = indices[:: self.page_size]
        if self._lazy_frees.pages is None:
            self._free_list.push(heads)
        else:
            self._lazy_frees.pages.append(heads.clone())

    def _page_to_token(self, pages: torch.Tensor) -> torch.Tensor:
        """The locations of all tokens of pages that are named by their first location."""
        if self.page_size == 1:
            return pages
        offsets = torch.arange(self.page_size, dtype=torch.int32, device=self.device)
        return (pages.unsqueeze(1) + offsets).flatten()


class _FreeList:
    """Free pages in hand-out order: taken from the front, freed to the back, both in O(1) per page.

    A window slides through a buffer of twice the pool and moves back to the start when it meets
    the end. What is pushed is copied.
    """

    def __init__(self, num_pages: int, page_size: int, device: torch.device) -> None:
        self._buffer = torch.empty(2 * num_pages, dtype=torch.int32, device=device)
        self._cells = cells(self._buffer)
        self._buffer[:num_pages] = torch.arange(num_pages, dtype=torch.int32) * page_size
        self._start, self._end = 0, num_pages

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def slots(self) -> torch.Tensor:
        """The free pages, a view that is valid until the next push."""
        return self._buffer[self._start : self._end]

    @slots.setter
    def slots(self, slots: torch.Tensor) -> None:
        self._buffer = torch.cat([slots.to(torch.int32), torch.empty_like(self._buffer)])
        self._cells = cells(self._buffer)
        self._start, self._end = 0, len(slots)

    def push(self, pages: torch.Tensor) -> None:
        """Put pages at the back."""
        if self._end + len(pages) > len(self._buffer):
            kept = self.slots.clone()
            if len(kept) + len(pages) > len(self._buffer):
                raise RuntimeError("KV integrity check failed: more pages freed than there are")
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        self._buffer[self._end : self._end + len(pages)] = pages
        self._end += len(pages)

    def pop(self, num_pages: int) -> Ints:
        """Take pages from the front; a view that is valid until the next push."""
        assert num_pages <= len(self), f"{num_pages} pages wanted, {len(self)} free"
        start, self._start = self._start, self._start + num_pages
        return self._cells[start : self._start]


class _LazyFrees(AbstractContextManager[None]):
    """Collects what is freed inside, without a generator for each step. pages: None outside."""

    def __init__(self, free_list: _FreeList) -> None:
        self._free_list = free_list
        self.pages: list[torch.Tensor] | None = None

    def __enter__(self) -> None:
        assert self.pages is None, "lazy_free_region cannot be nested"
        self.pages = []

    def __exit__(self, *_: object) -> None:
        pages, self.pages = self.pages, None
        if pages:
            self._free_list.push(torch.cat(pages))


def _write_page_table(
    page_table: torch.Tensor | Ints,
    allocated: torch.Tensor | Ints,
    spans: Sequence[tuple[int, int, int]],
    page_size: int,
) -> None:
    """Write the locations of all tokens of new pages; a span: (row, first page, end page)."""
    rows, starts, ends = np.array(spans).T * [[1], [page_size], [page_size]]
    index = token_index(rows, starts, ends, len(allocated))
    table = cells(page_table)
    table[index_on_device(index, table)] = cells(allocated)
