"""How many requests run at once under each admission policy? python benchmark/admission.py

500 requests that come together, prompt and max_tokens uniform in 100 to 1,024 tokens, a pool of
20,000 tokens, on the simulated engine, twice: answers take all they may, and answers stop at 10 to
60 % of it. Printed are the mean number of running requests, decode steps, both relative to the
conservative policy, how many more tokens were computed than under it, and preemptions. The second
load runs again on the default model, with lengths and pool an eighth, and 200 requests. Then 100
small random traces with shared prefixes, chunked prompts, aborts, pages of 1, 4 and 16 tokens and
both loops. The simulated world holds every token against what the request alone would get, counts
each page after every step (of the large loads every 32nd), and raises at the first allocation that
fails; on the model all policies must give the same tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minisgl.core import FinishReason, SamplingParams
from minisgl.llm import LLM
from minisgl.message import AbortBackendMsg, DetokenizeMsg
from minisgl.scheduler import Scheduler, StepRecord
from minisgl.scheduler.admission import POLICIES

from tests.sim.world import World, WorldConfig

MORE_AT_ONCE, FEWER_STEPS = 1.3, 0.77
FEWER_STEPS_WITH_STOPS, MOST_RECOMPUTED = 0.68, 0.05
STOPS = (0.1, 0.6)


@dataclass(frozen=True)
class Load:
    """Requests and the world they meet: lengths uniform in `shortest` to `longest`, both.

    shared: how many tokens at most a prompt has in common with others. abort_rate: the share of
    requests that are aborted after a while. stops: the shares of `max_tokens` between which answers
    stop, None if none does.
    """

    config: WorldConfig
    num_requests: int = 500
    shortest: int = 100
    longest: int = 1024
    shared: int = 0
    abort_rate: float = 0.0
    seed: int = 0
    stops: tuple[float, float] | None = None
    check_every: int = 1

    def lengths(self, rng: random.Random) -> tuple[int, int, int | None]:
        """Of one more request: prompt, max_tokens, and after how many tokens it stops."""
        prompt_len = rng.randint(self.shortest, self.longest)
        max_tokens = rng.randint(self.shortest, self.longest)
        if self.stops is None:
            return prompt_len, max_tokens, None
        return prompt_len, max_tokens, max(int(max_tokens * rng.uniform(*self.stops)), 1)


@dataclass
class Result:
    """What one run took; `answers` by request, None if it was aborted."""

    num_steps: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    sizes: list[int] = field(default_factory=list)
    answers: Sequence[list[int] | None] = ()

    @property
    def mean_running(self) -> float:
        """Requests of a decode step."""
        return sum(self.sizes) / len(self.sizes)

    def watch(self, scheduler: Scheduler) -> None:
        """Count its steps from now on."""

        def count(record: StepRecord) -> None:
            if record.phase == "decode":
                self.sizes.append(len(record.uids))
                self.num_steps += 1
            self.num_computed += record.num_tokens
            self.num_preemptions = record.num_preemptions

        scheduler.step_listeners.append(count)


def run(load: Load, policy: str) -> Result:
    """Serve the load; a broken property, a failed allocation among them, raises `Violation`."""
    rng, result = random.Random(load.seed), Result()
    config = replace(load.config, admission=policy)
    world = World(config, checks_all=False, check_every=load.check_every)
    result.watch(world.scheduler)
    vocab_size = load.config.vocab_size
    beginning = [rng.randrange(vocab_size) for _ in range(load.shared)]
    aborts: dict[int, list[int]] = {}
    aborted = set()
    for uid in range(load.num_requests):
        length, max_tokens, ends_after = load.lengths(rng)
        prompt = beginning[: min(length, rng.choice([0, load.shared // 2, load.shared]))]
        prompt = prompt + [rng.randrange(vocab_size) for _ in range(length - len(prompt))]
        world.submit(uid, prompt, max_tokens, ignore_eos=True, ends_after=ends_after)
        if rng.random() < load.abort_rate:
            aborts.setdefault(rng.randrange(4 * load.longest), []).append(uid)
            aborted.add(uid)
    while not world.is_idle:
        for uid in aborts.pop(world.num_steps, ()):
            world.abort(uid)
        world.step()
    world.drain()
    result.answers = [
        None if uid in aborted else world.book[uid].answer for uid in range(load.num_requests)
    ]
    return result


class EndingLLM(LLM):
    """Ends answer i after `ends_after[i]` tokens, as a stop string would."""

    ends_after: Sequence[int | None] = ()

    def offline_send_result(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Take in the replies of one step, then look who has said enough."""
        super().offline_send_result(replies)
        for reply in replies:
            answer = self._answers[reply.uid]
            if len(answer.token_ids) == self.ends_after[reply.uid] and not answer.finish_reason:
                answer.finish_reason = FinishReason.STOP
                self._inbox.append(AbortBackendMsg(reply.uid))


def run_model(load: Load, policy: str) -> Result:
    """The same on the default model, half of the requests greedy, half with a seed."""
    rng, result, config = random.Random(load.seed), Result(), load.config
    prompts, params, ends_after = [], [], []
    for uid in range(load.num_requests):
        length, max_tokens, end = load.lengths(rng)
        prompts.append([rng.randrange(1000, 20_000) for _ in range(length)])
        temperature = float(uid % 2)
        params.append(
            SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=uid
            )
        )
        ends_after.append(end)
    with EndingLLM(
        "default",
        "auto",
        num_page_override=config.num_pages,
        max_running_req=config.num_rows,
        admission=policy,
    ) as llm:
        llm.ends_after = ends_after
        result.watch(llm)
        result.answers = [answer["token_ids"] for answer in llm.generate(prompts, params)]
    return result


def random_load(seed: int) -> Load:
    """A small trace; every second one with overlap, half of them with answers that stop."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    config = WorldConfig(
        page_size=page_size,
        num_pages=rng.randint(300, 800) // page_size,
        num_rows=64,
        budget=rng.choice([7, 32, 128, 8192]),
        overlap=seed % 2 == 1,
        max_len=256,
        share_prefixes=rng.choice([0, 8]),
    )
    longest = rng.randint(30, 120)
    shared, abort_rate = rng.choice([0, longest // 2, longest]), rng.choice([0.0, 0.1])
    stops = rng.choice([None, STOPS])
    return Load(config, rng.randint(20, 50), 5, longest, shared, abort_rate, seed, stops)


def compare(load: Load, serve: Callable[[Load, str], Result] = run) -> dict[str, Result]:
    """Run a load under each policy; the answers must be the same."""
    results = {policy: serve(load, policy) for policy in POLICIES}
    answers = [result.answers for result in results.values()]
    assert all(given == answers[0] for given in answers), "the answers differ"
    return results


def ratios(results: dict[str, Result], policy: str) -> tuple[float, float, float]:
    """Requests at once and decode steps, of those of `conservative`, and tokens computed beyond."""
    base, result = results["conservative"], results[policy]
    return (
        result.mean_running / base.mean_running,
        result.num_steps / base.num_steps,
        result.num_computed / base.num_computed - 1,
    )


def show(title: str, results: dict[str, Result]) -> None:
    """One table."""
    print(f"\n{title}")
    print(
        f"{'policy':14} {'running':>8} {'ratio':>6} {'decode steps':>13} {'ratio':>6} "
        f"{'recomputed':>11} {'preemptions':>12}"
    )
    for policy, result in results.items():
        more, steps, extra = ratios(results, policy)
        print(
            f"{policy:14} {result.mean_running:8.1f} {more:6.2f} {result.num_steps:13,} "
            f"{steps:6.2f} {extra:11.1%} {result.num_preemptions:12,}",
            flush=True,
        )


def main() -> int:
    """Print the tables; the exit status says whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=int, default=100, metavar="N", help="random traces")
    parser.add_argument("--no-model", action="store_true", help="the simulated engine alone")
    args = parser.parse_args()
    config = WorldConfig(num_pages=20_000, num_rows=64, budget=8192, max_len=2048)
    large = Load(config, check_every=32)
    results = compare(large)
    show("answers take all they may, simulated", results)
    more, steps, _ = ratios(results, "peak")
    is_good = more >= MORE_AT_ONCE and steps <= FEWER_STEPS
    print(f"peak: at least {MORE_AT_ONCE} times as many, at most {FEWER_STEPS} of the steps")
    stopping = [("simulated", run, replace(large, stops=STOPS))]
    if not args.no_model:
        small = Load(replace(config, num_pages=2_500), 200, 12, 128, stops=STOPS)
        stopping.append(("default model, an eighth of all lengths", run_model, small))
    for where, serve, load in stopping:
        results = compare(load, serve)
        show(f"answers stop at 10 to 60 % of max_tokens, {where}", results)
        _, steps, extra = ratios(results, "optimistic")
        is_good &= steps <= FEWER_STEPS_WITH_STOPS and extra <= MOST_RECOMPUTED
    print(
        f"optimistic: at most {FEWER_STEPS_WITH_STOPS} of the steps, {MOST_RECOMPUTED:.0%} of the "
        "tokens computed again"
    )
    totals = dict.fromkeys(POLICIES, 0)
    for seed in range(args.traces):
        for policy, result in compare(random_load(seed)).items():
            totals[policy] += result.num_steps
    print(
        f"\n{args.traces} random traces, same answers, no allocation failed: {totals} decode steps"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
