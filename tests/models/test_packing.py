"""GGUF matrices that stay packed: the same weights, and nearly the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.kernel import native
from minisgl.models import (
    close_sources,
    create_model,
    load_model_config,
    load_model_weights,
    pack_stored,
)
from minisgl.models.sources import BlockTensor, FloatTensor
from minisgl.quant import StackedWeight
from minisgl.quant.packed import PackedWeight

from tests.models.by_hand import ByHand
from tests.resident import resident_bytes

pytestmark = pytest.mark.skipif(not native.available(), reason="built without native kernels")


def q8_0(rows: int, seed: int, num_heads: int = 0) -> BlockTensor:
    """A random Q8_0 matrix of 64 columns."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, 2, 34), dtype=np.uint8)
    raw[..., :2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    return BlockTensor("w", (rows, 64), "Q8_0", torch.from_numpy(raw.reshape(-1)), num_heads)


def q4_0(rows: int, seed: int) -> BlockTensor:
    """A random Q4_0 matrix of 64 columns."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, 2, 18), dtype=np.uint8)
    raw[..., :2] = np.array([0.1], dtype=np.float16).view(np.uint8)
    return BlockTensor("w", (rows, 64), "Q4_0", torch.from_numpy(raw.reshape(-1)))


def test_parts_of_one_type_become_one_packed_matrix_in_unpermuted_order() -> None:
    parts = [q8_0(32, 0, num_heads=2), q8_0(16, 1)]
    packed = pack_stored("qkv", parts)
    assert isinstance(packed, PackedWeight) and packed.shape == (48, 64)
    expected = torch.cat([part.tensor() for part in parts])
    torch.testing.assert_close(packed.rows(torch.arange(48)), expected, rtol=1e-6, atol=1e-6)


def test_rows_that_do_not_fit_their_heads_or_shape_are_refused() -> None:
    raw = q8_0(32, 0).data.numpy()
    for parts in ([(raw, 3)], [(raw, 32)], [(raw, -1)], [(raw, 0)] * 2, [(raw[:-34], 0)], []):
        with pytest.raises(ValueError):
            PackedWeight.from_gguf_parts(parts, 8, (32, 64))


def test_parts_of_two_types_become_a_stack() -> None:
    parts = [q8_0(32, 0), q8_0(32, 1), q4_0(16, 2)]
    packed = pack_stored("qkv", parts)
    assert isinstance(packed, StackedWeight) and [p.shape[0] for p in packed.parts] == [64, 16]
    x = torch.randn(3, 64)
    expected = x @ torch.cat([part.tensor() for part in parts]).t()
    assert (packed.matmul(x) - expected).abs().max() < 0.05 * expected.abs().max()
    assert torch.equal(packed.matmul(packed.prepare(x)), packed.matmul(x))


def test_floats_are_left_to_the_loader() -> None:
    assert pack_stored("w", [FloatTensor("w", torch.ones(4, 64))]) is None
    assert pack_stored("w", [q8_0(32, 0), FloatTensor("w", torch.ones(4, 64))]) is None


def test_a_load_gives_back_the_pages_of_every_weight(default_model_path: Path) -> None:
    close_sources()
    before = resident_bytes(default_model_path)
    with torch.device("meta"):
        model = create_model(load_model_config(default_model_path))
    sizes: list[int] = []
    load_model_weights(
        model,
        default_model_path,
        device="cpu",
        dtype=torch.float32,
        progress=lambda *_: sizes.append(resident_bytes(default_model_path) - before),
        pack=pack_stored,
    )
    assert max(sizes) < 6 << 20  # the vocabulary stays until the end
    assert resident_bytes(default_model_path) == before


def test_the_default_model_stays_packed_and_agrees_with_its_floats(
    default_model_path: Path,
) -> None:
    by_hand = ByHand(default_model_path)
    ids = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4784, 314]
    expected = by_hand.logits(ids)
    load_model_weights(
        by_hand.model, default_model_path, device="cpu", dtype=torch.float32, pack=pack_stored
    )
    weights = by_hand.model.state_dict().values()
    assert all(isinstance(w, PackedWeight) for w in weights if len(w.shape) == 2)
    assert sum(w.nbytes for w in weights) < 1.2 * default_model_path.stat().st_size
    got = by_hand.logits(ids)
    similarity = torch.nn.functional.cosine_similarity(got, expected).min().item()
    assert similarity > 0.99
