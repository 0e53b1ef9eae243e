"""A scheduler driven by hand: its engine keeps token ids where a model would keep K and V.

A forward writes each new token into its slot, reads every row back and notes where it does not
spell the request's own tokens. The next token is a hash of what was read, unless it is scripted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from minisgl.core import Batch, Req, SamplingParams
from minisgl.message import AbortBackendMsg, BaseBackendMsg, DetokenizeMsg, UserMsg
from minisgl.scheduler import ForwardInput, Scheduler, SchedulerConfig, StepRecord
from minisgl.utils import align_ceil

VOCAB_SIZE = 100
NAN = -1


class SimEvent:
    """Ready at once."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class SimOutput(NamedTuple):
    """The tokens of one step."""

    next_tokens_gpu: torch.Tensor
    next_tokens_cpu: torch.Tensor
    copy_done_event: SimEvent


class SimEngine:
    """Implements `EngineProtocol`.

    scripts: the tokens that a uid samples, in order; `NAN` for unusable logits. fails: says of a
    batch whether its forward raises.
    """

    def __init__(self, num_pages: int, page_size: int, num_rows: int, max_len: int) -> None:
        self.device = torch.device("cpu")
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = min(max_len, num_pages * page_size)
        self.vocab_size = VOCAB_SIZE
        width = align_ceil(self.max_seq_len, page_size)
        self.page_table = torch.zeros((num_rows + 1, width), dtype=torch.int32)
        self.shadow = torch.full((num_pages * page_size,), -7, dtype=torch.int32)
        self.scripts: dict[int, Sequence[int]] = {}
        self.fails: Callable[[Batch], bool] = lambda batch: False
        self.violations: list[str] = []

    def pad_batch(self, batch: Batch) -> None:
        """No padding."""

    def prepare(self, batch: Batch) -> Any:
        """A snapshot of the rows."""
        return [self.page_table[req.table_idx, : req.device_len].long() for req in batch.reqs]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the shadow."""
        return self.page_size * self.shadow.itemsize

    def read_pages(self, pages: Any) -> torch.Tensor:
        """A copy of the shadow's pages as bytes."""
        return self.shadow.view(-1, self.page_size)[torch.as_tensor(pages)].view(torch.uint8)

    def write_pages(self, pages: Any, data: torch.Tensor) -> None:
        """Put bytes back into the shadow."""
        by_page = self.shadow.view(-1, self.page_size)
        by_page[torch.as_tensor(pages)] = data.view(torch.int32)

    def fingerprint(self) -> bytes:
        """All simulated engines have the same KV."""
        return bytes(32)

    def launch_order(self) -> AbstractContextManager[None]:
        """Program order."""
        return nullcontext()

    def forward(self, batch: Batch) -> list[int]:
        """Write, read back, compare; returns the hash of each request's tokens."""
        if self.fails(batch):
            raise RuntimeError("told to fail")
        self.shadow[batch.out_loc.long()] = batch.input_ids
        sums = []
        for req, row in zip(batch.reqs, self.prepare(batch)):
            read, known = self.shadow[row].tolist(), req.input_ids.tolist()[: req.device_len]
            if read[: len(known)] != known:
                self.violations.append(f"{req} reads {read}, not {known}")
            sums.append(sum((i + 1) * (token + 3) for i, token in enumerate(read)))
        return sums

    def sample(self, batch: Batch, logits: list[int], args: Any) -> SimOutput:
        """The scripted token, else one that depends on all tokens so far."""
        chosen = [self._choose(req, total) for req, total in zip(batch.reqs, logits)]
        tokens = torch.tensor(chosen, dtype=torch.int32)
        return SimOutput(tokens, tokens.clone(), SimEvent())

    def _choose(self, req: Req, total: int) -> int:
        index = req.output_len - req.remain_len
        script = self.scripts.get(req.uid, ())
        return script[index] if index < len(script) else total % VOCAB_SIZE


class Sim:
    """A scheduler with its engine and its IO. `turn` is one turn of the loop `overlap` names."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 1,
        num_rows: int = 8,
        max_len: int = 128,
        *,
        overlap: bool = False,
        eos: Sequence[int] = (),
        **config: Any,
    ) -> None:
        self.engine = SimEngine(num_pages, page_size, num_rows, max_len)
        self.scheduler = Scheduler(
            SchedulerConfig("sim", page_size=page_size, max_running_req=num_rows, **config),
            self.engine,
            self,
            eos_token_ids=eos,
        )
        self.overlap = overlap
        self.data: Any = None
        self.inbox: list[BaseBackendMsg] = []
        self.replies: list[DetokenizeMsg] = []
        self.records: list[StepRecord] = []
        self.batches: list[tuple[str, dict[int, int]]] = []  # phase, uid -> tokens computed
        self.scheduler.step_listeners.append(self.records.append)
        self._forward = self.scheduler._forward
        self.scheduler._forward = self._observe  # type: ignore[method-assign]

    def _observe(self, forward_input: ForwardInput) -> Any:
        batch = forward_input.batch
        self.batches.append((batch.phase, {req.uid: req.extend_len for req in batch.reqs}))
        return self._forward(forward_input)

    # IOProtocol

    def receive(self, blocking: bool) -> Sequence[BaseBackendMsg]:
        """Everything sent since the last turn."""
        msgs, self.inbox = self.inbox, []
        return msgs

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Keep the replies."""
        self.replies.extend(replies)

    # The test's side

    def submit(
        self,
        uid: int,
        prompt: int | Sequence[int],
        max_tokens: int = 8,
        salt: str = "",
        **params: Any,
    ) -> SamplingParams:
        """Send a request; a number stands for that many tokens that no other uid has."""
        ids = (
            [(uid * 17 + i) % VOCAB_SIZE for i in range(prompt)]
            if isinstance(prompt, int)
            else list(prompt)
        )
        sampling_params = SamplingParams(max_tokens=max_tokens, **params)
        self.inbox.append(UserMsg(uid, ids, sampling_params, salt=salt))
        return sampling_params

    def abort(self, uid: int) -> None:
        """Ask for a request's end."""
        self.inbox.append(AbortBackendMsg(uid))

    def turn(self, times: int = 1) -> None:
        """Turn the loop; every page must have one owner afterwards."""
        for _ in range(times):
            if self.overlap:
                self.data = self.scheduler.overlap_loop(self.data)
            else:
                self.scheduler.normal_loop()
            self.scheduler.cache_manager.check_integrity()
            assert not self.engine.violations, self.engine.violations[0]

    def drain(self) -> None:
        """Turn until idle; then everything must be back."""
        bound = 2000
        while self.inbox or not self.scheduler.is_idle or self.data is not None:
            self.turn()
            bound -= 1
            assert bound, "requests wait for ever"
        self.scheduler.run_when_idle()
        assert self.free_rows == self.scheduler.table_manager.max_running_reqs
        assert self.scheduler.cache_manager.num_owned_pages == 0
        assert not self.scheduler.finished_reqs
        sizes = self.scheduler.cache_manager.prefix_cache.size_info
        assert sizes.protected_size == 0

    def of(self, uid: int) -> list[DetokenizeMsg]:
        """The replies to one request."""
        return [reply for reply in self.replies if reply.uid == uid]

    def tokens(self, uid: int) -> list[int]:
        """The tokens of one request."""
        return [reply.next_token for reply in self.of(uid)]

    @property
    def free_rows(self) -> int:
        """Free table rows."""
        return self.scheduler.table_manager.available_size

    @property
    def free_pages(self) -> int:
        """Pages in the free list."""
        return len(self.scheduler.cache_manager.free_slots)

    @property
    def waiting(self) -> list[int]:
        """The uids in the queue."""
        return [pending.uid for pending in self.scheduler.prefill_manager.pending_list]


def alone(prompt: Sequence[int], max_tokens: int, **params: Any) -> list[int]:
    """The tokens of a request that has the whole world to itself."""
    sim = Sim(num_pages=512, max_len=512, cache_type="naive")
    sim.submit(0, prompt, max_tokens, **params)
    sim.drain()
    return sim.tokens(0)
