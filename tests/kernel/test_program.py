"""Recorded programs against an eager twin made of the same kernels, to the bit.

The twin has the methods of a `Recorder` but computes at once, on tensors; the layers' own `record`
methods drive both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

native = pytest.importorskip("minisgl.kernel.native")
if not native.available():
    pytest.skip("this installation has no native kernels", allow_module_level=True)

from minisgl.kernel import native_attention, native_ops
from minisgl.kernel.native_attention import KV_KINDS, KVTensors, snapshot
from minisgl.kernel.program import Program, Recorder
from minisgl.kvcache import create_kvcache_pool
from minisgl.models import ModelConfig, create_model, init_dummy_weights
from minisgl.quant import ExpertWeights, FloatWeight, StackedWeight
from minisgl.quant.packed import PackedWeight
from minisgl.utils import torch_dtype

NUM_LOCATIONS = 4096
MAX_LEN = 700
BASE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qk_norm": {"model_type": "qwen3"},
    "window": {"model_type": "mistral", "sliding_window": 20},
    "odd": {"hidden_size": 72, "intermediate_size": 100, "head_dim": 24},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "many experts": {  # that all work, more than one parallel region takes
        "model_type": "qwen3_moe",
        "num_experts": 70,
        "num_experts_per_tok": 70,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 1,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 64},
    "longrope": {
        "model_type": "phi3",
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1, 2, 3], "long_factor": [2, 4, 8]},
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture(autouse=True)
def restore_native_settings():
    isa, threads = native.isa(), native.num_threads()
    yield
    native.set_isa(isa)
    native.set_num_threads(threads)


def make_model(weights: str = "float32", **changes: Any) -> Any:
    """A random model; weights: a dtype, "q4" or "q8"."""
    dtype = getattr(torch, weights, torch.float32)
    with torch.device("meta"), torch_dtype(dtype):
        model = create_model(ModelConfig.from_hf({**BASE, **changes}))
    init_dummy_weights(model, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, owner, attribute in list(model.slots()):
        tensor = getattr(owner, attribute)
        if tensor.dim() == 1:
            tensor += torch.randn(tensor.shape, generator=generator).to(dtype) * 0.1
        elif weights in ("q4", "q8"):
            bits, is_mixed = int(weights[1]), "gate_up" in name
            if tensor.dim() == 2:
                packed: Any = pack(tensor, bits, is_mixed)
            else:  # every other expert of mixed formats
                packed = ExpertWeights(
                    [pack(each, bits, is_mixed and e % 2 == 0) for e, each in enumerate(tensor)]
                )
            setattr(owner, attribute, packed)
    return model


def pack(tensor: torch.Tensor, bits: int, is_mixed: bool) -> Any:
    """A packed matrix; its halves in different formats if it is mixed."""
    if not is_mixed:
        return PackedWeight.from_float(tensor, bits)
    halves = zip(tensor.chunk(2), (bits, 12 - bits))
    return StackedWeight([PackedWeight.from_float(half, n) for half, n in halves])


def make_pool(model: Any, page_size: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    cfg = model.config
    return create_kvcache_pool(
        num_kv_heads=cfg.num_kv_heads, num_layers=cfg.num_layers, head_dim=cfg.head_dim,
        num_pages=NUM_LOCATIONS // page_size, page_size=page_size, dtype=dtype, device="cpu",
    )  # fmt: skip


def record(model: Any, pool: Any) -> Program:
    recorder = Recorder(model.config.vocab_size, pool, MAX_LEN)
    model.record(recorder)
    return recorder.finish()


class Eager:
    """A recorder that computes at once what it is told."""

    def __init__(
        self, pool: Any, ids: Any, positions: Any, out_loc: Any, requests: Any, wanted: Any
    ):
        self.num_positions = MAX_LEN
        self._pool, self._ids, self._positions = pool, ids, positions
        self._out_loc, self._requests, self._wanted = out_loc, requests, wanted
        self.result = torch.empty(0)

    def embed(self, weight: Any, scale: float) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return weight[self._ids.long()].float() * scale
        return native.rows(weight, self._ids) * scale

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return native_ops.rmsnorm(x, weight.float(), eps)

    def add_rms_norm(self, x: Any, residual: Any, weight: torch.Tensor, eps: float) -> None:
        native_ops.fused_add_rmsnorm(x, residual, weight.float(), eps)

    def gate_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return native_ops.gate_and_mul(x, activation)

    def gated_mlp(self, x: torch.Tensor, gate_up: list[Any], activation: str, down: Any) -> None:
        return None  # in three steps

    def experts(
        self, x: torch.Tensor, gating: torch.Tensor, gate_up: list[Any], down: list[Any],
        top_k: int, renormalize: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Token by token, expert by expert."""
        sums = []
        for row, *chosen in zip(x.split(1), *native_ops.route(gating, top_k, renormalize)):
            total = torch.empty(0)
            for weight, expert in zip(*(values.tolist() for values in chosen)):
                hidden = native_ops.gate_and_mul(self.linear(row, gate_up[expert]))
                part = self.linear(hidden, down[expert]) * weight
                total = total + part if len(total) else part
            sums.append(total)
        return torch.cat(sums)

    def linear(self, x: torch.Tensor, parts: list[Any], bias: Any = None) -> torch.Tensor:
        out = [
            native.matmul_float(part, x)
            if isinstance(part, torch.Tensor)
            else native.matmul(part, x)
            for part in parts
        ]
        joined = torch.cat(out, -1)
        if bias is not None:
            native_ops.add_bias(joined, bias.float())
        return joined

    def attention(
        self, qkv: Any, layer: int, num_q: int, num_kv: int, tables: Any, window: Any, norms: Any,
        scale: Any,
    ) -> torch.Tensor:  # fmt: skip
        kv = KVTensors.of_layer(self._pool, layer)
        q_norm, k_norm, eps = norms or (None, None, 1e-6)
        if q_norm is not None:
            q_norm, k_norm = q_norm.float(), k_norm.float()
        q = native_attention.rope_and_store(
            qkv, num_q, kv, self._out_loc, *tables, positions=self._positions,
            q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        out = native_attention.attention(q, kv, self._requests, scale=scale, window=window)
        return out.reshape(len(qkv), -1)

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._wanted]

    def logits(self, x: torch.Tensor, parts: list[Any], bias: Any = None) -> None:
        self.result = self.linear(x, parts, bias)


def prompts(count: int, lengths: list[int] | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    lengths = lengths or [1 + (5 * i + 3) % 41 for i in range(count)]
    return [torch.randint(0, 260, (n,), generator=generator, dtype=torch.int32) for n in lengths]


def make_table(num_rows: int, page_size: int) -> torch.Tensor:
    """Rows of MAX_LEN locations on scattered pages, all different."""
    pages_per_row = -(-MAX_LEN // page_size)
    pages = torch.randperm(NUM_LOCATIONS // page_size, generator=torch.Generator().manual_seed(3))[
        : num_rows * pages_per_row
    ].view(num_rows, -1, 1)
    locations = (pages * page_size + torch.arange(page_size)).reshape(num_rows, -1)
    return locations[:, :MAX_LEN].to(torch.int32).contiguous()


Step = tuple[int, int, int]  # request, first token, end


def inputs(table: torch.Tensor, tokens: list[torch.Tensor], steps: list[Step]) -> tuple[Any, ...]:
    """What a run takes for these pieces of requests."""
    ids = torch.cat([tokens[r][begin:end] for r, begin, end in steps])
    positions = torch.cat([torch.arange(begin, end, dtype=torch.int32) for _, begin, end in steps])
    out_loc = torch.cat([table[r, begin:end] for r, begin, end in steps])
    requests = snapshot(
        table, [r for r, _, _ in steps], [end - begin for _, begin, end in steps],
        [end for _, _, end in steps], NUM_LOCATIONS,
    )  # fmt: skip
    wanted = torch.tensor([end - begin for _, begin, end in steps]).cumsum(0) - 1
    return ids, positions, out_loc, requests, wanted


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16", "q4", "q8"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_program_equals_its_eager_twin_to_the_bit(kind: str, weights: str) -> None:
    model = make_model(weights, **MODELS[kind])
    table, tokens = make_table(5, 1), prompts(5)
    program, twin_pool = record(model, make_pool(model)), make_pool(model)
    prefill = [(r, 0, len(tokens[r]) - 1) for r in range(5) if len(tokens[r]) > 1]
    for steps in (prefill, [(r, len(tokens[r]) - 1, len(tokens[r])) for r in range(5)]):
        given = inputs(table, tokens, steps)
        actual = program.run(*given)
        twin = Eager(twin_pool, *given)
        model.record(twin)
        assert torch.equal(actual, twin.result)
        assert actual.isfinite().all() and actual.std() > 0


@pytest.mark.parametrize("kv", KV_KINDS)
def test_kv_may_be_stored_in_any_type(kv: torch.dtype) -> None:
    model = make_model()
    table, tokens = make_table(2, 1), prompts(2, [30, 9])
    given = inputs(table, tokens, [(0, 0, 30), (1, 0, 9)])
    twin = Eager(make_pool(model, dtype=kv), *given)
    model.record(twin)
    assert torch.equal(record(model, make_pool(model, dtype=kv)).run(*given), twin.result)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", ["float32", "q4"])
@pytest.mark.parametrize("kind", ["plain", "experts"])
def test_a_prompt_gives_the_same_bits_in_any_batch(
    kind: str, weights: str, threads: int, page_size: int
) -> None:
    native.set_num_threads(threads)
    model = make_model(weights, **MODELS[kind])
    tokens = [prompt[:100] for prompt in prompts(32)]
    lengths = [len(prompt) for prompt in tokens]

    def last_logits(chunk: int, together: bool) -> torch.Tensor:
        """Of every prompt: prefilled in chunks but for the last token, which is decoded."""
        program = record(model, make_pool(model, page_size))
        found = torch.empty(32, 260)
        for group in [range(32)] if together else [[r] for r in range(0, 32, 5)]:
            table = make_small_table(page_size)
            for begin in range(0, max(lengths), chunk):
                steps = [
                    (r, begin, min(begin + chunk, lengths[r] - 1))
                    for r in group
                    if begin < lengths[r] - 1
                ]
                if steps:
                    program.run(*inputs(table, tokens, steps))
            decode = [(r, lengths[r] - 1, lengths[r]) for r in group]
            found[list(group)] = program.run(*inputs(table, tokens, decode))
        return found

    whole = last_logits(1000, True)
    assert torch.equal(last_logits(7, True), whole)
    alone = last_logits(1000, False)
    assert torch.equal(alone[::5], whole[::5])


def make_small_table(page_size: int) -> torch.Tensor:
    """32 rows of 112 locations."""
    pages = torch.randperm(NUM_LOCATIONS // page_size, generator=torch.Generator().manual_seed(3))
    pages = pages[: 32 * 112 // page_size].view(32, -1, 1)
    return (pages * page_size + torch.arange(page_size)).reshape(32, -1).to(torch.int32)


def test_tiles_cut_long_batches_without_a_trace() -> None:
    model = make_model("q4")
    table, tokens = make_table(5, 1), prompts(3, [600, 3, 690])
    steps = [(0, 0, 600), (1, 0, 3), (2, 0, 690)]
    ids, positions, out_loc, requests, _ = inputs(table, tokens, steps)
    every = torch.arange(len(ids))
    together = record(model, make_pool(model)).run(ids, positions, out_loc, requests, every)
    start = 0
    for step in steps:
        program = record(model, make_pool(model))
        for begin in range(0, step[2], 100):
            end = min(begin + 100, step[2])
            given = inputs(table, tokens, [(step[0], begin, end)])
            logits = program.run(*given[:4], torch.arange(end - begin))
            assert torch.equal(logits, together[start + begin : start + end])
        start += step[2]


@pytest.mark.parametrize("kind", ["qk_norm", "gemma3", "experts"])
def test_every_instruction_set_gives_the_same_bits(kind: str) -> None:
    model = make_model("q4", **MODELS[kind])
    given = inputs(make_table(2, 1), prompts(2, [40, 3]), [(0, 0, 40), (1, 0, 3)])
    found = []
    for isa in native.available_isas():
        native.set_isa(isa)
        found.append(record(model, make_pool(model)).run(*given))
    assert all(torch.equal(one, found[0]) for one in found)


def test_wanted_rows_may_be_none_all_or_repeated_and_out_is_used() -> None:
    model = make_model()
    given = inputs(make_table(1, 1), prompts(1, [20]), [(0, 0, 20)])[:4]
    program = record(model, make_pool(model))
    every = program.run(*given, torch.arange(20))
    assert program.run(*given, torch.empty(0, dtype=torch.int64)).shape == (0, 260)
    out = torch.zeros(4, 300)[:, :260]
    assert program.run(*given, torch.tensor([3, 3, 7, 19]), out) is out
    assert torch.equal(out, every[[3, 3, 7, 19]])
    many = program.run(*given, torch.arange(20).repeat_interleave(60))
    assert torch.equal(many, every.repeat_interleave(60, 0))


def test_an_empty_batch_gives_no_logits() -> None:
    model = make_model()
    none = torch.empty(0, dtype=torch.int32)
    requests = snapshot(make_table(1, 1), [], [], [], NUM_LOCATIONS)
    assert record(model, make_pool(model)).run(none, none, none, requests, none).shape == (0, 260)


def test_the_program_keeps_its_weights_alive() -> None:
    model = make_model("q4")
    given = inputs(make_table(1, 1), prompts(1, [9]), [(0, 0, 9)])
    program = record(model, make_pool(model))
    before = program.run(*given).clone()
    for _, owner, attribute in list(model.slots()):
        setattr(owner, attribute, torch.empty(0))
    del model
    junk = [torch.full((64, 64), float("nan")) for _ in range(100)]
    assert torch.equal(program.run(*given), before)
    del junk


def test_a_float32_weight_written_in_place_takes_effect() -> None:
    model = make_model()
    given = inputs(make_table(1, 1), prompts(1, [9]), [(0, 0, 9)])
    program = record(model, make_pool(model))
    before = program.run(*given).clone()
    model.lm_head.weight.mul_(2)
    assert torch.equal(program.run(*given), 2 * before)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ids": [260]}, IndexError), ({"ids": [-1]}, IndexError),
        ({"positions": [MAX_LEN]}, IndexError), ({"positions": [-1]}, IndexError),
        ({"out_loc": [NUM_LOCATIONS]}, IndexError), ({"out_loc": [-1]}, IndexError),
        ({"wanted": [9]}, IndexError), ({"wanted": [-1]}, IndexError),
        ({"wanted": [3, 2]}, ValueError), ({"ids": [1] * 10}, ValueError),
        ({"positions": [1] * 8}, ValueError), ({"ids": [0.5] * 9}, TypeError),
        ({"out": torch.empty(1, 259)}, ValueError),
        ({"out": torch.empty(1, 260).half()}, TypeError),
        ({"out": torch.empty(1, 520)[:, ::2]}, ValueError),
    ],
)  # fmt: skip
def test_wrong_inputs_raise_and_write_nothing(change: dict[str, Any], error: Any) -> None:
    model = make_model()
    pool = make_pool(model)
    program = record(model, pool)
    names = ("ids", "positions", "out_loc", "requests", "wanted")
    given = dict(zip(names, inputs(make_table(1, 1), prompts(1, [9]), [(0, 0, 9)])))
    for name, value in change.items():
        if isinstance(value, list) and name != "wanted" and len(value) == 1:
            given[name][4] = value[0]
        else:
            given[name] = torch.tensor(value) if isinstance(value, list) else value
    out = given.pop("out", None)
    with pytest.raises(error):
        program.run(*given.values(), out)
    assert not pool._kv_buffer.any()


@pytest.mark.parametrize("how", ["int64", "uint8", "apart", "backwards"])
def test_arrays_of_other_integers_are_taken_for_what_they_say(how: str) -> None:
    model = make_model()
    program = record(model, make_pool(model))
    ids, positions, *rest = inputs(make_table(1, 1), prompts(1, [9]), [(0, 0, 9)])
    expected = program.run(ids, positions, *rest).clone()

    def other(ints: torch.Tensor) -> np.ndarray:
        values = ints.numpy()
        if how == "apart":
            return np.repeat(values, 2)[::2]
        return values[::-1].copy()[::-1] if how == "backwards" else values.astype(how)

    if how == "backwards":  # torch has no negative strides
        with pytest.raises(ValueError, match="negative"):
            program.run(other(ids), positions, *rest)
        return
    positions = other(positions)
    ids = np.minimum(other(ids), 255) if how == "uint8" else other(ids)
    if how == "uint8":
        expected = program.run(torch.from_numpy(ids.astype(np.int32)), positions, *rest).clone()
    assert torch.equal(program.run(ids, positions, *rest), expected)


def test_lengths_that_do_not_fit_raise() -> None:
    model = make_model()
    program = record(model, make_pool(model))
    given = inputs(make_table(1, 1), prompts(1, [9]), [(0, 0, 9)])
    for field, value in (("kv_len", 8), ("kv_len", 10), ("query_start", 8)):
        requests = snapshot(make_table(1, 1), [0], [9], [9], NUM_LOCATIONS)
        getattr(requests, field)[-1] = value
        with pytest.raises(ValueError):
            program.run(*given[:3], requests, given[4])
    requests = snapshot(make_table(1, 1), [0], [9], [9], NUM_LOCATIONS)
    requests.rows[0, 3] = NUM_LOCATIONS
    with pytest.raises(IndexError):
        program.run(*given[:3], requests, given[4])


def as_parts(matrix: torch.Tensor, how: str) -> Any:
    """A matrix as an expert may have it: floats of some type, packed, or one over the other."""
    if how in ("float32", "bfloat16"):
        return FloatWeight(matrix.to(getattr(torch, how)))
    if how == "both":
        return StackedWeight([as_parts(half, each) for half, each in
                              zip(matrix.chunk(2), ("q8", "bfloat16"))])  # fmt: skip
    return PackedWeight.from_float(matrix, int(how[1]))


def test_a_product_may_have_many_parts_of_any_kind() -> None:
    model = make_model()
    attention = model.model.layers.op_list[1].self_attn
    rows, kinds = attention.o_proj.weight.split(4), ("q8", "q4", "q8", "float32")
    parts = [as_parts(part, kinds[i % len(kinds)]) for i, part in enumerate(rows)]
    assert len(parts) == 16  # more packed ones than go into one parallel region
    attention.o_proj.weight = StackedWeight(parts)
    given = inputs(make_table(1, 1), prompts(1, [9]), [(0, 0, 9)])
    twin = Eager(make_pool(model), *given)
    model.record(twin)
    assert torch.equal(record(model, make_pool(model)).run(*given), twin.result)


@pytest.mark.parametrize("inner", [32, 28])
@pytest.mark.parametrize(("gate_up", "down"), [
    ("q4", "bfloat16"), ("float32", "q8"), ("both", "q4"), ("q8", "both"), ("q4", "q4"),
])  # fmt: skip
def test_experts_may_have_floats_and_packed_matrices(gate_up: str, down: str, inner: int) -> None:
    model = make_model(**{**MODELS["experts"], "moe_intermediate_size": inner})
    experts = model.model.layers.op_list[1].mlp.experts
    for name, how in (("gate_up_proj", gate_up), ("down_proj", down)):
        kinds = (how, how, "float32") if inner == 28 else (how,)  # an expert of its own kind
        matrices = enumerate(getattr(experts, name))
        parts = [as_parts(matrix, kinds[e % len(kinds)]) for e, matrix in matrices]
        setattr(experts, name, ExpertWeights(parts))
    table, tokens = make_table(5, 1), prompts(5, [40, 9, 1, 22, 30])
    steps = [(r, 0, len(tokens[r])) for r in range(5)]
    given = inputs(table, tokens, steps)
    together = record(model, make_pool(model)).run(*given)
    twin = Eager(make_pool(model), *given)
    model.record(twin)
    assert torch.equal(together, twin.result)
    for r in range(5):
        alone = record(model, make_pool(model))
        for begin in range(0, len(tokens[r]), 7):
            step = (r, begin, min(begin + 7, len(tokens[r])))
            found = alone.run(*inputs(table, tokens, [step]))
        assert torch.equal(found[0], together[r])
