"""The bodies of completions, generate, tokenize and detokenize. May import the protocol modules."""

from __future__ import annotations

from typing import Any

import msgspec

from .body import check_depth
from .bounds import MAX_CHOICES, MAX_PROMPT_TOKENS, MAX_PROMPTS
from .errors import bad_request
from .protocol import MAX_INT32, Sampling, Strict, check_logprobs, refuse
from .protocol_chat import Message, check_text

Prompt = str | list[int]


class CompletionRequest(Sampling):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    # Refused unless they ask for what is done anyway.
    best_of: Any = None
    suffix: Any = None


class GenerateRequest(Sampling):
    """POST /generate: one prompt, a plain answer."""

    prompt: str | list[int] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation as the model's template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


NEUTRAL = {"best_of": (1,), "suffix": ("",)}

COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)
GENERATE_DECODER = msgspec.json.Decoder(GenerateRequest)
TOKENIZE_DECODER = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE_DECODER = msgspec.json.Decoder(DetokenizeRequest)


def check_completion(request: CompletionRequest) -> None:
    """Everything about a completion but its prompts; raises `ApiError`."""
    refuse(request, {**NEUTRAL, "best_of": (1, request.n)})
    check_logprobs(request.logprobs, "logprobs")


def prompts_of(request: CompletionRequest, n: int, max_seq_len: int) -> list[Prompt]:
    """The prompts of a completion, each a text or token ids that fit into the context."""
    given = request.prompt
    if given is None:
        raise bad_request("prompt is missing", "prompt")
    prompts: list[Any] = [given]
    if isinstance(given, list) and given and not isinstance(given[0], int):
        prompts = given
    if not 1 <= len(prompts) <= MAX_PROMPTS or len(prompts) * n > MAX_CHOICES:
        raise bad_request(
            f"prompt takes 1 to {MAX_PROMPTS} prompts, and n times as many are at most "
            f"{MAX_CHOICES}",
            "prompt",
        )
    if len({type(prompt) for prompt in prompts}) > 1:
        raise bad_request("prompt is a list of texts, or of token id lists, not of both", "prompt")
    check_text(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), "prompt")
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_room(prompt, max_seq_len)
            check_ids(prompt, "prompt")
    return prompts


def check_room(ids: list[Any], max_seq_len: int) -> None:
    """A 400 if token ids fill the context; told here, a long list costs the engine nothing."""
    if len(ids) >= max_seq_len:
        raise bad_request(
            f"the prompt has {len(ids)} tokens and the context holds {max_seq_len}, which leaves "
            "no room for an answer",
            "prompt",
            "context_length_exceeded",
        )


def check_ids(ids: list[Any], param: str) -> None:
    """A 400 unless these are token ids of some vocabulary, at least one and not too many."""
    if not 1 <= len(ids) <= MAX_PROMPT_TOKENS:
        raise bad_request(f"{param} takes 1 to {MAX_PROMPT_TOKENS} token ids", param)
    if set(map(type, ids)) != {int}:
        raise bad_request(f"{param} mixes token ids with other things", param)
    if min(ids) < 0 or max(ids) > MAX_INT32:
        raise bad_request(f"{param} has a token id that is in no vocabulary", param)


def check_vocabulary(ids: list[int], vocab_size: int, param: str) -> None:
    """A 400 if a token id is none of this model's."""
    if max(ids) >= vocab_size:
        raise bad_request(f"token id {max(ids)} is not in the vocabulary of {vocab_size}", param)


def check_tokenize(request: TokenizeRequest) -> None:
    """Everything about a tokenize request but its messages."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give a prompt or messages", "prompt")
    if request.prompt is not None:
        check_text(len(request.prompt), "prompt")
    if request.chat_template_kwargs is not None:
        check_depth(request.chat_template_kwargs, "chat_template_kwargs")
