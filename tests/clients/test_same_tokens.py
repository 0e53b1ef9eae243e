"""A server answers with the tokens of `LLM`, id by id, whatever else it does at that time."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minisgl.llm import LLM
from minisgl.params import SamplingParams

from tests.server.harness import Server

PROMPTS = [f"{'Once upon a time, ' * (i % 4)}{i} reasons to like the sea:\n" for i in range(32)]
NUM_TOKENS = 16


def answer(server: Server, prompt: str, stream: bool) -> tuple[str, list[int]]:
    """Text and ids of a greedy answer; streamed, it comes in several pieces."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    connection.request("POST", "/generate", json.dumps({**body, "stream": stream}))
    data = connection.getresponse().read()
    connection.close()
    lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line]
    pieces = [json.loads(line) for line in lines if line != b"[DONE]"]
    assert len(pieces) > 4 if stream else len(pieces) == 1
    return "".join(p["text"] for p in pieces), [i for p in pieces for i in p["token_ids"]]


def test_greedy_tokens_are_those_of_llm_alone_and_among_32_streamed_or_not(
    server: Server, default_model_path: Path
) -> None:
    with LLM(str(default_model_path), dtype="auto") as llm:  # as the server has it
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    expected = [(one["text"], one["token_ids"]) for one in found]
    for stream in (False, True):
        assert [answer(server, prompt, stream) for prompt in PROMPTS[:3]] == expected[:3]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda i: answer(server, PROMPTS[i], i % 2 == 0), range(32)))
    assert together == expected
