"""A scheduler in a simulated world: fed with messages, every property checked after every step.

The world keeps its own book of what each request must answer and when it has ended; `checks`
looks at pages, rows and the cache.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minisgl.core import Req
from minisgl.message import AbortBackendMsg, BaseBackendMsg, DetokenizeMsg, UserMsg
from minisgl.params import FinishReason, SamplingParams
from minisgl.scheduler import Scheduler, SchedulerConfig

from .checks import (
    MAX_PREEMPTIONS,
    check_idle,
    check_pages,
    check_queue,
    check_rows,
    check_spill,
    check_tree,
)
from .engine import Script, SimEngine, Violation
from .oracle import spell_out

EOS = 0


@dataclass(frozen=True)
class WorldConfig:
    """The size of a world. `vocab_size` is small so that prefixes collide.

    share_prefixes: how many shared tokens are worth a wait, 0 for never. spill_pages: the slots of
    the second tier.
    """

    page_size: int = 1
    num_pages: int = 16
    num_rows: int = 3
    budget: int = 8
    cache_type: str = "radix"
    overlap: bool = False
    vocab_size: int = 5
    max_len: int = 256
    pad_decode_to: int = 1
    share_prefixes: int = 0
    admission: str = "conservative"
    spill_pages: int = 0
    admission_share: float | None = None


@dataclass
class Entry:
    """One request in the world's book. `state`: waiting for its submit, live, or ended."""

    uid: int
    state: str = "unknown"
    prompt: list[int] = field(default_factory=list)
    max_tokens: int = 0
    is_refused: bool = False
    stop_ids: frozenset[int] = frozenset()
    expected: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class World:
    """One scheduler, its simulated engine, and the book.

    checks_all: look at the cache's tree after every step; otherwise when it seems to have changed,
    and every eighth step. check_every: look at pages, rows and queue after so many steps; tokens
    and what the engine reads are held against the book at each. `live`: the owner of each row, as
    of the last check.
    """

    def __init__(
        self, config: WorldConfig, *, checks_all: bool = True, check_every: int = 1
    ) -> None:
        self.config = config
        self.checks_all = checks_all
        self.check_every = check_every
        self.engine = SimEngine(
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_rows=config.num_rows,
            vocab_size=config.vocab_size,
            budget=config.budget,
            max_len=config.max_len,
            pad_decode_to=config.pad_decode_to,
        )
        scheduler_config = SchedulerConfig(
            model_path="simulated",
            page_size=config.page_size,
            max_running_req=config.num_rows,
            max_extend_tokens=config.budget,
            cache_type=config.cache_type,  # type: ignore[arg-type]
            share_prefixes=config.share_prefixes,
            admission=config.admission,
            kv_spill_bytes=config.spill_pages * self.engine.page_bytes,
            admission_share=config.admission_share,
        )
        self.scheduler = Scheduler(scheduler_config, self.engine, self, eos_token_ids=[EOS])
        self.book: dict[int, Entry] = {}
        self.inbox: list[BaseBackendMsg] = []
        self.counts: Counter[str] = Counter()
        self.trace = hashlib.sha256()
        self.last_data: Any = None
        self.live: dict[int, Req] = {}
        self.standing: set[int] = set()
        self.preemptions: dict[int, int] = {}
        self.tree_seen: Any = None
        self.spill_seen: Any = None
        self.resident_seen: tuple[Any, Any] = (None, None)
        self.num_steps = 0
        self.history: list[list[Any]] = []

    # What happens to the world

    def submit(
        self,
        uid: int,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
        nan_after: int | None = None,
        ends_after: int | None = None,
    ) -> None:
        """Send a request; salts are "" or one letter. ends_after: it stops after so many tokens."""
        given: list[tuple[str, Any, Any]] = [
            ("salt", salt, ""),
            ("ignore_eos", ignore_eos, False),
            ("stop_ids", list(stop_ids), []),
            ("nan_after", nan_after, None),
            ("ends_after", ends_after, None),
        ]
        changed = {name: value for name, value, default in given if value != default}
        vocab_size = self.config.vocab_size - (ends_after is not None)
        stop_ids = [*stop_ids, vocab_size] if ends_after else stop_ids
        self.history.append(["submit", uid, list(prompt), max_tokens, changed])
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=tuple(stop_ids)
        )
        ids = torch.tensor(list(prompt), dtype=torch.int32)
        self.inbox.append(UserMsg(uid=uid, input_ids=ids, sampling_params=params, salt=salt))
        room = self.engine.max_seq_len - len(prompt)
        entry = self.book.setdefault(uid, Entry(uid))
        entry.prompt = list(prompt)
        entry.is_refused = room <= 0 or not prompt or max(prompt) >= self.config.vocab_size
        if entry.is_refused:
            return
        entry.max_tokens = min(max_tokens, room)
        entry.stop_ids = frozenset(stop_ids) | (frozenset() if ignore_eos else frozenset([EOS]))
        tokens = spell_out(prompt, entry.max_tokens, vocab_size)
        if ends_after and ends_after <= entry.max_tokens:
            tokens[len(prompt) + ends_after - 1] = vocab_size
        entry.expected = tokens[len(prompt) :].tolist()
        salt_id = ord(salt) - ord("a") + 1 if salt else 0
        order = len(self.engine.scripts)
        self.engine.scripts[uid] = Script(
            order, len(prompt), tokens, salt_id, nan_after, ends_after
        )

    def abort(self, uid: int) -> None:
        """Ask for the end of any uid."""
        self.history.append(["abort", uid])
        self.inbox.append(AbortBackendMsg(uid))

    def flush(self) -> None:
        """Forget every cached prefix that is not in use."""
        self.history.append(["flush"])
        self.scheduler.cache_manager.flush()
        self.check()

    def reload(self) -> None:
        """Save every cached prefix, forget what can be forgotten, and load the file."""
        self.history.append(["reload"])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prefixes"
            self.scheduler.save_prefixes(path)
            self.scheduler.flush_cache()
            self.counts["loaded tokens"] += self.scheduler.load_prefixes(path)
        self.check()

    def fail(self, stage: str) -> None:
        """Make the next step fail in one of the engine's stages."""
        self.history.append(["fail", stage])
        self.engine.fails_at = stage

    def reset(self) -> None:
        """End everything at once, without a reply, also what is in flight; then go on."""
        self.history.append(["reset"])
        self.scheduler.reset()
        self.last_data = None
        self.engine.in_flight.clear()
        for entry in self.book.values():
            if entry.state == "live":
                entry.state, entry.reason = "ended", FinishReason.ABORT
            elif entry.state == "aborted early":
                entry.state = "unknown"  # what is forgotten may run after all
        self.counts["reset"] += 1
        self.check()
        check_idle(self)

    def step(self) -> None:
        """One turn of the loop, then every check."""
        self.history.append(["step"])
        self.num_steps += 1
        if self.config.overlap:
            self.last_data = self.scheduler.overlap_loop(self.last_data)
        else:
            self.scheduler.normal_loop()
        if self.num_steps % self.check_every == 0 or self.engine.violations:
            self.check()

    def drain(self) -> None:
        """Turn until idle; every request must have come to its end by then."""
        waiting = [entry for entry in self.book.values() if entry.state in ("unknown", "live")]
        bound = 20 + sum(len(entry.prompt) + entry.max_tokens + 3 for entry in waiting)
        bound *= 1 + MAX_PREEMPTIONS
        while not self.is_idle:
            self.step()
            bound -= 1
            if bound < 0:
                raise Violation("I10: requests wait for ever")
        self.step()
        live = [entry.uid for entry in self.book.values() if entry.state == "live"]
        if live:
            raise Violation(f"I9: idle, but requests {live} never ended")
        check_idle(self)

    @property
    def is_busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.inbox) or not self.scheduler.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running, or in flight."""
        return not self.inbox and self.last_data is None and self.scheduler.is_idle

    # IOProtocol

    def receive(self, blocking: bool) -> Sequence[BaseBackendMsg]:
        """Everything that was sent since the last turn; never waits."""
        if blocking:
            self.counts["idle"] += 1
        msgs, self.inbox = self.inbox, []
        for msg in msgs:
            self._note(msg)
        return msgs

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Hold each reply against the book."""
        for reply in replies:
            self._take_reply(reply)
        self.trace.update(repr([(r.uid, r.next_token, r.finished) for r in replies]).encode())

    def _note(self, msg: BaseBackendMsg) -> None:
        """From here on the message counts: a request that is aborted now answers nothing more."""
        assert isinstance(msg, (UserMsg, AbortBackendMsg))
        entry = self.book.setdefault(msg.uid, Entry(msg.uid))
        if isinstance(msg, UserMsg):
            if entry.state == "aborted early":
                entry.state, entry.reason = "ended", FinishReason.ABORT
            else:
                entry.state = "live"
        elif entry.state == "unknown":
            entry.state = "aborted early"
            self.counts["abort early"] += 1
        elif entry.state == "live" and not entry.is_refused:
            entry.state, entry.reason = "ended", FinishReason.ABORT
            self.counts["abort"] += 1
            if any(
                req.uid == msg.uid for event in self.engine.in_flight for req in event.batch.reqs
            ):
                self.counts["abort in flight"] += 1
            elif any(p.uid == msg.uid and p.chunked_req for p in self.queue):
                self.counts["abort half-prefilled"] += 1
            elif any(p.uid == msg.uid and p.num_preemptions for p in self.queue):
                self.counts["abort preempted"] += 1

    @property
    def queue(self) -> list[Any]:
        """The requests that wait, the half-prefilled one included."""
        return self.scheduler.prefill_manager.pending_list

    def _take_reply(self, reply: DetokenizeMsg) -> None:
        entry = self.book.get(reply.uid)
        if entry is None or entry.state != "live":
            raise Violation(f"I9: {reply} answers a request that is not running")
        reason = reply.finish_reason
        if reply.finished != (reason is not None):
            raise Violation(f"I9: {reply} finishes without a reason, or not with one")
        if reason is FinishReason.ERROR:
            if not entry.is_refused and reply.uid not in self.engine.failing_uids:
                raise Violation(f"I7: request {reply.uid} failed: {reply.error}")
            self.counts["error"] += 1
        else:
            self._take_token(entry, reply.next_token, reason)
        if reason is not None:
            entry.state, entry.reason = "ended", reason

    def _take_token(self, entry: Entry, token: int, reason: FinishReason | None) -> None:
        index = len(entry.answer)
        if entry.is_refused or index >= entry.max_tokens:
            raise Violation(f"I9: request {entry.uid} answers more than it may")
        if token != entry.expected[index]:
            raise Violation(
                f"I13: request {entry.uid} says {token} at {index}, not {entry.expected[index]}"
            )
        entry.answer.append(token)
        is_stop, is_full = token in entry.stop_ids, index + 1 == entry.max_tokens
        expected = FinishReason.STOP if is_stop else FinishReason.LENGTH if is_full else None
        if reason is not expected:
            raise Violation(f"I9: request {entry.uid} ends with {reason}, not {expected}")
        if reason is not None:
            self.counts[reason.value] += 1

    # Checks

    def check(self) -> None:
        """Every property that must hold between two steps."""
        if self.engine.violations:
            raise Violation(self.engine.violations[0])
        for event in self.engine.trace:
            self.trace.update(repr(event).encode())
        self.engine.trace.clear()
        check_rows(self)
        check_pages(self)
        check_spill(self)
        check_queue(self)
        cache = self.scheduler.cache_manager.prefix_cache
        handles = [(req.uid, req.cache_handle) for req in self.live.values()]
        seen = (cache.size_info, getattr(cache, "_num_made", 0), handles)
        if self.checks_all or self.num_steps % 8 == 0 or seen != self.tree_seen:
            check_tree(self)
            self.tree_seen = seen
