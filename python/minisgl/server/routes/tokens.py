"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.body import read_json
from minisgl.server.generation import server_of
from minisgl.server.openapi import described
from minisgl.server.protocol_chat import ChatRequest, prompt_of
from minisgl.server.protocol_completion import (
    DETOKENIZE_DECODER,
    TOKENIZE_DECODER,
    DetokenizeRequest,
    TokenizeRequest,
    check_ids,
    check_tokenize,
    check_vocabulary,
)
from minisgl.server.replies import json_response
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
    ids = await while_connected(
        request.receive,
        server.frontend.tokenize(
            text, add_special_tokens=add, template_args=body.chat_template_kwargs
        ),
    )
    limit = server.frontend.info.max_seq_len
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": limit})


@router.post("/detokenize", **described(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of some token ids."""
    body = await read_json(request, DETOKENIZE_DECODER)
    server = server_of(request)
    server.model_name(body.model)
    check_ids(body.tokens, "tokens")
    check_vocabulary(body.tokens, server.frontend.info.vocab_size, "tokens")
    text = await while_connected(request.receive, server.frontend.detokenize(body.tokens))
    return json_response({"text": text})
