"""What a server costs beside `LLM`: the share of its tokens a second that is left, and its start.

`python -m benchmark.serving share [--streams 16] [--tokens 128]` runs the default model
in this process and in a server, in turns; the client is niced, as it would be elsewhere. `python -m
benchmark.serving start [--rounds 3]` takes the time from the command to a ready server, and to the
first token of `LLM`, in turns, and then the memory of the server's processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from minisgl.llm import LLM
from minisgl.params import SamplingParams
from minisgl.utils.model_files import resolve_model

from tests.server.harness import Server, running

PARTS = {"engine": "minisgl.engine:Engine", "app": "minisgl.server.app:create_app"}
FIRST_TOKEN = """
from minisgl.llm import LLM
from minisgl.params import SamplingParams
with LLM("default", dtype="auto") as llm:
    next(iter(llm.stream("Hello", SamplingParams(max_tokens=1))))
    print("token", flush=True)
"""
# Reads prompts from its command line, asks all at once when a line comes, and writes the seconds.
CLIENT = """
import asyncio, json, os, sys, time
os.nice(10)
host, port, bodies = json.loads(sys.argv[1])
async def one(body):
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n"
    writer.write(f"{head}content-length: {len(body)}\\r\\n\\r\\n{body}".encode())
    data = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in data, data[-300:]
    return data.count(b"data: ")
async def all():
    return sum(await asyncio.gather(*map(one, bodies)))
for line in sys.stdin:
    start = time.perf_counter()
    num_events = asyncio.run(all())
    print(json.dumps([time.perf_counter() - start, num_events]), flush=True)
"""


@contextmanager
def served() -> Iterator[Server]:
    """A server of the default model."""
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model("default").path
        env = {"MINISGL_LOG_LEVEL": "WARNING"}
        with running(Path(folder), model, env=env, dtype="auto", **PARTS) as server:
            yield server


def share(num_streams: int, num_tokens: int, num_rounds: int) -> None:
    """Print the tokens a second of both, and their ratio in each round."""
    prompts = [f"{i} reasons to read about {'the sea ' * (i % 4)}:" for i in range(num_streams)]
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    bodies = [json.dumps({"prompt": prompt, **fields}) for prompt in prompts]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    total = num_streams * num_tokens
    rates: dict[str, list[float]] = {"LLM": [], "server": []}
    os.environ["MINISGL_LOG_LEVEL"] = "WARNING"
    with served() as server, LLM("default", dtype="auto") as llm:
        task = json.dumps([*server.address, bodies])
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdin is not None and client.stdout is not None
            for i in range(num_rounds + 1):
                start = time.perf_counter()
                llm.generate(prompts, params)
                seconds = time.perf_counter() - start
                client.stdin.write("go\n")
                client.stdin.flush()
                served_seconds, num_events = json.loads(client.stdout.readline())
                if i > 0:  # the first warms up
                    rates["LLM"].append(total / seconds)
                    rates["server"].append(total / served_seconds)
            client.stdin.close()
    for name, values in rates.items():
        print(
            f"{name}: {median(values):.0f} tokens/s of {num_streams} streams, {num_events} events"
        )
    ratios = sorted(b / a for a, b in zip(rates["LLM"], rates["server"]))
    print(f"share: {median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})")


def start(num_rounds: int) -> None:
    """Print the seconds of both starts, and the peak memory of each process."""
    seconds: dict[str, list[float]] = {"LLM": [], "server": []}
    for _ in range(num_rounds + 1):
        began = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", FIRST_TOKEN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"token\n"
            seconds["LLM"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with served() as server:
            assert server.get("/health/ready")[0] == 200
            seconds["server"].append(time.perf_counter() - began)
            memory = server.memory()
    for name, values in seconds.items():
        print(f"{name}: {median(values[1:]):.2f} s")  # the first fills the caches of files
    print(f"ratio: {median(seconds['server'][1:]) / median(seconds['LLM'][1:]):.2f}")
    for name, num in memory.items():
        print(f"{name}: {num / 1e6:.0f} MB")


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["share", "start"], nargs="?", help="both if not given")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=None)
    args = parser.parse_args()
    if args.what != "start":
        share(args.streams, args.tokens, args.rounds or 5)
    if args.what != "share":
        start(args.rounds or 3)


if __name__ == "__main__":
    main()
