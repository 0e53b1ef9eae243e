"""Reasoning in tags, told apart from the answer however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.server.reasoning import (
    ReasoningParser,
    prompt_opens_reasoning,
    template_reasons,
)


def split(pieces: list[str], starts_inside: bool = False) -> tuple[str, str]:
    """(reasoning, content) of an answer that came in these pieces."""
    parser = ReasoningParser(starts_inside=starts_inside)
    told = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(p.reasoning for p in told), "".join(p.content for p in told)


@pytest.mark.parametrize(
    "text, starts_inside, expected",
    [
        ("plain <think>text</think>", False, ("", "plain <think>text</think>")),
        ("<think>\nHm.\n</think>\n\nYes.\n", False, ("Hm.", "Yes.\n")),
        ("\n<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("Hm. 1 < 2\n</think>\n\nYes.", True, ("Hm. 1 < 2", "Yes.")),
        ("<think>\nHm.</think>Yes", True, ("Hm.", "Yes")),
        ("<think>cut off, 1 </thi", False, ("cut off, 1 </thi", "")),
        ("<think>a</think><think>b</think>", False, ("a", "<think>b</think>")),
        (" <thi", False, ("", " <thi")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_told_apart(text: str, starts_inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], starts_inside) == expected
    assert split(list(text), starts_inside) == expected


@given(
    fragments=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é"]),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 60), max_size=12),
    starts_inside=st.booleans(),
)
def test_the_pieces_do_not_depend_on_how_the_text_is_cut(
    fragments: list[str], cuts: list[int], starts_inside: bool
) -> None:
    text = "".join(fragments)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = split([text], starts_inside)
    assert split([text[a:b] for a, b in itertools.pairwise(places)], starts_inside) == whole
    assert split(list(text), starts_inside) == whole


def test_reasoning_streams_and_only_what_may_become_the_tag_is_held_back() -> None:
    parser = ReasoningParser()
    assert parser.push("<think>one <") == ("one", "")
    assert parser.push("b> two") == (" <b> two", "")
    assert parser.push("</think> yes") == ("", "yes")
    assert parser.push(" and </think>") == ("", " and </think>")


def test_a_prompt_that_ends_in_the_opening_tag_starts_inside() -> None:
    assert prompt_opens_reasoning("<|assistant|>\n<think>\n")
    assert not prompt_opens_reasoning("<|assistant|>\n<think>\n\n</think>\n\n")
    assert not prompt_opens_reasoning("what does <think> mean?\n<|assistant|>\n")


def test_a_template_that_knows_the_closing_tag_is_of_a_model_that_reasons() -> None:
    assert template_reasons("{% set x = content.split('</think>') %}")
    assert not template_reasons("{{ messages }}") and not template_reasons(None)
