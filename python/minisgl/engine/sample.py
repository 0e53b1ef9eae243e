"""Choosing tokens: argmax for greedy rows, a filtered draw for the others.

A draw inverts the distribution function at one uniform number per row: from (seed, position) for a
seeded request, so that it is the same in any batch and after preemption, else from a generator that
all ranks share. A row's token depends on that row alone. A row without usable logits gets -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from minisgl.core import Batch

from .logits import LogitsProcessors, RowState

NO_TOKEN = -1
TOP_CANDIDATES = 1024  # a nucleus is looked for among these before the vocabulary is sorted
MIN_TEMPERATURE = 1e-5
_MASK64 = (1 << 64) - 1


@dataclass
class BatchSamplingArgs:
    """What `Sampler.sample` needs besides the logits; tensors are per row of the batch.

    temperatures: None if every row is greedy. seeds: None for a row that draws afresh; positions:
    absolute position of the token to be chosen.
    """

    temperatures: torch.Tensor | None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    seeds: list[int | None] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    processors: list[tuple[int, RowState]] = field(default_factory=list)


class Sampler:
    """Chooses one token per request.

    generator_seed: where unseeded draws start; equal on all ranks.
    """

    def __init__(
        self, device: torch.device, vocab_size: int, generator_seed: int | None = None
    ) -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self._generator = torch.Generator()
        if generator_seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(generator_seed)
        self._processors = LogitsProcessors(vocab_size, self.device)

    def prepare(self, batch: Batch) -> BatchSamplingArgs:
        """The arguments for `batch.reqs`; nothing else of the batch is read."""
        params = [req.sampling_params for req in batch.reqs]
        processors = self._processors.rows_of(batch.reqs)
        if all(p.is_greedy for p in params):
            return BatchSamplingArgs(temperatures=None, processors=processors)
        top_k = [p.top_k if 0 < p.top_k < self.vocab_size else self.vocab_size for p in params]
        return BatchSamplingArgs(
            temperatures=self._tensor([p.temperature for p in params]),
            top_k=self._tensor([1 if p.is_greedy else k for p, k in zip(params, top_k)]).long(),
            top_p=self._tensor([p.top_p for p in params]),
            min_p=self._tensor([p.min_p for p in params]),
            seeds=[p.seed for p in params],
            positions=[req.device_len for req in batch.reqs],
            processors=processors,
        )

    def sample(self, logits: torch.Tensor, args: BatchSamplingArgs) -> torch.Tensor:
        """Tokens int32 `(rows,)` for float32 logits `(rows, vocab)`; -1 for a row without use."""
        if args.processors:
            logits = logits.clone()
            for row, state in args.processors:
                state.apply(logits[row])
        best, tokens = logits.max(dim=-1)
        if args.temperatures is not None and args.top_k is not None:
            is_drawn = (args.temperatures > 0.0) & (args.top_k > 1)
            rows = is_drawn.nonzero().flatten()
            if len(rows):
                tokens = tokens.index_copy(0, rows, self._draw(logits[rows], rows, args))
        tokens = torch.where(torch.isfinite(best), tokens, NO_TOKEN).to(torch.int32)
        for row, state in args.processors:
            state.update(tokens[row : row + 1])
        return tokens

    def _draw(
        self, logits: torch.Tensor, rows: torch.Tensor, args: BatchSamplingArgs
    ) -> torch.Tensor:
        """Tokens int64 for the rows that are not greedy."""
        assert args.temperatures is not None and args.top_k is not None
        assert args.top_p is not None and args.min_p is not None
        scaled = logits.float() / args.temperatures[rows].clamp(min=MIN_TEMPERATURE).unsqueeze(1)
        scaled = torch.nan_to_num(scaled, nan=float("-inf"))
        probs = torch.softmax(scaled, dim=-1)
        uniform = self._uniform(rows.tolist(), args)
        top_k, top_p, min_p = args.top_k[rows], args.top_p[rows], args.min_p[rows]
        whole = (top_k >= self.vocab_size) & (top_p >= 1.0) & (min_p <= 0.0)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        if whole.any():
            tokens[whole] = _invert(probs[whole], uniform[whole])
        cut = (~whole).nonzero().flatten()
        if len(cut):
            tokens[cut] = _draw_filtered(
                probs[cut], uniform[cut], top_k[cut], top_p[cut], min_p[cut]
            )
        return tokens

    def _uniform(self, rows: list[int], args: BatchSamplingArgs) -> torch.Tensor:
        """One number in [0, 1) per row, float64."""
        drawn = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        for i, row in enumerate(rows):
            if (seed := args.seeds[row]) is not None:
                drawn[i] = seeded_uniform(seed, args.positions[row])
        return drawn.to(self.device)

    def _tensor(self, values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(self.device)


def seeded_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else (two rounds of SplitMix64, Steele 2014)."""
    return (_mix64(_mix64(seed & _MASK64) + position) >> 11) * 2.0**-53


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index `(rows,)` where the running sum of `weights` `(rows, n)` passes `uniform` of all."""
    sums = weights.double().cumsum(dim=-1)
    target = uniform.unsqueeze(1) * sums[:, -1:]
    index = torch.searchsorted(sums, target, right=True).flatten()
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(dim=1)
    return torch.minimum(index, last)


def _draw_filtered(
    probs: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Top-k, then top-p of what is left, then min-p, then the draw."""
    num_candidates = min(TOP_CANDIDATES, probs.shape[1])
    values, ids = probs.topk(num_candidates, dim=-1)
    ends_inside = (values.double().sum(dim=-1) >= top_p) | (values[:, -1] < min_p * values[:, 0])
    enough = (ends_inside & (top_k >= probs.shape[1])) | (top_k <= num_candidates)
    tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    if enough.any():
        tokens[enough] = _draw_sorted(
            values[enough],
            ids[enough],
            uniform[enough],
            top_k[enough],
            top_p[enough],
            min_p[enough],
        )
    rest = (~enough).nonzero().flatten()
    if len(rest):
        values, ids = probs[rest].sort(dim=-1, descending=True)
        tokens[rest] = _draw_sorted(
            values, ids, uniform[rest], top_k[rest], top_p[rest], min_p[rest]
        )
    return tokens


def _draw_sorted(
    values: torch.Tensor,
    ids: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The draw from candidates sorted by falling probability `(rows, n)`."""
    rank = torch.arange(values.shape[1], device=values.device)
    weights = torch.where(rank < top_k.unsqueeze(1), values, 0.0).double()
    before = weights.cumsum(dim=-1) - weights
    kept_mass = torch.where(
        top_k.unsqueeze(1) < values.shape[1], weights.sum(dim=-1, keepdim=True), 1.0
    )
    weights = torch.where(before < top_p.unsqueeze(1) * kept_mass, weights, 0.0)
    weights = torch.where(weights >= min_p.unsqueeze(1) * weights[:, :1], weights, 0.0)
    return ids.gather(1, _invert(weights, uniform).unsqueeze(1)).flatten()
