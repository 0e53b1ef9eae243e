"""Our expansion of GGUF blocks against the gguf package's, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from minisgl.quant.dequant import CHUNK_ELEMENTS, block_sizes, dequantize, dequantize_into

OWN = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
BORROWED = sorted({kind.name for kind in gguf.quants._type_traits} - set(OWN))
SCALES = {  # where the float16 scales of a block are, if not first
    "Q6_K": [208],
    "Q3_K": [108],
    "Q2_K": [80, 82],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_M": [],  # in pieces: made finite below
    "MXFP4": [],
    "NVFP4": [],
}


def random_blocks(type_name: str, num_blocks: int) -> np.ndarray:
    """Random codes; every float16 scale is made finite by clearing its top exponent bit."""
    rng = np.random.default_rng(0)
    items, num_bytes = block_sizes(type_name)
    if items == 1:
        values = torch.randn(num_blocks, generator=torch.Generator().manual_seed(0))
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
        return values.to(kind).view(torch.uint8).numpy()
    raw = rng.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    for start in SCALES.get(type_name, [0, 2] if type_name.startswith("Q") else [0]):
        raw[:, start + 1] &= 0xBF
    if type_name == "IQ1_M":  # the top exponent bit is in the last of the four pieces
        raw[:, 55] &= 0xBF
    return raw.reshape(-1)


@pytest.mark.parametrize("type_name", OWN + BORROWED)
def test_it_is_exactly_what_the_gguf_package_computes(type_name: str) -> None:
    num_blocks = 37 if block_sizes(type_name)[0] > 1 else 1024
    raw = random_blocks(type_name, num_blocks)
    kind = gguf.GGMLQuantizationType[type_name]
    expected = gguf.quants.dequantize(raw.reshape(num_blocks, -1), kind).reshape(-1)
    got = dequantize(torch.from_numpy(raw), type_name, expected.shape).float().numpy()
    np.testing.assert_array_equal(got, expected)


def test_every_type_that_the_gguf_package_dequantises_has_its_sizes() -> None:
    assert {"IQ1_M", "IQ3_S", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"} <= set(BORROWED)
    for name in OWN + BORROWED:
        kind = gguf.GGMLQuantizationType[name]
        assert block_sizes(name) == gguf.GGML_QUANT_SIZES[kind]


def test_a_borrowed_type_is_expanded_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks = CHUNK_ELEMENTS // 256 + 3
    raw = random_blocks("Q2_K", num_blocks)
    kind = gguf.GGMLQuantizationType.Q2_K
    borrowed, sizes = gguf.quants.dequantize, []

    def counted(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        wide = borrowed(data, kind)
        sizes.append(wide.size)
        return wide

    monkeypatch.setattr(gguf.quants, "dequantize", counted)
    got = dequantize(torch.from_numpy(raw), "Q2_K", (num_blocks, 256))
    np.testing.assert_array_equal(got.numpy(), borrowed(raw.reshape(num_blocks, -1), kind))
    assert sizes == [CHUNK_ELEMENTS, 3 * 256]


def test_a_tensor_of_many_chunks_is_written_into_any_float_type() -> None:
    raw = torch.from_numpy(random_blocks("Q4_1", 3 * 16384 + 5))
    whole = dequantize(raw, "Q4_1", (3 * 16384 + 5, 32))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(whole.shape, dtype=dtype)
        dequantize_into(raw, "Q4_1", out)
        torch.testing.assert_close(out, whole.to(dtype), rtol=0, atol=0, equal_nan=True)
