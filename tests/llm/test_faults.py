"""An LLM outlives what goes wrong in a call: bad logits, failing steps, Ctrl-C, closed streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.env import ENV
from minisgl.llm import LLM
from minisgl.params import InvalidRequestError

from tests.llm.conftest import MakeLLM

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


@pytest.fixture
def make(make_llm: MakeLLM) -> Callable[[bool], Any]:
    def make(overlap: bool, **fields: Any) -> LLM:
        ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
        return make_llm(**fields)

    return make


def check_usable(llm: LLM, expected: list[dict[str, Any]]) -> None:
    """Nothing is left behind, and the same question has the same answer."""
    assert llm.is_idle and llm.table_manager.available_size == 16
    assert not llm.finished_reqs and llm.cache_manager.num_owned_pages == 0
    llm.cache_manager.check_integrity()
    assert llm.generate(PROMPTS, PARAMS) == expected


def in_forward(llm: Any, act: Callable[[int, Any, Any], None]) -> None:
    """Call `act(step, batch, logits)` after each forward of the engine, from now on."""
    forward, steps = llm.engine.forward, iter(range(10**6))

    def wrapped(batch: Any) -> Any:
        logits = forward(batch).clone()
        act(next(steps), batch, logits)
        return logits

    llm.engine.forward = wrapped
    llm.restore = lambda: setattr(llm.engine, "forward", forward)


@both_loops
@pytest.mark.parametrize("bad_step", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_one_row_ends_only_that_request(
    make: Any, overlap: bool, bad_step: int, temperature: float
) -> None:
    llm = make(overlap)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, seed=3)
    expected, plain = llm.generate(PROMPTS, params), llm.generate(PROMPTS, PARAMS)

    def spoil(step: int, batch: Any, logits: Any) -> None:
        if step == bad_step:
            logits[[req.uid for req in batch.reqs].index(1), 17] = float("nan")

    in_forward(llm, spoil)
    results = llm.generate(PROMPTS, params)
    llm.restore()
    assert results[0] == expected[0] and results[2] == expected[2]
    assert results[1]["token_ids"] == expected[1]["token_ids"][:bad_step]
    assert results[1]["finish_reason"] == "error" and "NaN" in results[1]["error"]
    check_usable(llm, plain)


@both_loops
@pytest.mark.parametrize("bad_step", [0, 1, 4])
def test_a_step_that_raises_ends_its_requests_and_the_llm_stays_usable(
    make: Any, overlap: bool, bad_step: int
) -> None:
    llm = make(overlap)
    expected = llm.generate(PROMPTS, PARAMS)

    def fail(step: int, batch: Any, logits: Any) -> None:
        if step == bad_step:
            raise RuntimeError("the kernel is on fire")

    in_forward(llm, fail)
    results = llm.generate(PROMPTS, PARAMS)
    llm.restore()
    for result, whole in zip(results, expected):
        assert result["finish_reason"] == "error"
        assert "the kernel is on fire" in result["error"]
        assert result["token_ids"] == whole["token_ids"][: len(result["token_ids"])]
    check_usable(llm, expected)


@both_loops
def test_only_the_batch_that_raises_is_lost(make: Any, overlap: bool) -> None:
    llm = make(overlap, max_extend_tokens=6)  # request 2 is in the second prefill batch
    expected = llm.generate(PROMPTS, PARAMS)
    llm.cache_manager.flush()

    def fail(step: int, batch: Any, logits: Any) -> None:
        if batch.is_prefill and batch.reqs[-1].uid == 2:
            raise RuntimeError("no")

    in_forward(llm, fail)
    results = llm.generate(PROMPTS, PARAMS)
    llm.restore()
    assert results[:2] == expected[:2]
    assert results[2]["finish_reason"] == "error" and results[2]["token_ids"] == []
    check_usable(llm, expected)


@both_loops
@pytest.mark.parametrize("bad_step", [0, 2])
def test_ctrl_c_passes_through_and_the_llm_stays_usable(
    make: Any, overlap: bool, bad_step: int
) -> None:
    llm = make(overlap)
    expected = llm.generate(PROMPTS, PARAMS)

    def interrupt(step: int, batch: Any, logits: Any) -> None:
        if step == bad_step:
            raise KeyboardInterrupt

    in_forward(llm, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    llm.restore()
    check_usable(llm, expected)


@both_loops
@pytest.mark.parametrize("num_events", [1, 2, 4, 9])
def test_a_stream_that_is_closed_early_leaves_nothing_behind(
    make: Any, overlap: bool, num_events: int
) -> None:
    llm = make(overlap)
    expected = llm.generate(PROMPTS, PARAMS)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 4, 8)]
    stream = llm.stream(PROMPTS, params)
    for _ in range(num_events):
        next(stream)
    with pytest.raises(InvalidRequestError, match="busy"):
        llm.generate(PROMPTS, PARAMS)
    stream.close()
    check_usable(llm, expected)


def test_a_stream_that_is_never_started_takes_nothing(make: Any) -> None:
    llm = make(False)
    expected = llm.generate(PROMPTS, PARAMS)
    llm.stream([[1, 2, 3]], PARAMS)
    check_usable(llm, expected)


@both_loops
def test_the_pieces_of_a_stream_join_to_the_answers(make: Any, overlap: bool) -> None:
    llm = make(overlap)
    expected = llm.generate(PROMPTS, PARAMS)
    texts, ids, reasons = [""] * 3, [[], [], []], [None] * 3
    for event in llm.stream(PROMPTS, PARAMS):
        assert reasons[event.index] is None  # nothing follows the end
        texts[event.index] += event.text
        ids[event.index] += event.token_ids
        reasons[event.index] = event.finish_reason
    assert texts == [result["text"] for result in expected]
    assert ids == [result["token_ids"] for result in expected]
    assert reasons == ["length"] * 3


def test_a_receiver_that_raises_leaves_the_llm_usable(make: Any) -> None:
    llm = make(False)
    expected = llm.generate(PROMPTS, PARAMS)
    send = llm.send_result

    def fail(replies: Any) -> None:
        raise ZeroDivisionError

    llm.send_result = fail
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, PARAMS)
    llm.send_result = send
    check_usable(llm, expected)
