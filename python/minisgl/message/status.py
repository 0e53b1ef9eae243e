"""What the worker processes tell the API server about themselves, beside the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .frontend import BaseFrontendMsg


@dataclass(eq=False)
class LoadProgress(BaseFrontendMsg):
    """How much of the weights is loaded, in bytes."""

    done: int
    total: int


@dataclass(eq=False)
class StartFailed(BaseFrontendMsg):
    """Process `name` cannot start; `message` is for the user."""

    name: str
    message: str


@dataclass(eq=False)
class TokenizerReady(BaseFrontendMsg):
    """Tokenizer process `index` takes messages. The rest is about its model.

    sampling_defaults: fields of `SamplingParams` that the model's authors advise. chat_template,
    tool_template: their sources, None if there is none.
    """

    index: int
    eos_token_ids: list[int]
    vocab_size: int
    sampling_defaults: dict[str, Any]
    chat_template: str | None
    tool_template: str | None


@dataclass(eq=False)
class EngineReady(BaseFrontendMsg):
    """The scheduler takes requests. max_seq_len: most tokens of a request, prompt and answer."""

    max_seq_len: int
    vocab_size: int
    num_pages: int
    page_size: int


@dataclass(eq=False)
class TokenizerStats(BaseFrontendMsg):
    """Tokenizer process `index` keeps the state of `held` requests."""

    index: int
    held: int


@dataclass(eq=False)
class EngineStats(BaseFrontendMsg):
    """Where the scheduler is: requests and pages now, and totals since it started.

    held: requests that it keeps anything for, whatever it is: 0 as soon as nothing is left to do.
    """

    held: int = 0
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    evictable_pages: int = 0
    owned_pages: int = 0
    num_requests: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_aborts: int = 0
    num_errors: int = 0
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
