"""The bodies of answers, as OpenAI's clients read them. May import `params` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from minisgl.params import Logprob, PositionLogprobs

LOWEST_LOGPROB = -9999.0  # what stands for a probability of zero, which JSON cannot hold


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A whole answer."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of a request; the prompt counts once for all of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Reply(msgspec.Struct, kw_only=True):
    """An answer or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET


class FunctionDelta(msgspec.Struct):
    """The name, or a piece of the arguments, of a call."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, kw_only=True):
    """A piece of a tool call in a stream; id and type come with its name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One choice in a chat chunk."""

    index: int
    delta: Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class TextChoice(msgspec.Struct):
    """One choice of a completion, or of a chunk of one."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


def token_text(token: Logprob) -> str:
    """A token as text; what is no whole character shows as U+FFFD."""
    return token.raw.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def _told(token: Logprob) -> dict[str, Any]:
    return {
        "token": token_text(token),
        "logprob": _finite(token.logprob),
        "bytes": list(token.raw),
    }


def chat_logprob(position: PositionLogprobs) -> dict[str, Any]:
    """One position in the form of chat completions."""
    return {**_told(position.chosen), "top_logprobs": [_told(token) for token in position.top]}


class TextLogprobs:
    """Positions in the form of completions; offsets count characters of all that came before."""

    def __init__(self) -> None:
        self._offset = 0

    def take(self, positions: list[PositionLogprobs]) -> dict[str, Any]:
        """The next positions: four lists of equal length."""
        tokens = [token_text(position.chosen) for position in positions]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(position.chosen.logprob) for position in positions],
            "top_logprobs": [self._top(position) for position in positions],
            "text_offset": offsets,
        }

    @staticmethod
    def _top(position: PositionLogprobs) -> dict[str, float | None] | None:
        if position.chosen.logprob is None:
            return None  # nothing stands before the first token
        best = {token_text(token): _finite(token.logprob) for token in reversed(position.top)}
        best.setdefault(token_text(position.chosen), _finite(position.chosen.logprob))
        return dict(sorted(best.items(), key=lambda item: -(item[1] or 0.0)))
