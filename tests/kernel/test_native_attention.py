"""Native paged attention, storing and rotation: against attention written out in float64 and the
torch twins, and equal to the bit whatever surrounds a query."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from minisgl.kernel import native, torch_ops
from minisgl.kernel import native_attention as na

if not native.available():
    pytest.skip("the native extension is not built", allow_module_level=True)
if not hasattr(native.load(), "paged_attention"):
    pytest.skip("this build of the extension has no attention", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int16]
MOST_CODE = {torch.int8: 127, torch.int16: 4095}
MOST_QUERY = MOST_WEIGHT = 8191
# (query heads, KV heads, head_dim, window)
SHAPES = [(9, 3, 64, None), (4, 4, 40, 33), (8, 2, 128, 100), (6, 1, 20, 7), (3, 3, 7, None)]
# (query tokens, KV length) of each request: decode, whole prompts, chunks, nothing to do
MIXED = [(1, 1), (5, 300), (70, 70), (1, 700), (0, 3), (33, 520), (1, 256), (2, 257)]


# avxvnni has the attention of avx2.
@pytest.fixture(params=[name for name in native.available_isas() if name != "avxvnni"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before, threads = native.isa(), native.num_threads()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)
    native.set_num_threads(threads)


class Paged:
    """K and V of requests, kept as numbers and in a paged pool that is NaN everywhere else."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        page_size: int = 1,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        pages = [-(-n // page_size) for n in lengths]
        order = torch.randperm(sum(pages) + 3, generator=random)
        shape = (len(order), page_size, heads, dim)
        width = max(pages) * page_size
        # Past the end of a request, the table points nowhere: those entries must not be read.
        self.table = torch.full((len(lengths), width), -1, dtype=torch.int32)
        scales: list[torch.Tensor | None] = [None, None]
        if dtype in MOST_CODE:
            caches = [torch.full(shape, 77, dtype=dtype) for _ in range(2)]
            nan = float("nan")
            scales = [torch.full((len(order) * page_size, heads), nan) for _ in range(2)]
        else:
            caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
        self.kv = na.KVTensors(caches[0], caches[1], *scales)
        self.k, self.v = [], []
        for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
            mine, order = order[:count], order[count:]
            where = (mine.unsqueeze(1) * page_size + torch.arange(page_size)).flatten()[:length]
            self.table[row, :length] = where.int()
            # Each request has numbers of its own, whatever the others and the pages are.
            own = torch.Generator().manual_seed(1000 * seed + length)
            k = torch.randn(length, heads, dim, generator=own) * 2
            v = torch.randn(length, heads, dim, generator=own)
            na.store_kv(self.kv, where, k, v)
            self.k.append(self._read(self.kv.k, self.kv.k_scale, where))
            self.v.append(self._read(self.kv.v, self.kv.v_scale, where))
            self.exact = k, v

    @staticmethod
    def _read(cache: torch.Tensor, scale: torch.Tensor | None, where: torch.Tensor) -> torch.Tensor:
        values = cache.flatten(0, 1)[where].double()
        return values if scale is None else values * scale[where].double().unsqueeze(2)

    def batch(self, rows: list[int], query_lens: list[int], kv_lens: list[int]) -> na.PagedBatch:
        return na.snapshot(self.table, rows, query_lens, kv_lens, self.kv.num_locations)

    def expected(self, row: int, q: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
        """Attention of the last len(q) positions of the first `length` tokens, float64."""
        group = q.shape[1] // self.k[row].shape[1]
        k = self.k[row][:length].repeat_interleave(group, 1)
        v = self.v[row][:length].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
        at = torch.arange(length - len(q), length).unsqueeze(1)
        hidden = torch.arange(length) > at
        if window is not None:
            hidden |= torch.arange(length) <= at - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_attention_written_out(
    isa: str, shape: tuple[int, int, int, int | None], dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, window = shape
    paged = Paged([n for _, n in MIXED], kv_heads, dim, dtype, page_size=4)
    counts = [count for count, _ in MIXED]
    q = torch.randn(sum(counts), heads, dim, generator=torch.Generator().manual_seed(1))
    batch = paged.batch(list(range(len(MIXED))), counts, paged.lengths)
    got = na.attention(q, paged.kv, batch, window=window)
    wanted = [
        paged.expected(row, part, paged.lengths[row], window)
        for row, part in enumerate(q.split(counts))
    ]
    # Over codes, queries and weights become codes of 13 bits too.
    assert (got - torch.cat(wanted)).abs().max().item() < (4e-3 if dtype in MOST_CODE else 1e-5)


def short_exp2(x: np.ndarray) -> np.ndarray:
    """What weights that become codes are: 2 ** x within 3e-6, by the polynomial of the kernels."""
    coefficients = "0x1.3a02ccp-7", "0x1.c9fc46p-5", "0x1.ec0378p-3", "0x1.62e12cp-1", "1"
    whole = np.rint(x)
    power = np.polyval([float.fromhex(c) for c in coefficients], x - whole)
    assert np.allclose(power, np.exp2(x - whole), rtol=3e-6, atol=0)
    return np.ldexp(power, whole.astype(int)).astype(np.float32)


def coded_twin(paged: Paged, q: torch.Tensor, window: int | None) -> np.ndarray:
    """Attention over the codes of the only request, one query and head and block at a time."""
    f32, kv, where = np.float32, paged.kv, paged.table[0].long()
    codes = [x.flatten(0, 1)[where].numpy().astype(np.int64) for x in (kv.k, kv.v)]
    assert kv.k_scale is not None and kv.v_scale is not None
    k_scale, v_scale = kv.k_scale[where].numpy(), kv.v_scale[where].numpy()
    tokens, heads, dim = q.shape
    length, group = len(where), heads // kv.num_heads
    padded = -(-dim // 16) * 16
    most = f32(min(MOST_QUERY, (2**31 - 1) // (padded * MOST_CODE[kv.k.dtype])))
    scaled = q.numpy() * (f32(dim**-0.5) * f32(1.44269504))
    largest = np.abs(scaled).max(2)
    queries = np.rint(scaled.astype(float) * (most / largest)[:, :, None]).astype(np.int64)
    out = np.empty(q.shape, f32)
    for t, h in np.ndindex(tokens, heads):
        head, position, q_scale = h // group, length - tokens + t, largest[t, h] / most
        low = 0 if window is None else max(0, position - window + 1)
        parts = []
        for split in range(low // 256 * 256, position + 1, 256):
            best, total, gathered = f32(-np.inf), f32(0), np.zeros(dim, f32)
            for block in range(max(split, low // 64 * 64), min(split + 256, position + 1), 64):
                seen = slice(max(block, low), min(block + 64, position + 1))
                dots = codes[0][seen, head] @ queries[t, h]
                assert np.abs(dots).max() < 2**31
                scores = dots.astype(f32) * k_scale[seen, head]
                now = max(best, scores.max() * q_scale)
                weights = short_exp2(scores.astype(float) * q_scale - now)
                keep = f32(np.exp2(float(best) - float(now)))
                total, best = total * keep + weights.sum(dtype=f32), now
                units = weights * v_scale[seen, head]
                unit = units.max() / f32(MOST_WEIGHT)
                rounded = np.rint(units.astype(float) / unit).astype(np.int64)
                sums = rounded @ codes[1][seen, head]
                gathered = (sums.astype(f32).astype(float) * unit + gathered * keep).astype(f32)
            parts.append((best, total, gathered))
        top = max(part[0] for part in parts)
        shares = [np.exp2(float(part[0]) - float(top)) for part in parts]
        total = sum(share * part[1] for share, part in zip(shares, parts, strict=True))
        gathered = sum(share * part[2] for share, part in zip(shares, parts, strict=True))
        out[t, h] = gathered / total
    return out


@pytest.mark.parametrize("dtype", MOST_CODE)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_equal_their_definition_in_exact_sums(
    isa: str, shape: tuple[int, int, int, int | None], dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, window = shape
    paged = Paged([330], kv_heads, dim, dtype)
    q = torch.randn(9, heads, dim, generator=torch.Generator().manual_seed(11))
    got = na.attention(q, paged.kv, paged.batch([0], [9], [330]), window=window)
    error = np.abs(got.numpy() - coded_twin(paged, q, window))
    # The last bit of a float may move a code by one, here and there.
    assert error.max() < 1e-4 and (error < 2e-6).mean() > 0.95


def test_int16_is_as_near_to_float32_as_float16_is(isa: str) -> None:
    errors = {}
    for dtype in (torch.int16, torch.float16, torch.int8):
        paged = Paged([300], 2, 64, dtype)
        q = torch.randn(40, 6, 64, generator=torch.Generator().manual_seed(12))
        got = na.attention(q, paged.kv, paged.batch([0], [40], [300]))
        paged.k, paged.v = ([x.double()] for x in paged.exact)
        difference = got - paged.expected(0, q, 300, None)
        errors[dtype] = difference.square().mean().sqrt().item()
    # Both have 11 bits and more; where they round differs.
    assert errors[torch.int16] < 1.15 * errors[torch.float16] < 3e-4
    assert errors[torch.int16] < errors[torch.int8] / 15


@pytest.mark.parametrize("window", [None, 1, 64, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_alone_in_chunks_and_in_pages_of_any_size(
    isa: str, dtype: torch.dtype, window: int | None
) -> None:
    length, heads, dim = 311, 6, 48
    q = torch.randn(length, heads, dim, generator=torch.Generator().manual_seed(2))
    reference: torch.Tensor | None = None
    for page_size in (1, 4, 16):
        paged = Paged([900, length, 5], 2, dim, dtype, page_size)
        whole = na.attention(q, paged.kv, paged.batch([1], [length], [length]), window=window)
        reference = whole if reference is None else reference
        assert torch.equal(whole, reference)
        for step in (1, 7) if page_size == 4 else (100,):
            if isa == "portable" and step == 1:
                continue  # slow, and the other sets are compared with this one below
            cuts = [*range(0, length, step), length]
            for low, high in pairwise(cuts):
                # Neighbours in the same call: a decode before, a chunk after.
                batch = paged.batch([0, 1, 2], [1, high - low, 3], [900, high, 5])
                neighbours = torch.cat([q[:1], q[low:high], q[:3]])
                got = na.attention(neighbours, paged.kv, batch, window=window)
                assert torch.equal(got[1:-3], whole[low:high])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_with_every_instruction_set_and_number_of_threads(
    isa: str, shape: tuple[int, int, int, int | None], dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, window = shape
    sizes = [(1, 2100), *MIXED]
    counts = [count for count, _ in sizes]
    q = torch.randn(sum(counts), heads, dim, generator=torch.Generator().manual_seed(3))
    results = []
    for name, threads in (("portable", 1), (isa, 1), (isa, 2), (isa, 5)):
        native.set_isa(name)
        native.set_num_threads(threads)
        paged = Paged([n for _, n in sizes], kv_heads, dim, dtype)
        batch = paged.batch(list(range(len(sizes))), counts, paged.lengths)
        out = na.attention(q, paged.kv, batch, window=window)
        results.append((out, paged.kv.k.nan_to_num(), paged.kv.v.nan_to_num()))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    assert not results[0][0].isnan().any()


def test_a_long_context_of_one_request_is_shared_out_and_merged(isa: str) -> None:
    length = 1500 if isa == "portable" else 9000  # the portable body is slow
    paged = Paged([length], 3, 64, torch.float16)
    q = torch.randn(20, 9, 64, generator=torch.Generator().manual_seed(4))
    for count in (1, 20):
        batch = paged.batch([0], [count], [length])
        outs = []
        for threads in (1, 2, 3):
            native.set_num_threads(threads)
            outs.append(na.attention(q[:count], paged.kv, batch))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        expected = paged.expected(0, q[:count], length, None)
        assert (outs[0] - expected).abs().max().item() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_in_a_later_token_spoils_no_earlier_one(
    isa: str, dtype: torch.dtype, which: int
) -> None:
    paged = Paged([200], 2, 64, dtype)
    q = torch.randn(200, 4, 64, generator=torch.Generator().manual_seed(5))
    batch = paged.batch([0], [200], [200])
    clean = na.attention(q, paged.kv, batch)
    new = [torch.zeros(1, 2, 64), torch.zeros(1, 2, 64)]
    new[which][0, :, 9] = float("nan")
    na.store_kv(paged.kv, paged.table[0, 150:151], *new)
    spoilt = na.attention(q, paged.kv, batch)
    assert torch.equal(spoilt[:150], clean[:150]) and spoilt[150:, :, 9].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_a_query_spoils_that_query_alone(isa: str, dtype: torch.dtype) -> None:
    paged = Paged([90], 2, 64, dtype)
    q = torch.randn(90, 4, 64, generator=torch.Generator().manual_seed(13))
    batch = paged.batch([0], [90], [90])
    clean = na.attention(q, paged.kv, batch)
    for value in (float("nan"), float("inf")):
        q[50, 1, 3] = value
        spoilt = na.attention(q, paged.kv, batch)
        changed = torch.zeros(90, 4, dtype=torch.bool)
        changed[50, 1] = True
        assert spoilt[changed].isnan().all() and torch.equal(spoilt[~changed], clean[~changed])


@pytest.mark.parametrize("dtype", MOST_CODE)
def test_codes_of_nothing_but_zeros_give_means_and_zeros(isa: str, dtype: torch.dtype) -> None:
    paged = Paged([100], 2, 64, dtype)
    batch = paged.batch([0], [1], [100])
    got = na.attention(torch.zeros(1, 4, 64), paged.kv, batch)
    mean = paged.v[0].mean(0).repeat_interleave(2, 0)
    assert (got[0] - mean).abs().max().item() < 1e-3
    na.store_kv(paged.kv, paged.table[0], torch.ones(100, 2, 64), torch.zeros(100, 2, 64))
    assert not na.attention(torch.randn(1, 4, 64), paged.kv, batch).any()


def test_extreme_scores_stay_finite_and_right(isa: str) -> None:
    paged = Paged([130], 1, 16)
    q = torch.randn(130, 1, 16, generator=torch.Generator().manual_seed(6)) * 1000
    got = na.attention(q, paged.kv, paged.batch([0], [130], [130]))
    # One rounding of a score of thousands moves a weight by about 1e-3.
    assert (got - paged.expected(0, q, 130, None)).abs().max().item() < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_are_the_same_bits_on_every_instruction_set(dtype: torch.dtype) -> None:
    """A score below the largest by a half, where rounding may go either way; or by so much that
    2 ** score is too small for a float, which counts as nothing even where the value is huge."""
    before, huge = native.isa(), 6e4 if dtype is torch.float16 else 1e38
    halves = [-whole - 0.5 for whole in range(8)]
    far = [-126.5, -127.0, -140.0, -149.5, -160.0]
    outs: dict[str, list[float]] = {}
    for below in [*halves, *far]:
        k, v, q = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16), torch.zeros(1, 1, 16)
        k[1, 0, 0], v[1], q[0, 0, 0] = below, huge if below in far else 1.0, 1.0
        scales = (torch.zeros(2, 1), torch.zeros(2, 1)) if dtype in MOST_CODE else ()
        pool = (torch.zeros(2, 1, 1, 16, dtype=dtype), torch.zeros(2, 1, 1, 16, dtype=dtype))
        kv = na.KVTensors(*pool, *scales)
        na.store_kv(kv, torch.arange(2), k, v)
        batch = na.snapshot(torch.arange(2, dtype=torch.int32).view(1, 2), [0], [1], [2], 2)
        for name in native.available_isas():
            native.set_isa(name)
            got = na.attention(q, kv, batch, scale=math.log(2))
            outs.setdefault(name, []).append(got[0, 0, 0].item())
    native.set_isa(before)
    assert all(out == outs["portable"] for out in outs.values()), outs
    wanted = [2**below / (1 + 2**below) for below in halves] + [0.0] * len(far)
    assert outs["portable"] == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("dtype", MOST_CODE)
def test_codes_stand_for_numbers_of_any_size(isa: str, dtype: torch.dtype) -> None:
    paged = Paged([100], 2, 64, dtype)
    batch = paged.batch([0], [1], [100])
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(14))
    usual = na.attention(q, paged.kv, batch)
    # One key has all the weight as soon as scores are large; they may be much larger than that.
    chosen = na.attention(q * 1e4, paged.kv, batch)
    for scale in (1e9, 1e13, 1e20):
        paged.kv.k_scale.mul_(scale)
        assert torch.equal(na.attention(q * 1e4, paged.kv, batch), chosen), scale
        paged.kv.k_scale.div_(scale)
    for scale in (1e-26, 1e-20, 1e20, 1e30):
        paged.kv.v_scale.mul_(scale)
        error = na.attention(q, paged.kv, batch).double() / scale - usual
        assert error.abs().max().item() < 1e-4, scale
        paged.kv.v_scale.div_(scale)


def test_storing_equals_the_torch_twin(isa: str) -> None:
    random = torch.Generator().manual_seed(7)
    k, v = (torch.randn(50, 3, 20, generator=random) * 300 for _ in range(2))
    k[0, 0, :6] = torch.tensor([0.0, -0.0, 1e-8, 6e-5, 70000.0, float("inf")])
    where = torch.randperm(64, generator=random)[:50]
    for dtype in DTYPES[:3]:
        ours, twin = (tuple(torch.zeros(64, 1, 3, 20, dtype=dtype) for _ in range(2)) for _ in "ab")
        na.store_kv(na.KVTensors(*ours), where, k, v)
        torch_ops.store_cache(*twin, where, k, v)
        for a, b in zip(ours, twin, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), dtype


@pytest.mark.parametrize("dtype", MOST_CODE)
def test_integers_round_to_the_nearest_code_and_show_a_nan(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 2, 33, generator=torch.Generator().manual_seed(8))
    x[2, 1] = 0.0
    x[3, 0, 5] = float("nan")
    caches = [torch.zeros(4, 1, 2, 33, dtype=dtype) for _ in range(2)]
    scales = [torch.ones(4, 2) for _ in range(2)]
    na.store_kv(na.KVTensors(*caches, *scales), torch.arange(4), x, x)
    good = torch.ones(4, 2, dtype=torch.bool)
    good[3, 0] = False
    back = caches[0].view(4, 2, 33).float() * scales[0].unsqueeze(2)
    assert ((back - x).abs() <= scales[0].unsqueeze(2) * 0.501)[good].all()
    assert caches[0].view(4, 2, 33)[:2].abs().amax(2).eq(MOST_CODE[dtype]).all()
    assert torch.equal(scales[0].isnan(), ~good) and not caches[0][3, 0, 0].any()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("half", [32, 8])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_rotation_equals_the_torch_twins(
    isa: str, dtype: torch.dtype, half: int, norm: bool
) -> None:
    random = torch.Generator().manual_seed(9)
    tokens, num_q, num_kv, dim = 37, 6, 2, 64
    whole = torch.randn(tokens, (num_q + 2 * num_kv) * dim, generator=random)
    cos, sin = (torch.randn(100, half, generator=random) for _ in range(2))
    positions = torch.randint(100, (tokens,), generator=random)
    where = torch.randperm(64, generator=random)[:tokens]
    weights = [torch.randn(dim, generator=random) for _ in range(2)] if norm else [None, None]

    qkv = whole.clone()
    heads = qkv.view(tokens, -1, dim)
    q, k, v = heads.split((num_q, num_kv, num_kv), 1)
    for x, weight in zip((q, k), weights, strict=True):
        if weight is not None:
            x.copy_(torch_ops.rmsnorm(x, weight, 1e-5))
    angles = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    torch_ops.rotate_(heads[:, : num_q + num_kv], *angles)

    for table in ((cos, sin, positions), (cos[positions], sin[positions], None)):
        ours = whole.clone()
        kv = na.KVTensors(*(torch.zeros(64, 1, num_kv, dim, dtype=dtype) for _ in range(2)))
        got = na.rope_and_store(
            ours, num_q, kv, where, table[0], table[1], positions=table[2],
            q_norm=weights[0], k_norm=weights[1], eps=1e-5,
        )  # fmt: skip
        assert torch.allclose(got, q, rtol=1e-6, atol=1e-5)
        assert torch.equal(ours[:, num_q * dim :], whole[:, num_q * dim :])
        tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        stored = kv.k.flatten(0, 1)[where].float()
        assert torch.allclose(stored, k, rtol=tolerance, atol=1e-5)
        assert torch.equal(kv.v.flatten(0, 1)[where], v.to(dtype))


def test_rotation_gives_the_same_bits_with_every_instruction_set(isa: str) -> None:
    random = torch.Generator().manual_seed(10)
    whole = torch.randn(20, 10 * 24, generator=random)
    cos, sin = (torch.randn(20, 12, generator=random) for _ in range(2))
    weight = torch.randn(24, generator=random)
    results = []
    for name in ("portable", isa):
        native.set_isa(name)
        qkv = whole.clone()
        kv = na.KVTensors(*(torch.zeros(20, 1, 2, 24, dtype=torch.float16) for _ in range(2)))
        na.rope_and_store(
            qkv, 6, kv, torch.arange(20), cos, sin, q_norm=weight, k_norm=weight
        )  # fmt: skip
        results.append((qkv, kv.k, kv.v))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_wrong_arguments_are_errors() -> None:
    paged = Paged([40], 2, 16)
    q, batch = torch.randn(40, 4, 16), paged.batch([0], [40], [40])
    kv, k = paged.kv, torch.zeros(40, 2, 16)
    where = torch.arange(40)
    table = torch.zeros(40, 8)
    wrong = [
        (TypeError, lambda: na.attention(q.double(), kv, batch)),
        (TypeError, lambda: na.attention(q.numpy(), kv, batch)),
        (ValueError, lambda: na.attention(q[:39], kv, batch)),
        (ValueError, lambda: na.attention(q[:, :3], kv, batch)),
        (ValueError, lambda: na.attention(q[:, :, :8], kv, batch)),
        (ValueError, lambda: na.attention(q, kv, batch, window=0)),
        (ValueError, lambda: na.attention(q, kv, batch, out=torch.empty(40, 4, 8))),
        (ValueError, lambda: na.attention(q, kv, batch, out=q[:1].expand(40, 4, 16))),
        (TypeError, lambda: na.KVTensors(kv.k.double(), kv.v.double())),
        (TypeError, lambda: na.KVTensors(kv.k, kv.v.half())),
        (TypeError, lambda: na.KVTensors(kv.k.to(torch.int8), kv.v.to(torch.int8))),
        (TypeError, lambda: na.KVTensors(kv.k.to(torch.int16), kv.v.to(torch.int16))),
        (ValueError, lambda: na.KVTensors(kv.k[:, :, :1], kv.v[:, :, :1])),
        (ValueError, lambda: na.KVTensors(kv.k, kv.v[:1])),
        (IndexError, lambda: paged.batch([1], [1], [40])),
        (IndexError, lambda: paged.batch([0], [1], [41])),
        (IndexError, lambda: na.snapshot(paged.table, [0], [1], [40], 20)),
        (TypeError, lambda: na.snapshot(paged.table.long(), [0], [1], [40], 99)),
        (ValueError, lambda: na.attention(q, kv, paged.batch([0], [40], [39]))),
        (TypeError, lambda: na.PagedBatch(batch.ints.astype(float), 1, 40)),
        (TypeError, lambda: na.PagedBatch(batch.ints[::2], 1, 40)),
        (ValueError, lambda: na.PagedBatch(batch.ints, 1, 39)),
        (IndexError, lambda: na.store_kv(kv, where + 10, k, k)),
        (IndexError, lambda: na.store_kv(kv, where - 1, k, k)),
        (ValueError, lambda: na.store_kv(kv, where[:3], k, k)),
        (ValueError, lambda: na.store_kv(kv, where, k, k[:3])),
        (TypeError, lambda: na.store_kv(kv, where.float(), k, k)),
        (ValueError, lambda: na.rope_and_store(torch.zeros(40, 120), 4, kv, where, table, table)),
        (ValueError, lambda: na.rope_and_store(
            torch.zeros(40, 128), 4, kv, where, table[:3], table[:3])),
        (ValueError, lambda: na.rope_and_store(
            torch.zeros(40, 128), 4, kv, where, torch.zeros(40, 9), torch.zeros(40, 9))),
        (IndexError, lambda: na.rope_and_store(
            torch.zeros(40, 128), 4, kv, where, table, table, positions=where + 1)),
        (TypeError, lambda: na.rope_and_store(
            torch.zeros(40, 128), 4, kv, where, table, table, q_norm=torch.zeros(16).half())),
    ]  # fmt: skip
    for index, (error, call) in enumerate(wrong):
        with pytest.raises(error):
            call()
            pytest.fail(f"case {index} raised nothing")
