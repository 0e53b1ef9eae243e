"""Small worlds under Hypothesis: a failing history shrinks to the shortest one that fails."""

from __future__ import annotations

import logging
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.config import QUEUE_ORDERS

from .engine import STAGES
from .world import World, WorldConfig

configs = st.builds(
    WorldConfig,
    page_size=st.sampled_from([1, 2, 3, 4]),
    num_pages=st.integers(2, 9),
    num_rows=st.integers(1, 3),
    budget=st.sampled_from([1, 2, 3, 5, 100]),
    cache_type=st.sampled_from(["radix", "radix", "naive"]),
    overlap=st.booleans(),
    vocab_size=st.integers(2, 3),
    pad_decode_to=st.sampled_from([1, 2]),
    share_prefixes=st.sampled_from([0, 1, 1, 3]),
    spill_pages=st.sampled_from([0, 1, 2, 3, 9]),
    max_prefill_streak=st.sampled_from([0, 0, 1, 2]),
    mixed_chunk=st.sampled_from([0, 0, 1, 3]),
    queue_order=st.sampled_from(["fcfs", *QUEUE_ORDERS]),
    max_overtaken=st.integers(0, 3),
    max_queued=st.sampled_from([0, 0, 2]),
).map(lambda c: c if c.cache_type == "radix" else replace(c, spill_pages=0))
policies = st.sampled_from(
    [("conservative", None), ("peak", None), ("optimistic", None), ("optimistic", 0.05)]
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class SchedulerMachine(RuleBasedStateMachine):
    """Rules send events and turn the loop; the world checks every property after every step."""

    @initialize(config=configs, policy=policies)
    def build(self, config: WorldConfig, policy: tuple[str, float | None]) -> None:
        logging.getLogger("minisgl").setLevel(logging.CRITICAL)
        admission, share = policy
        self.world = World(replace(config, admission=admission, admission_share=share))
        self.num_uids = 0
        self.sent: list[list[int]] = []

    def new_uid(self) -> int:
        self.num_uids += 1
        return self.num_uids - 1

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from(["", "", "a"]),
        ignore_eos=st.booleans(),
        is_spoilt=st.sampled_from([None, None, None, -2, 0, 1]),
        priority=st.integers(0, 2),
        rest=st.sampled_from([None, None, None, 0, 3]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        salt: str,
        ignore_eos: bool,
        is_spoilt: int | None,
        priority: int,
        rest: int | None,
    ) -> None:
        self.sent.append(prompt)
        self.world.submit(
            self.new_uid(),
            prompt,
            max_tokens,
            salt=salt,
            ignore_eos=ignore_eos,
            nan_after=is_spoilt,
            priority=priority,
            deadline=None if rest is None else self.world.num_steps + rest,
        )

    @rule(which=st.integers(0, 20), count=st.integers(1, 2), num_more=st.integers(0, 2))
    def submit_again(self, which: int, count: int, num_more: int) -> None:
        if self.sent:
            prompt = self.sent[which % len(self.sent)] + [0] * num_more
            for _ in range(count):
                self.world.submit(self.new_uid(), prompt, 3)

    @rule(back=st.integers(0, 5))
    def abort(self, back: int) -> None:
        if self.num_uids:
            self.world.abort(max(self.num_uids - 1 - back, 0))

    @rule(prompt=prompts)
    def abort_before_submit(self, prompt: list[int]) -> None:
        uid = self.new_uid()
        self.world.abort(uid)
        self.world.submit(uid, prompt, 2)

    @rule()
    def abort_unknown(self) -> None:
        self.world.abort(self.new_uid())

    @rule(stage=st.sampled_from(STAGES))
    def fail_the_next_step(self, stage: str) -> None:
        self.world.fail(stage)

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @rule()
    def reload(self) -> None:
        if self.world.config.cache_type == "radix":
            self.world.reload()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule()
    def drain(self) -> None:
        self.world.drain()

    @invariant()
    def nothing_is_out_of_place(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.flush()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
