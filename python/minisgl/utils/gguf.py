"""GGUF files, memory-mapped: metadata as plain values, tensors as views of their stored bytes.

Imports numpy and the standard library. Invariant: no count, length, type or offset of the file is
used before it has been checked against the file's size, so that a damaged or hostile file is a
`ModelLoadError`, never a crash or a hang. Format: versions 2 and 3, little endian, as described in
the ggml project's docs/gguf.md. A split model is opened by the name of any of its parts.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from .arith import align_ceil
from .errors import ModelLoadError, UnsupportedModelError

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ARRAY_ITEMS = 1 << 22
MAX_NESTED_ARRAYS = 1 << 16
MAX_ALIGNMENT = 1 << 20
MAPPED_AT_ONCE = 1 << 16  # Linux maps what lies around a page that is read, in such blocks

# id: (name, weights per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

_SCALARS = {
    0: "B",
    1: "b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_STRUCTS = {type_id: struct.Struct(code) for type_id, code in _SCALARS.items()}
_ARRAY_DTYPES = {type_id: np.dtype(code) for type_id, code in _SCALARS.items()}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as it lies in the file.

    shape: in torch order, the reverse of GGUF's. data: flat uint8, a view of the mapped file; it
    may be written to (the mapping is private), but nothing ever reaches the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    data: np.ndarray


class GGUFFile:
    """A mapped GGUF file, or all parts of a split one. The mapping lives as long as any view of it.

    metadata: str, int, float, bool; arrays of numbers as numpy arrays, others as lists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._maps: list[mmap.mmap] = []
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        parts = split_parts(self.path)
        for number, part in enumerate(parts):
            self._read_part(part, number, len(parts))
        total = self.field("split.tensors.count", int, len(self.tensors))
        if total != len(self.tensors):
            raise ModelLoadError(
                f"{self.path}: its parts have {len(self.tensors)} tensors, not {total}"
            )

    def _read_part(self, path: str, number: int, num_parts: int) -> None:
        """Map one part; the metadata that counts are those of the first."""
        data = _map_file(path)
        reader = _Reader(path, data)
        num_tensors, num_metadata = reader.header()
        metadata = reader.metadata(num_metadata)
        place = metadata.get("split.no", 0), metadata.get("split.count", 0) or 1
        if place != (number, num_parts):
            raise ModelLoadError(
                f"{path} is part {place[0]} (from 0) of {place[1]} of a split model, but by its "
                f"name part {number} of {num_parts}: name the parts NAME-00001-of-0000N.gguf"
            )
        tensors = reader.tensors(num_tensors, metadata.get("general.alignment", 32))
        twice = self.tensors.keys() & tensors.keys()
        if twice:
            raise ModelLoadError(f"{path}: tensor {min(twice)!r} is in an earlier part too")
        self._maps.append(data)
        self.metadata = self.metadata or metadata
        self.tensors |= tensors

    def field(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata value of `key`, checked to be a `kind`; an error if there is none."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.path}: metadata has no {key}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelLoadError(
                f"{self.path}: {key} is a {type(value).__name__}, not a {kind.__name__}"
            )
        return value

    def release(self, data: np.ndarray) -> None:
        """Give back the memory behind (part of) a tensor's `data`: the next read asks the file.

        What was written to it is lost.
        """
        for mapped in self._maps:
            first = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
            if 0 <= first < len(mapped):
                start = first // MAPPED_AT_ONCE * MAPPED_AT_ONCE
                stop = min(align_ceil(first + data.nbytes, MAPPED_AT_ONCE), len(mapped))
                mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def __repr__(self) -> str:
        return f"GGUFFile({self.path!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"


_open_files: WeakValueDictionary[tuple[str, int, int], GGUFFile] = WeakValueDictionary()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """The GGUF file at `path`: the one that somebody holds already, or a new one."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise ModelLoadError(f"{os.fspath(path)} cannot be read: {error}") from error
    key = (os.fspath(path), stat.st_mtime_ns, stat.st_size)
    file = _open_files.get(key)
    if file is None:
        _open_files[key] = file = GGUFFile(path)
    return file


def split_parts(path: str) -> list[str]:
    """The files of a split model, in order, by the name of any of them; of others, the file."""
    match = _PART.fullmatch(path)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    return [f"{stem}-{i + 1:05}-of-{count}.gguf" for i in range(int(count))] or [path]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether the file starts like a GGUF file."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def _map_file(path: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise ModelLoadError(f"{path} is too short for a GGUF file")
            # Copy-on-write, so that torch takes the views without a warning about read-only memory.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


class _Reader:
    """A cursor over the mapped file in which every read is checked."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0

    def fail(self, problem: str) -> ModelLoadError:
        """The error for a damaged file."""
        return ModelLoadError(f"{self.path} is damaged: {problem} (near byte {self.pos})")

    def scalar(self, type_id: int) -> Any:
        """The next number."""
        layout = _STRUCTS[type_id]
        if self.pos + layout.size > self.size:
            raise self.fail("it ends in the middle of a number")
        (value,) = layout.unpack_from(self.data, self.pos)
        self.pos += layout.size
        return value

    def count(self, item_bytes: int, limit: int, what: str) -> int:
        """The next 64-bit count of things of at least `item_bytes` each that must follow."""
        value: int = self.scalar(10)
        if value > limit or value * item_bytes > self.size - self.pos:
            raise self.fail(f"{what} {value} leaves the file or passes the limit of {limit}")
        return value

    def string(self, limit: int | None = None) -> str:
        """The next string."""
        length = self.count(1, limit or self.size, "a string of length")
        start, self.pos = self.pos, self.pos + length
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError as error:
            raise self.fail("a string is not UTF-8") from error

    def header(self) -> tuple[int, int]:
        """(number of tensors, number of metadata entries)"""
        if self.data[:4] != MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file: it does not start with 'GGUF'")
        self.pos = 4
        version = self.scalar(4)
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise UnsupportedModelError(
                    f"{self.path} is big-endian: convert it with gguf-convert-endian"
                )
            raise UnsupportedModelError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 are read: convert it anew"
            )
        num_tensors = self.count(24, MAX_TENSORS, "a number of tensors of")
        return num_tensors, self.count(13, MAX_METADATA, "a number of metadata entries of")

    def metadata(self, num_entries: int) -> dict[str, Any]:
        """All key-value pairs."""
        out: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.string(MAX_NAME_BYTES)
            if key in out:
                raise self.fail(f"metadata key {key!r} occurs twice")
            out[key] = self.value(self.scalar(4), key)
        return out

    def value(self, type_id: int, key: str, nested: bool = False) -> Any:
        """The next value of the given type."""
        if type_id in _STRUCTS:
            return self.scalar(type_id)
        if type_id == _BOOL:
            return self.scalar(0) != 0
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise self.fail(f"{key!r} has the unknown value type {type_id}")
        return self.array(key, nested)

    def array(self, key: str, nested: bool) -> np.ndarray | list[Any]:
        """The next array: numpy if its items are numbers or truth values."""
        type_id = self.scalar(4)
        what = f"{key!r}: an array of length"
        if type_id in _ARRAY_DTYPES or type_id == _BOOL:
            dtype = _ARRAY_DTYPES[0 if type_id == _BOOL else type_id]
            length = self.count(dtype.itemsize, self.size, what)
            array = np.empty(0, dtype)
            if length:
                array = np.frombuffer(self.data, dtype, length, self.pos).copy()
            self.pos += length * dtype.itemsize
            return array != 0 if type_id == _BOOL else array
        if type_id == _STRING:
            return self.strings(self.count(8, MAX_ARRAY_ITEMS, what), key)
        if type_id != _ARRAY:
            raise self.fail(f"{key!r} is an array of the unknown type {type_id}")
        if nested:  # one level is all that occurs; more could multiply without end
            raise self.fail(f"{key!r} nests arrays too deeply")
        length = self.count(12, MAX_NESTED_ARRAYS, what)
        return [self.value(_ARRAY, key, nested=True) for _ in range(length)]

    def strings(self, length: int, key: str) -> list[str]:
        """The next `length` strings. This loop is most of the cost of opening a file."""
        out: list[str] = []
        data, pos, last = self.data, self.pos, self.size - 8
        unpack, append = _U64.unpack_from, out.append
        try:
            for _ in range(length):
                if pos > last:
                    raise self.fail(f"{key!r} ends after {len(out)} of {length} strings")
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                append(data[start:pos].decode())
                # A length past the end gives a short slice here and `pos > last` in the next turn.
        except (UnicodeDecodeError, OverflowError) as error:
            raise self.fail(f"string {len(out)} of {key!r} is not UTF-8 or too long") from error
        if pos > self.size:
            raise self.fail(f"the last string of {key!r} leaves the file")
        self.pos = pos
        return out

    def tensors(self, num_tensors: int, alignment: Any) -> dict[str, GGUFTensor]:
        """All tensors, in the order of the file, whose bytes lie in the file and do not overlap."""
        if not _is_power_of_two(alignment) or alignment > MAX_ALIGNMENT:
            raise self.fail(f"general.alignment is {alignment!r}, not a power of two")
        infos = [self.tensor_info() for _ in range(num_tensors)]
        base = -(-self.pos // alignment) * alignment
        spans: list[tuple[int, int, str]] = []
        out: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset, num_bytes in infos:
            if name in out:
                raise self.fail(f"tensor {name!r} occurs twice")
            if offset % alignment:
                raise self.fail(
                    f"tensor {name!r} starts at {offset}, off the alignment {alignment}"
                )
            if offset + num_bytes > self.size - base:
                raise self.fail(f"tensor {name!r} leaves the file, which may be truncated")
            spans.append((offset, offset + num_bytes, name))
            view = np.frombuffer(self.data, np.uint8, num_bytes, base + offset)
            out[name] = GGUFTensor(name, shape, type_id, TENSOR_TYPES[type_id][0], view)
        spans.sort()
        for (_, end, first), (start, _, second) in pairwise(spans):
            if start < end:
                raise self.fail(f"tensors {first!r} and {second!r} overlap")
        return out

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int, int]:
        """(name, torch shape, type id, offset, number of bytes) of the next tensor."""
        name = self.string(MAX_NAME_BYTES)
        num_dims = self.scalar(4)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name!r} has {num_dims} dimensions")
        dims = [self.scalar(10) for _ in range(num_dims)]
        type_id = self.scalar(4)
        if type_id not in TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has the unknown type {type_id}: "
                "convert the model to one of the usual types, such as Q4_K_M or Q8_0"
            )
        _, block_items, block_bytes = TENSOR_TYPES[type_id]
        num_items = 1
        for dim in dims:
            num_items *= dim
        if num_items == 0 or dims[0] % block_items:
            raise self.fail(f"tensor {name!r} cannot have the shape {dims[::-1]}")
        num_bytes = num_items // block_items * block_bytes
        return name, tuple(reversed(dims)), type_id, self.scalar(10), num_bytes


def _is_power_of_two(value: Any) -> bool:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return False
    return value & (value - 1) == 0
