"""GGUF files are read like the reference reader reads them, and damaged ones are refused."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGUFEndian

from minisgl.params import ModelLoadError, UnsupportedModelError
from minisgl.utils.gguf import TENSOR_TYPES, GGUFFile, is_gguf, open_gguf
from minisgl.utils.model_files import resolve_model

from tests.resident import resident_bytes


def write_sample(path: Path, endian: GGUFEndian = GGUFEndian.LITTLE) -> Path:
    """A small file with every kind of value and three tensors."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -7)
    writer.add_uint64("a.u64", 2**63 + 1)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "größer 猫")
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 2.0])
    writer.add_array("a.bools", [True, False])
    writer.add_array("a.texts", ["x", "", "漢字", "é"])
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    blocks = np.arange(40, dtype=np.uint8).reshape(2, 20)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "sample.gguf")


def text(value: str) -> bytes:
    """A string as GGUF stores it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def tensor(name: str, dims: list[int], type_id: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", type_id, offset)


def test_every_kind_of_metadata_value_reads_as_it_was_written(sample: Path) -> None:
    found = GGUFFile(sample).metadata
    assert {k: v for k, v in found.items() if not isinstance(v, (list, np.ndarray))} == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 4_000_000_000,
        "a.i32": -7,
        "a.u64": 2**63 + 1,
        "a.i64": -(2**62),
        "a.f32": 0.5,
        "a.f64": 1e300,
        "a.bool": True,
        "a.text": "größer 猫",
    }
    assert found["a.bool"] is True
    assert found["a.ints"].tolist() == [1, -2, 3]
    assert found["a.floats"].tolist() == [0.5, 2.0]
    assert found["a.bools"].tolist() == [True, False]
    assert found["a.texts"] == ["x", "", "漢字", "é"]
    assert [row.tolist() for row in found["a.nested"]] == [[1, 2], [3]]


def test_tensors_have_torch_shapes_and_their_stored_bytes(sample: Path) -> None:
    tensors = GGUFFile(sample).tensors
    assert [(t.name, t.shape, t.type_id, t.type_name) for t in tensors.values()] == [
        ("token_embd.weight", (2, 32), 0, "F32"),
        ("blk.0.attn_q.weight", (2, 32), 3, "Q4_1"),
        ("blk.0.attn_norm.weight", (5,), 1, "F16"),
    ]
    floats = tensors["token_embd.weight"].data
    assert floats.dtype == np.uint8 and floats.view(np.float32).tolist() == list(range(64))
    assert tensors["blk.0.attn_q.weight"].data.tolist() == list(range(40))


def test_writing_to_a_view_never_reaches_the_file(sample: Path) -> None:
    before = sample.read_bytes()
    file = GGUFFile(sample)
    file.tensors["token_embd.weight"].data[:] = 7
    del file
    assert sample.read_bytes() == before


def test_released_tensors_take_no_memory_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    first, second = np.arange(1 << 20, dtype=np.float32), np.ones(1 << 18, dtype=np.float32)
    infos = b"".join(
        text(name) + struct.pack("<IQIQ", 1, len(data), 0, offset)
        for name, data, offset in (("a", first, 0), ("b", second, first.nbytes))
    )
    head = header(2, 0) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + first.tobytes() + second.tobytes())
    file = GGUFFile(path)
    a, b = (file.tensors[name].data for name in "ab")
    assert a.view(np.float32).sum() == first.sum() and b.view(np.float32).sum() == len(second)
    assert resident_bytes(path) >= a.nbytes + b.nbytes
    file.release(a)
    assert abs(resident_bytes(path) - b.nbytes) <= 1 << 17
    file.release(b[: len(b) // 2])
    assert abs(resident_bytes(path) - b.nbytes // 2) <= 1 << 17
    assert np.array_equal(a.view(np.float32), first)


def test_a_file_that_is_held_is_opened_once(sample: Path) -> None:
    file = open_gguf(sample)
    assert open_gguf(sample) is file
    sample.write_bytes(sample.read_bytes() + b" ")
    assert open_gguf(sample) is not file
    with pytest.raises(ModelLoadError, match="cannot be read"):
        open_gguf(sample.with_name("absent"))


def test_the_default_model_reads_like_the_reference_reader_reads_it() -> None:
    path = resolve_model("default").path
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert len(ours.tensors) == len(theirs.tensors) == 272
    for reference in theirs.tensors:
        found = ours.tensors[reference.name]
        assert found.shape == tuple(int(n) for n in reversed(reference.shape))
        assert (found.type_id, found.type_name) == (
            int(reference.tensor_type),
            reference.tensor_type.name,
        )
        assert np.array_equal(found.data, reference.data.view(np.uint8).reshape(-1))


def test_block_sizes_are_those_of_the_reference_table() -> None:
    reference = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {i: reference[i] for i in TENSOR_TYPES} == TENSOR_TYPES


def test_a_vocabulary_of_150_000_strings_takes_well_under_a_second(tmp_path: Path) -> None:
    num = 150_000
    body = b"".join(text(f"token{i}") for i in range(num))
    path = tmp_path / "big.gguf"
    entry = text("tokens") + struct.pack("<IIQ", 9, 8, num)
    path.write_bytes(header(0, 1) + entry + body)
    started = time.process_time()
    tokens = GGUFFile(path).metadata["tokens"]
    assert time.process_time() - started < 0.5
    assert (len(tokens), tokens[0], tokens[-1]) == (num, "token0", "token149999")


def test_field_checks_presence_and_kind(sample: Path) -> None:
    file = GGUFFile(sample)
    assert file.field("a.u8", int) == 200
    assert file.field("a.u8", float) == 200.0
    assert file.field("absent", int, 5) == 5
    with pytest.raises(ModelLoadError, match=r"metadata has no absent"):
        file.field("absent", int)
    with pytest.raises(ModelLoadError, match=r"a.text is a str, not a int"):
        file.field("a.text", int)
    with pytest.raises(ModelLoadError, match=r"a.bool is a bool, not a int"):
        file.field("a.bool", int)


PADDING = b"\0" * 64
GOOD = tensor("t", [4], 0, 0)

DAMAGED: list[tuple[str, bytes, str]] = [
    ("empty", b"", "too short"),
    ("other magic", b"GGML" + bytes(40), "not a GGUF file"),
    ("version 1", header(version=1), "version 1"),
    ("version 4", header(version=4), "version 4"),
    ("absurd tensor count", header(num_tensors=2**63), "a number of tensors"),
    ("tensor count past the file", header(num_tensors=10), "a number of tensors"),
    ("absurd metadata count", header(num_metadata=2**64 - 1), "a number of metadata entries"),
    ("absurd key length", header(0, 1) + struct.pack("<Q", 2**62) + PADDING, "string of length"),
    ("unknown value type", header(0, 1) + text("k") + struct.pack("<I", 99) + PADDING, "type 99"),
    (
        "absurd array",
        header(0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 2**61) + PADDING,
        "array of length",
    ),
    (
        "absurd string in an array",
        header(0, 1) + text("k") + struct.pack("<IIQQ", 9, 8, 2, 2**63) + PADDING,
        "'k'",
    ),
    (
        "array of an unknown type",
        header(0, 1) + text("k") + struct.pack("<IIQ", 9, 77, 1) + PADDING,
        "unknown type 77",
    ),
    (
        "arrays in arrays in arrays",
        header(0, 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40 + PADDING,
        "too deeply",
    ),
    ("key twice", header(0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2 + PADDING, "twice"),
    ("not UTF-8", header(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + PADDING, "not UTF-8"),
    ("tensor twice", header(2) + GOOD + tensor("t", [4], 0, 32) + bytes(128), "occurs twice"),
    ("tensors overlap", header(2) + GOOD + tensor("u", [4], 0, 0) + bytes(128), "overlap"),
    ("offset past the end", header(1) + tensor("t", [4], 0, 2**40) + PADDING, "leaves the file"),
    ("huge tensor", header(1) + tensor("t", [2**40, 2**40], 0, 0) + PADDING, "leaves the file"),
    ("odd offset", header(1) + tensor("t", [4], 0, 4) + PADDING, "alignment"),
    ("empty dimension", header(1) + tensor("t", [4, 0], 0, 0) + PADDING, "cannot have the shape"),
    ("broken block", header(1) + tensor("t", [31], 2, 0) + PADDING, "cannot have the shape"),
    ("no dimensions", header(1) + tensor("t", [], 0, 0) + PADDING, "0 dimensions"),
    ("five dimensions", header(1) + tensor("t", [1] * 5, 0, 0) + PADDING, "5 dimensions"),
    ("unknown tensor type", header(1) + tensor("t", [32], 4, 0) + PADDING, "unknown type 4"),
    (
        "odd alignment",
        header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 33) + PADDING,
        "not a power of two",
    ),
    (
        "zero alignment",
        header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0) + PADDING,
        "not a power of two",
    ),
    (
        "part of a split",
        header(0, 1) + text("split.count") + struct.pack("<IH", 2, 3) + PADDING,
        "of a split model, but by its name",
    ),
]


@pytest.mark.parametrize(
    ("content", "problem"), [c[1:] for c in DAMAGED], ids=[c[0] for c in DAMAGED]
)
def test_a_damaged_file_is_one_error_with_its_name_and_the_problem(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        GGUFFile(path)
    assert "bad.gguf" in str(caught.value)


def test_a_big_endian_file_is_unsupported(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "big.gguf", GGUFEndian.BIG)
    with pytest.raises(UnsupportedModelError, match=r"big-endian"):
        GGUFFile(path)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match=r"cannot be read"):
            GGUFFile(path)
        assert is_gguf(path) is False


def opens(path: Path, content: bytes) -> bool:
    """Whether the file opens; anything but `ModelLoadError` fails the test."""
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
    except ModelLoadError:
        return False
    assert sum(t.data.nbytes for t in file.tensors.values()) <= len(content)
    return True


def test_a_file_cut_anywhere_before_its_last_tensor_ends_is_refused(sample: Path) -> None:
    content = sample.read_bytes()
    last = GGUFFile(sample).tensors["blk.0.attn_norm.weight"].data
    end = content.rindex(last.tobytes()) + last.nbytes
    cut = sample.with_name("cut.gguf")
    assert [n for n in range(end) if opens(cut, content[:n])] == []
    assert opens(cut, content[:end])


@pytest.mark.parametrize("value", [0, 0x80, 0xFF])
def test_any_changed_byte_gives_a_file_or_a_load_error(sample: Path, value: int) -> None:
    content = bytearray(sample.read_bytes())
    path = sample.with_name("changed.gguf")
    for at in range(len(content)):
        before, content[at] = content[at], value
        opens(path, bytes(content))
        content[at] = before


def test_random_damage_gives_a_file_or_a_load_error(sample: Path) -> None:
    original = sample.read_bytes()
    path = sample.with_name("random.gguf")
    rng = random.Random(7)
    for _ in range(1500):
        content = bytearray(original)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(content))
            width = rng.choice([1, 2, 4, 8])
            values: list[Any] = [
                0,
                1,
                2**31,
                2**32 - 1,
                2**62,
                2**63,
                2**64 - 1,
                rng.getrandbits(64),
            ]
            content[at : at + width] = rng.choice(values).to_bytes(8, "little")[:width]
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        opens(path, bytes(content))
