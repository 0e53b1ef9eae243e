"""What HTTP costs: CPU seconds of the API and tokenizer processes for 1,000 streamed tokens.

A simulated engine gives each of many streams a token a step, so nothing else costs. Run
`python -m benchmark.http_path [--streams 64] [--tokens 256] [--step 0.02]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from tests.llm.tiny import write_model
from tests.server.harness import Server, running

APP = "minisgl.server.app:create_app"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(server: Server, index: int, num_tokens: int) -> int:
    """Read one streamed answer; the number of its events."""
    body = json.dumps(
        {
            "prompt": f"stream {index}",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(*server.address)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    data = await reader.read(-1)
    writer.close()
    return data.count(b"data: ") - 1


async def streams(server: Server, num_streams: int, num_tokens: int) -> int:
    """All streams at once."""
    return sum(await asyncio.gather(*(stream(server, i, num_tokens) for i in range(num_streams))))


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny")
        env = {"SIM_SECONDS": str(args.step), "MINISGL_LOG_LEVEL": "WARNING"}
        with running(Path(folder), model, env=env, app=APP) as server:
            pids = {"API": server.process.pid}
            pids |= {name: pid for name, pid in server.children().items() if "token" in name}
            asyncio.run(streams(server, args.streams, 4))  # warm
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            start = time.perf_counter()
            num_events = asyncio.run(streams(server, args.streams, args.tokens))
            seconds = time.perf_counter() - start
            used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    num_tokens = args.streams * args.tokens
    each = ", ".join(f"{name} {value / num_tokens * 1000:.3f}" for name, value in used.items())
    total = sum(used.values()) / num_tokens * 1000
    print(f"{args.streams} streams of {args.tokens} tokens in {seconds:.1f} s, {num_events} events")
    print(f"CPU seconds for 1,000 tokens: {total:.3f} ({each})")


if __name__ == "__main__":
    main()
