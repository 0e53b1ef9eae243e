"""A small server in the shape of OpenAI's that answers from a script: real HTTP, real events.

It answers a prompt with its last message's words in capitals, one a piece. Words with a meaning:
BUSY (429), REFUSE (400), LONG (400, the context is full), BREAK (500), GARBAGE (not HTTP), in
mid-answer FAIL (an error event), VANISH (the connection ends), NONSENSE (an event that is no JSON),
WAIT (until `release` is set), INTERRUPT (Ctrl-C in this process), CUT (ends by length), MUTE
(no usage), THINK (a thought), CUTLESS (the end without [DONE]).
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REFUSALS = {
    "BUSY": (429, "too many requests", "overloaded"),
    "REFUSE": (400, "temperature must be in 0 to 100", None),
    "LONG": (400, "the prompt of 99 tokens leaves no room in 64", "context_length_exceeded"),
    "BREAK": (500, "the request failed (request id x)", "internal_error"),
}


class ScriptedServer(ThreadingHTTPServer):
    """Notes what it is asked in `paths`, `bodies` and `authorizations`, in the order of arrival."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, api_key: str | None = None, certificate: Any = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if certificate is not None:
            self.socket = certificate.wrap_socket(self.socket, server_side=True)
        self.api_key = api_key
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.num_connections = 0
        self.num_gone = 0
        self.waiting = threading.Semaphore(0)
        self.gone = threading.Semaphore(0)
        self.release = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.num_gone += 1  # a client that went away
        self.gone.release()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def log_message(self, *unused: Any) -> None:
        return

    def do_GET(self) -> None:
        if self._is_allowed():
            self._whole(200, {"object": "list", "data": [{"id": "scripted"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._is_allowed():
            return
        with self.server.lock:
            self.server.bodies.append(body)
        is_chat = self.path.endswith("/chat/completions")
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        words = text.upper().split()
        for word in words:
            if word in REFUSALS:
                status, message, code = REFUSALS[word]
                error = {"message": message, "type": "t", "param": None, "code": code}
                self._whole(status, {"error": error}, {"retry-after": "7"})
                return
        if "GARBAGE" in words:
            self.wfile.write(b"\x00\x01\x02 what is this\r\n\r\n")
            self.close_connection = True
            return
        self._stream(is_chat, words, body)

    def _is_allowed(self) -> bool:
        self.server.paths.append(self.path)
        self.server.authorizations.append(self.headers.get("authorization"))
        key = self.server.api_key
        if key is None or self.headers.get("authorization") == f"Bearer {key}":
            return True
        self._whole(401, {"error": {"message": "wrong API key", "code": "invalid_api_key"}})
        return False

    def _whole(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, is_chat: bool, words: list[str], body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if is_chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        limit = body.get("max_tokens", 1 << 30)
        num_pieces, reason = 0, "stop"
        for i, word in enumerate(words):
            if word == "INTERRUPT":
                signal.raise_signal(signal.SIGINT)
            elif word == "WAIT":
                self.server.waiting.release()
                self.server.release.wait(30)
            elif word == "FAIL":
                self._event({"error": {"message": "the engine is gone", "code": "unavailable"}})
                return self._chunk(b"")
            elif word == "NONSENSE":
                self._chunk(b"data: {not json\n\n")
                continue
            elif word == "VANISH":
                self.close_connection = True
                return
            if word in ("CUT",) or num_pieces == limit:
                reason = "length"
                break
            num_pieces += 1
            self._event(self._piece(is_chat, word + " " * (i + 1 < len(words)), word == "THINK"))
        end = {"index": 0, "finish_reason": reason} | ({"delta": {}} if is_chat else {"text": ""})
        self._event({"choices": [end]})
        if "MUTE" not in words:
            usage = {"prompt_tokens": len(words), "completion_tokens": num_pieces}
            usage |= {"prompt_tokens_details": {"cached_tokens": 1}}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"" if "CUTLESS" in words else b": a comment\n\ndata: [DONE]\n\n")
        self._chunk(b"")

    def _piece(self, is_chat: bool, text: str, is_thought: bool) -> dict[str, Any]:
        if not is_chat:
            return {"choices": [{"index": 0, "text": text}]}
        name = "reasoning_content" if is_thought else "content"
        return {"choices": [{"index": 0, "delta": {name: text}}]}

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps({"id": "x", **value}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


@contextmanager
def scripted_server(api_key: str | None = None) -> Iterator[ScriptedServer]:
    """A server on a free port of this machine, gone when the block ends."""
    server = ScriptedServer(api_key)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
