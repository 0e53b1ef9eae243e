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

from minisgl.core import Batch, Req
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    DetokenizeMsg,
    ExpireBackendMsg,
    UserMsg,
)
from minisgl.params import ErrorKind, FinishReason, SamplingParams
from minisgl.scheduler import Deadlines, ForwardInput, Scheduler, SchedulerConfig

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
    the second tier. The rest as in `SchedulerConfig`.
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
    max_prefill_streak: int = 0
    mixed_chunk: int = 0
    queue_order: str = "fcfs"
    max_overtaken: int = 0
    max_queued: int = 0


@dataclass
class Entry:
    """One request in the world's book. `state`: waiting for its submit, live, or ended.

    is_crowded: it found the queue full. is_late: its deadline has passed; it is to end with that.
    """

    uid: int
    state: str = "unknown"
    prompt: list[int] = field(default_factory=list)
    max_tokens: int = 0
    is_refused: bool = False
    is_crowded: bool = False
    is_late: bool = False
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
            mixed_budget=min(config.mixed_chunk, config.budget),
            max_overtaken=config.max_overtaken if config.queue_order != "fcfs" else 0,
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
            max_prefill_streak=config.max_prefill_streak,
            mixed_chunk=config.mixed_chunk,
            queue_order=config.queue_order,
            max_overtaken=config.max_overtaken,
            max_queued=config.max_queued,
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
        self.deadlines = Deadlines(lambda: self.num_steps)
        self.streak = 0
        self.late: list[Entry] = []
        self._prepare = self.scheduler._prepare_batch
        self.scheduler._prepare_batch = self._watch  # type: ignore[method-assign]

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
        priority: int = 0,
        deadline: int | None = None,
    ) -> None:
        """Send a request; salts are "" or one letter, a deadline is the number of a step.

        ends_after: it stops after so many tokens.
        """
        given: list[tuple[str, Any, Any]] = [
            ("salt", salt, ""),
            ("ignore_eos", ignore_eos, False),
            ("stop_ids", list(stop_ids), []),
            ("nan_after", nan_after, None),
            ("ends_after", ends_after, None),
            ("priority", priority, 0),
            ("deadline", deadline, None),
        ]
        changed = {name: value for name, value, default in given if value != default}
        vocab_size = self.config.vocab_size - (ends_after is not None)
        stop_ids = [*stop_ids, vocab_size] if ends_after else stop_ids
        self.history.append(["submit", uid, list(prompt), max_tokens, changed])
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=tuple(stop_ids)
        )
        ids = torch.tensor(list(prompt), dtype=torch.int32)
        self.inbox.append(
            UserMsg(uid, ids, params, salt=salt, priority=priority, deadline=deadline)
        )
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
        if any(entry.is_late for entry in self.late):
            raise Violation(f"I9: deadlines have passed, and they go on: {self.late}")
        self.late.clear()
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
        msgs, self.inbox = self.deadlines.expire(self.inbox), []
        waiting = [pending.uid for pending in self.queue]
        for msg in msgs:
            self._note(msg, waiting)
        return msgs

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Hold each reply against the book."""
        self.deadlines.forget(replies)
        for reply in replies:
            self._take_reply(reply)
        self.trace.update(repr([(r.uid, r.next_token, r.finished) for r in replies]).encode())

    def _note(self, msg: BaseBackendMsg, waiting: list[int]) -> None:
        """From here on the message counts: a request that is aborted now answers nothing more.

        waiting: the uids in the queue when the message is acted on.
        """
        assert isinstance(msg, (UserMsg, AbortBackendMsg, ExpireBackendMsg))
        entry = self.book.setdefault(msg.uid, Entry(msg.uid))
        if isinstance(msg, UserMsg):
            if entry.state == "aborted early":
                entry.state, entry.reason = "ended", FinishReason.ABORT
            else:
                entry.state = "live"
                entry.is_crowded = not entry.is_refused and self._is_full(waiting)
                entry.is_refused |= entry.is_crowded
                if not entry.is_refused:
                    waiting.append(msg.uid)
            return
        if msg.uid in waiting:
            waiting.remove(msg.uid)
        if isinstance(msg, ExpireBackendMsg):
            entry.is_late = entry.state == "live" and not entry.is_refused
            self.late.append(entry)
        elif entry.state == "unknown":
            entry.state = "aborted early"
            self.counts["abort early"] += 1
        elif entry.state == "live" and not entry.is_refused:
            entry.state, entry.reason, entry.is_late = "ended", FinishReason.ABORT, False
            self.counts["abort"] += 1
            if any(
                req.uid == msg.uid for event in self.engine.in_flight for req in event.batch.reqs
            ):
                self.counts["abort in flight"] += 1
            elif any(p.uid == msg.uid and p.chunked_req for p in self.queue):
                self.counts["abort half-prefilled"] += 1
            elif any(p.uid == msg.uid and p.num_preemptions for p in self.queue):
                self.counts["abort preempted"] += 1

    def _is_full(self, waiting: list[int]) -> bool:
        return 0 < self.config.max_queued <= len(waiting)

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
            if not self._may_fail(entry, reply):
                raise Violation(f"I7: request {reply.uid} failed: {reply.error}")
            entry.is_late = False
            self.counts["error"] += 1
            self.counts[reply.error_kind.value] += 1
        else:
            self._take_token(entry, reply.next_token, reason)
        if reason is not None:
            entry.state, entry.reason = "ended", reason

    def _may_fail(self, entry: Entry, reply: DetokenizeMsg) -> bool:
        """Whether this error has its reason."""
        if reply.error_kind is ErrorKind.TIMEOUT:
            return entry.is_late
        if reply.error_kind is ErrorKind.OVERLOADED:
            return entry.is_crowded
        return entry.is_refused or reply.uid in self.engine.failing_uids

    def _watch(self, batch: Batch) -> ForwardInput:
        """I8: all who run are in each batch with one who does; prompts do not hold them up."""
        running = [req.uid for req in self.scheduler.decode_manager.running_reqs]
        uids = [req.uid for req in batch.reqs]
        num_running = 0 if batch.is_prefill else len(running)
        if uids[:num_running] != running[:num_running]:
            self.engine.violate(f"I8: {running} run, {batch.phase} batch of {uids}")
        self.streak = self.streak + 1 if batch.is_prefill and running else 0
        limit = 0 if self.config.mixed_chunk else self.config.max_prefill_streak
        if self.streak > limit and (limit or self.config.mixed_chunk):
            self.engine.violate(f"I8: {running} wait for the prompts of {uids}")
        for pending in self.queue:
            started = self.engine.scripts[pending.uid].started
            started.setdefault(pending.num_preemptions, len(self.engine.started))
        self.counts[batch.phase] += 1
        return self._prepare(batch)

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
        num_new = sum(not pending.num_preemptions for pending in self.queue)
        if self.config.max_queued and num_new > self.config.max_queued:
            raise Violation(f"I8: {num_new} requests wait that were not preempted")
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
