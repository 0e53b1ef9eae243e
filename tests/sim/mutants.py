"""Broken schedulers, each with one mistake that engines of this kind have really made.

A mutant is applied to a fresh world before its first step; the suite must catch each of them. They
wrap methods from outside, so that they stay mutants of whatever the scheduler becomes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from pytest import MonkeyPatch

from minisgl.core import Req
from minisgl.kvcache import MatchResult
from minisgl.scheduler import PageDemand, PendingReq, Preemptor, admission, prefill
from minisgl.scheduler.admission import Promises
from minisgl.scheduler.queue import Turns

from .world import World


def drop_the_repointing(world: World, patch: MonkeyPatch) -> None:
    """Free a running request's duplicates, but let its row go on naming them."""
    manager = world.scheduler.cache_manager
    cache_req = manager.cache_req

    def mutated(req: Req, *, finished: bool, length: int | None = None) -> None:
        row = manager.page_table[req.table_idx]
        before = row.clone()
        cache_req(req, finished=finished, length=length)
        if not finished:
            row.copy_(before)

    patch.setattr(manager, "cache_req", mutated)


def drop_a_lock(world: World, patch: MonkeyPatch) -> None:
    """Let the cache evict the prefixes that requests use."""
    manager = world.scheduler.cache_manager
    patch.setattr(manager, "lock", lambda handle: None)
    patch.setattr(manager, "unlock", lambda handle: None)


def reserve_tokens(world: World, patch: MonkeyPatch) -> None:
    """Count tokens where whole pages must be counted; the same at page size 1."""

    def in_fractions(make: Any) -> Any:
        def mutated(*args: Any, **kwargs: Any) -> Any:
            *lens, prefix, page_size = args
            whole = make(*lens, prefix, 1, **kwargs)  # with pages of one token
            return dataclasses.replace(
                whole, held=whole.held / page_size, worst=whole.worst / page_size
            )

        return staticmethod(mutated)

    patch.setattr(PageDemand, "of_candidate", in_fractions(PageDemand.of_candidate))
    patch.setattr(PageDemand, "of_holder", in_fractions(PageDemand.of_holder))


def free_twice(world: World, patch: MonkeyPatch) -> None:
    """Give the pages of a request back a second time when it finishes."""
    manager = world.scheduler.cache_manager
    cache_req = manager.cache_req

    def mutated(req: Req, *, finished: bool, length: int | None = None) -> None:
        start = (req.cached_len - 1) // manager.page_size * manager.page_size
        last_page = manager.page_table[req.table_idx, start : start + manager.page_size].clone()
        cache_req(req, finished=finished, length=length)
        if finished:
            manager._free(last_page)

    patch.setattr(manager, "cache_req", mutated)


def forget_the_duplicates(world: World, patch: MonkeyPatch) -> None:
    """Never free what was computed here and meanwhile cached by another."""
    manager = world.scheduler.cache_manager
    cache_req, free = manager.cache_req, manager._free

    def mutated(req: Req, *, finished: bool, length: int | None = None) -> None:
        row = manager.page_table[req.table_idx]
        own = set(row[: req.cached_len].tolist())
        num_valid = req.cached_len if length is None else length
        found = manager.prefix_cache.match_prefix(req.input_ids[:num_valid], req.salt).cuda_handle
        duplicates = own - set(found.get_matched_indices().tolist())
        duplicates &= set(row[: found.cached_len].tolist())

        def filtered(indices: torch.Tensor) -> None:
            if not duplicates.intersection(indices.tolist()):
                free(indices)

        manager._free = filtered  # type: ignore[method-assign]
        cache_req(req, finished=finished, length=length)
        manager._free = free  # type: ignore[method-assign]

    patch.setattr(manager, "cache_req", mutated)


def release_in_flight(world: World, patch: MonkeyPatch) -> None:
    """Give a row back at once, although a batch that uses it is still in flight."""
    scheduler = world.scheduler

    def mutated(req: Req) -> None:
        if req in scheduler.finished_reqs:
            scheduler._release(req)

    patch.setattr(scheduler, "_release_if_drained", mutated)


def match_the_whole_prompt(world: World, patch: MonkeyPatch) -> None:
    """Take even a prompt's last token from the cache, which leaves nothing to compute."""
    manager = world.scheduler.cache_manager

    def mutated(req: PendingReq) -> MatchResult:
        return manager.prefix_cache.match_prefix(req.input_ids, req.salt)

    patch.setattr(manager, "match_req", mutated)


def ignore_the_salt(world: World, patch: MonkeyPatch) -> None:
    """Share prefixes across salts."""
    cache = world.scheduler.cache_manager.prefix_cache
    match, insert = cache.match_prefix, cache.insert_prefix
    patch.setattr(cache, "match_prefix", lambda ids, salt="": match(ids))
    patch.setattr(cache, "insert_prefix", lambda ids, indices, salt="": insert(ids, indices))


def share_what_failed(world: World, patch: MonkeyPatch) -> None:
    """Hand the KV of a request that ended in an error to the cache."""
    manager = world.scheduler.cache_manager
    patch.setattr(manager, "drop_req", lambda req: manager.cache_req(req, finished=True))


def keep_the_old_lock(world: World, patch: MonkeyPatch) -> None:
    """Forget to unlock the old prefix when a request is handed over: its pages stay for ever."""
    manager = world.scheduler.cache_manager
    unlock = manager.unlock
    skipped = iter(range(1 << 30))
    patch.setattr(manager, "unlock", lambda handle: unlock(handle) if next(skipped) % 7 else None)


def share_a_bad_chunk(world: World, patch: MonkeyPatch) -> None:
    """Hand a chunk's KV to the cache although its logits were bad."""
    scheduler = world.scheduler
    process = scheduler._process_last_data

    def mutated(data: Any) -> None:
        for req, token in zip(data[0].batch.reqs, data[1].next_tokens_gpu.tolist()) if data else ():
            if token < 0 and not req.is_sampled:
                scheduler.cache_manager.cache_chunk(req)
        process(data)

    patch.setattr(scheduler, "_process_last_data", mutated)


def share_the_stale_chunk(world: World, patch: MonkeyPatch) -> None:
    """Hand a chunk over in its own name, although the next chunk holds its row and its lock."""
    manager = world.scheduler.cache_manager

    def mutated(chunk: Req) -> None:
        manager.cache_req(chunk, finished=False, length=len(chunk.input_ids))

    patch.setattr(manager, "cache_chunk", mutated)


def wait_for_ever(world: World, patch: MonkeyPatch) -> None:
    """Never forget what was once being computed, even if it failed or was evicted."""
    queue = world.scheduler.prefill_manager
    schedule = queue.schedule_next_batch
    seen: frozenset[Any] = frozenset()

    def mutated(budget: int) -> Any:
        nonlocal seen
        queue._in_flight = seen = seen | queue._in_flight
        return schedule(budget)

    patch.setattr(queue, "schedule_next_batch", mutated)


def overtake_a_waiting_request(world: World, patch: MonkeyPatch) -> None:
    """Let the next in the queue start while the head waits for a prefix."""
    queue = world.scheduler.prefill_manager
    schedule = queue.schedule_next_batch

    def mutated(budget: int) -> Any:
        batch = schedule(budget)
        if batch is None and queue.head_waits_for == "shared prefix":
            queue.pending_list.append(queue.pending_list.pop(0))
        return batch

    patch.setattr(queue, "schedule_next_batch", mutated)


def demands_of(promised: Promises) -> list[PageDemand]:
    """One by one."""
    fields = zip(promised.ints.T.tolist(), promised.prefixes)
    return [PageDemand(*ints, prefix, unused) for (*ints, unused), prefix in fields]


def change_the_demands(
    world: World, patch: MonkeyPatch, change: Callable[[PageDemand, list[PageDemand]], Any]
) -> None:
    """Let the policy see other demands: `change` gets the candidate's and those of the others."""
    queue = world.scheduler.prefill_manager
    policy = queue.policy

    def mutated(candidate: PageDemand, promised: Promises, pool: Any) -> bool:
        candidate, demands = change(candidate, demands_of(promised))
        return policy(candidate, Promises(demands), pool)

    patch.setattr(queue, "policy", mutated)


def release_a_step_early(world: World, patch: MonkeyPatch) -> None:
    """Count on pages of a request that ends before its results can have been processed."""
    patch.setattr(admission, "LAG", 0)


def charge_the_first_holder(world: World, patch: MonkeyPatch) -> None:
    """Let a shared page go when the first of its holders ends."""
    cache = world.scheduler.cache_manager.prefix_cache
    shared_lens = cache.shared_lens
    patch.setattr(cache, "shared_lens", lambda handles: shared_lens(handles[::-1])[::-1])


def take_hits_for_free(world: World, patch: MonkeyPatch) -> None:
    """Charge nothing for what a newcomer finds in the cache, though it keeps it longer."""

    def change(candidate: PageDemand, promised: list[PageDemand]) -> Any:
        hit = candidate.prefix.cached_len if candidate.prefix is not None else 0
        return dataclasses.replace(candidate, tokens=candidate.tokens - hit, prefix=None), promised

    change_the_demands(world, patch, change)


def ignore_the_shift(world: World, patch: MonkeyPatch) -> None:
    """Let the others decode while a prompt is computed: they would end that much sooner."""

    def change(candidate: PageDemand, promised: list[PageDemand]) -> Any:
        num_missing = candidate.tokens - candidate.prefix.cached_len  # type: ignore[union-attr]
        num_chunks = -(-num_missing // world.config.budget)
        return candidate, [
            dataclasses.replace(d, until=d.until - num_chunks, tokens=d.tokens + num_chunks)
            for d in promised
            if d.until >= num_chunks
        ]

    change_the_demands(world, patch, change)


def round_down_pages(world: World, patch: MonkeyPatch) -> None:
    """Count only full pages in the profile."""

    def change(candidate: PageDemand, promised: list[PageDemand]) -> Any:
        less = world.config.page_size - 1
        candidate, *promised = [
            dataclasses.replace(d, tokens=d.tokens - less) for d in [candidate, *promised]
        ]
        return candidate, promised

    change_the_demands(world, patch, change)


def forget_the_half_prefilled(world: World, patch: MonkeyPatch) -> None:
    """Take what is computed of a prompt for all that it needs."""

    queue, manager = world.scheduler.prefill_manager, world.scheduler.cache_manager
    promised = queue._promised

    def mutated() -> Promises:
        both = zip(demands_of(promised()), manager.holders, strict=True)
        return Promises(demand for demand, req in both if req.is_sampled)

    patch.setattr(queue, "_promised", mutated)


def forget_the_rest_of_the_batch(world: World, patch: MonkeyPatch) -> None:
    """Admit each of a batch as if the others of the batch had not been admitted."""

    def change(candidate: PageDemand, promised: list[PageDemand]) -> Any:
        return candidate, promised[: len(world.scheduler.cache_manager.holders)]

    change_the_demands(world, patch, change)


def forget_who_drains(world: World, patch: MonkeyPatch) -> None:
    """Count the pages of those whose last step is in flight as free."""

    def change(candidate: PageDemand, promised: list[PageDemand]) -> Any:
        return candidate, [d for d in promised if d.until > admission.LAG]

    change_the_demands(world, patch, change)


def spill_of(world: World) -> Any:
    """The second tier; without one, a world in which the mutant changes nothing."""
    return world.scheduler.cache_manager.spill


def reuse_pages_before_they_are_copied_out(world: World, patch: MonkeyPatch) -> None:
    """Let the next step write into evicted pages before the second tier has read them."""
    spill, engine = spill_of(world), world.engine
    if spill is None:
        return
    write, forward, late = spill._memory.write, engine.forward, []

    def note(slots: Any, data: Any) -> None:
        late.append((slots, noted[-1]))

    noted: list[Any] = []
    read_pages = engine.read_pages

    def read(pages: Any) -> Any:
        noted.append(pages)
        return read_pages(pages)

    def mutated(batch: Any) -> Any:
        logits = forward(batch)
        for slots, pages in late:
            write(slots, read_pages(pages))
        late.clear()
        return logits

    patch.setattr(spill._memory, "write", note)
    patch.setattr(engine, "read_pages", read)
    patch.setattr(engine, "forward", mutated)


def compute_before_it_is_copied_back(world: World, patch: MonkeyPatch) -> None:
    """Launch the copy of a restored prefix behind the step that reads it."""
    spill, engine = spill_of(world), world.engine
    if spill is None:
        return
    copy_back, forward, late = spill.copy_back, engine.forward, []

    def note(handle: Any, start: int, locations: torch.Tensor) -> bool:
        late.append((handle, start, locations))
        return True

    def mutated(batch: Any) -> Any:
        logits = forward(batch)
        for args in late:
            copy_back(*args)
        late.clear()
        return logits

    patch.setattr(spill, "copy_back", note)
    patch.setattr(engine, "forward", mutated)


def ignore_the_salt_of_the_second_tier(world: World, patch: MonkeyPatch) -> None:
    """Bring back what another salt left."""
    spill = spill_of(world)
    if spill is not None:
        found = spill.found
        patch.setattr(spill, "found", lambda ids, salt: found(ids, ""))


def let_the_tier_forget_what_is_found(world: World, patch: MonkeyPatch) -> None:
    """Push a prefix out of the second tier to make room while it is being copied."""
    spill = spill_of(world)
    if spill is not None:
        make = type(spill).clear

        def unlocked(tier: Any) -> None:
            make(tier)
            tier.index.lock_handle = lambda handle, unlock=False: None

        patch.setattr(type(spill), "clear", unlocked)
        spill.clear()


def take_spilled_hits_for_free(world: World, patch: MonkeyPatch) -> None:
    """Count what the second tier has as if it lay in the pool already."""
    spill = spill_of(world)
    if spill is None:
        return
    manager, queue = world.scheduler.cache_manager, world.scheduler.prefill_manager
    match, hits = manager.match_req, [0]

    def matched(req: PendingReq) -> MatchResult:
        result = match(req)
        with spill.found(req.input_ids[: req.input_len - 1], req.salt) as handle:
            hits[0] = max(handle.cached_len - result.cuda_handle.cached_len, 0)
        return result

    policy = queue.policy

    def mutated(candidate: PageDemand, promised: Promises, pool: Any) -> bool:
        less = hits[0] // manager.page_size
        fewer = dataclasses.replace(
            candidate, held=candidate.held + less, tokens=candidate.tokens - less
        )
        return policy(fewer, promised, pool)

    patch.setattr(manager, "match_req", matched)
    patch.setattr(queue, "policy", mutated)


def forget_the_pages_that_were_restored(world: World, patch: MonkeyPatch) -> None:
    """Free what was taken for a restored prefix although it is cached."""
    manager = world.scheduler.cache_manager
    lengthen = manager._lengthen

    def mutated(ids: Any, handle: Any, salt: str, locations: torch.Tensor) -> Any:
        manager._free(locations)
        return lengthen(ids, handle, salt, locations)

    patch.setattr(manager, "_lengthen", mutated)


def restore_the_wrong_pages(world: World, patch: MonkeyPatch) -> None:
    """Copy back from the first page on, wherever the pool is to go on."""
    spill = spill_of(world)
    if spill is not None:
        copy_back = spill.copy_back

        def mutated(handle: Any, start: int, locations: torch.Tensor) -> bool:
            return copy_back(handle, 0 if start else start, locations)

        patch.setattr(spill, "copy_back", mutated)


def preemptor_of(world: World) -> Preemptor:
    """What the mutants below break."""
    assert world.scheduler.preemptor is not None, "an optimistic world is needed"
    return world.scheduler.preemptor


def around_preempt(
    world: World, patch: MonkeyPatch, change: Callable[[Callable[[Req], None], Req], None]
) -> None:
    """Preempt as `change` does; it gets the right way and the request."""
    preemptor = preemptor_of(world)
    preempt = preemptor.preempt
    patch.setattr(preemptor, "preempt", lambda req: change(preempt, req))


def preempt_without_handing_over(world: World, patch: MonkeyPatch) -> None:
    """Keep the pages of a preempted request, as if it still ran."""
    manager = world.scheduler.cache_manager

    def change(preempt: Callable[[Req], None], req: Req) -> None:
        with MonkeyPatch.context() as local:
            local.setattr(manager, "cache_req", lambda req, **_: None)
            preempt(req)

    around_preempt(world, patch, change)


def free_a_preempted_twice(world: World, patch: MonkeyPatch) -> None:
    """Give the pages of a preempted request to the cache, and to the free list as well."""
    manager = world.scheduler.cache_manager

    def change(preempt: Callable[[Req], None], req: Req) -> None:
        pages = manager.page_table[req.table_idx, : manager.page_size].clone()
        preempt(req)
        manager._free(pages)

    around_preempt(world, patch, change)


def forget_the_spliced_tokens(world: World, patch: MonkeyPatch) -> None:
    """Begin the answer of a preempted request anew."""

    def change(preempt: Callable[[Req], None], req: Req) -> None:
        ids = req.pending.input_ids  # type: ignore[union-attr]
        preempt(req)
        req.pending.input_ids = ids  # type: ignore[union-attr]

    around_preempt(world, patch, change)


def take_an_answer_for_a_prompt(world: World, patch: MonkeyPatch) -> None:
    """Let a preempted request generate `max_tokens` once more."""

    def change(preempt: Callable[[Req], None], req: Req) -> None:
        preempt(req)
        req.pending.num_generated = 0  # type: ignore[union-attr]

    around_preempt(world, patch, change)


def go_on_with_a_preempted(world: World, patch: MonkeyPatch) -> None:
    """Leave a preempted request in the running set."""

    def change(preempt: Callable[[Req], None], req: Req) -> None:
        preempt(req)
        world.scheduler.decode_manager.filter_reqs([req])

    around_preempt(world, patch, change)


def preempt_the_oldest(world: World, patch: MonkeyPatch) -> None:
    """Put back who has come furthest."""
    preemptor = preemptor_of(world)

    def mutated(batch: Any) -> Req:
        return next(req for req in preemptor.cache_manager.holders if req.finish_reason is None)

    patch.setattr(preemptor, "_newest", mutated)


def preempt_the_last(world: World, patch: MonkeyPatch) -> None:
    """Put everybody back when pages run short."""
    preemptor = preemptor_of(world)
    make_room, manager = preemptor.make_room, preemptor.cache_manager

    def mutated(batch: Any) -> None:
        before = preemptor.num_preemptions
        make_room(batch)
        if preemptor.num_preemptions > before:
            for req in [req for req in manager.holders if req.finish_reason is None][::-1]:
                preemptor.preempt(req)
            batch.reqs.clear()

    patch.setattr(preemptor, "make_room", mutated)


def preempt_for_ever(world: World, patch: MonkeyPatch) -> None:
    """Start a request by the guess however often that went wrong."""
    patch.setattr(prefill, "MAX_PREEMPTIONS", 1 << 30)


def preempt_in_flight(world: World, patch: MonkeyPatch) -> None:
    """Preempt without waiting for the results of the step in flight."""
    patch.setattr(preemptor_of(world), "is_short", lambda: False)


def put_back_at_the_end(world: World, patch: MonkeyPatch) -> None:
    """Let a preempted request wait behind all others."""
    queue = world.scheduler.prefill_manager
    patch.setattr(queue, "put_back", queue.pending_list.append)


def see_the_shortage_too_late(world: World, patch: MonkeyPatch) -> None:
    """Preempt only when three pages are missing."""
    preemptor = preemptor_of(world)
    manager = preemptor.cache_manager
    missing, make_room = manager.num_missing_pages, preemptor.make_room

    def mutated(batch: Any) -> None:
        with MonkeyPatch.context() as local:
            local.setattr(manager, "num_missing_pages", lambda reqs: missing(reqs) - 2)
            make_room(batch)

    patch.setattr(preemptor, "make_room", mutated)


def join_in_time(world: World, patch: MonkeyPatch) -> None:
    """Take a prompt that is computed beside others for one that keeps step with them."""
    patch.setattr(admission, "most_steps_late", lambda num_missing, pace: 0)


def forget_to_age(world: World, patch: MonkeyPatch) -> None:
    """Let a request be overtaken for ever."""
    patch.setattr(Turns, "_is_aged", lambda turns, pending: False)


def overtake_once_more(world: World, patch: MonkeyPatch) -> None:
    """Look at who has waited long enough before a step only, not after each that starts in it."""
    patch.setattr(Turns, "may_start", lambda turns, pending: True)


def leave_one_behind(world: World, patch: MonkeyPatch) -> None:
    """Let the last of those that decode make room for a prompt."""
    answers = world.scheduler.decode_manager
    schedule = answers.schedule_next_batch

    def mutated() -> Any:
        batch = schedule()
        if batch is not None and batch.size > 1 and world.queue:
            batch.reqs.pop()
        return batch

    patch.setattr(answers, "schedule_next_batch", mutated)


def fill_mixed_batches(world: World, patch: MonkeyPatch) -> None:
    """Give prompts that are computed beside answers the budget of those that are not."""
    if world.config.mixed_chunk:
        patch.setattr(world.scheduler, "mixed_budget", world.config.budget)


def count_no_streak(world: World, patch: MonkeyPatch) -> None:
    """Forget how many batches of prompts have gone before."""
    scheduler = world.scheduler
    next_batch = scheduler._next_batch

    def mutated() -> Any:
        scheduler._prefill_streak = 0
        return next_batch()

    patch.setattr(scheduler, "_next_batch", mutated)


def let_everyone_in(world: World, patch: MonkeyPatch) -> None:
    """Forget the limit of the queue."""
    scheduler = world.scheduler
    patch.setattr(scheduler, "config", dataclasses.replace(scheduler.config, max_queued=0))


def let_the_late_finish(world: World, patch: MonkeyPatch) -> None:
    """End what waits when its deadline passes, but not what runs."""
    scheduler = world.scheduler
    expire = scheduler._expire

    def mutated(uid: int) -> None:
        if any(pending.uid == uid for pending in world.queue):
            expire(uid)

    patch.setattr(scheduler, "_expire", mutated)


Mutant = Callable[[World, MonkeyPatch], None]

ALWAYS: tuple[Mutant, ...] = (
    drop_the_repointing,
    drop_a_lock,
    reserve_tokens,
    free_twice,
    forget_the_duplicates,
    release_in_flight,
    match_the_whole_prompt,
    ignore_the_salt,
    share_what_failed,
    keep_the_old_lock,
    share_a_bad_chunk,
    share_the_stale_chunk,
    wait_for_ever,
    overtake_a_waiting_request,
    reuse_pages_before_they_are_copied_out,
    compute_before_it_is_copied_back,
    ignore_the_salt_of_the_second_tier,
    let_the_tier_forget_what_is_found,
    take_spilled_hits_for_free,
    forget_the_pages_that_were_restored,
    restore_the_wrong_pages,
)
PEAK: tuple[Mutant, ...] = (
    release_a_step_early,
    charge_the_first_holder,
    take_hits_for_free,
    ignore_the_shift,
    round_down_pages,
    forget_the_half_prefilled,
    forget_the_rest_of_the_batch,
    forget_who_drains,
)
OPTIMISTIC: tuple[Mutant, ...] = (
    preempt_without_handing_over,
    free_a_preempted_twice,
    forget_the_spliced_tokens,
    take_an_answer_for_a_prompt,
    go_on_with_a_preempted,
    preempt_the_oldest,
    preempt_the_last,
    preempt_for_ever,
    preempt_in_flight,
    put_back_at_the_end,
    see_the_shortage_too_late,
)
UNFAIR: tuple[Mutant, ...] = (
    join_in_time,
    forget_to_age,
    overtake_once_more,
    leave_one_behind,
    fill_mixed_batches,
    count_no_streak,
    let_everyone_in,
    let_the_late_finish,
)
MUTANTS: dict[str, Mutant] = {f.__name__: f for f in (*ALWAYS, *PEAK, *OPTIMISTIC, *UNFAIR)}
# What a world must be like for a mutant to be wrong in it, or to be wrong in it often.
WORLD_OF: dict[str, dict[str, Any]] = {f.__name__: {"admission": "peak"} for f in PEAK}
WORLD_OF |= {f.__name__: {"admission": "optimistic"} for f in OPTIMISTIC}
WORLD_OF["join_in_time"] = {"admission": "peak"}
WORLD_OF["reserve_tokens"] = {"admission": "conservative"}
CROWDED: dict[str, Any] = {"num_rows": 8, "num_pages": 40}
WORLD_OF["charge_the_first_holder"] |= CROWDED | {"budget": 10_000, "vocab_size": 2}
WORLD_OF["preempt_for_ever"] |= CROWDED | {"admission_share": 0.001}
