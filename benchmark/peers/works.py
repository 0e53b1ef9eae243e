"""The rows of the table: what is measured, and what we want to reach.

A rate counts tokens (or requests) per second, more is better; memory is less is better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

LOWER_IS_BETTER = ("memory",)


@dataclass(frozen=True)
class Work:
    """One row. job: what the workers are told; must, aim: the ratio to the best peer.

    streams and context say what the ceilings make of it; streams 0: no ceiling is known.
    share_must, share_aim: of the ceiling, 0 for none.
    """

    name: str
    title: str
    job: dict[str, Any] = field(hash=False)
    must: float
    aim: float
    share_must: float = 0.0
    share_aim: float = 0.0
    unit: str = "tokens/s"

    @property
    def is_lower_better(self) -> bool:
        return self.name in LOWER_IS_BETTER


def _decode(streams: int, context: int, steps: int) -> dict[str, Any]:
    return {"work": "decode", "streams": streams, "context": context, "steps": steps}


CHAT = {"work": "chat", "requests": 64, "at_once": 16, "system": 512, "user": 16, "output": 16}

WORKS = (
    Work("decode-1", "decode, 1 stream, 64 tokens of context", _decode(1, 64, 48),
         1.25, 1.4, 0.80, 0.92),
    Work("decode-1-long", "decode, 1 stream, 1,024 tokens of context", _decode(1, 1024, 32),
         1.4, 1.8),
    Work("prefill", "prefill, 512 tokens",
         {"work": "prefill", "context": 512, "repeats": 3}, 1.5, 2.0, 0.50, 0.60),
    Work("decode-8", "decode, 8 streams", _decode(8, 32, 24), 2.2, 3.0),
    Work("decode-32", "decode, 32 streams", _decode(32, 32, 10), 2.6, 3.5),
    Work("chat", "64 chats, one system prompt, 16 at a time", {**CHAT, "is_warm": False},
         3.0, 5.0, unit="requests/s"),
    Work("memory", "process memory at 2,048 tokens",
         {"work": "memory", "context": 2048, "steps": 32}, 1.1, 1.0, unit="MB"),
)  # fmt: skip


def chosen(names: list[str] | None, scale: float = 1.0, is_warm: bool = False) -> list[Work]:
    """The works of these names (all if None), with steps and requests scaled."""
    works = [work for work in WORKS if names is None or work.name in names]
    return [replace(work, job=_scaled(work.job, scale, is_warm)) for work in works]


def _scaled(job: dict[str, Any], scale: float, is_warm: bool) -> dict[str, Any]:
    job = dict(job)
    if job["work"] in ("decode", "chat"):
        key = "steps" if job["work"] == "decode" else "requests"
        job[key] = max(2, round(job[key] * scale))
    if job["work"] == "chat":
        job["is_warm"] = is_warm
    return job


def value_of(work: Work, answer: dict[str, Any]) -> float:
    """The number of the row from a worker's answer: tokens/s, requests/s or megabytes."""
    if work.name == "memory":
        return float(answer["peak"]) / 1e6
    count = work.job["requests"] if work.job["work"] == "chat" else answer["tokens"]
    return float(count) / float(answer["seconds"])


@dataclass(frozen=True)
class ModelFacts:
    """What a forward has to read and to compute.

    weight_bytes: all matrices as stored. layer_ops, head_ops: operations (a multiplication and an
    addition are two) per token in the matrices of the layers and of the head. kv_bytes: K and V per
    token of context, at 16 bits. attention_ops: operations per token and token of its context, as
    in the model FLOPs of PaLM (Chowdhery et al. 2022, appendix B), but only for what a token sees.
    """

    weight_bytes: int
    layer_ops: int
    head_ops: int
    kv_bytes: int
    attention_ops: int


def ceiling_of(work: Work, facts: ModelFacts, read: float, multiply: float) -> float | None:
    """Tokens/s that memory (bytes/s) and 8-bit arithmetic (ops/s) would allow; None if unknown.

    The slower of reading everything once per forward and computing all of it with 8 bits, though
    attention may take more.
    """
    job = work.job
    if job["work"] == "decode":
        tokens, heads = job["streams"], job["streams"]
        in_pool = seen = job["streams"] * (job["context"] + job["steps"] / 2)
    elif job["work"] == "prefill":
        tokens, heads, in_pool = job["context"], 1, job["context"]
        seen = tokens * (tokens + 1) / 2
    else:
        return None
    reading = (facts.weight_bytes + in_pool * facts.kv_bytes) / read
    products = tokens * facts.layer_ops + heads * facts.head_ops
    computing = (products + seen * facts.attention_ops) / multiply
    return float(tokens / max(reading, computing))
