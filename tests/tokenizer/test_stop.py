"""Nothing of a stop string ever comes out, however the text was cut."""

from __future__ import annotations

import random

import pytest

from minisgl.tokenizer import StopStringFilter


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    found = StopStringFilter(stops)
    out = "".join(found.push(piece) for piece in pieces)
    return out + found.flush(), found.matched


def by_letter(stops: list[str], text: str) -> tuple[str, str | None]:
    """What must come out: the text before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "matched"),
    [
        ([], ["any", "thing"], "anything", None),
        ([""], ["any"], "any", None),
        (["END"], ["the E", "ND of it"], "the ", "END"),
        (["END"], ["the E", "N", "X"], "the ENX", None),
        (["END"], ["the EN"], "the EN", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["bc", "abcd"], ["ab", "cd"], "a", "bc"),
        (["bc", "abc"], ["abcd"], "", "abc"),
        (["aab"], ["aaa", "ab"], "aa", "aab"),
        (["x", "y"], ["yx"], "", "y"),
        (["🤖!"], ["a🤖", "!b"], "a", "🤖!"),
    ],
)
def test_text_before_the_first_complete_stop_string_comes_out(
    stops: list[str], pieces: list[str], out: str, matched: str | None
) -> None:
    assert run(stops, pieces) == (out, matched)


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    found = StopStringFilter(["STOP", "###"])
    assert [found.push(text) for text in ["Hello S", "TO", "AST #", "#", "x", "#"]] == [
        "Hello ", "", "STOAST ", "", "##x", "",
    ]  # fmt: skip
    assert not found.stopped
    assert found.flush() == "#"
    assert found.flush() == ""


def test_nothing_comes_out_after_the_stop() -> None:
    found = StopStringFilter(["."])
    assert [found.push(text) for text in ["a.b", "c", "."]] == ["a", "", ""]
    assert (found.stopped, found.matched, found.flush()) == (True, ".", "")


def test_the_result_does_not_depend_on_how_the_text_was_cut() -> None:
    rng = random.Random(11)
    for _ in range(5000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 20)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert run(stops, pieces) == by_letter(stops, text), (stops, pieces)
