"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.body import read_json
from minisgl.server.errors import bad_request
from minisgl.server.frontend import RequestFailed
from minisgl.server.generation import failed, server_of
from minisgl.server.openapi import described
from minisgl.server.protocol_chat import ChatRequest, prompt_of
from minisgl.server.protocol_completion import (
    DETOKENIZE_DECODER,
    TOKENIZE_DECODER,
    DetokenizeRequest,
    TokenizeRequest,
    check_ids,
    check_tokenize,
)
from minisgl.server.stream import while_connected

router = APIRouter()


@router.post("/tokenize", **described(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as the model sees it."""
    body = await read_json(request, TOKENIZE_DECODER)
    server = server_of(request)
    server.model_name(body.model)
    check_tokenize(body)
    text = prompt_of(ChatRequest(messages=body.messages, prompt=body.prompt))
    add = True if body.add_special_tokens is None else body.add_special_tokens
    try:
        ids = await while_connected(
            request.receive,
            server.frontend.tokenize(
                text, add_special_tokens=add, template_args=body.chat_template_kwargs
            ),
        )
    except RequestFailed as error:
        raise failed(error, request.state.request_id) from error
    limit = server.frontend.info.max_seq_len
    return _json({"tokens": ids, "count": len(ids), "max_model_len": limit})


@router.post("/detokenize", **described(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of some token ids."""
    body = await read_json(request, DETOKENIZE_DECODER)
    server = server_of(request)
    server.model_name(body.model)
    check_ids(body.tokens, "tokens")
    vocab_size = server.frontend.info.vocab_size
    if max(body.tokens) >= vocab_size:
        raise bad_request(
            f"token id {max(body.tokens)} is not in the vocabulary of {vocab_size}", "tokens"
        )
    try:
        text = await while_connected(request.receive, server.frontend.detokenize(body.tokens))
    except RequestFailed as error:
        raise failed(error, request.state.request_id) from error
    return _json({"text": text})


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
