"""Random worlds and random histories, each from one seed.

A `Case` is all that a run depends on; it is one line of JSON, printed when a run fails. Because the
generator may change, what once failed is kept as its history (`replay`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minisgl.config import QUEUE_ORDERS

from .engine import STAGES
from .replay import violation_of
from .world import World, WorldConfig

MAX_QUEUE = 12
SALTS = ("", "", "", "", "", "a", "b")


@dataclass(frozen=True)
class Case:
    """One reproducible run. What the seed does not fix is given here.

    world: fields of the `WorldConfig` that are not drawn.
    """

    seed: int
    page_size: int = 1
    cache_type: str = "radix"
    overlap: bool = False
    num_steps: int = 1000
    shares: bool = True
    is_fair: bool = True
    world: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """A case from its line."""
        return cls(**json.loads(text))


def random_config(case: Case, rng: random.Random) -> WorldConfig:
    """A world whose size hurts: few pages, few rows, a budget from 1."""
    num_pages = rng.choice([2, 3, rng.randint(4, 12), rng.randint(4, 60), rng.randint(4, 60)])
    policies = ["conservative", "peak", "peak", "optimistic", "optimistic"]
    admission = case.world.get("admission") or rng.choice(policies)
    is_optimistic = admission == "optimistic"
    if is_optimistic:
        num_pages = rng.choice([num_pages, rng.randint(8, 60)])
    config = WorldConfig(
        page_size=case.page_size,
        num_pages=num_pages,
        num_rows=rng.choice([1, 2, 3, rng.randint(2, 8)]) + is_optimistic,
        budget=rng.choice([1, 2, rng.randint(1, 8), rng.randint(4, 64), 10_000]),
        cache_type=case.cache_type,
        overlap=case.overlap,
        vocab_size=rng.choice([2, 3, 5, 9]),
        max_len=rng.choice([256, 256, rng.randint(2, 64)]),
        pad_decode_to=rng.choice([1, 1, 2, 4]),
        share_prefixes=rng.choice([0, 1, 1, rng.randint(1, 8)]) if case.shares else 0,
        admission=admission,
        admission_share=rng.choice([None, 0.001, 0.05, 0.3]) if is_optimistic else None,
        spill_pages=random_spill(case, num_pages),
    )
    config = random_fairness(config, rng) if case.is_fair else config
    return dataclasses.replace(config, **case.world)


def random_fairness(config: WorldConfig, rng: random.Random) -> WorldConfig:
    """Every combination of who is protected, who is next, and who may wait."""
    return dataclasses.replace(
        config,
        max_prefill_streak=rng.choice([0, 0, 1, 2, 4]),
        mixed_chunk=rng.choice([0, 0, 1, rng.randint(1, 8), 64]),
        queue_order=rng.choice(["fcfs", *QUEUE_ORDERS]),
        max_overtaken=rng.choice([0, 1, 2, 5, 40]),
        max_queued=rng.choice([0, 0, 0, rng.randint(1, 6)]),
    )


def random_spill(case: Case, num_pages: int) -> int:
    """Slots of the second tier, from a source of its own: the rest of the world stays the same."""
    rng = random.Random(case.seed)
    return rng.choice([0, 1, rng.randint(2, 2 * num_pages)]) if case.cache_type == "radix" else 0


class Driver:
    """Feeds one world random events. `pressure` is how many events a step gets on average.

    is_fair: requests have priorities and, in some worlds, deadlines.
    """

    def __init__(self, world: World, rng: random.Random, *, is_fair: bool) -> None:
        self.world = world
        self.rng = rng
        self.is_fair = is_fair
        self.late_rate = rng.choice([0.0, 0.0, 0.2]) if is_fair else 0.0
        self.next_uid = 0
        self.grows = world.config.admission != "conservative" and rng.random() < 0.8
        self.pressure = 0.5 if self.grows else rng.choice([0.05, 0.2, 0.5])
        self.abort_rate = rng.choice([0.0, 0.1, 0.4])
        self.fault_rate = rng.choice([0.0, 0.0, 0.1, 0.3])
        self.goes_on = (
            self.grows or rng.random() < 0.4
        )  # answers of many lengths, which no EOS ends
        self.prompts: list[list[int]] = [[]]
        self.reserved: list[int] = []

    def step(self) -> None:
        """A few random events, then one step of the scheduler."""
        rng = self.rng
        while rng.random() < self.pressure:
            self._one_event()
        if not self.world.is_busy and rng.random() < 0.8:
            self._submit(self._new_uid())
        if self.fault_rate and rng.random() < self.fault_rate / 10:
            self.world.fail(rng.choice(STAGES))
        self.world.step()

    def _one_event(self) -> None:
        rng = self.rng
        draw = rng.random()
        if draw < self.abort_rate:
            self._abort()
        elif draw > 0.995 or (draw > 0.99 and self.world.config.cache_type == "naive"):
            self.world.flush()
        elif draw > 0.99:
            self.world.reload()
        elif draw > 0.988:
            self.world.reset()
        elif self.reserved and rng.random() < 0.3:
            self._submit(self.reserved.pop(0))
        elif len(self.world.queue) < MAX_QUEUE:
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                self._submit(self._new_uid())

    def _new_uid(self) -> int:
        self.next_uid += 1
        return self.next_uid - 1

    def _abort(self) -> None:
        """A live request, a recent one, any, an unknown one, or one yet to be submitted."""
        rng, live = self.rng, self.world.live
        if live and rng.random() < 0.5:
            uid = live[rng.choice(sorted(live))].uid
        elif rng.random() < 0.1:
            uid = self._new_uid()
            if rng.random() < 0.5:
                self.reserved.append(uid)
        else:
            first = max(self.next_uid - 12, 0) if rng.random() < 0.9 else 0
            uid = rng.randint(first, self.next_uid)
            if uid == self.next_uid:
                uid = self._new_uid()  # unknown, and never to be submitted
        self.world.abort(uid)
        if rng.random() < 0.1:
            self.world.abort(uid)

    def _submit(self, uid: int) -> None:
        rng, limit = self.rng, self.world.engine.max_seq_len
        prompt = self._prompt(limit)[: limit // 4 + 1 if self.grows else limit + 1]
        rest = max(limit - len(prompt), 1)
        short = min(rest, rng.choice([4, 4, 2 * self.world.config.page_size]))
        max_tokens = rng.choice([1, rng.randint(1, short), rng.randint(1, short), rest + 2])
        if self.goes_on:
            max_tokens = rng.randint(1, max(rest // (1 if self.grows else 2), 1))
        learns = self.grows and self.world.config.admission_share is None
        stops = learns and uid % 60 < 40  # then answers are longer than the latest were
        self.world.submit(
            uid,
            prompt,
            max_tokens,
            ends_after=max(max_tokens // 8, 1) if stops else None,
            salt=rng.choice(SALTS),
            ignore_eos=self.goes_on or rng.random() < 0.5,
            stop_ids=[1] if rng.random() < 0.1 else [],
            nan_after=rng.choice([rng.randint(0, 3), -rng.randint(1, len(prompt) + 1)])
            if rng.random() < self.fault_rate
            else None,
            priority=rng.choice([0, 0, 0, rng.randint(-2, 2)]) if self.is_fair else 0,
            deadline=self.world.num_steps + rng.randint(-1, 30)
            if self.late_rate and rng.random() < self.late_rate
            else None,
        )

    def _prompt(self, limit: int) -> list[int]:
        """The same again, another end to an old one, a longer one, or something new."""
        rng, vocab_size = self.rng, self.world.config.vocab_size
        kind = rng.random()
        prompt = list(rng.choice(self.prompts))
        if kind < 0.7:
            prompt = prompt[: rng.randint(0, len(prompt))] if kind > 0.2 else prompt
            num_new = rng.choice([0, 1, rng.randint(0, 2 * self.world.config.page_size)])
        else:
            prompt, num_new = [], rng.randint(1, min(limit, 40) + 1)
        if kind > 0.9 and self.next_uid:
            entry = self.world.book.get(rng.randrange(max(self.next_uid - 20, 0), self.next_uid))
            if entry is not None:  # the next turn of a conversation
                prompt, num_new = entry.prompt + entry.answer, rng.randint(0, 2)
        prompt += [rng.randrange(vocab_size) for _ in range(num_new)]
        if len(prompt) >= limit and rng.random() < 0.95:
            prompt = prompt[: limit - 1]
        self.prompts = [*self.prompts[-7:], prompt]
        return prompt


def run_case(
    case: Case, *, checks_all: bool = True, prepare: Callable[[World], None] | None = None
) -> World:
    """Run one case to its end; what goes wrong is raised with the case's line.

    prepare: called with the world before its first step, to break it or to watch it.
    """
    logging.getLogger("minisgl").setLevel(logging.CRITICAL)  # injected faults are not news
    rng = random.Random(case.to_json())
    world = World(random_config(case, rng), checks_all=checks_all)
    driver = Driver(world, rng, is_fair=case.is_fair)
    if prepare is not None:
        prepare(world)
    try:
        for _ in range(case.num_steps):
            driver.step()
        world.drain()
        world.flush()
    except Exception as error:
        raise violation_of(world, error, case.to_json()) from error
    return world
