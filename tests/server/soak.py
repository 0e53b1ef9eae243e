"""A soak: thousands of requests of every kind at a real server of a tiny model, and what is left.

`python -m tests.server.soak [--requests 20000] [--users 32] [--seed 0]`. One in five clients goes
away before its answer is complete, one in twenty sends what is no request; the others mix lengths,
choices, stop strings, constraints, log-probabilities, penalties and salts. Whatever a request does,
it must be answered as is right: 200, 400 if it is bad, 504 if its time is up. A quarter of the way
and at the end nothing may be held, and between the two no process may have grown or have more open
files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .harness import Server, running
from tests.llm.tiny import write_model

ENGINE, APP = "minisgl.engine:Engine", "minisgl.server.app:create_app"
NUM_PAGES = 4096
FIELDS: dict[str, Any] = {
    "dtype": "float32",
    "num_page_override": NUM_PAGES,
    "num_threads": 1,
    "page_size": 4,
    "num_tokenizer": 2,
    "max_running_req": 48,
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
NUM_DISCONNECTS, NUM_BAD = 0.2, 0.05
GROWTH = 8 << 20  # bytes: what a process may grow by in three quarters of a soak
PARAGRAPH = "The quick brown fox jumps over the lazy dog, and 7 wizards boxed. "
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
BAD: list[bytes] = [
    b"",
    b"{",
    b"[" * 5000,
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "max_tokens": 9223372036854775808}',
    b'{"prompt": "x", "unknown": 1}',
    b'{"prompt": [99999]}',
    b'{"prompt": "x", "regex": "("}',
    b'{"prompt": "x", "grammar": "nonsense"}',
    b'{"prompt": "' + b"x" * 5000 + b'"}',
]


def some_options(rng: random.Random) -> dict[str, Any]:
    """Fields of one request, each kind with its own chance."""
    options: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 12, 40))}
    if rng.random() < 0.5:
        options |= {"temperature": round(rng.uniform(0.2, 2), 2), "seed": rng.randrange(99)}
    if rng.random() < 0.15:
        options["n"] = rng.randrange(2, 5)
    if rng.random() < 0.2:
        options["stop"] = rng.sample(["a", "e", "0", "!", "xyz", "\n\n"], rng.randrange(1, 4))
    if rng.random() < 0.15:
        options |= rng.choice(CONSTRAINTS)(rng)
    if rng.random() < 0.15:
        options["logprobs"] = rng.randrange(4)
    if rng.random() < 0.2:
        options["cache_salt"] = f"tenant {rng.randrange(20)}"
    if rng.random() < 0.1:
        options |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
    if rng.random() < 0.1:
        options["ignore_eos"] = True
    if rng.random() < 0.05:
        options["timeout"] = rng.choice((0.001, 0.05, 5))
    if rng.random() < 0.5:
        options["stream"] = True
    return options


CONSTRAINTS = [
    lambda rng: {"regex": rng.choice(("[0-9]{3}", "(yes|no)!?", f"v{rng.randrange(500)}"))},
    lambda rng: {"choice": ["left", "right", f"door {rng.randrange(500)}"]},
    lambda rng: {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    lambda rng: {"grammar": 'start: "a" | "b" start'},
]


def some_prompt(rng: random.Random) -> Any:
    """A prompt of 1 to 200 tokens, often with a prefix that others share.

    Texts are of a few hundred: the tokenizer's library remembers 10,000 words, and here a text is
    a word; that it fills this memory would look like a leak.
    """
    if rng.random() < 0.2:
        return [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
    start = rng.choice((0, 4))
    return (PARAGRAPH * 4)[start : start + rng.randrange(1, 200)]


class Soak:
    """The clients of one server. counts: of what was sent and of how it ended.

    all_good: nobody leaves, sends nonsense, or gives a request a moment only.
    """

    def __init__(self, server: Server, seed: int, all_good: bool = False) -> None:
        self.server = server
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._all_good = all_good

    async def run(self, num_requests: int, num_users: int) -> None:
        """So many requests, from users who each send one after the other."""
        left = iter(range(num_requests))

        async def user() -> None:
            for _ in left:
                await asyncio.wait_for(self._one(), 120)

        await asyncio.gather(*(user() for _ in range(num_users)))

    async def _one(self) -> None:
        rng, kind = self._rng, 1.0 if self._all_good else self._rng.random()
        path, body = "/v1/completions", b""
        if kind < NUM_BAD:
            body = rng.choice(BAD)
            self.counts["bad"] += 1
        else:
            options = some_options(rng)
            if self._all_good:
                options.pop("timeout", None)
            self.counts.update(name for name in options if name != "max_tokens")
            if rng.random() < 0.3 and "logprobs" not in options:
                path = "/v1/chat/completions"
                options["messages"] = [{"role": "user", "content": PARAGRAPH[: rng.randrange(60)]}]
            else:
                options["prompt"] = some_prompt(rng)
            body = json.dumps(options).encode()
        leaves = NUM_BAD <= kind < NUM_BAD + NUM_DISCONNECTS
        status = await self._send(path, body, rng.random() if leaves else None)
        self.counts["disconnected" if leaves else f"status {status}"] += 1
        is_late = status == 504 and b'"timeout"' in body
        assert leaves or is_late or status == (400 if kind < NUM_BAD else 200), (status, body)

    async def _send(self, path: str, body: bytes, leave: float | None) -> int:
        """Send one request; its status. leave: go away at once (0), or within 50 ms."""
        reader, writer = await asyncio.open_connection(*self.server.address)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        try:
            if leave is not None:
                if leave > 0.2:
                    await asyncio.wait_for(reader.read(-1), leave * 0.05)
                return 0
            data = await reader.read(-1)
            if b"text/event-stream" in data and b"data: [DONE]" not in data:
                self.counts["streams that ended in an error"] += 1
                assert b'"error"' in data and b'"timeout' in body, data[-500:]
            return int(data[9:12])
        except asyncio.TimeoutError:
            return 0
        finally:
            writer.transport.abort()  # a reset, not a polite end


def measure(server: Server) -> tuple[dict[str, int], dict[str, int]]:
    """(resident bytes, open files) of each process, once nothing is held."""
    server.wait_empty(NUM_PAGES, 30)
    return server.memory(), server.open_files()


def soak(server: Server, num_requests: int, num_users: int, seed: int) -> Counter[str]:
    """Run it, print what each process weighs, and check that nothing is left; the counts."""
    run = Soak(server, seed)
    start = time.perf_counter()
    asyncio.run(run.run(num_requests // 4, num_users))
    memory, files = measure(server)
    asyncio.run(run.run(num_requests - num_requests // 4, num_users))
    memory_2, files_2 = measure(server)
    seconds = time.perf_counter() - start
    print(f"{num_requests} requests of {num_users} users in {seconds:.0f} s")
    for name, num in sorted(run.counts.items()):
        print(f"  {name}: {num}")
    for name in memory:
        print(
            f"  {name}: {memory[name] / 1e6:.1f} MB after a quarter, {memory_2[name] / 1e6:.1f} MB "
            f"at the end; open files {files[name]}, {files_2[name]}"
        )
    for name in memory:
        assert memory_2[name] - memory[name] <= GROWTH, f"{name} grew"
        assert files_2[name] <= files[name], f"{name} has more open files"
    return run.counts


def main() -> None:
    """Run one soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with soaked_server(Path(folder)) as server:
            soak(server, args.requests, args.users, args.seed)


def soaked_server(folder: Path) -> Any:
    """A server of a tiny model that can chat, on its real engine."""
    model = write_model(folder / "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    env = {"MINISGL_LOG_LEVEL": "WARNING"}
    return running(folder, model, env=env, engine=ENGINE, app=APP, **FIELDS)


if __name__ == "__main__":
    main()
