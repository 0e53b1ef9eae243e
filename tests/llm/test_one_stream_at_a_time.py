"""Who gets which answer when calls of one `LLM` overlap, in one thread and in several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from minisgl.llm import LLM
from minisgl.params import ConfigError, InvalidRequestError, SamplingParams

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def ids_of(events: Any) -> list[int]:
    """All tokens of a stream of one prompt."""
    return [token for event in events for token in event.token_ids]


def test_a_later_call_takes_the_place_of_a_stream_that_has_not_begun(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = llm.generate([[5, 6]], PARAMS)[0]["token_ids"]
    first, second = llm.stream([[3, 4]], PARAMS), llm.stream([[5, 6]], PARAMS)
    with pytest.raises(InvalidRequestError, match="taken the place"):
        next(first)
    assert ids_of(second) == expected


def test_a_stream_that_runs_keeps_its_place(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = llm.generate([[3, 4]], PARAMS)[0]["token_ids"]
    stream = llm.stream([[3, 4]], PARAMS)
    start = next(stream).token_ids
    with pytest.raises(InvalidRequestError, match="busy"):
        llm.generate([[5, 6]], PARAMS)
    assert start + ids_of(stream) == expected


def test_a_stream_of_an_llm_that_was_shut_down_says_so(make_llm: MakeLLM) -> None:
    llm = make_llm()
    running = llm.stream([[3, 4]], PARAMS)
    next(running)
    llm.shutdown()
    with pytest.raises(InvalidRequestError, match="shut down"):
        next(running)


def test_threads_get_their_own_answers_or_a_refusal(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompts = [[3, 4], [5, 6], [7, 8], [9, 10]]
    expected = [llm.generate([prompt], PARAMS)[0]["token_ids"] for prompt in prompts]
    outcomes: list[tuple[int, Any]] = []

    def ask(i: int) -> None:
        for _ in range(20):
            try:
                outcomes.append((i, llm.generate([prompts[i]], PARAMS)[0]["token_ids"]))
            except InvalidRequestError as error:
                outcomes.append((i, str(error)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 80
    for i, outcome in outcomes:
        if isinstance(outcome, str):
            assert "busy" in outcome or "taken the place" in outcome
        else:
            assert outcome == expected[i]
    assert any(isinstance(outcome, list) for _, outcome in outcomes)


def test_ctrl_c_is_no_error_in_the_log(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm()
    capsys.readouterr()

    def interrupted(batch: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[3, 4]], PARAMS)
    assert capsys.readouterr().err == ""  # no report of a failed step
    assert len(llm.generate([[3, 4]], PARAMS)[0]["token_ids"]) == 6


def test_an_llm_is_a_context_manager(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        assert llm.generate([[3, 4]], PARAMS)
    with pytest.raises(InvalidRequestError, match="shut down"):
        llm.generate([[3, 4]], PARAMS)


@pytest.mark.parametrize(
    "fields",
    [
        {"quant": "q3"},
        {"quant": 4},
        {"use_dummy_weight": "no"},
        {"tp_info": 3},
        {"cuda_graph_bs": 5},
        {"num_threads": 257},
        {"num_page_override": 2**31},
    ],
    ids=str,
)
def test_an_argument_without_meaning_is_named(make_llm: MakeLLM, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        make_llm(**fields)


def test_a_pool_that_no_memory_holds_is_named_with_its_flags(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        make_llm(num_page_override=None, cpu_kv_cache_bytes=2**60)
