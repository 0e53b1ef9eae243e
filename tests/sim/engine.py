"""The simulated engine: a shadow KV of token ids in place of K and V.

A forward writes each new token and its salt into its slot, then reads every request's row back,
from the snapshot that `prepare` took, and demands that it spells exactly the request's own tokens.
Work happens at launch, in stream order; the host sees tokens only after `synchronize`. Violations
are collected, because the scheduler turns exceptions of an engine into errors of requests.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from minisgl.core import Batch, Req
from minisgl.params import SamplingParams
from minisgl.utils import align_ceil

from .oracle import mix, weighted

STAGES = ("pad", "prepare", "forward", "sample")
NEVER_WRITTEN = -7
POISON = -99
NOT_YET = -55


class Violation(AssertionError):
    """A property of the state machine does not hold. `history`: what led to it in `config`."""

    config: Any = None
    history: Any = None


class InjectedFault(RuntimeError):
    """A forward pass that was told to fail."""


@dataclass
class Script:
    """What the engine knows of a request beforehand.

    order: its place among the submits. tokens: the prompt and all that may follow. nan_after: so
    many tokens are sampled before the logits go bad, None for never; below 0 they go bad so many
    tokens before the prompt's end, which may be in a chunk. ends_after: so many tokens are sampled,
    the last of them the largest id, which no other is. computed: how far it is. known: tokens that
    were known when it was preempted. started: how many had started when it was put back for the
    n-th time.
    """

    order: int
    prompt_len: int
    tokens: np.ndarray
    salt_id: int
    nan_after: int | None = None
    ends_after: int | None = None
    computed: int | None = None
    known: int = 0
    num_preemptions: int = 0
    started: dict[int, int] = field(default_factory=dict)
    is_spoilt: bool = False

    @property
    def input_len(self) -> int:
        """What has to be computed before the next token is sampled."""
        return max(self.prompt_len, self.known)


@dataclass
class SimEvent:
    """Reveals the tokens of a step when it is waited for."""

    engine: SimEngine
    batch: Batch
    hidden: torch.Tensor
    visible: torch.Tensor

    def synchronize(self) -> None:
        self.visible.copy_(self.hidden)
        self.engine.in_flight = [event for event in self.engine.in_flight if event is not self]


@dataclass
class SimOutput:
    next_tokens_gpu: torch.Tensor
    next_tokens_cpu: torch.Tensor
    copy_done_event: SimEvent


@dataclass
class SimEngine:
    """Implements `EngineProtocol`; decode batches are padded to a multiple of `pad_decode_to`.

    budget: prompt tokens of a prefill batch; mixed_budget: of one with others that decode, 0 if
    there must be none. max_overtaken: how many may start before one that was submitted earlier.
    """

    num_pages: int
    page_size: int
    num_rows: int
    vocab_size: int
    budget: int
    max_len: int = 1 << 30
    pad_decode_to: int = 1
    mixed_budget: int = 0
    max_overtaken: int = 0
    scripts: dict[int, Script] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    in_flight: list[SimEvent] = field(default_factory=list)
    failing_uids: set[int] = field(default_factory=set)
    trace: list[Any] = field(default_factory=list)
    fails_at: str | None = None
    started: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self.max_seq_len = min(self.max_len, self.num_pages * self.page_size)
        self.dummy = self.num_pages * self.page_size
        width = align_ceil(self.max_seq_len, self.page_size)
        self.page_table = torch.full((self.num_rows + 1, width), self.dummy, dtype=torch.int32)
        self.table = self.page_table.numpy()
        self.shadow = np.full(self.dummy + self.page_size, NEVER_WRITTEN, dtype=np.int64)
        params = SamplingParams(max_tokens=1)
        ids = torch.zeros(1, dtype=torch.int32)
        self.dummy_req = Req(ids, self.num_rows, 0, 1, -1, params)

    def violate(self, what: str) -> None:
        """Note that a property does not hold; the world raises at the end of the step."""
        self.violations.append(what)

    def maybe_fail(self, stage: str, batch: Batch) -> None:
        """Raise once where it was asked for: in "pad", "prepare", "forward" or "sample"."""
        if self.fails_at == stage:
            self.fails_at = None
            self.failing_uids.update(req.uid for req in batch.reqs)
            raise InjectedFault(f"told to fail in {stage}")

    def pad_batch(self, batch: Batch) -> None:
        self.maybe_fail("pad", batch)
        missing = -batch.size % self.pad_decode_to if batch.is_decode else 0
        if missing:
            batch.padded_reqs = batch.reqs + [self.dummy_req] * missing

    def prepare(self, batch: Batch) -> np.ndarray:
        """The locations of all tokens of the batch's requests, request after request."""
        self.maybe_fail("prepare", batch)
        rows = [self.table[req.table_idx, : req.device_len] for req in batch.reqs]
        batch.attn_metadata = np.concatenate(rows)  # type: ignore[assignment]
        return batch.attn_metadata  # type: ignore[return-value]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the shadow."""
        return self.page_size * self.shadow.itemsize

    def read_pages(self, pages: Any) -> torch.Tensor:
        """A copy of the shadow's pages as bytes."""
        by_page = self.shadow.reshape(-1, self.page_size)
        return torch.from_numpy(by_page[np.asarray(pages)].view(np.uint8))

    def write_pages(self, pages: Any, data: torch.Tensor) -> None:
        """Put bytes back into the shadow."""
        by_page = self.shadow.reshape(-1, self.page_size)
        by_page[np.asarray(pages)] = data.numpy().view(np.int64)

    def fingerprint(self) -> bytes:
        """All simulated engines have the same KV."""
        return bytes(32)

    @contextmanager
    def launch_order(self) -> Iterator[None]:
        yield

    def forward(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Write, read back, compare; returns the tokens read and where each request's end."""
        self._check_batch(batch)
        self.maybe_fail("forward", batch)
        scripts = [self.scripts[req.uid] for req in batch.reqs]
        lens = np.array([req.device_len for req in batch.reqs])
        self._write(batch, scripts)
        locations: Any = batch.attn_metadata
        stored = self.shadow[locations]
        expected = np.concatenate(
            [
                s.tokens[:n] + s.salt_id * self.vocab_size if s.salt_id else s.tokens[:n]
                for s, n in zip(scripts, lens)
            ]
        )
        if not np.array_equal(stored, expected):
            self._explain(batch, scripts, stored, expected, lens)
        return stored % self.vocab_size, lens

    def sample(self, batch: Batch, logits: tuple[np.ndarray, np.ndarray], args: Any) -> SimOutput:
        """Hash what was read; a chunk's token is garbage that nobody may use, but -1 is -1."""
        self.maybe_fail("sample", batch)
        tokens, lens = logits
        starts = lens.cumsum() - lens
        positions = np.arange(len(tokens)) - starts.repeat(lens)
        sums = np.add.reduceat(weighted(tokens, positions), starts).tolist()
        chosen = [self._choose(req, total) for req, total in zip(batch.reqs, sums)]
        hidden = torch.tensor(chosen, dtype=torch.int32)
        visible = torch.full_like(hidden, NOT_YET)
        event = SimEvent(self, batch, hidden, visible)
        self.in_flight.append(event)
        self.trace.append((batch.phase, [r.uid for r in batch.reqs], args.tobytes(), chosen))
        return SimOutput(hidden, visible, event)

    def _choose(self, req: Req, total: int) -> int:
        script = self.scripts[req.uid]
        if script.nan_after is not None and req.device_len >= script.prompt_len + script.nan_after:
            self._spoil(req, script)
            return -1
        if not req.is_sampled:
            return self.vocab_size + 5
        if script.ends_after is None:
            return mix(total, self.vocab_size)
        is_last = req.device_len == script.prompt_len + script.ends_after - 1
        return self.vocab_size - 1 if is_last else mix(total, self.vocab_size - 1)

    def _spoil(self, req: Req, script: Script) -> None:
        """Bad logits mean bad KV: whoever reads these slots from now on would see it."""
        script.is_spoilt = True
        own = self.table[req.table_idx, req.cached_len : req.device_len]
        self.shadow[own] = POISON
        self.failing_uids.add(req.uid)

    def _write(self, batch: Batch, scripts: list[Script]) -> None:
        lens = [req.extend_len for req in batch.reqs]
        num_real = sum(lens)
        out_loc = batch.out_loc.numpy()[:num_real]
        places = out_loc.tolist()
        if len(set(places)) != num_real or (num_real and max(places) >= self.dummy):
            self.violate(f"I1: a step writes a slot twice, or the dummy page: {out_loc}")
        values = batch.input_ids.numpy()[:num_real]
        if any(script.salt_id for script in scripts):
            salts = np.array([script.salt_id * self.vocab_size for script in scripts])
            values = values + salts.repeat(lens)
        self.shadow[out_loc] = values
        for req, script in zip(batch.reqs, scripts):
            if script.is_spoilt:
                own = self.table[req.table_idx, req.cached_len : req.device_len]
                self.shadow[own] = POISON

    def _check_batch(self, batch: Batch) -> None:
        """I8: the budget, and that chunks and steps cover each request exactly once; I10: order."""
        restarts = {req.uid for req in batch.reqs if self._was_preempted(req)}
        self._check_phase(batch)
        if batch.size > self.num_rows or len({req.uid for req in batch.reqs}) != batch.size:
            self.violate("I8: too many requests in a batch, or one of them twice")
        rows = {req.table_idx: req.uid for event in self.in_flight for req in event.batch.reqs}
        for req in batch.reqs:
            script = self.scripts[req.uid]
            if rows.get(req.table_idx, req.uid) != req.uid:
                self.violate(f"I3: {req} got a row that a batch in flight uses")
            if script.computed is None:
                num_before = len(self.started) - bisect(self.started, script.order)
                if num_before > self.max_overtaken:
                    self.violate(f"I10: {req} was overtaken by {self.started[-num_before:]}")
                insort(self.started, script.order)
            elif req.uid in restarts:
                num_started = len(self.started)
                num_since = num_started - script.started.get(script.num_preemptions, num_started)
                if num_since > self.max_overtaken:
                    self.violate(f"I10: {num_since} started before {req} started again")
            elif script.computed != req.cached_len:
                self.violate(f"I8: {req} goes on where it has not stopped, at {script.computed}")
            script.computed = req.device_len
            is_decode = req.cached_len >= script.input_len
            if is_decode and req.extend_len != 1:
                self.violate(f"I8: {req} decodes more than one token")
            if not is_decode and req.device_len > script.input_len:
                self.violate(f"I8: {req} computes past its input of {script.input_len}")
            if req.is_sampled != (req.device_len >= script.input_len):
                self.violate(f"I8: {req} is sampled in the middle of its input, or not at its end")

    def _was_preempted(self, req: Req) -> bool:
        """Whether the request starts again, at what the cache still has of it."""
        assert req.pending is not None
        script = self.scripts[req.uid]
        seen, script.num_preemptions = script.num_preemptions, req.pending.num_preemptions
        if seen == script.num_preemptions or script.computed is None:
            return False
        script.known = max(script.known, script.computed + 1)
        script.is_spoilt = False  # what was bad has been dropped, and is computed anew
        return True

    def _check_phase(self, batch: Batch) -> None:
        """I8: the phase says what is in the batch, and prompts are within its budget."""
        prompts = [r for r in batch.reqs if r.cached_len < self.scripts[r.uid].input_len]
        phase = "prefill" if len(prompts) == batch.size else "mixed" if prompts else "decode"
        if phase != batch.phase:
            self.violate(f"I8: a {phase} batch calls itself {batch.phase}")
        budget = self.budget if phase == "prefill" else self.mixed_budget
        if sum(req.extend_len for req in prompts) > budget:
            self.violate(f"I8: a {phase} batch exceeds the prompt budget of {budget}")

    def _explain(
        self,
        batch: Batch,
        scripts: list[Script],
        stored: np.ndarray,
        expected: np.ndarray,
        lens: np.ndarray,
    ) -> None:
        start = 0
        for req, script, length in zip(batch.reqs, scripts, lens):
            read, own = stored[start : start + length], expected[start : start + length]
            start += length
            if not script.is_spoilt and not np.array_equal(read, own):
                self.violate(f"I2: the row of {req} spells {read.tolist()}, not {own.tolist()}")
