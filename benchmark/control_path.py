"""What the scheduler itself costs, on an engine without a model. python benchmark/control_path.py

Four tables, all on one thread:
* a decode step by the number of running requests: scheduling (who runs, pages, the arrays that a
  forward reads, the attention metadata, the sampling arguments), launching, processing the results,
  and the whole turn of the loop; with `--waiting N`, while so many others wait and do not fit;
* an abort in a queue of `--queue` requests, first and last in it;
* matching, locking and unlocking a cached prompt of 100,000 tokens, in one piece and in many;
* `--total` requests one after the other through 256 rows: the time and the memory of each tenth.

Times are medians. `--profile` adds where the time of a step and of a request goes, by function,
which cProfile makes several times slower: read its shares only. What is not asked for by `--only`
is left out; the exit status says whether the limits hold.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.core import Batch, SamplingParams, Spans
from minisgl.engine import Sampler
from minisgl.kernel import native
from minisgl.kernel.native_attention import PageTable
from minisgl.kvcache import RadixPrefixCache
from minisgl.message import AbortBackendMsg, BaseBackendMsg, DetokenizeMsg, UserMsg
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.utils import align_ceil, zeros_as_used

VOCAB_SIZE = 32_000
WARM_STEPS = 5
STEP_LIMIT = 1e-3  # seconds, 256 requests
LINEAR_LIMIT = 1.5  # microseconds per request with 4,096, over those with 256
MATCH_LEN, MATCH_LIMIT = 100_000, 5e-3
MEMORY_LIMIT = 8 << 20  # bytes that the last nine tenths may add


class Event:
    """Ready at once."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Output(NamedTuple):
    """The tokens of one step, int32 `(requests,)`."""

    next_tokens_gpu: np.ndarray[Any, Any]
    next_tokens_cpu: np.ndarray[Any, Any]
    copy_done_event: Event


class Engine:
    """An engine that prepares like a real one on a CPU, and computes nothing."""

    def __init__(self, num_pages: int, page_size: int, num_rows: int, max_len: int) -> None:
        self.device = torch.device("cpu")
        self.num_pages, self.page_size = num_pages, page_size
        self.max_seq_len = min(max_len, num_pages * page_size)
        self.vocab_size = VOCAB_SIZE
        width = align_ceil(self.max_seq_len, page_size)
        self.page_table = zeros_as_used((num_rows + 1, width), torch.int32, self.device)
        self.sampler = Sampler(self.device, VOCAB_SIZE, 0)
        self.table = PageTable(self.page_table) if native.available() else None
        self.tokens = np.full(num_rows, 7, dtype=np.int32)

    def pad_batch(self, batch: Batch) -> None:
        """No padding."""

    def prepare(self, batch: Batch) -> Any:
        """The attention metadata (with the native kernels) and the sampling arguments."""
        if self.table is not None:
            rows, starts, ends, _ = batch.spans or Spans.of(batch.padded_reqs)
            self.table.snapshot(rows, ends - starts, ends, self.num_pages * self.page_size)
        return self.sampler.prepare(batch)

    def launch_order(self) -> AbstractContextManager[None]:
        """Program order."""
        return nullcontext()

    def forward(self, batch: Batch) -> None:
        """Nothing."""

    def sample(self, batch: Batch, logits: None, args: Any) -> Output:
        """The same token for all."""
        tokens = self.tokens[: batch.size]
        return Output(tokens, tokens, Event())

    def shutdown(self) -> None:
        """Nothing to let go of."""


class World:
    """A scheduler with its engine and its IO; `times` has the seconds of each timed method."""

    def __init__(
        self, num_pages: int, page_size: int, num_rows: int, max_len: int, admission: str
    ) -> None:
        config = SchedulerConfig(
            "sim",
            page_size=page_size,
            max_running_req=num_rows,
            max_extend_tokens=1 << 20,
            admission=admission,
        )
        engine = Engine(num_pages, page_size, num_rows, max_len)
        self.scheduler = Scheduler(config, engine, self, eos_token_ids=[0])
        self.inbox: list[BaseBackendMsg] = []
        self.num_finished = 0
        self.times: dict[str, list[float]] = {}

    def receive(self, blocking: bool) -> Sequence[BaseBackendMsg]:
        """Everything that was sent since the last turn."""
        msgs, self.inbox = self.inbox, []
        return msgs

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Count those that have ended."""
        self.num_finished += sum([reply.finished for reply in replies])

    def submit(self, uid: int, prompt: np.ndarray[Any, Any], max_tokens: int) -> None:
        """Send one request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.inbox.append(UserMsg(uid, torch.from_numpy(prompt), params))

    def time_method(self, name: str) -> None:
        """Put a clock around a method of the scheduler."""
        original, times = getattr(self.scheduler, name), self.times.setdefault(name, [])

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = original(*args)
            times.append(time.perf_counter() - start)
            return result

        setattr(self.scheduler, name, timed)


PARTS = ("_schedule_next_batch", "_launch", "_process_last_data", "normal_loop")


def make_running(args: argparse.Namespace, num_reqs: int, num_waiting: int) -> World:
    """A world whose prompts are computed and whose requests have room for all steps."""
    rng = np.random.default_rng(0)
    num_steps = args.steps + 4 * WARM_STEPS
    length = align_ceil(args.prompt + num_steps, args.page_size)
    max_len = length + 2 * num_reqs  # too long for what those that run leave unused
    num_pages = num_reqs * length // args.page_size
    world = World(num_pages, args.page_size, num_reqs + 1, max_len, args.admission)
    for uid in range(num_reqs):
        prompt = rng.integers(1, VOCAB_SIZE, args.prompt, dtype=np.int32)
        world.submit(uid, prompt, length - args.prompt)
    world.scheduler.normal_loop()
    for uid in range(num_reqs, num_reqs + num_waiting):
        prompt = rng.integers(1, VOCAB_SIZE, args.prompt, dtype=np.int32)
        world.submit(uid, prompt, max_len - args.prompt)
    for _ in range(WARM_STEPS):
        world.scheduler.normal_loop()
    return world


def measure_steps(args: argparse.Namespace, num_reqs: int) -> dict[str, float]:
    """Median seconds of each part of a decode step."""
    world = make_running(args, num_reqs, args.waiting)
    for name in PARTS:
        world.time_method(name)
    gc.collect()
    for _ in range(args.steps):
        world.scheduler.normal_loop()
    assert len(world.scheduler.decode_manager.running_reqs) >= num_reqs
    return {name: statistics.median(times) for name, times in world.times.items()}


def show_steps(args: argparse.Namespace) -> bool:
    """Table 1."""
    wait = f", {args.waiting} waiting" if args.waiting else ""
    print(f"a decode step, page size {args.page_size}{wait}; us, and us per request of the turn")
    print(f"{'requests':>9} {'schedule':>9} {'launch':>9} {'process':>9} {'turn':>9} {'each':>6}")
    turns = {}
    for num_reqs in args.requests:
        found = measure_steps(args, num_reqs)
        turns[num_reqs] = found["normal_loop"]
        columns = " ".join(f"{found[name] * 1e6:9.0f}" for name in PARTS)
        each = found["normal_loop"] / num_reqs * 1e6
        print(f"{num_reqs:>9} {columns} {each:6.2f}", flush=True)
    is_good = turns.get(256, 0.0) < STEP_LIMIT
    if 256 in turns and 4096 in turns:
        is_good &= turns[4096] / 4096 < LINEAR_LIMIT * turns[256] / 256
    print(f"limits: 1 ms for 256, at most {LINEAR_LIMIT} times as much for each of 4,096\n")
    return is_good


def show_aborts(args: argparse.Namespace) -> bool:
    """Table 2."""
    world = make_running(args, 256, args.queue)
    print(f"a turn with 256 running and an abort in a queue of {args.queue:,}; us")
    for where, uids in (("first", range(256, 276)), ("last", range(args.queue + 255, 0, -1))):
        times = []
        for uid, _ in zip(uids, range(20)):
            world.inbox.append(AbortBackendMsg(uid))
            start = time.perf_counter()
            world.scheduler._receive(may_block=False)
            times.append(time.perf_counter() - start)
        print(f"  {where:>5} {statistics.median(times) * 1e6:9.1f}")
    print()
    return True


def show_matching(args: argparse.Namespace) -> bool:
    """Table 3."""
    print(f"a cached prompt of {MATCH_LEN:,} tokens; us")
    print(f"{'pieces':>9} {'page':>5} {'match':>9} {'lock':>9} {'locations':>9}")
    is_good = True
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, MATCH_LEN, dtype=np.int32)
    ids = torch.from_numpy(prompt)
    locations = torch.arange(MATCH_LEN, dtype=torch.int32)
    for page_size in (1, 16):
        for num_pieces in (1, 25, 500):
            cache = RadixPrefixCache("cpu", page_size)
            for end in range(MATCH_LEN // num_pieces, MATCH_LEN + 1, MATCH_LEN // num_pieces):
                cache.insert_prefix(ids[:end], locations[:end])
            times: list[list[float]] = [[], [], []]
            for _ in range(args.repeats):
                start = time.perf_counter()
                handle = cache.match_prefix(ids).cuda_handle
                matched = time.perf_counter()
                cache.lock_handle(handle)
                cache.lock_handle(handle, unlock=True)
                locked = time.perf_counter()
                found = handle.get_matched_indices()
                end_time = time.perf_counter()
                assert len(found) == MATCH_LEN
                for column, taken in zip(
                    times, (matched - start, locked - matched, end_time - locked)
                ):
                    column.append(taken)
            medians = [statistics.median(column) for column in times]
            columns = " ".join(f"{median * 1e6:9.0f}" for median in medians)
            print(f"{num_pieces:>9} {page_size:>5} {columns}", flush=True)
            is_good &= medians[0] < MATCH_LIMIT
    print(f"limit: {MATCH_LIMIT * 1e3:g} ms to match\n")
    return is_good


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def serve(world: World, num_reqs: int, rng: random.Random, ids: np.ndarray[Any, Any]) -> None:
    """Requests of 8 to 40 tokens with answers of 1 to 8, some with a common beginning."""
    scheduler, first = world.scheduler, world.num_finished
    num_sent = 0
    while world.num_finished - first < num_reqs:
        while num_sent < num_reqs and num_sent - (world.num_finished - first) < 1024:
            start = rng.randrange(len(ids) - 64)
            prompt = ids[start : start + rng.randint(8, 40)].copy()
            if num_sent % 4 == 0:
                prompt[:8] = ids[:8]
            world.submit(first + num_sent, prompt, rng.randint(1, 8))
            num_sent += 1
        scheduler.normal_loop()


def show_many(args: argparse.Namespace) -> bool:
    """Table 4."""
    rng = random.Random(0)
    ids = np.random.default_rng(0).integers(1, VOCAB_SIZE, 1 << 22, dtype=np.int32)
    world = World(16_384, args.page_size, 256, 1024, args.admission)
    print(f"{args.total:,} requests, 1,024 at a time, 256 rows")
    print(f"{'requests':>10} {'CPU us each':>12} {'resident MB':>12}")
    sizes = []
    num_each = args.total // 10
    for tenth in range(1, 11):
        start = time.process_time()
        serve(world, num_each, rng, ids)
        each = (time.process_time() - start) / num_each * 1e6
        gc.collect()
        sizes.append(resident_bytes())
        print(f"{tenth * num_each:>10,} {each:12.1f} {sizes[-1] / 1e6:12.1f}", flush=True)
    world.scheduler.cache_manager.check_integrity()
    grown = sizes[-1] - sizes[0]
    print(f"the last nine tenths added {grown / 1e6:.1f} MB, {MEMORY_LIMIT / 1e6:.1f} allowed\n")
    return grown < MEMORY_LIMIT


@contextmanager
def profiled(what: str) -> Iterator[None]:
    """Print where the time inside goes, by functions' own time."""
    profile = cProfile.Profile()
    with profile:
        yield
    print(f"profile of {what}")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(25)


def show_profiles(args: argparse.Namespace) -> bool:
    """Where the time of decode steps of 256, and of 20,000 requests, goes."""
    world = make_running(args, 256, args.waiting)
    with profiled(f"{args.steps} decode steps of 256"):
        for _ in range(args.steps):
            world.scheduler.normal_loop()
    ids = np.random.default_rng(0).integers(1, VOCAB_SIZE, 1 << 20, dtype=np.int32)
    world = World(16_384, args.page_size, 256, 1024, args.admission)
    serve(world, 5_000, random.Random(0), ids)
    with profiled("20,000 requests"):
        serve(world, 20_000, random.Random(1), ids)
    return True


TABLES: dict[str, Callable[[argparse.Namespace], bool]] = {
    "steps": show_steps,
    "aborts": show_aborts,
    "matching": show_matching,
    "many": show_many,
}


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=TABLES, default=list(TABLES), metavar="TABLE",
                        help=f"of {', '.join(TABLES)}")  # fmt: skip
    parser.add_argument("--requests", type=numbers, default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=100, help="decode steps of each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of their prompts")
    parser.add_argument("--waiting", type=int, default=0, help="requests that do not fit meanwhile")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--admission", default="conservative")
    parser.add_argument(
        "--queue", type=int, default=10_000, help="requests in the queue of table 2"
    )
    parser.add_argument("--repeats", type=int, default=50, help="of each match")
    parser.add_argument("--total", type=int, default=1_000_000, help="requests of table 4")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    results = [TABLES[name](args) for name in args.only]
    if args.profile:
        show_profiles(args)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
