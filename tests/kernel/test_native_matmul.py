"""Packed and float products against numpy and torch twins, at every instruction set there is here.

The twin of a packed product (packed_twin.py) works on the packed bytes, once they have been checked
against what the `gguf` package makes of the file, and quantises the activations with torch.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

native = pytest.importorskip("minisgl.kernel.native")
if not native.available():
    pytest.skip("this installation has no native kernels", allow_module_level=True)

import gguf
from gguf import GGMLQuantizationType as Type

from minisgl.quant.packed import (
    GGUF_FORMATS,
    PackedWeight,
    QuantizedActivations,
    matmul_many,
    packed_bytes,
    quantize_activations,
)

from .packed_twin import read_units, twin_activations, twin_matmul

ISAS = native.available_isas()
TYPES = [Type(number) for number in GGUF_FORMATS]
# Where each type keeps its fp16 scales; random bits there could be NaN.
HALVES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}  # fmt: skip
EXACT = {Type.Q5_0, Type.Q5_1, Type.Q8_0}


@pytest.fixture(autouse=True)
def restore_native_settings():
    isa, threads = native.isa(), native.num_threads()
    yield
    native.set_isa(isa)
    native.set_num_threads(threads)


def random_gguf(kind: Type, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid blocks with random codes (all 256 values of a byte) and random scales."""
    rng = np.random.default_rng(seed)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = rng.standard_normal((rows, columns // block, 1)) * 0.01
        raw[:, :, at : at + 2] = scale.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def pack(kind: Type, rows: int, columns: int, seed: int = 0) -> PackedWeight:
    raw = random_gguf(kind, rows, columns, seed)
    return PackedWeight.from_gguf(raw, int(kind), (rows, columns))


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    scale = wanted.abs().max().item() + 1e-30
    assert (actual.double() - wanted).abs().max().item() <= 2e-6 * scale


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_repacking_keeps_every_value_of_the_file(kind: Type) -> None:
    rows, columns = 83, 512
    raw = random_gguf(kind, rows, columns)
    weight = PackedWeight.from_gguf(raw, int(kind), (rows, columns))
    wanted = gguf.quants.dequantize(raw, kind)
    actual = weight.dequantize().numpy()
    assert weight.shape == (rows, columns) and actual.shape == (rows, columns)
    if kind in EXACT:
        np.testing.assert_array_equal(actual, wanted)
    elif weight.format in ("q4", "q4m"):  # scale and minimum in steps of the row's unit
        parts = read_units(weight)
        assert (np.abs(parts.scales) + np.abs(parts.minimums)).max() <= 8190
        np.testing.assert_allclose(actual, parts.values(), rtol=1e-6)
        error = np.abs(actual - wanted).max(1)
        assert (error <= 8.01 * parts.units).all()
        assert (parts.units <= np.abs(wanted).max(1) / 16384).all()
    else:  # the product of an fp16 scale and a small integer is rounded to fp16 again
        block = np.abs(wanted).reshape(-1, 32).max(1, keepdims=True)
        error = np.abs(actual - wanted).reshape(-1, 32)
        assert (error <= block * 2.0**-9 + 2.0**-20).all()


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_packed_weights_take_at_most_a_fifth_more_than_the_file(kind: Type) -> None:
    raw = random_gguf(kind, 64, 512)
    weight = PackedWeight.from_gguf(raw, int(kind), (64, 512))
    assert weight.format == GGUF_FORMATS[int(kind)]
    assert weight.nbytes <= 1.2 * raw.nbytes


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_what_a_packed_weight_takes_is_known_beforehand(kind: Type) -> None:
    for rows, columns in ((64, 512), (1, 256), (33, 768)):
        weight = pack(kind, rows, columns, seed=0)
        assert weight.nbytes == packed_bytes(weight.format, (rows, columns))
    for bits in (4, 8):
        weight = PackedWeight.from_float(torch.zeros(17, 33), bits)
        assert weight.nbytes == packed_bytes(weight.format, (17, 33))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_packed_product_equals_its_twin_over_random_shapes(kind: Type, isa: str) -> None:
    native.set_isa(isa)
    rng = np.random.default_rng(1)
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for seed in range(8):
        rows, tokens = int(rng.integers(1, 100)), int(rng.integers(1, 100))
        columns = block * int(rng.integers(1, 2048 // block))
        weight = pack(kind, rows, columns, seed)
        x = torch.from_numpy(rng.standard_normal((tokens, columns)).astype(np.float32))
        assert_close(weight.matmul(x), twin_matmul(weight, x))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_integer_scales_add_at_most_two_percent_of_squared_error(kind: Type) -> None:
    source = np.random.default_rng(0).standard_normal((300, 1536)).astype(np.float32)
    raw = gguf.quants.quantize(source, kind)
    weight = PackedWeight.from_gguf(raw, int(kind), (300, 1536))
    file = torch.from_numpy(gguf.quants.dequantize(raw, kind)).double()
    x = torch.randn(40, 1536, generator=torch.Generator().manual_seed(1))
    x[10:, 100] *= 100  # outliers, as models have them
    x[20:, ::7] *= 10
    eight_bits = twin_activations(x)
    by_rounding_x = (eight_bits - x.double()) @ file.T
    by_integers = weight.matmul(x).double() - eight_bits @ file.T
    assert (by_integers.square().sum(1) <= by_rounding_x.square().sum(1) / 50).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_extreme_codes_do_not_saturate(kind: Type, isa: str) -> None:
    native.set_isa(isa)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    for byte in (0x00, 0x80, 0x7F, 0xFF):
        raw = np.full((16, 2, nbytes), byte, dtype=np.uint8)
        for at in HALVES[kind]:
            raw[:, :, at : at + 2] = np.full((16, 2, 1), 0.5, np.float16).view(np.uint8)
        weight = PackedWeight.from_gguf(raw.reshape(16, -1), int(kind), (16, 2 * block))
        for sign in (1.0, -1.0):
            x = torch.full((3, 2 * block), sign)
            assert_close(weight.matmul(x), twin_matmul(weight, x))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_row_is_the_same_to_the_bit_in_any_batch_on_any_threads_and_isa(kind: Type) -> None:
    weight = pack(kind, 200, 768)
    x = torch.randn(512, 768, generator=torch.Generator().manual_seed(0))
    native.set_num_threads(1)
    native.set_isa("portable")
    few = torch.cat([weight.matmul(x[i : i + 1]) for i in range(0, 512, 16)])
    native.set_isa(ISAS[-1])
    wanted = torch.cat([weight.matmul(x[i : i + 1]) for i in range(512)])
    assert torch.equal(few, wanted[::16])
    for isa in ISAS[1:]:
        native.set_isa(isa)
        for threads in (1, 2):
            native.set_num_threads(threads)
            for tokens in (1, 2, 3, 5, 8, 17, 32, 33, 80, 81, 512):
                assert torch.equal(weight.matmul(x[:tokens]), wanted[:tokens]), (isa, tokens)
                assert torch.equal(weight.matmul(x[-tokens:]), wanted[-tokens:]), (isa, tokens)


def test_activations_quantised_once_serve_several_weights() -> None:
    weights = [pack(kind, 40 + i, 512) for i, kind in enumerate(TYPES)]
    x = torch.randn(9, 512)
    shared = quantize_activations(x)
    assert isinstance(shared, QuantizedActivations) and shared.shape == (9, 512)
    wide = torch.zeros(9, 60)
    for weight, together in zip(weights, matmul_many(weights, shared), strict=True):
        alone = weight.matmul(x)
        assert torch.equal(alone, together)
        assert torch.equal(alone, weight.matmul(weight.prepare(x)))
        rows = weight.shape[0]
        assert weight.matmul(shared, wide[:, 5 : 5 + rows]).data_ptr() == wide[:, 5:].data_ptr()
        assert torch.equal(wide[:, 5 : 5 + rows], alone)
        assert not wide[:, :5].any() and not wide[:, 5 + rows :].any()
        wide.zero_()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_only_itself(isa: str, bad: float) -> None:
    native.set_isa(isa)
    weight = pack(Type.Q4_1, 32, 64)
    x = torch.randn(6, 64)
    wanted = weight.matmul(x)
    x[2, 40] = bad
    actual = weight.matmul(x)
    assert actual[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(actual[keep], wanted[keep])


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_and_zero_activations_give_zero(isa: str) -> None:
    native.set_isa(isa)
    weight = pack(Type.Q8_0, 16, 64)
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    assert torch.equal(weight.matmul(x), torch.zeros(3, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "limit"), [(8, 0.006), (4, 0.09)])
def test_floats_pack_with_the_error_of_their_bits(dtype, bits: int, limit: float) -> None:
    source = torch.randn(37, 100).to(dtype)
    weight = PackedWeight.from_float(source, bits)
    error = (weight.dequantize() - source.float()).norm() / source.float().norm()
    assert error < limit
    x = torch.randn(5, 100)
    assert_close(weight.matmul(x), twin_matmul(weight, x))
    odd = torch.randn(50, 300).to(dtype)[3:40, 7:107]  # rows apart from each other
    packed, dense = PackedWeight.from_float(odd, bits), PackedWeight.from_float(odd.clone(), bits)
    assert torch.equal(packed.dequantize(), dense.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_spoils_its_row_and_no_other(bad: float, bits: int) -> None:
    source = torch.randn(20, 72)
    source[3, 5] = source[7, 71] = bad
    rows = PackedWeight.from_float(source, bits).dequantize()
    spoilt = ~rows.isfinite().all(1)
    assert spoilt.nonzero().flatten().tolist() == [3, 7]
    clean = PackedWeight.from_float(torch.where(source.isfinite(), source, 0.0), bits).dequantize()
    assert torch.equal(rows[~spoilt], clean[~spoilt])


def test_rows_look_up_an_embedding() -> None:
    weight = pack(Type.Q6_K, 50, 256)
    ids = torch.tensor([[0, 49], [7, 7]], dtype=torch.int32)
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids.long()])
    assert weight.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 256)
    for outside in (-1, 50, 2**40):
        with pytest.raises(IndexError):
            weight.rows(torch.tensor([outside]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_product_equals_its_twin_and_does_not_see_the_batch(dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    for rows, columns in [(1, 1), (5, 16), (50, 83), (129, 576)]:
        weight = torch.randn(rows, columns, generator=generator).to(dtype)
        x = torch.randn(70, columns, generator=generator)
        wanted = x.double() @ weight.double().T
        first = native.matmul_float(weight, x)
        for isa in ISAS:
            native.set_isa(isa)
            for threads in (1, 2):
                native.set_num_threads(threads)
                for tokens in (1, 2, 3, 8, 17, 90):
                    actual = native.matmul_float(weight, x[:tokens])
                    assert_close(actual, wanted[:tokens])
                    assert torch.equal(actual, first[:tokens]), (isa, tokens)


def test_wrong_arguments_raise_and_never_crash() -> None:
    weight = pack(Type.Q4_0, 32, 64)
    x = torch.randn(4, 64)
    for bad in (x.double(), x.half(), x.numpy(), None, x.to("meta")):
        with pytest.raises(TypeError):
            weight.matmul(bad)
    for shape in ((4, 63), (64,), (1, 4, 64), (4, 96)):
        with pytest.raises(ValueError):
            weight.matmul(torch.randn(shape))
    for out in (torch.empty(4, 31), torch.empty(3, 32), torch.empty(32, 4).t()):
        with pytest.raises(ValueError):
            weight.matmul(x, out)
    with pytest.raises(ValueError):
        weight.matmul(x, torch.empty(1, 32).expand(4, 32))
    with pytest.raises(ValueError):
        weight.matmul(quantize_activations(torch.randn(4, 32)))
    with pytest.raises(TypeError):
        weight.matmul(x, torch.empty(4, 32, dtype=torch.float64))
    raw = random_gguf(Type.Q4_0, 32, 64)
    for kind, shape in ((2, (32, 32)), (2, (32, 65)), (2, (0, 64)), (2, (-32, -64)), (1, (32, 64))):
        with pytest.raises(ValueError):
            PackedWeight.from_gguf(raw, kind, shape)
    with pytest.raises(TypeError):
        PackedWeight.from_gguf(raw.astype(np.int8), 2, (32, 64))
    with pytest.raises(ValueError):
        PackedWeight.from_float(torch.randn(4, 32), 3)
    with pytest.raises(TypeError):
        PackedWeight.from_float(torch.zeros(4, 32, dtype=torch.int32), 8)
    with pytest.raises(ValueError):
        native.set_isa("mmx")
    for threads in (0, -1, 257):
        with pytest.raises(ValueError):
            native.set_num_threads(threads)


def test_strided_inputs_equal_dense_ones() -> None:
    weight = pack(Type.Q5_1, 20, 64)
    wide = torch.randn(8, 200)
    for view in (wide[:, 3:67], wide[::2, 3:67], wide[:, 0:128:2], wide[:1, :64].expand(5, 64)):
        assert torch.equal(weight.matmul(view), weight.matmul(view.clone()))
    assert weight.matmul(torch.empty(0, 64)).shape == (0, 20)


def test_threads_of_python_may_multiply_at_the_same_time() -> None:
    weight = pack(Type.Q4_1, 640, 256)
    x = torch.randn(64, 256)
    wanted = weight.matmul(x)
    wrong: list[int] = []

    def work() -> None:
        for i in range(50):
            if not torch.equal(weight.matmul(x), wanted):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(20):
        native.set_num_threads(1 + i % 3)
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_threads_of_its_own() -> None:
    weight = pack(Type.Q4_1, 640, 256)
    x = torch.randn(64, 256)
    native.set_num_threads(2)
    wanted = weight.matmul(x).numpy()
    child = os.fork()
    if child == 0:  # compares with numpy: torch's own thread pool does not survive a fork
        os._exit(0 if np.array_equal(weight.matmul(x).numpy(), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
