"""Hostile input at a whole server, and what must hold after each: nobody else notices.

A case is a list of requests, as bytes, each on a connection of its own, with the statuses that it
may have. After each case the server is healthy, a reference request returns its tokens, nothing is
held in any process, every page is free or cached, and no process has grown.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from minisgl.server import bounds

from .harness import Server, clock, running
from tests.llm.tiny import write_model

ENGINE, APP = "minisgl.engine:Engine", "minisgl.server.app:create_app"
NUM_PAGES, CONTEXT, VOCAB_SIZE = 1024, 256, 260
FIELDS = {"dtype": "float32", "num_page_override": NUM_PAGES, "num_threads": 1, "page_size": 4}
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('never') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
)
GROWTH = 4 << 20  # bytes that all processes together may grow by
REFERENCE = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"
MINIMAL: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    GENERATE: {"prompt": "x"},
    RESPONSES: {"input": "x"},
}
OK, BAD, EITHER = {200}, {400}, {200, 400}


@dataclass
class Case:
    """Requests, and the statuses that each may have."""

    name: str
    requests: list[bytes]
    statuses: set[int]
    param: str | None = None


def http_of(path: str, content: bytes, method: str = "POST", **headers: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    if "transfer-encoding" not in headers:
        head.append(f"content-length: {headers.get('length', len(content))}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


def ask_of(path: str, **fields: Any) -> bytes:
    """A request with some fields beside those that it needs, and a short answer."""
    short = {} if path == RESPONSES or "max_tokens" in fields else {"max_tokens": 2}
    return http_of(path, json.dumps({**MINIMAL[path], **short, **fields}).encode())


def raw(path: str, text: str) -> bytes:
    """A request whose prompt is given as JSON text."""
    return http_of(path, b'{"prompt": %s, "max_tokens": 2}' % text.encode())


# --- HTTP -----------------------------------------------------------------------------------------

DEEP = b"[" * 100_000
BODIES: dict[str, bytes] = {
    "no body": b"",
    "broken JSON": b'{"prompt": "x"',
    "a list": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "deep nesting": DEEP + b"]" * len(DEEP),
    "deep nesting, not closed": DEEP,
    "deep nesting in a harmless field": b'{"prompt": "x", "user": '
    + DEEP
    + b"]" * len(DEEP)
    + b"}",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "an endless number": b'{"prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    "invalid UTF-8": b'{"prompt": "\xc3\x28"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone surrogate in a field": b'{"prompt": "x", "stop": "\\udfff"}',
    "a key twice": b'{"prompt": 5, "prompt": []}',
    "a form": b"prompt=x&max_tokens=5",
}
CHUNKED = {"transfer-encoding": "chunked"}
CHUNKS = (b"%x\r\n%s\r\n" % (1 << 16, b" " * (1 << 16))) * (bounds.MAX_BODY_BYTES // (1 << 16) + 1)
HTTP: list[Case] = [
    *(Case(name, [http_of(GENERATE, body)], BAD) for name, body in BODIES.items()),
    *(Case(f"chat: {name}", [http_of(CHAT, body)], BAD) for name, body in BODIES.items()),
    Case("a length over the bound", [http_of(GENERATE, b"", length="99999999999")], {413}),
    Case("a length that is none", [http_of(GENERATE, b"", length="-1")], {400}),
    Case("chunks over the bound", [http_of(GENERATE, CHUNKS, **CHUNKED)], {413}),
    Case("large headers", [http_of(GENERATE, b"{}", pad="x" * bounds.MAX_HEADER_BYTES)], {431}),
    Case("a long path", [http_of("/" + "x" * bounds.MAX_HEADER_BYTES, b"")], {431}),
    Case(
        "many headers", [http_of(GENERATE, b"{}", **{f"h{i}": "x" * 90 for i in range(999)})], {431}
    ),
    Case("another method", [http_of(CHAT, b"", m) for m in ("GET", "PUT", "DELETE")], {405}),
    Case("an unknown path", [http_of(p, b"{}") for p in ("/x", "/v1/x", "/%00", "/..")], {404}),
    Case("no HTTP", [b"\x16\x03\x01\x02\x00", b"nonsense\r\n\r\n", b"GET / HTTP/9\r\n\r\n"], BAD),
]

# --- fields ---------------------------------------------------------------------------------------

NUMBERS: list[str] = ["null", "-1", "0", "1", "2147483648", "9223372036854775808", "NaN", "1e999"]
WRONG = ['"1"', "[]", "{}", "true", "1.5", "[null]", '""', '{"a": [1]}']
LIMITS: dict[str, list[str]] = {  # field: values at its limit and past it
    "max_tokens": ["2147483647"],
    "n": [str(bounds.MAX_CHOICES), str(bounds.MAX_CHOICES + 1)],
    "temperature": ["100", "100.1"],
    "top_p": ["1.0", "1.0001", "1e-9"],
    "top_k": ["2147483647", "-2"],
    "min_p": ["1.0", "1.0001"],
    "frequency_penalty": ["2", "-2", "2.1"],
    "presence_penalty": ["2", "-2", "-2.1"],
    "repetition_penalty": ["100", "100.1", "1e-9"],
    "stop": ['"x"', json.dumps(["x"] * 16), json.dumps(["x"] * 17), '[""]', '"' + "x" * 257 + '"'],
    "stop_token_ids": [json.dumps([1] * 64), json.dumps([1] * 65), "[260]", "[-1]"],
    "logprobs": ["20", "21"],
    "logit_bias": ['{"259": 100}', '{"260": 1}', '{"5": 101}', '{"-1": 1}', '{"x": 1}'],
    "seed": ["-9223372036854775808", "9223372036854775807"],
    "stream_options": ['{"include_usage": true}', '{"x": 1}'],
    "stream": ["false"],
    "priority": ["2147483647", "-2147483648"],
    "timeout": ["86400", "86401"],
    "cache_salt": ['"a"', '"' + "x" * 257 + '"', '"\\u0000"'],
    "regex": ['"("', '"a{1000000}"', '"(a*)*b"', '"' + "(" * 9999 + '"', '"[a-z]"'],
    "grammar": ['"x"', '"start: start start"', '"start: \\"a\\""'],
    "choice": ['["a"]', '["a", ""]', json.dumps(["a"] * 1025)],
    "response_format": [
        '{"type": "json_object"}',
        '{"type": "xml"}',
        '{"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}',
        '{"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}',
        '{"type": "json_schema", "json_schema": {"schema": {"$ref": "http://localhost/x"}}}',
        '{"type": "json_schema", "json_schema": {"schema": {"pattern": "(", "type": "string"}}}',
        '{"type": "json_schema", "json_schema": {"schema": '
        + '{"items": ' * 40
        + "{}"
        + "}" * 40
        + "}}",
    ],
    "echo": ["true"],
    "user": ["{}"],
}
OF_CHATS: dict[str, list[str]] = {
    "max_completion_tokens": ["2147483647"],
    "logprobs": ["true", "false"],
    "top_logprobs": ["20"],
    "tools": [
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]',
        '[{"type": "function", "function": {"name": "\\ud800"}}]',
        "[" + ", ".join(['{"type": "function", "function": {"name": "f"}}'] * 129) + "]",
    ],
    "tool_choice": ['"auto"', '"required"', '{"type": "function", "function": {"name": "g"}}'],
    "chat_template_kwargs": [
        '{"messages": 5}',
        "[" * 40 + "]" * 40,
        '{"a": ' * 40 + "1" + "}" * 40,
    ],
}


def field_case(path: str, field: str, values: list[str]) -> Case:
    """One request for each value, the others of the answer kept short."""
    fixed = {k: v for k, v in {"max_tokens": 1, **MINIMAL[path]}.items() if k != field}
    head = json.dumps(fixed)[:-1]
    bodies = [f'{head}, "{field}": {value}}}'.encode() for value in values]
    return Case(f"{path} {field}", [http_of(path, body) for body in bodies], EITHER, field)


FIELD_CASES = [field_case(COMPLETIONS, f, NUMBERS + WRONG + more) for f, more in LIMITS.items()]
FIELD_CASES += [field_case(CHAT, f, NUMBERS + WRONG + more) for f, more in OF_CHATS.items()]

# --- prompts and messages -------------------------------------------------------------------------

IDS = [1] * CONTEXT


def messages(*given: Any) -> bytes:
    return ask_of(CHAT, messages=list(given))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


PROMPTS: list[Case] = [
    Case("an empty prompt", [ask_of(p, prompt="") for p in (GENERATE, COMPLETIONS)], BAD),
    Case("no prompt", [ask_of(p, prompt=[]) for p in (GENERATE, COMPLETIONS)], BAD),
    Case("one token", [ask_of(GENERATE, prompt="x"), ask_of(GENERATE, prompt=[1])], OK),
    Case(
        "almost the context",
        [ask_of(GENERATE, prompt="x" * (CONTEXT - 1)), ask_of(GENERATE, prompt=IDS[1:])],
        OK,
    ),
    Case(
        "exactly the context, and one more",
        [ask_of(GENERATE, prompt=p) for p in ("x" * CONTEXT, "x" * (CONTEXT + 1), IDS, [*IDS, 1])],
        BAD,
    ),
    Case(
        "ten megabytes of one letter",
        [ask_of(GENERATE, prompt="x" * 10_000_000), messages(user("x" * 10_000_000))],
        BAD,
    ),
    Case("half a megabyte of one letter", [ask_of(GENERATE, prompt="x" * 500_000)], BAD),
    Case("a million ids", [ask_of(GENERATE, prompt=[1] * 1_000_000)], BAD),
    Case(
        "special tokens as text",
        [ask_of(GENERATE, prompt="<eos><bos><stop>"), messages(user("<eos><end>"))],
        OK,
    ),
    Case(
        "ids that are none",
        [ask_of(GENERATE, prompt=[i]) for i in (-1, VOCAB_SIZE, 2**31, 2**63, 10**30)]
        + [raw(GENERATE, text) for text in ("[1.5]", "[null]", '["a", 1]', "[[1]]", "[true]")],
        BAD,
    ),
    Case("zeros and odd spaces", [ask_of(GENERATE, prompt="\0\0\u2028\ufeff\U0010ffff")], OK),
    Case("no messages", [messages(), ask_of(CHAT, messages=None)], BAD),
    Case("an unknown role", [messages({"role": "wizard", "content": "x"})], BAD),
    Case("no content", [messages(user(None)), messages({"role": "user"})], BAD),
    Case("content in parts", [messages(user([{"type": "text", "text": "x"}] * 3))], OK),
    Case("parts that are no text", [messages(user([{"type": "image_url"}])), messages("x")], BAD),
    Case("a template that raises", [messages(user("refuse"))] * 3, BAD),
    Case(
        "the template's language in content",
        [messages(user(t)) for t in ("{{ 7 * 7 }}", "{% for x in y %}", "{# #}", "{{ x.__a__ }}")],
        OK,
    ),
    Case("input of a response", [ask_of(RESPONSES, input=i) for i in ([], 5, [{}], None)], BAD),
    Case(
        "texts to tokenize",
        [raw(TOKENIZE, '"x"').replace(b', "max_tokens": 2', b"                 ")]
        + [http_of(TOKENIZE, body) for body in (b"{}", b'{"prompt": 5}')],
        EITHER,
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny model that can chat, on its real engine."""
    folder = tmp_path_factory.mktemp("hostile")
    model = write_model(folder / "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with running(folder, model, engine=ENGINE, app=APP, **FIELDS) as server:
        yield server


@pytest.fixture(scope="module")
def known_tokens(server: Server) -> list[int]:
    """Of the reference request, before anything bad was sent."""
    status, answer = server.ask("POST", GENERATE, REFERENCE)
    assert status == 200 and len(answer["token_ids"]) == 12
    tokens: list[int] = answer["token_ids"]
    return tokens


def send(server: Server, data: bytes) -> tuple[int, bytes]:
    """(status, body) of whatever comes back."""
    with socket.create_connection(server.address, timeout=60) as client:
        try:
            client.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all of it was sent; the answer is there
        response = http.client.HTTPResponse(client)
        response.begin()
        return response.status, response.read()


def expect_answers(server: Server, case: Case) -> None:
    for data in case.requests:
        status, body = send(server, data)
        assert status in case.statuses, (status, body, data[:500])
        if status == 200:
            continue
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        if case.param is not None and error["code"] != "invalid_json":
            assert error["param"], (error, data[:500])


def size(server: Server) -> int:
    return sum(server.memory().values())


@pytest.mark.parametrize("case", HTTP + FIELD_CASES + PROMPTS, ids=lambda case: case.name)
def test_bad_input_is_refused_and_leaves_nothing(
    case: Case, server: Server, known_tokens: list[int]
) -> None:
    for _ in range(3):  # a heap that has grown once for a large body stays so; a leak grows again
        before = size(server)
        expect_answers(server, case)
        assert server.get("/health") == (200, {"status": "ready"})
        assert server.ask("POST", GENERATE, REFERENCE)[1]["token_ids"] == known_tokens
        server.wait_empty(NUM_PAGES)
        if size(server) - before <= GROWTH:
            return
    raise AssertionError(f"{case.name}: {(size(server) - before) >> 20} MiB more, each time")


def test_a_sender_that_stalls_holds_nothing_but_its_connection(
    server: Server, known_tokens: list[int]
) -> None:
    whole = ask_of(GENERATE)
    before, files = size(server), server.open_files()["api"]
    stalled = [socket.create_connection(server.address, timeout=10) for _ in range(50)]
    for i, client in enumerate(stalled):
        client.sendall(whole[: i * len(whole) // 50])
    start = clock()
    assert server.ask("POST", GENERATE, REFERENCE)[1]["token_ids"] == known_tokens
    assert clock() - start < 5
    for client in stalled:
        client.close()
    server.wait_empty(NUM_PAGES)
    assert server.open_files()["api"] <= files + 1
    assert size(server) - before <= GROWTH
