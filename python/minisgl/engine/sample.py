"""Choosing tokens: argmax for greedy rows, a filtered draw for the others.

A draw inverts the distribution function at one uniform number per row: from (seed, position) for a
seeded request, so that it is the same in any batch and after preemption, else from a generator that
all ranks share. A row's token depends on that row alone. A row without usable logits gets -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch

from minisgl.core import Batch, SamplingParams
from minisgl.kernel import native, native_ops

from .logits import LogitsProcessors, MaskState, RowState
from .logprobs import LogprobPlan

NO_TOKEN = -1
TOP_CANDIDATES = 1024  # a nucleus is looked for among these before the vocabulary is sorted
MIN_TEMPERATURE = 1e-5
_MASK64 = (1 << 64) - 1

Tokens = torch.Tensor | np.ndarray[Any, Any]
Draw = native_ops.Draw


@dataclass
class BatchSamplingArgs:
    """What `Sampler.sample` needs besides the logits; of all lists an entry per row of the batch.

    temperatures: None if every row is greedy. filters: (temperature, top_k, top_p, min_p), top_k 1
    for a greedy row. seeds: None for a row that draws afresh; positions: absolute position of the
    token to be chosen. logprobs: what the batch is to be measured on.
    """

    temperatures: torch.Tensor | None
    filters: list[tuple[float, int, float, float]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    processors: list[tuple[int, RowState | MaskState]] = field(default_factory=list)
    logprobs: LogprobPlan | None = None


class Sampler:
    """Chooses one token per request.

    generator_seed: where unseeded draws start; equal on all ranks.
    """

    def __init__(
        self, device: torch.device, vocab_size: int, generator_seed: int | None = None
    ) -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self._random = Random(generator_seed)
        self._is_native = self.device.type == "cpu" and native.available()
        self._last_rows: native_ops.LogitRows | None = None
        self.processors = LogitsProcessors(vocab_size, self.device)

    def prepare(self, batch: Batch) -> BatchSamplingArgs:
        """The arguments for `batch.reqs`; nothing else of the batch is read."""
        params = [req.sampling_params for req in batch.reqs]
        processors = self.processors.rows_of(batch.reqs)
        if all(p.is_greedy for p in params):
            return BatchSamplingArgs(temperatures=None, processors=processors)
        filters = [self._filter(p) for p in params]
        return BatchSamplingArgs(
            temperatures=torch.tensor([temperature for temperature, *_ in filters]),
            filters=filters,
            seeds=[p.seed for p in params],
            positions=[req.device_len for req in batch.reqs],
            processors=processors,
        )

    def _filter(self, params: SamplingParams) -> tuple[float, int, float, float]:
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        is_argmax = params.is_greedy or params.temperature <= 0.0
        top_k = 1 if is_argmax else top_k
        return float(params.temperature), top_k, float(params.top_p), float(params.min_p)

    def sample(self, logits: torch.Tensor, args: BatchSamplingArgs) -> Tokens:
        """Tokens int32 `(rows,)` for float32 logits `(rows, vocab)`; -1 for a row without use.

        An array where the native kernels chose them, else a tensor.
        """
        if args.processors:
            logits = torch.from_numpy(logits.numpy().copy()) if self._is_native else logits.clone()
            for row, state in args.processors:
                state.apply(logits[row])
        draws: list[Draw] = []
        if args.filters:
            uniform = self._uniform(args)
            draws = [(*limits, number) for limits, number in zip(args.filters, uniform)]
        if self._is_native:
            tokens: Tokens = np.array(self._rows(logits).choose_tokens(draws), dtype=np.int32)
        else:
            tokens = choose_tokens(logits, draws)
        for row, state in args.processors:
            state.update(torch.as_tensor(tokens[row : row + 1]))
        return tokens

    def _rows(self, logits: torch.Tensor) -> native_ops.LogitRows:
        """A program gives the same tensor step after step, which is checked once.

        One that has to be copied to be contiguous is copied each time.
        """
        if self._last_rows is None or self._last_rows.source is not logits:
            self._last_rows = native_ops.LogitRows(logits.contiguous())
        return self._last_rows

    def _uniform(self, args: BatchSamplingArgs) -> list[float]:
        """One number in [0, 1) for each row of a batch that is not greedy throughout."""
        return [
            self._random.random() if seed is None else seeded_uniform(seed, position)
            for seed, position in zip(args.seeds, args.positions)
        ]


def seeded_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else (two rounds of SplitMix64, Steele 2014)."""
    return (_mix64(_mix64(seed & _MASK64) + position) >> 11) * 2.0**-53


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The twin of `native_ops.choose_tokens` for any device: tokens int32 `(rows,)`."""
    best, tokens = logits.max(dim=-1)
    drawn = [i for i, (temperature, top_k, *_) in enumerate(draws) if temperature > 0 and top_k > 1]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        limits = [draws[i] for i in drawn]
        found = _draw(logits[rows], torch.tensor(limits, dtype=torch.float64).to(logits.device))
        tokens = tokens.index_copy(0, rows, found)
    return torch.where(torch.isfinite(best), tokens, NO_TOKEN).to(torch.int32)


def _draw(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Tokens int64 for rows that are not greedy; draws: float64 `(rows, 5)`."""
    temperature, top_k, top_p, min_p, uniform = draws.unbind(1)
    scaled = logits.float() / temperature.float().clamp(min=MIN_TEMPERATURE).unsqueeze(1)
    probs = torch.softmax(torch.nan_to_num(scaled, nan=float("-inf")), dim=-1)
    num_candidates = min(TOP_CANDIDATES, probs.shape[1])
    values, ids = probs.topk(num_candidates, dim=-1)
    mass = values.double().sum(dim=-1)
    is_whole = (top_k >= probs.shape[1]) & (top_p >= 1.0) & (min_p <= 0.0)
    ends_inside = torch.where(
        is_whole, mass > uniform, (mass >= top_p) | (values[:, -1] < min_p * values[:, 0])
    )
    enough = (ends_inside & (top_k >= probs.shape[1])) | (top_k <= num_candidates)
    tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    if enough.any():
        tokens[enough] = _draw_sorted(values[enough], ids[enough], draws[enough], probs.shape[1])
    rest = (~enough).nonzero().flatten()
    if len(rest):
        values, ids = probs[rest].sort(dim=-1, descending=True, stable=True)
        tokens[rest] = _draw_sorted(values, ids, draws[rest], probs.shape[1])
    return tokens


def _draw_sorted(
    values: torch.Tensor, ids: torch.Tensor, draws: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """The draw from candidates sorted by falling probability `(rows, n)`.

    Top-k, then top-p of what is left, then min-p, then the first whose running sum passes `uniform`
    of all.
    """
    _, top_k, top_p, min_p, uniform = draws.unsqueeze(2).unbind(1)
    rank = torch.arange(values.shape[1], device=values.device)
    weights = torch.where(rank < top_k, values, 0.0).double()
    before = weights.cumsum(dim=-1) - weights
    mass = torch.where(top_k < vocab_size, weights.sum(dim=-1, keepdim=True), 1.0)
    weights = torch.where((before < top_p * mass) | (top_p >= 1.0), weights, 0.0)
    weights = torch.where(weights >= min_p * weights[:, :1], weights, 0.0)
    is_whole = (top_k >= vocab_size) & (top_p >= 1.0) & (min_p <= 0.0)
    sums = weights.cumsum(dim=-1)
    target = uniform * torch.where(is_whole, 1.0, sums[:, -1:])
    index = torch.searchsorted(sums, target, right=True)
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(dim=1, keepdim=True)
    return ids.gather(1, torch.minimum(index, last)).flatten()
