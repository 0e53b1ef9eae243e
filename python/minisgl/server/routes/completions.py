"""POST /v1/completions and POST /generate: texts that are continued as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from minisgl.message import UserReply
from minisgl.params import SamplingParams
from minisgl.server.body import read_json
from minisgl.server.errors import bad_request
from minisgl.server.generation import Generation, new_id, server_of
from minisgl.server.openapi import described
from minisgl.server.protocol import num_choices, routing, sampling_params, wants_usage
from minisgl.server.protocol_chat import check_text
from minisgl.server.protocol_completion import (
    COMPLETION_DECODER,
    GENERATE_DECODER,
    NEUTRAL,
    CompletionRequest,
    GenerateRequest,
    Prompt,
    check_completion,
    check_ids,
    check_room,
    check_vocabulary,
    prompts_of,
)
from minisgl.server.replies import Reply, TextChoice, TextLogprobs, json_response
from minisgl.server.stream import DONE, EventStream, event, while_connected

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions


@router.post("/v1/completions", **described(CompletionRequest, NEUTRAL))
async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    body = await read_json(request, COMPLETION_DECODER)
    has_usage = wants_usage(body)
    completion = await _open(request, body)
    if body.stream:
        return EventStream(
            completion.generation.chunks("cmpl", "text_completion", completion.choices(), has_usage)
        )
    return json_response(await while_connected(request.receive, completion.answer()))


async def _open(request: Request, body: CompletionRequest) -> _Completion:
    server = server_of(request)
    model = server.model_name(body.model)
    n = num_choices(body)
    check_completion(body)
    prompts = prompts_of(body, n, server.frontend.info.max_seq_len)
    only_echo = bool(body.echo) and body.max_tokens == 0
    if only_echo:
        body.max_tokens = 1  # the least that runs; it is not told
    fields: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo:
        fields["prompt_logprobs"] = body.logprobs
    params = sampling_params(body, server.defaults(), DEFAULT_MAX_TOKENS, **fields)
    generation = Generation(request, model, list(prompts), params, n=n, **routing(body))
    echoes = [await _text_of(request, prompt) for prompt in prompts] if body.echo else []
    return _Completion(generation, params, echoes, only_echo)


async def _text_of(request: Request, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    frontend = server_of(request).frontend
    check_vocabulary(prompt, frontend.info.vocab_size, "prompt")
    return await frontend.detokenize(prompt)


class _Completion:
    """One request under way. echoes: the texts of the prompts, if the answers begin with them."""

    def __init__(
        self, generation: Generation, params: SamplingParams, echoes: list[str], only_echo: bool
    ) -> None:
        self.generation = generation
        self._has_logprobs = params.logprobs is not None
        self._echoes = echoes
        self._only_echo = only_echo
        self._logprobs = [TextLogprobs() for _ in generation.msgs]
        self._has_begun = [False] * len(generation.msgs)

    async def choices(self) -> AsyncGenerator[TextChoice, None]:
        """The pieces of all choices; raises `ApiError`."""
        async with aclosing(self.generation.replies()) as replies:
            async for i, reply in replies:
                choice = self._read(i, reply)
                if choice.text or choice.logprobs or choice.finish_reason:
                    yield choice

    def _read(self, i: int, reply: UserReply) -> TextChoice:
        text, positions = reply.incremental_output, reply.logprobs
        if self._only_echo:
            text, positions = "", []
            self.generation.drop_generated()
        if self._echoes and not self._has_begun[i]:
            text = self._echoes[i // self.generation.n] + text
            positions = [*reply.prompt_logprobs, *positions]
        self._has_begun[i] = True
        logprobs = self._logprobs[i].take(positions) if self._has_logprobs else None
        reason = reply.finish_reason.value if reply.finished and reply.finish_reason else None
        return TextChoice(i, text, logprobs, reason)

    async def answer(self) -> Reply:
        """The whole answer."""
        whole = [TextChoice(i, "") for i in range(len(self.generation.msgs))]
        texts: list[list[str]] = [[] for _ in whole]
        async with aclosing(self.choices()) as choices:
            async for piece in choices:
                choice = whole[piece.index]
                texts[piece.index].append(piece.text)
                choice.finish_reason = piece.finish_reason
                if piece.logprobs is not None:
                    if choice.logprobs is None:
                        choice.logprobs = piece.logprobs
                    else:
                        for name, values in piece.logprobs.items():
                            choice.logprobs[name] += values
        for choice, parts in zip(whole, texts):
            choice.text = "".join(parts)
        usage = self.generation.usage()
        return self.generation.reply(new_id("cmpl"), "text_completion", whole, usage=usage)


@router.post("/generate", **described(GenerateRequest))
async def generate(request: Request) -> Response:
    """Continue one prompt; the answer is `{"text", "token_ids", "finish_reason", "usage"}`."""
    body = await read_json(request, GENERATE_DECODER)
    server = server_of(request)
    model = server.model_name(body.model)
    if num_choices(body) > 1:
        raise bad_request("/generate gives one answer", "n")
    if body.prompt is None:
        raise bad_request("prompt is missing", "prompt")
    if isinstance(body.prompt, str):
        check_text(len(body.prompt), "prompt")
    else:
        check_room(body.prompt, server.frontend.info.max_seq_len)
        check_ids(body.prompt, "prompt")
    wants_usage(body)
    params = sampling_params(body, server.defaults(), SamplingParams().max_tokens)
    generation = Generation(request, model, [body.prompt], params, **routing(body))
    if body.stream:
        return EventStream(_generate_events(generation))
    return json_response(await while_connected(request.receive, _generate_answer(generation)))


def _plain(text: str, ids: list[int], reply: UserReply | None, generation: Generation) -> Any:
    reason = None if reply is None or reply.finish_reason is None else reply.finish_reason.value
    plain = {"text": text, "token_ids": ids, "finish_reason": reason}
    return {**plain, "usage": generation.usage()} if reason else plain


async def _generate_answer(generation: Generation) -> Any:
    texts, ids, last = [], [], None
    async with aclosing(generation.replies()) as replies:
        async for _, last in replies:
            texts.append(last.incremental_output)
            ids += last.token_ids
    return _plain("".join(texts), ids, last, generation)


async def _generate_events(generation: Generation) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.replies()) as replies:
        async for _, reply in replies:
            yield event(_plain(reply.incremental_output, reply.token_ids, reply, generation))
    yield DONE
