"""What comes out of the processes of a server is what went in, for each request its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .harness import Server, wait_until

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def ids_of(text: str) -> list[int]:
    """As the tokenizer of `tests.llm.tiny` has it."""
    return [220 if letter == " " else ord(letter) - ord("!") for letter in text]


def expected(prompt: str, num: int) -> str:
    """What the simulated engine answers: the alphabet from a letter that the prompt chooses."""
    ids = ids_of(prompt)
    start = sum(ids) + len(ids)
    return "".join(ALPHABET[(start + i) % 26] for i in range(num))


def test_an_answer_comes_back_piece_by_piece_and_says_why_it_ended(server: Server) -> None:
    lines = server.stream("hello", max_tokens=7).lines()
    assert "".join(line["text"] for line in lines) == expected("hello", 7)
    assert sum(len(line["ids"]) for line in lines) == 7
    assert [line.get("reason") for line in lines][-1] == "length"
    assert {line["prompt"] for line in lines} == {5}


def test_many_at_once_get_each_their_own_answer(server: Server) -> None:
    prompts = ["x" * (i % 7 + 1) + ALPHABET[i % 26] for i in range(64)]
    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(lambda prompt: server.text(prompt, max_tokens=33), prompts))
    assert texts == [expected(prompt, 33) for prompt in prompts]
    server.wait_idle()


def test_token_ids_are_taken_as_a_prompt(server: Server) -> None:
    assert server.text(ids_of("hello"), max_tokens=4) == expected("hello", 4)


def test_a_prompt_seen_before_tells_how_much_was_cached(server: Server) -> None:
    prompt = "seen before, word for word"
    first = server.stream(prompt, max_tokens=2).lines()
    second = server.stream(prompt, max_tokens=2).lines()
    assert (first[0]["cached"], second[0]["cached"]) == (0, len(prompt) - 1)


def test_a_stop_string_ends_the_answer_and_never_shows(server: Server) -> None:
    text = expected("stop here", 20)
    lines = server.stream("stop here", max_tokens=2000, stop=[text[7:10]]).lines()
    assert "".join(line["text"] for line in lines) == text[:7]
    assert lines[-1]["reason"] == "stop"
    stats = server.wait_idle()  # and the engine was told, long before 2,000 tokens
    assert stats["finished"].get("abort", 0) == 0
    assert stats["num_generated_tokens"] < 20_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": -1.0}, "temperature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [70, 260]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
    ],
)
def test_what_cannot_run_is_refused_with_the_field_at_fault(
    server: Server, fields: dict, param: str
) -> None:
    status, answer = server.ask("POST", "/generate", fields)
    assert (status, answer["kind"], answer["param"]) == (400, "invalid", param)


def test_the_tokenizer_answers_questions_beside_the_requests(server: Server) -> None:
    status, answer = server.ask("POST", "/tokenize", {"text": "hi, you"})
    assert (status, answer["text"]) == (200, "hi, you")
    assert answer["ids"] == ids_of("hi, you")


def test_a_client_that_goes_away_takes_its_request_along(server: Server) -> None:
    before = server.wait_idle()["num_aborts"]
    stream = server.stream("gone", max_tokens=4000)
    assert stream.next()["text"]
    stream.close()
    wait_until(lambda: server.get("/stats")[1]["num_aborts"] == before + 1, 5.0, "its abort")
    server.wait_idle()


def test_counters_add_up(server: Server) -> None:
    before = server.wait_idle()
    server.text("count", max_tokens=11)
    after = wait_until(
        lambda: (s := server.get("/stats")[1])["num_requests"] > before["num_requests"] and s,
        5,
        "the request is counted",
    )
    assert after["num_requests"] == before["num_requests"] + 1
    assert after["num_generated_tokens"] == before["num_generated_tokens"] + 11
    assert after["num_prompt_tokens"] == before["num_prompt_tokens"] + 5
    assert (
        after["free_pages"] + after["cached_pages"] == before["free_pages"] + before["cached_pages"]
    )


def test_no_process_but_the_scheduler_loads_torch_and_all_stay_small(server: Server) -> None:
    pids = {"server": server.process.pid, **server.children()}
    assert len(pids) == 4
    for name, pid in pids.items():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert ("libtorch" in maps) == name.startswith("minisgl.worker"), name
        if not name.startswith("minisgl.worker"):
            status = Path(f"/proc/{pid}/status").read_text()
            peak = int(status.partition("VmHWM:")[2].split()[0])
            assert peak < 150 << 10, f"{name} took {peak} kB"


def test_the_sockets_lie_in_a_folder_that_only_this_user_can_enter(server: Server) -> None:
    (folder,) = server.sockets.glob("minisgl-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {
        "frontend",
        "scheduler",
        "tokenizer-0",
        "tokenizer-1",
    }
