"""Saving what is cached, and loading it in another run.

What is saved is the first tier and the second. Prefixes stand in the order of their last use, so
that a smaller pool keeps the latest ones; of what several share, the KV is there once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from minisgl.core import ConfigError
from minisgl.kvcache import CachedPrefix, PagedEngine, RadixPrefixCache
from minisgl.kvcache.prefix_file import (
    PrefixFileError,
    PrefixRecord,
    read_records,
    write_records,
)
from minisgl.utils import init_logger

from .cache import CacheManager

logger = init_logger(__name__)

MAX_PIECE_BYTES = 32 << 20  # of KV in one record, at least a page

ReadPages = Callable[[torch.Tensor], torch.Tensor]


def save_prefixes(
    path: str | os.PathLike[str], fingerprint: bytes, manager: CacheManager, engine: PagedEngine
) -> int:
    """Write every cached prefix to a file; returns how many tokens. `ConfigError` if it cannot."""
    records = list_records(manager, engine)
    num_tokens = 0

    def counted() -> Iterator[PrefixRecord]:
        nonlocal num_tokens
        for record in records:
            num_tokens += len(record.ids) - record.first
            yield record

    try:
        write_records(path, fingerprint, counted())
    except OSError as error:
        raise ConfigError(f"the cached prefixes cannot be saved to {path}: {error}") from error
    return num_tokens


def list_records(manager: CacheManager, engine: PagedEngine) -> Iterator[PrefixRecord]:
    """All that is cached, each token once, least recently used first."""
    page_size = manager.page_size
    step = max(MAX_PIECE_BYTES // engine.page_bytes, 1) * page_size
    written = RadixPrefixCache("cpu", page_size)
    for prefix, read_pages in _both_tiers(manager, engine):
        ids, indices = torch.from_numpy(prefix.ids), prefix.indices
        known = written.match_prefix(ids, prefix.salt).cuda_handle.cached_len
        for first in range(known, len(ids), step):
            pages = indices[first : first + step : page_size] // page_size
            data = read_pages(pages).numpy().reshape(-1)
            yield PrefixRecord(prefix.salt, prefix.ids[: first + step], first, data)
        written.insert_prefix(ids, indices, prefix.salt)


def _both_tiers(
    manager: CacheManager, engine: PagedEngine
) -> Iterator[tuple[CachedPrefix, ReadPages]]:
    def read_pool(pages: torch.Tensor) -> torch.Tensor:
        with engine.launch_order():
            return engine.read_pages(pages).cpu()

    if manager.spill is not None:
        for prefix in manager.spill.index.prefixes():
            yield prefix, manager.spill.read_pages
    for prefix in manager.prefix_cache.prefixes():
        yield prefix, read_pool


def load_prefixes(
    path: str | os.PathLike[str], fingerprint: bytes, manager: CacheManager, engine: PagedEngine
) -> int:
    """Cache what a file holds; returns how many tokens.

    A file that is damaged or not of this engine is ignored, from there on, with one line in the
    log. What does not fit pushes out what was used less recently.
    """
    num_tokens = 0
    try:
        for record in read_records(path, fingerprint):
            num_tokens += _load_record(record, manager, engine)
    except (PrefixFileError, OSError) as error:
        logger.warning("ignored the saved prefixes in %s: %s", path, error)
    return num_tokens


def _load_record(record: PrefixRecord, manager: CacheManager, engine: PagedEngine) -> int:
    salt, ids, first, data = record
    num_pages, rest = divmod(len(ids) - first, manager.page_size)
    if rest or first % manager.page_size or data.nbytes != num_pages * engine.page_bytes:
        raise PrefixFileError("it is damaged")
    by_page = torch.from_numpy(data).view(num_pages, engine.page_bytes)

    def write(pages: torch.Tensor, row: int) -> None:
        with engine.launch_order():
            engine.write_pages(pages, by_page[row : row + len(pages)])

    return manager.adopt(torch.from_numpy(ids), salt, first, write)
