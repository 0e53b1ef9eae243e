"""`Sampler`: greedy rows, filtered draws, seeds, bad logits; each against an obvious reference."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.core import Batch, Req, SamplingParams
from minisgl.engine import BatchSamplingArgs, Sampler
from minisgl.engine.sample import choose_tokens
from minisgl.kernel import native, native_ops
from minisgl.scheduler import ChunkedReq

VOCAB_SIZE = 40
CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")


def request(params: SamplingParams, uid: int = 0, num_ids: int = 5) -> Req:
    ids = torch.arange(num_ids, dtype=torch.int32)
    return Req(ids, uid, 0, 100, uid, params)


def draw(
    params: list[SamplingParams], logits: torch.Tensor, sampler: Sampler | None = None
) -> list[int]:
    """The tokens of one batch with one row for each of `params`."""
    sampler = sampler or Sampler(CPU, logits.shape[-1])
    batch = Batch([request(p, uid) for uid, p in enumerate(params)], "decode")
    rows = logits.expand(len(params), -1).clone() if logits.dim() == 1 else logits
    tokens = torch.as_tensor(sampler.sample(rows, sampler.prepare(batch)))
    assert tokens.dtype == torch.int32 and tokens.shape == (len(params),)
    return tokens.tolist()


def random_logits(seed: int = 0, rows: int | None = None, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (VOCAB_SIZE,) if rows is None else (rows, VOCAB_SIZE)
    return torch.randn(shape, generator=generator) * scale


# --- greedy ---


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0, top_p=0.9), False),
        (SamplingParams(temperature=0.7, top_k=1), True),
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(temperature=0, top_k=5), True),
    ],
)
def test_which_parameters_are_greedy(params: SamplingParams, is_greedy: bool) -> None:
    assert params.is_greedy is is_greedy


def test_an_all_greedy_batch_has_no_temperatures() -> None:
    sampler = Sampler(CPU, VOCAB_SIZE)
    params = [SamplingParams(temperature=0.7, top_k=1), SamplingParams()]
    batch = Batch([request(p) for p in params], "decode")
    args = sampler.prepare(batch)
    assert isinstance(args, BatchSamplingArgs) and args.temperatures is None
    logits = random_logits(rows=2)
    assert sampler.sample(logits, args).tolist() == logits.argmax(-1).tolist()


def test_prepare_needs_only_the_requests() -> None:
    reqs = [request(SamplingParams(temperature=0.5)), request(SamplingParams())]
    args = Sampler(CPU, VOCAB_SIZE).prepare(SimpleNamespace(reqs=reqs))  # type: ignore[arg-type]
    assert args.temperatures is not None and args.temperatures.tolist() == [0.5, 0.0]


def test_greedy_rows_are_an_argmax_also_in_a_mixed_batch() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=0, top_p=0.5),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=1),
    ]
    for seed in range(20):
        logits = random_logits(seed, rows=5, scale=0.5)
        tokens = draw(params, logits)
        best = logits.argmax(-1).tolist()
        assert [tokens[i] for i in (0, 2, 3, 4)] == [best[i] for i in (0, 2, 3, 4)]


def test_the_callers_parameters_are_never_changed() -> None:
    params = SamplingParams(
        temperature=0.0, top_k=10**9, top_p=0.3, logit_bias={1: 5.0}, frequency_penalty=0.5
    )
    before = copy.deepcopy(params)
    draw([params, SamplingParams(temperature=1.0)], random_logits())
    assert params == before


@pytest.mark.parametrize(
    "width", [VOCAB_SIZE, VOCAB_SIZE + 3], ids=["contiguous", "part of wider rows"]
)
def test_a_tensor_that_is_written_again_is_read_again(width: int) -> None:
    sampler, args = Sampler(CPU, VOCAB_SIZE), BatchSamplingArgs(temperatures=None)
    logits = torch.zeros(3, width)[:, :VOCAB_SIZE]
    for token in (1, 4, 2):
        logits.zero_()[:, token] = 1
        assert sampler.sample(logits, args).tolist() == [token] * 3


def test_the_logits_of_the_caller_are_not_changed() -> None:
    sampler = Sampler(CPU, VOCAB_SIZE)
    batch = Batch([request(SamplingParams(temperature=0.7, logit_bias={3: 50.0}))], "decode")
    logits = random_logits(rows=1)
    before = logits.clone()
    assert sampler.sample(logits, sampler.prepare(batch)).tolist() == [3]
    assert torch.equal(logits, before)


# --- distributions ---


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution by the book: temperature, top-k, top-p of what is left, min-p."""
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    order = sorted(range(len(probs)), key=lambda i: -float(probs[i]))
    if params.top_k > 0:
        order = order[: params.top_k]
    mass, kept = sum(float(probs[i]) for i in order), []
    before = 0.0
    for i in order:
        if before < params.top_p * mass:
            kept.append(i)
        before += float(probs[i])
    kept = [i for i in kept if probs[i] >= params.min_p * probs[order[0]]]
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


def measured(logits: torch.Tensor, params: SamplingParams, num_draws: int) -> torch.Tensor:
    sampler = Sampler(CPU, len(logits), generator_seed=1234)
    tokens = draw([params] * num_draws, logits, sampler)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)).double() / num_draws


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 0.05},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 10_000},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    logits, sampling_params = random_logits(seed=3, scale=1.5), SamplingParams(**params)
    expected = reference(logits, sampling_params)
    counted = measured(logits, sampling_params, 4000)
    assert (counted[expected == 0] == 0).all()
    sigma = (expected * (1 - expected) / 4000).sqrt()
    assert ((counted - expected).abs() <= 4.5 * sigma + 1e-9).all()


def test_with_top_k_2_over_falling_logits_the_first_is_drawn_with_probability_0_731() -> None:
    logits = torch.arange(5.0, -5.0, -1.0)
    counted = measured(logits, SamplingParams(temperature=1.0, top_k=2), 20_000)
    assert counted[:2].sum() == 1.0
    assert abs(float(counted[0]) - 0.731) < 0.015


def test_a_nucleus_wider_than_the_first_candidates_is_drawn_from_in_full() -> None:
    logits = torch.linspace(0.0, 0.1, 5000)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    allowed = reference(logits, params) > 0
    tokens = torch.tensor(draw([params] * 400, logits, Sampler(CPU, 5000, generator_seed=5)))
    assert allowed[tokens].all() and int(tokens.min()) < 1500
    assert len(tokens.unique()) > 350


def test_rows_of_one_batch_are_filtered_each_by_its_own_parameters() -> None:
    logits = random_logits(seed=9, scale=1.0)
    kinds = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=1.0, min_p=0.5),
        SamplingParams(temperature=1.0),
    ]
    tokens = draw(kinds * 300, logits)
    for i, params in enumerate(kinds):
        seen = set(tokens[i::4])
        allowed = set((reference(logits, params) > 0).nonzero().flatten().tolist())
        assert seen <= allowed and len(seen) >= min(3, len(allowed))


# --- the twins ---

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1e-7},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.01},
    {"top_p": 1e-6},
]


@needs_native
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_the_native_draw_is_that_of_torch(fields: dict[str, Any], temperature: float) -> None:
    logits = torch.randn(60, 5000, generator=torch.Generator().manual_seed(6)) * 2.5
    limits = {"top_k": 5000, "top_p": 1.0, "min_p": 0.0, **fields}
    draws = [(temperature, *limits.values(), (i * 0.618034) % 1.0) for i in range(60)]
    expected = choose_tokens(logits, draws).tolist()
    found = native_ops.choose_tokens(logits, draws)
    # A draw that falls on the border of two tokens may land on either side: sums are rounded.
    assert sum(a != b for a, b in zip(found, expected)) <= 1
    assert len(set(found)) > 20 or limits["top_p"] < 0.1 or temperature < 1.0


@needs_native
def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(8))
    draws = [(1.0, 5000, 0.95 if i % 2 else 1.0, 0.0, i / 40) for i in range(40)]
    alone = [native_ops.choose_tokens(logits[i : i + 1], draws[i : i + 1])[0] for i in range(40)]
    assert native_ops.choose_tokens(logits, draws) == alone
    assert native_ops.choose_tokens(logits) == logits.argmax(-1).tolist()


@needs_native
def test_the_largest_draw_never_takes_a_token_without_mass() -> None:
    logits = torch.full((1, 300), float("-inf"))
    logits[0, 5], logits[0, 9] = 1.0, 0.5
    for top_k in (2, 7, 300):
        draws = [(1.0, top_k, 1.0, 0.0, 1.0 - 2.0**-53)]
        assert native_ops.choose_tokens(logits, draws) == [9]
        assert choose_tokens(logits, draws).tolist() == [9]


@needs_native
def test_a_draw_for_each_row_or_none() -> None:
    with pytest.raises(ValueError, match="a draw for each row"):
        native_ops.choose_tokens(torch.zeros(3, 8), [(1.0, 8, 1.0, 0.0, 0.5)])
    assert native_ops.choose_tokens(torch.zeros(0, 8)) == []


@needs_native
def test_without_the_native_kernels_the_tokens_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = random_logits(seed=11, rows=6)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1, top_p=1, min_p=0, top_k=3, seed=4),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5),
        SamplingParams(temperature=2.0, min_p=0.2, seed=6, presence_penalty=1.0),
        SamplingParams(temperature=2.0, seed=7),
    ]
    found = draw(params, logits)
    monkeypatch.setattr(native, "available", lambda: False)
    assert draw(params, logits) == found


# --- seeds ---


def test_unseeded_draws_differ_from_call_to_call() -> None:
    sampler = Sampler(CPU, VOCAB_SIZE)
    params, logits = [SamplingParams(temperature=3.0)] * 16, torch.zeros(VOCAB_SIZE)
    draws = [draw(params, logits, sampler) for _ in range(3)]
    assert draws[0] != draws[1] != draws[2]
    assert len(set(draws[0])) > 4  # the rows of one batch differ too


def test_two_samplers_do_not_draw_the_same() -> None:
    params, logits = [SamplingParams(temperature=3.0)] * 16, torch.zeros(VOCAB_SIZE)
    assert draw(params, logits) != draw(params, logits)


def test_a_seeded_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = random_logits(seed=4, scale=0.3)
    for extra in ({}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1}):
        params = SamplingParams(temperature=1.0, seed=42, **extra)
        (alone,) = draw([params], logits)
        others = [SamplingParams(), SamplingParams(temperature=2.0), SamplingParams(top_p=0.5)]
        for place in range(4):
            row = [*others[:place], params, *others[place:]]
            assert draw(row, logits)[place] == alone


def test_a_seeded_row_draws_by_seed_and_position() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    sampler = Sampler(CPU, VOCAB_SIZE)

    def at(seed: int, position: int) -> int:
        req = request(SamplingParams(temperature=1.0, seed=seed), num_ids=position)
        (token,) = sampler.sample(logits, sampler.prepare(Batch([req], "decode"))).tolist()
        return token

    grid = {(seed, pos): at(seed, pos) for seed in (0, 1, -7, 2**63 - 1) for pos in range(1, 30)}
    assert grid == {key: at(*key) for key in grid}
    for seed in (0, 1, -7, 2**63 - 1):
        assert len({grid[seed, position] for position in range(1, 30)}) > 10
    assert len({tuple(grid[s, p] for p in range(1, 30)) for s in (0, 1, -7, 2**63 - 1)}) == 4


def test_seeded_draws_follow_the_distribution() -> None:
    logits = torch.arange(5.0, -5.0, -1.0)
    params = [SamplingParams(temperature=1.0, top_k=2, seed=seed) for seed in range(8000)]
    share = sum(token == 0 for token in draw(params, logits)) / 8000
    assert abs(share - 0.731) < 0.02


# --- unusable logits ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_bad_logits_gives_minus_one_and_the_others_their_tokens(
    bad: float, temperature: float
) -> None:
    logits = random_logits(rows=3, scale=1.0)
    logits[1, 7] = bad
    params = [SamplingParams(temperature=temperature, seed=1)] * 3
    clean = random_logits(rows=3, scale=1.0)
    tokens, expected = draw(params, logits), draw(params, clean)
    assert tokens == [expected[0], -1, expected[2]]


def test_a_row_that_is_minus_infinity_throughout_gives_minus_one() -> None:
    logits = torch.full((2, VOCAB_SIZE), float("-inf"))
    logits[1, 4] = 0.0
    assert draw([SamplingParams(), SamplingParams(temperature=1.0)], logits) == [-1, 4]


def test_a_chunk_costs_no_logits_processing() -> None:
    ids = torch.arange(4, dtype=torch.int32)
    chunk = ChunkedReq(ids, 0, 0, 5, 0, SamplingParams(presence_penalty=1.0))
    assert Sampler(CPU, VOCAB_SIZE).prepare(Batch([chunk], "prefill")).processors == []


# --- penalties and bias ---


def penalised(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """The logits by the book, one token at a time."""
    result = logits.clone()
    for token in range(len(logits)):
        value = float(logits[token])
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        count = output.count(token)
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (count > 0)
        value += params.logit_bias.get(token, 0.0)
        result[token] = value
    return result


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.2},
        {"presence_penalty": -1.5},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"logit_bias": {0: 3.0, 39: -100.0, 5: 1.5}},
        {
            "frequency_penalty": 0.4,
            "presence_penalty": 0.9,
            "repetition_penalty": 1.3,
            "logit_bias": {2: 2.0},
        },
    ],
    ids=str,
)
def test_penalties_and_bias_agree_with_the_reference_token_by_token(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    sampler = Sampler(CPU, VOCAB_SIZE)
    prompt = [3, 3, 17, 30]
    req = Req(torch.tensor(prompt, dtype=torch.int32), 0, 0, 100, 0, params)
    neighbour = request(SamplingParams(), uid=1)
    output: list[int] = []
    for step in range(25):
        logits = random_logits(seed=step % 3, rows=2, scale=0.7)
        batch = Batch([neighbour, req], "decode")
        tokens = sampler.sample(logits, sampler.prepare(batch)).tolist()
        expected = penalised(logits[1], prompt, output, params)
        assert tokens == [int(logits[0].argmax()), int(expected.argmax())]
        output.append(tokens[1])
        req.complete_one()
        req.append_host(tokens[1])
    assert not torch.equal(expected, logits[1])


def test_a_request_that_comes_back_with_its_output_is_counted_right() -> None:
    params = SamplingParams(frequency_penalty=2.0)
    req = Req(torch.tensor([1, 2], dtype=torch.int32), 0, 0, 10, 0, params)
    for token in (5, 5, 6):
        req.complete_one()
        req.append_host(token)
    sampler, logits = Sampler(CPU, VOCAB_SIZE), random_logits(rows=1)
    (token,) = sampler.sample(logits, sampler.prepare(Batch([req], "decode"))).tolist()
    assert token == int(penalised(logits[0], [1, 2], [5, 5, 6], params).argmax())
