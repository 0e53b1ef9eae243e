"""Eight steps of a pool of nine pages, drawn: the free list, the tree, the rows.

    python examples/pages_over_time.py

No model is needed: the engine here answers with letters. The scheduler, the page table and the
prefix cache are the real ones. docs/kvcache.md shows this output.

Look at: a page is in exactly one place, or in the tree and in the rows of all who share it. At time
1 two prompts that begin alike are both computed, and the second gives its copy back. At time 3 a
third one finds everything but its end in the tree. At time 7 no page is free, and the leaf that was
used least recently gives up its own.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from minisgl import SamplingParams
from minisgl.config import SchedulerConfig
from minisgl.message import UserMsg
from minisgl.scheduler import Scheduler

NUM_PAGES, PAGE_SIZE, NUM_ROWS = 9, 2, 3
REQUESTS = {  # time of arrival: uid, prompt, longest answer
    1: [(0, "ABCDE", 4), (1, "ABCF", 2)],
    3: [(2, "ABCDGH", 2)],
    6: [(3, "KLMNOP", 3)],
}


class Letters:
    """An engine without a model: the n-th token of an answer is the n-th letter of the end."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.num_pages, self.vocab_size = NUM_PAGES, 128
        self.max_seq_len = NUM_PAGES * PAGE_SIZE
        self.page_table = torch.zeros((NUM_ROWS + 1, self.max_seq_len), dtype=torch.int32)
        self.launch_order = nullcontext

    def pad_batch(self, batch):
        """Nothing to pad."""

    def prepare(self, batch):
        """Nothing to prepare."""

    def forward(self, batch):
        """How many tokens each request has answered so far."""
        return [req.output_len - req.remain_len for req in batch.reqs]

    def sample(self, batch, num_answered, args):
        """u, v, w, ..."""
        tokens = torch.tensor([ord("u") + n for n in num_answered], dtype=torch.int32)
        done = SimpleNamespace(synchronize=lambda: None)
        return SimpleNamespace(next_tokens_gpu=tokens, next_tokens_cpu=tokens, copy_done_event=done)


class Inbox(list):
    """The scheduler's IO: requests go in, replies are not looked at."""

    def receive(self, blocking):
        """Everything that has arrived."""
        msgs = self[:]
        self.clear()
        return msgs

    def send(self, replies):
        """Drop them."""


def pages(locations, ids):
    """Pages with what they hold: `3:CD`."""
    heads = locations.tolist()[::PAGE_SIZE]
    text = "".join(map(chr, ids.tolist()))
    return " ".join(
        f"{head // PAGE_SIZE}:{text[PAGE_SIZE * i : PAGE_SIZE * (i + 1)]}"
        for i, head in enumerate(heads)
    )


def draw_tree(node, depth=0):
    """One line per node: its pages, and how many running requests hold them."""
    for child in node.children.values():
        holders = f"held by {child.ref_count}" if child.ref_count else "can be evicted"
        yield f"{'  ' * depth}{pages(child.indices, child.key)}  {holders}"
        yield from draw_tree(child, depth + 1)


def draw(time, record, scheduler):
    """The state after a step has been processed."""
    cache = scheduler.cache_manager
    uids = " ".join(map(str, record.uids))
    waits = f"   the next waits for {record.head_waits_for}" if record.waiting else ""
    print(f"time {time}  {record.phase} {uids}{waits}")
    free = " ".join(str(slot // PAGE_SIZE) for slot in cache.free_slots.tolist())
    print(f"  free   {free}")
    for req in sorted(scheduler.decode_manager.running_reqs, key=lambda req: req.uid):
        row = scheduler.engine.page_table[req.table_idx]
        shown = pages(row[: req.cached_len], req.input_ids[: req.cached_len])
        print(f"  row {req.table_idx}  {shown}   request {req.uid}, next {chr(req.input_ids[-1])}")
    for i, line in enumerate(draw_tree(cache.prefix_cache.root_node)):
        print(f"  {'tree ' if i == 0 else '     '}  {line}")


def main():
    """Run until nothing is left to do."""
    inbox, records = Inbox(), []
    config = SchedulerConfig("letters", page_size=PAGE_SIZE, max_running_req=NUM_ROWS)
    scheduler = Scheduler(config, Letters(), inbox)
    scheduler.step_listeners.append(records.append)
    time = 0
    while time < max(REQUESTS) or not scheduler.is_idle:
        time += 1
        for uid, prompt, max_tokens in REQUESTS.get(time, []):
            params = SamplingParams(max_tokens=max_tokens)
            inbox.append(UserMsg(uid, list(map(ord, prompt)), params))
        scheduler.normal_loop()
        scheduler.cache_manager.check_integrity()
        draw(time, records[-1], scheduler)


if __name__ == "__main__":
    main()
