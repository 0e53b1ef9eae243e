"""Saved prefixes: what was written comes back, or the file says that it is damaged."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from minisgl.kvcache import prefix_file
from minisgl.kvcache.prefix_file import (
    PrefixFileError,
    PrefixRecord,
    read_records,
    write_records,
)

MINE, OTHER = bytes(range(32)), bytes(range(1, 33))


def records() -> list[PrefixRecord]:
    """Three prefixes of two salts; the last goes on where the first ends."""
    generator = np.random.default_rng(0)

    def record(salt: str, num_tokens: int, first: int) -> PrefixRecord:
        ids = np.arange(num_tokens, dtype=np.int32) - 1
        data = generator.integers(0, 256, (num_tokens - first) * 6, dtype=np.uint8)
        return PrefixRecord(salt, ids, first, data)

    return [record("", 4, 0), record("sält", 2, 0), record("", 9, 4)]


def is_same(a: PrefixRecord, b: PrefixRecord) -> bool:
    """Whether two records say the same."""
    return (
        (a.salt, a.first) == (b.salt, b.first)
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.data, b.data)
    )


def read_all(path: Path, fingerprint: bytes = MINE) -> tuple[list[PrefixRecord], str | None]:
    """What can be read, and why not more."""
    found = []
    try:
        for record in read_records(path, fingerprint):
            found.append(record)
    except PrefixFileError as error:
        return found, str(error)
    return found, None


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of the three records."""
    path = tmp_path / "prefixes"
    write_records(path, MINE, records())
    return path


def test_what_was_written_comes_back(saved: Path) -> None:
    found, reason = read_all(saved)
    assert reason is None and len(found) == 3
    assert all(is_same(a, b) for a, b in zip(found, records()))
    assert found[0].ids.flags.writeable and found[0].ids.dtype == np.int32


def test_no_records_are_a_file_too(tmp_path: Path) -> None:
    write_records(tmp_path / "empty", MINE, [])
    assert read_all(tmp_path / "empty") == ([], None)


def test_another_engines_file_is_not_read(saved: Path) -> None:
    found, reason = read_all(saved, OTHER)
    assert found == [] and reason is not None and "another model" in reason


@pytest.mark.parametrize("content", [b"", b"x", b"GGUF" + bytes(100), bytes(1000)])
def test_any_other_file_is_not_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    found, reason = read_all(tmp_path / "file")
    assert found == [] and reason is not None


def test_a_changed_byte_anywhere_ends_the_reading_before_it(saved: Path) -> None:
    good, original = saved.read_bytes(), records()
    for position in range(len(good)):
        for change in (1, 128, 255):
            damaged = bytearray(good)
            damaged[position] ^= change
            saved.write_bytes(damaged)
            found, reason = read_all(saved)
            assert reason is not None, position
            assert all(is_same(a, b) for a, b in zip(found, original)), position


def test_a_file_that_is_cut_off_anywhere_is_noticed(saved: Path) -> None:
    good, original = saved.read_bytes(), records()
    for size in range(len(good)):
        saved.write_bytes(good[:size])
        found, reason = read_all(saved)
        assert reason is not None, size
        assert all(is_same(a, b) for a, b in zip(found, original)), size


def test_bytes_put_in_or_taken_out_are_noticed(saved: Path) -> None:
    good, original, rng = saved.read_bytes(), records(), random.Random(1)
    for position in range(0, len(good) + 1, 3):
        for cut, added in ((0, 1), (0, 40), (1, 0), (40, 0), (8, 8)):
            if not cut and position == len(good):
                added = 1  # a tail
            new = good[:position] + rng.randbytes(added) + good[position + cut :]
            if new == good:
                continue
            saved.write_bytes(new)
            found, reason = read_all(saved)
            assert reason is not None, (position, cut, added)
            assert all(is_same(a, b) for a, b in zip(found, original))


def test_records_cannot_change_places_or_come_from_another_file(tmp_path: Path) -> None:
    a, b, both = tmp_path / "a", tmp_path / "b", tmp_path / "both"
    first, second, _ = records()
    write_records(a, MINE, [first, second])
    write_records(b, MINE, [second, first])
    length = 76 + 20 + 4 * len(first.ids) + first.data.nbytes + 32
    both.write_bytes(a.read_bytes()[:length] + b.read_bytes()[length:])
    found, reason = read_all(both)
    assert len(found) == 1 and is_same(found[0], first) and reason == "it is damaged"


def test_lengths_beyond_the_file_or_the_bound_take_no_memory(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = saved.read_bytes()
    head = struct.pack("<IIIQ", 0, 1, 0, 1 << 62)
    saved.write_bytes(good[:76] + head + good[96:])
    assert read_all(saved) == ([], "it is damaged")
    saved.write_bytes(good)
    first = records()[0]
    size = 4 * len(first.ids) + first.data.nbytes
    monkeypatch.setattr(prefix_file, "MAX_RECORD_BYTES", size)
    assert len(read_all(saved)[0]) == 2  # the third one is larger
    monkeypatch.setattr(prefix_file, "MAX_RECORD_BYTES", size - 1)
    assert read_all(saved) == ([], "it is damaged")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved: Path) -> None:
    good = saved.read_bytes()

    def failing() -> object:
        yield records()[0]
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        write_records(saved, MINE, failing())  # type: ignore[arg-type]
    assert saved.read_bytes() == good
    assert os.listdir(saved.parent) == [saved.name]


def test_a_saved_file_is_for_its_owner_alone(saved: Path) -> None:
    assert saved.stat().st_mode & 0o077 == 0  # prompts are private
