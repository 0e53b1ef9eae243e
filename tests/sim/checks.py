"""The properties of the state machine that can be read off a scheduler between two steps.

They are written apart from the scheduler's own `check_integrity`, which they also call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.core import Req
from minisgl.kvcache import RadixPrefixCache
from minisgl.utils import div_ceil

from .engine import Violation

if TYPE_CHECKING:
    from .world import World

OWNED, CACHED = 1, 2
MAX_EARLY_ABORTS = 4096
MAX_PREEMPTIONS = 3


def live_reqs(world: World) -> dict[int, Req]:
    """The owner of each row in use, gathered from every place where a request can be."""
    scheduler = world.scheduler
    queue = scheduler.prefill_manager.pending_list
    live: dict[int, Req] = {}
    halves = [pending.chunked_req for pending in queue if pending.chunked_req is not None]
    last_steps = [
        req
        for event in world.engine.in_flight
        for req in event.batch.reqs
        if req.is_sampled and not req.can_decode and req.finish_reason is None
    ]
    for req in [*scheduler.decode_manager.running_reqs, *halves, *scheduler.finished_reqs]:
        if req.table_idx in live:
            raise Violation(f"I3: row {req.table_idx} is held by {live[req.table_idx]} and {req}")
        live[req.table_idx] = req
    for req in last_steps:
        if live.setdefault(req.table_idx, req) is not req:
            raise Violation(f"I3: row {req.table_idx} is held by {live[req.table_idx]} and {req}")
    return live


def check_rows(world: World) -> None:
    """I3, and the part of I8 that is about rows."""
    table = world.scheduler.table_manager
    live = live_reqs(world)
    taken = {row for row in range(world.config.num_rows) if row not in table._free_rows}
    if taken != set(live):
        raise Violation(f"I3: rows {sorted(taken)} are taken, {sorted(live)} are in use")
    if len(table._free_rows) + len(taken) != world.config.num_rows:
        raise Violation(f"I3: the free rows {table._free_rows} name one twice")
    for event in world.engine.in_flight:
        for req in event.batch.reqs:
            owner = live.get(req.table_idx)
            if owner is None or owner.uid != req.uid:
                raise Violation(f"I3: row {req.table_idx} is given away while {req} is in flight")
    owners = {row: req.uid for row, (req, _) in world.scheduler.cache_manager._owners.items()}
    if owners != {row: req.uid for row, req in live.items()}:
        raise Violation(f"I1: pages are held for {owners}, rows for {live}")
    world.live = live


def check_pages(world: World) -> None:
    """I1, I2, and that what is promised can be kept (I7)."""
    manager, page_size = world.scheduler.cache_manager, world.config.page_size
    num_pages, table = world.config.num_pages, world.engine.table
    cached = resident(world)
    heads, locked, rows = [manager.free_slots.numpy(), cached[::page_size]], [], []
    for row, req in world.live.items():
        locked_len = req.cache_handle.cached_len if req.cache_handle is not None else 0
        end = manager._owners[row][1] * page_size
        if end < req.cached_len:
            raise Violation(f"I7: {req} owns pages for {end} tokens only")
        heads.append(table[row, locked_len:end:page_size])
        locked.append(table[row, :locked_len:page_size])
        rows.append(table[row, :end])
    counts = np.bincount(np.concatenate(heads) // page_size, minlength=num_pages)
    if len(counts) != num_pages or (counts != 1).any():
        raise Violation(f"I1: pages are owned {counts.tolist()} times; {describe(world)}")
    if not rows:
        return
    check_promises(world)
    is_cached = np.zeros(num_pages, dtype=bool)
    is_cached[cached // page_size] = True
    if not is_cached[np.concatenate(locked) // page_size].all():
        raise Violation("I2: a live row names a page in its locked prefix that is not cached")
    if page_size > 1:
        pages = np.concatenate(rows).reshape(-1, page_size)
        if (pages - pages[:, :1] != np.arange(page_size)).any():
            raise Violation("I1: a row tears a page apart")


def check_promises(world: World) -> None:
    """I7, counted afresh, page by page: what everyone may still come to need fits.

    Decode step 1 is the next one; step 0 is the last of the prefill steps before it, if a prompt is
    half computed. A page is in use until the last of those who hold it has ended; with overlap one
    step more, but whatever drains now has drained by the step after the next. A prompt that is half
    computed while others decode is late, by exactly so many steps.
    """
    if world.config.admission == "optimistic":
        return check_last_resort(world)
    manager, page_size = world.scheduler.cache_manager, world.config.page_size
    lag, is_half, growth = int(world.config.overlap), False, 0
    last_use = np.full(world.config.num_pages, -1)
    stored, steps, held, delays = [], [], [], []
    for row, req in world.live.items():
        num_held = manager._owners[row][1]
        tokens, rest, delay = req.cached_len, 0, 0
        if req.finish_reason is None:
            prompt_len = world.engine.scripts[req.uid].prompt_len
            tokens = max(req.cached_len, prompt_len)
            rest = prompt_len + world.book[req.uid].max_tokens - 1 - tokens
            is_half |= req.cached_len < prompt_len
            delay = steps_until_computed(world, prompt_len - req.cached_len)
            growth += max(div_ceil(tokens + rest, page_size) - num_held, 0)
        stored.append(tokens)
        steps.append(rest)
        held.append(num_held)
        delays.append(delay)
        pages = world.engine.table[row, : num_held * page_size : page_size] // page_size
        last_use[pages] = np.maximum(last_use[pages], rest + delay + lag)
    if world.config.admission == "conservative" and growth > manager.available_pages:
        raise Violation(f"I7: {growth} pages are promised, {manager.available_pages} available")
    last = np.array(steps) + np.array(delays) + lag
    ends = [0 if is_half else 1, *last[last > 0]]
    step = np.unique(ends)[:, None]  # between two ends use only grows
    advanced = np.clip(step - np.array(delays), 0, steps)
    longest = (np.array(stored) + advanced + page_size - 1) // page_size
    grown = np.where(step <= last, np.maximum(longest - held, 0), 0).sum(1)
    num_over = np.bincount(last_use + 1, minlength=step.max() + 2).cumsum()[step[:, 0]]
    in_use = world.config.num_pages - num_over + grown
    if in_use.max() > world.config.num_pages:
        raise Violation(f"I7: {in_use.tolist()} pages may be in use at steps {step[:, 0].tolist()}")


def check_last_resort(world: World) -> None:
    """I7 where requests are preempted: what is left when nobody else can be, fits at its longest.

    These are the oldest request, and the last one that was preempted as often as may be with all
    before it. Those that drain are done before anyone is preempted.
    """
    manager, page_size = world.scheduler.cache_manager, world.config.page_size
    live = [world.live[row] for row in manager._owners if world.live[row].finish_reason is None]
    pending: Any = [req.pending for req in live]
    last = [i for i, p in enumerate(pending) if p.num_preemptions >= MAX_PREEMPTIONS]
    num_kept = last[-1] + 1 if last else 1
    held, growth = set(), 0
    for req in live[:num_kept]:
        num_held = manager._owners[req.table_idx][1]
        held |= set(world.engine.table[req.table_idx, : num_held * page_size : page_size].tolist())
        longest = world.engine.scripts[req.uid].prompt_len + world.book[req.uid].max_tokens - 1
        growth += max(div_ceil(longest, page_size) - num_held, 0)
    if len(held) + growth > world.config.num_pages:
        raise Violation(f"I7: {live[:num_kept]} may not be preempted, and do not fit")


def check_queue(world: World) -> None:
    """I10, and the rules of preemption: the newest first, never the last, none for ever.

    Where requests may overtake, those that were preempted stand before those that were not.

    World.standing: the requests with a row after the step before; `preemptions`: of each request.
    """
    scripts = world.engine.scripts
    standing = {
        req.uid for req in world.live.values() if req.finish_reason is None and req.uid in scripts
    }
    waiting = [pending for pending in world.queue if pending.chunked_req is None]
    if any(pending.chunked_req for pending in world.queue[len(world.queue) - len(waiting) :]):
        raise Violation(f"I10: somebody waits before a prompt that is half computed: {world.queue}")
    orders = [scripts[pending.uid].order for pending in world.queue]
    newest = max([scripts[uid].order for uid in standing], default=-1)
    if world.engine.max_overtaken:
        orders = [-1 if p.num_preemptions else scripts[p.uid].order for p in waiting]
        newest = -1
    if orders != sorted(orders) or any(scripts[p.uid].order < newest for p in waiting):
        raise Violation(f"I10: {orders} wait in this order, and {newest} has started")
    preempted = {p.uid for p in waiting if p.num_preemptions > world.preemptions.get(p.uid, 0)}
    if preempted and not (world.standing | standing) - preempted:
        raise Violation(f"I10: all of {world.standing} were preempted")
    for pending in world.queue:
        if pending.num_preemptions > MAX_PREEMPTIONS:
            raise Violation(f"I10: {pending} was preempted once too often")
        world.preemptions[pending.uid] = pending.num_preemptions
    world.counts["preempted"] += len(preempted)
    world.counts["preempted though others decode"] += len(preempted) * (
        world.scheduler.prefill_manager.pace > 0
    )
    world.standing = standing


def steps_until_computed(world: World, num_missing: int) -> int:
    """How many tokens others decode before the rest of a prompt is computed."""
    config, budget = world.config, world.config.budget
    if config.mixed_chunk:
        return div_ceil(max(num_missing, 0), min(config.mixed_chunk, budget))
    if not config.max_prefill_streak or num_missing <= 0:
        return 0
    num_left = div_ceil(num_missing, budget)
    num_left -= config.max_prefill_streak - world.scheduler._prefill_streak  # before the next one
    return max(div_ceil(num_left, config.max_prefill_streak), 0)


def check_tree(world: World) -> None:
    """I4 and I5 with the handles of the live requests, and the manager's own check."""
    handles = [req.cache_handle for req in world.live.values() if req.cache_handle is not None]
    world.scheduler.cache_manager.prefix_cache.check_integrity(handles)
    world.scheduler.cache_manager.check_integrity(full=False)


def check_spill(world: World) -> None:
    """The second tier: every slot has one state, and what it says it has is what was computed."""
    spill = world.scheduler.cache_manager.spill
    if spill is None:
        return
    seen = (spill.index._num_made, spill.index.size_info, spill.num_free_slots)
    if seen == world.spill_seen:
        return
    world.spill_seen = seen
    spill.check_integrity()
    page_size = world.config.page_size
    for ids, indices, salt in spill.index.prefixes():
        salt_id = ord(salt) - ord("a") + 1 if salt else 0
        stored = spill.read_pages(indices[::page_size] // page_size).numpy().view(np.int64)
        expected = ids + salt_id * world.config.vocab_size
        if not np.array_equal(stored.reshape(-1), expected):
            raise Violation(f"I2: the second tier has {stored.tolist()} for {ids} of {salt!r}")


def check_idle(world: World) -> None:
    """I11: only the cache may hold pages, and every map is empty but that of early aborts."""
    scheduler = world.scheduler
    rest: dict[str, Any] = {
        "queue": scheduler.prefill_manager.pending_list,
        "running": scheduler.decode_manager.running_reqs,
        "finished": scheduler.finished_reqs,
        "in flight": scheduler._num_in_flight,
        "owners": scheduler.cache_manager._owners,
        "outbox": scheduler._outbox,
    }
    left = {name: len(items) for name, items in rest.items() if len(items)}
    if left or scheduler.table_manager.available_size != world.config.num_rows:
        raise Violation(f"I11: idle, but {left} remain")
    if len(scheduler._early_aborts) > MAX_EARLY_ABORTS:
        raise Violation("I11: the list of early aborts is not bounded")
    manager = scheduler.cache_manager
    manager.check_integrity()
    held = manager.prefix_cache.size_info
    free = len(manager.free_slots) * world.config.page_size
    if held.protected_size or held.total_size + free != world.engine.dummy:
        raise Violation(f"I11: idle with {held} cached and {free} tokens free")


def describe(world: World) -> str:
    """The page books in one line."""
    free = world.scheduler.cache_manager.free_slots.tolist()
    return f"free {free}, live {list(world.live.values())}, cache {resident(world).tolist()}"


def resident(world: World) -> np.ndarray:
    """Every location in the cache, gathered without torch.

    Walked only if it can have changed: what enters makes a node, what leaves makes it smaller.
    """
    cache: Any = world.scheduler.cache_manager.prefix_cache
    if not isinstance(cache, RadixPrefixCache):
        return np.empty(0, dtype=np.int32)
    seen = (cache._num_made, cache.size_info.total_size)
    if world.resident_seen[0] != seen:
        parts = [node.indices.numpy() for node in cache._nodes()]
        world.resident_seen = (seen, np.concatenate(parts))
    return world.resident_seen[1]
