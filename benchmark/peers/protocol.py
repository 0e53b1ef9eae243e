"""What every worker shares: jobs in and results out as JSON lines, and the prompts of a job.

A worker is a script that the run starts with one engine's own Python. It may import this module,
the standard library, numpy and its engine, nothing else. Protocol: one job a line on stdin, one
answer a line on stdout; whatever the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from dataclasses import dataclass
from typing import Any

FIRST_TOKEN, LAST_TOKEN = 1000, 48000  # random prompts stay clear of special tokens
# Decode steps before the clock starts: the caches hold what the engine before has left, and the
# first ten steps take up to 1.7 times as long as those that follow.
WARM_STEPS = 12


@dataclass(frozen=True)
class ChatRequest:
    """One user's turn after the shared system prompt, and how many tokens the answer has."""

    user: list[int]
    num_output: int


def random_tokens(count: int, seed: int) -> list[int]:
    """The same tokens in every engine."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def make_prompts(job: dict[str, Any]) -> list[list[int]]:
    """One prompt of `context` tokens for each of the job's streams."""
    return [
        random_tokens(job["context"], job["seed"] * 1009 + i) for i in range(job.get("streams", 1))
    ]


def make_chat(job: dict[str, Any]) -> tuple[list[int], list[ChatRequest]]:
    """The system prompt and the requests; lengths vary by half around their means."""
    rng = random.Random(job["seed"])

    def around(mean: int) -> int:
        return rng.randint(mean - mean // 2, mean + mean // 2)

    system = random_tokens(job["system"], job["seed"] + 1)
    return system, [
        ChatRequest(random_tokens(around(job["user"]), job["seed"] * 31 + i), around(job["output"]))
        for i in range(job["requests"])
    ]


def warm_up_chat(job: dict[str, Any]) -> dict[str, Any]:
    """A small job of the same kind, for what an engine does at its first steps."""
    return {**job, "requests": 4, "system": 64, "seed": job["seed"] + 77}


# --- memory ---------------------------------------------------------------------------------------


def reset_peak() -> None:
    """Let the kernel count the peak of resident memory from here on."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # the peak then includes what came before, which is less than what follows


def memory_now() -> dict[str, int]:
    """Bytes: resident, its peak, and the proportional share (pages that others map count less)."""
    found = {}
    wanted = {"VmRSS": "rss", "VmHWM": "peak", "Pss": "pss"}
    for name in ("status", "smaps_rollup"):
        with open(f"/proc/self/{name}") as file:
            for line in file:
                key, _, rest = line.partition(":")
                if key in wanted:
                    found[wanted[key]] = int(rest.split()[0]) * 1024
    return found


def memory_beyond(base: dict[str, int]) -> dict[str, int]:
    """What the process takes now beyond `base`, and took at its peak."""
    now = memory_now()
    return {key: now[key] - base["rss" if key == "peak" else key] for key in now}


# --- the loop -------------------------------------------------------------------------------------


def serve(make_worker: Any) -> None:
    """Answer jobs until stdin ends. `make_worker(options)` gets the JSON of the first argument.

    A job {"work": NAME, ...} calls the worker's method NAME with the job; a failure is answered
    with {"error": ...} and the worker goes on.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(result: dict[str, Any]) -> None:
        out.write(json.dumps(result) + "\n")

    try:
        worker = make_worker(json.loads(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer(getattr(worker, job["work"])(job))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
