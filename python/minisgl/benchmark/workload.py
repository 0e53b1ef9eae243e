"""What is asked for, and when: a file's prompts, synthetic prompts, moments of arrival.

May import `params`. Invariant: request number i depends on the seed and on i alone, not on how many
requests there are or on what came back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.params import ConfigError

# Words that are one token, with the space before them, in the vocabularies of today's models.
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back"
).split()


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a prompt or the messages of a chat, and the longest answer, None for any."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    max_tokens: int | None

    def body(self, is_chat: bool) -> dict[str, Any]:
        """The fields of the request that are its own."""
        fields: dict[str, Any] = {}
        if not is_chat:
            fields["prompt"] = self.prompt
        elif self.messages is not None:
            fields["messages"] = self.messages
        else:
            fields["messages"] = [{"role": "user", "content": self.prompt}]
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        return fields


class Workload(Protocol):
    """Requests by number, without end."""

    def __getitem__(self, index: int, /) -> Request:
        """Request number `index`."""


@dataclass(frozen=True, slots=True)
class SyntheticRequests:
    """Prompts of random words, about one token each; the server's usage has the exact numbers.

    input_tokens, output_tokens: least and most, drawn evenly for each request; the input counts the
    `shared_prefix` words with which all prompts begin.
    """

    seed: int
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_prefix: int = 0

    def __getitem__(self, index: int, /) -> Request:
        rng = random.Random(f"{self.seed}/{index}")
        num_input, num_output = rng.randint(*self.input_tokens), rng.randint(*self.output_tokens)
        common = random.Random(f"{self.seed}/prefix").choices(WORDS, k=self.shared_prefix)
        own = rng.choices(WORDS, k=max(0, num_input - self.shared_prefix))
        return Request(" ".join([*common, *own]), None, num_output)


@dataclass(frozen=True, slots=True)
class RepeatedRequests:
    """Given requests, from the first again after the last."""

    requests: Sequence[Request]

    def __getitem__(self, index: int, /) -> Request:
        return self.requests[index % len(self.requests)]


def parse_requests(lines: Sequence[str], max_tokens: int | None, is_chat: bool) -> list[Request]:
    """The requests of a file: JSON objects, one a line, or else each line is a prompt.

    An object has "prompt" or, for a chat, "messages", and may have "max_tokens"; where it has not,
    `max_tokens` counts. Raises `ConfigError` that names the line.
    """
    if not lines:
        raise ConfigError("the file of prompts is empty")
    if not lines[0].lstrip().startswith("{"):
        return [Request(line, None, max_tokens) for line in lines]
    return [_from_json(line, number, max_tokens, is_chat) for number, line in enumerate(lines, 1)]


def _from_json(line: str, number: int, max_tokens: int | None, is_chat: bool) -> Request:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"prompt {number} of the file is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"prompt {number} of the file is not a JSON object")
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if not (isinstance(prompt, str) and messages is None):
        is_list = isinstance(messages, list) and messages and prompt is None
        if not is_list:
            raise ConfigError(f'prompt {number} of the file needs a "prompt" or "messages"')
        if not is_chat:
            raise ConfigError(f"prompt {number} of the file has messages: that needs --api chat")
    limit = fields.get("max_tokens", max_tokens)
    if limit is not None and not (type(limit) is int and limit > 0):
        raise ConfigError(f'prompt {number} of the file: "max_tokens" is no number above 0')
    return Request(prompt, messages, limit)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests arrive, `rate` a second on average, without end."""
    rng = random.Random(f"{seed}/arrivals")
    second = 0.0
    while True:
        yield second
        second += rng.expovariate(rate) if rate != float("inf") else 0.0
