"""The second tier: bounds, the order of forgetting, salts, failing memory and disks."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import ConfigError
from minisgl.kvcache import CachedPrefix, MHAKVCache, SpillTier

PAGE_SIZE = 2


class Pool(MHAKVCache):
    """A pool of random K and V that stands for its engine."""

    def __init__(self, num_pages: int = 16) -> None:
        super().__init__(2, 3, 4, num_pages, PAGE_SIZE, torch.float16, "cpu")
        self._kv_buffer.copy_(torch.randn(self._kv_buffer.shape))

    def launch_order(self) -> AbstractContextManager[None]:
        """Program order."""
        return nullcontext()


@pytest.fixture(params=["memory", "file"])
def directory(request: Any, tmp_path: Path) -> str | None:
    """Where the tier is."""
    return str(tmp_path) if request.param == "file" else None


def tier(num_slots: int, directory: str | None = None, pool: Pool | None = None) -> Any:
    """(a tier with room for so many pages, its pool)."""
    pool = pool or Pool()
    return SpillTier(num_slots * pool.page_bytes, pool, PAGE_SIZE, directory), pool


def prefix(ids: list[int], first_page: int, salt: str = "") -> CachedPrefix:
    """Tokens whose KV lies in consecutive pages."""
    start = first_page * PAGE_SIZE
    indices = torch.arange(start, start + len(ids), dtype=torch.int32)
    return CachedPrefix(np.array(ids, dtype=np.int32), indices, salt)


def length(spill: SpillTier, ids: list[int], salt: str = "") -> int:
    """How many tokens of `ids` are in the tier."""
    with spill.found(torch.tensor(ids, dtype=torch.int32), salt) as handle:
        return handle.cached_len


def pages_of(spill: SpillTier, ids: list[int], salt: str = "") -> torch.Tensor:
    """The bytes that the tier has for `ids`."""
    with spill.found(torch.tensor(ids, dtype=torch.int32), salt) as handle:
        return spill.read_pages(handle.get_matched_indices()[::PAGE_SIZE].numpy() // PAGE_SIZE)


def test_what_was_stored_comes_back_to_the_bit_after_its_pages_were_reused(
    directory: str | None,
) -> None:
    spill, pool = tier(8, directory)
    before = pool.read_pages([3, 4, 5])
    spill.store(prefix([1, 2, 3, 4, 5, 6], 3))
    pool._kv_buffer.zero_()
    with spill.found(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), "") as handle:
        assert handle.cached_len == 6
        # from token 2 on, to pages 9 and 7
        assert spill.copy_back(handle, 2, torch.tensor([18, 19, 14, 15], dtype=torch.int32))
    assert torch.equal(pool.read_pages([9, 7]), before[1:])
    assert pool.read_pages([0, 3, 4, 5, 8, 10]).count_nonzero() == 0
    spill.check_integrity()


def test_a_shared_beginning_is_copied_once() -> None:
    spill, pool = tier(8)
    read: list[int] = []
    read_pages = pool.read_pages
    pool.read_pages = lambda pages: read.extend(pages.tolist()) or read_pages(pages)
    spill.store(prefix([1, 2, 3, 4], 0))
    spill.store(prefix([1, 2, 9, 9], 4))
    spill.store(prefix([1, 2, 3, 4], 8))
    assert read == [0, 1, 5] and spill.num_free_slots == 5
    assert length(spill, [1, 2, 9, 9]) == 4


def test_it_never_holds_more_than_its_bytes_and_forgets_what_was_used_least_recently() -> None:
    spill, _ = tier(4)
    spill.store(prefix([1, 1, 2, 2], 0))
    spill.store(prefix([3, 3], 2))
    assert length(spill, [1, 1, 2, 2]) == 4  # a use
    spill.store(prefix([4, 4, 5, 5], 3))
    assert length(spill, [3, 3]) == 0, "the one that was not used"
    assert [length(spill, ids) for ids in ([1, 1, 2, 2], [4, 4, 5, 5])] == [4, 4]
    spill.check_integrity()
    assert spill.num_free_slots == 0


def test_of_a_prefix_that_is_too_long_it_keeps_the_front() -> None:
    spill, pool = tier(3)
    spill.store(prefix([7, 7], 0))
    spill.store(prefix(list(range(16)), 1))
    assert length(spill, list(range(16))) == 6 and length(spill, [7, 7]) == 0
    assert torch.equal(pages_of(spill, list(range(16))), pool.read_pages([1, 2, 3]))
    spill.store(prefix(list(range(16)), 1))  # what is there is not pushed out for its own tail
    assert length(spill, list(range(16))) == 6
    spill.check_integrity()


def test_bytes_that_are_no_whole_pages_are_not_used() -> None:
    pool = Pool()
    spill = SpillTier(3 * pool.page_bytes - 1, pool, PAGE_SIZE)
    assert spill.num_slots == 2
    with pytest.raises(ConfigError, match="no room for a page"):
        SpillTier(pool.page_bytes - 1, pool, PAGE_SIZE)


def test_it_has_no_more_slots_than_locations_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.kvcache.spill.MAX_SLOTS", 3 * PAGE_SIZE + 1)
    spill, _ = tier(4)
    assert spill.num_slots == 3


def test_salts_are_worlds_of_their_own(directory: str | None) -> None:
    spill, pool = tier(8, directory)
    spill.store(prefix([1, 2, 3, 4], 0, "a"))
    spill.store(prefix([1, 2], 6, "b"))
    assert [length(spill, [1, 2, 3, 4], salt) for salt in ("", "a", "b", "c")] == [0, 4, 2, 0]
    assert torch.equal(pages_of(spill, [1, 2], "b"), pool.read_pages([6]))
    assert torch.equal(pages_of(spill, [1, 2, 3, 4], "a"), pool.read_pages([0, 1]))


def test_tokens_are_compared_not_their_hashes() -> None:
    spill, _ = tier(8)
    # Python's hash of -1 and of -2 is the same, and so is that of these two pages.
    assert hash((-1, 5)) == hash((-2, 5))
    spill.store(prefix([-1, 5, 1, 1], 0))
    assert length(spill, [-2, 5, 1, 1]) == 0 and length(spill, [-1, 5, 1, 2]) == 2


def test_what_is_being_copied_back_is_not_pushed_out() -> None:
    spill, pool = tier(3)
    spill.store(prefix([1, 2, 3, 4], 0))
    with spill.found(torch.tensor([1, 2, 3, 4]), ""):
        spill.store(prefix([5, 5, 6, 6, 7, 7], 4))  # as the room for the copy is made
        assert length(spill, [5, 5, 6, 6, 7, 7]) == 2
    assert torch.equal(pages_of(spill, [1, 2, 3, 4]), pool.read_pages([0, 1]))
    spill.check_integrity()


def test_long_copies_go_in_pieces(monkeypatch: pytest.MonkeyPatch, directory: str | None) -> None:
    pool = Pool()
    monkeypatch.setattr("minisgl.kvcache.spill.MAX_STAGING_BYTES", 3 * pool.page_bytes)
    spill, _ = tier(16, directory, pool)
    sizes: list[int] = []
    read_pages = pool.read_pages
    pool.read_pages = lambda pages: sizes.append(len(pages)) or read_pages(pages)
    spill.store(prefix(list(range(16)), 2))
    assert sizes == [3, 3, 2]
    del pool.read_pages
    assert torch.equal(pages_of(spill, list(range(16))), pool.read_pages(list(range(2, 10))))


def test_clear_forgets_everything(directory: str | None) -> None:
    spill, pool = tier(4, directory)
    spill.store(prefix([1, 2, 3, 4], 0))
    spill.clear()
    assert length(spill, [1, 2, 3, 4]) == 0 and spill.num_free_slots == 4
    spill.store(prefix([1, 2, 3, 4], 5))
    assert torch.equal(pages_of(spill, [1, 2, 3, 4]), pool.read_pages([5, 6]))


def test_the_file_takes_its_place_at_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    spill, pool = tier(6, str(tmp_path))
    file = spill._memory._file
    assert list(tmp_path.iterdir()) == [], "it has no name, so a crash leaves nothing either"
    stat = os.fstat(file.fileno())
    assert stat.st_size == 6 * pool.page_bytes and stat.st_blocks * 512 >= stat.st_size
    spill.store(prefix(list(range(24)), 0))
    assert os.fstat(file.fileno()).st_size == 6 * pool.page_bytes


@pytest.mark.parametrize("where", ["missing", "file/below"])
def test_a_directory_that_cannot_be_used_is_a_config_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-spill.*has no place"):
        tier(4, str(tmp_path / where))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_is_full_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(code, "told to fail")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="told to fail"):
        tier(4, str(tmp_path))


def test_more_memory_than_there_can_be_is_a_config_error() -> None:
    pool = Pool()
    with pytest.raises(ConfigError, match="there is no memory"):
        SpillTier(1 << 62, pool, PAGE_SIZE)


@pytest.mark.parametrize("goes_wrong", ["write", "read"])
@pytest.mark.parametrize("error", [OSError("disk"), MemoryError("none left"), RuntimeError("gpu")])
def test_when_its_memory_fails_it_is_empty_from_then_on_with_one_line(
    caplog: pytest.LogCaptureFixture, goes_wrong: str, error: Exception
) -> None:
    spill, _ = tier(8)
    spill.store(prefix([1, 2, 3, 4], 0))

    def fail(*args: Any) -> Any:
        raise error

    setattr(spill._memory, goes_wrong, fail)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        spill.store(prefix([1, 2, 9, 9, 8, 8], 2))
        with spill.found(torch.tensor([1, 2, 3, 4]), "") as handle:
            locations = torch.arange(handle.cached_len, dtype=torch.int32)
            is_copied = spill.copy_back(handle, 0, locations)
            assert is_copied == (not handle.cached_len)
        spill.check_integrity()
    assert length(spill, [1, 2, 3, 4]) == 0
    assert len(caplog.records) == 1 and "second tier" in caplog.text
