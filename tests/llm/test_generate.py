"""`LLM.generate`: what goes in, what comes out, when it ends, and what users may wrap."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.env import ENV
from minisgl.llm import LLM
from minisgl.params import ConfigError, InvalidRequestError
from minisgl.scheduler import Scheduler

from tests.llm.conftest import MakeLLM
from tests.llm.tiny import EOS, EOS_2, EOS_3, VOCAB_SIZE, write_model

TEXTS = ["Hello", "a", "The quick brown fox"]
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def use_overlap(overlap: bool) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap


def test_an_llm_is_a_scheduler(llm: LLM) -> None:
    assert isinstance(llm, Scheduler)
    for name in (
        "cache_manager",
        "decode_manager",
        "prefill_manager",
        "table_manager",
        "token_pool",
        "finished_reqs",
        "run_when_idle",
        "_prepare_batch",
        "_process_last_data",
        "engine",
    ):
        assert hasattr(llm, name), name
    assert llm.token_pool.shape == llm.engine.page_table.shape
    assert not llm.token_pool.is_inference() and not llm.engine.page_table.is_inference()


def test_what_the_authors_advise_counts_where_a_call_is_silent(
    tmp_path: Path, make_llm: MakeLLM
) -> None:
    folder = write_model(tmp_path)
    advice = {"do_sample": True, "temperature": 0.7, "top_k": 3, "eos_token_id": [EOS_2]}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    llm = make_llm(folder)
    assert llm.default_sampling_params == SamplingParams(temperature=0.7, top_k=3)
    assert EOS_2 in llm.tokenizer.eos_token_ids
    asked: list[SamplingParams] = []
    receive = llm.receive_msg

    def watch(blocking: bool = False) -> Any:
        msgs = receive(blocking=blocking)
        asked.extend(msg.sampling_params for msg in msgs)
        return msgs

    llm.receive_msg = watch  # type: ignore[method-assign]
    llm.generate(["a"])
    llm.generate(["a"], SamplingParams(max_tokens=2))
    assert [(p.temperature, p.top_k) for p in asked] == [(0.7, 3), (0.0, -1)]
    plain = make_llm(folder, sampling_defaults="none")
    assert plain.default_sampling_params == SamplingParams()
    assert EOS_2 in plain.tokenizer.eos_token_ids


def test_answers_come_in_order_with_text_and_token_ids(llm: LLM) -> None:
    results = llm.generate(TEXTS, greedy(7))
    assert len(results) == 3
    for text, result in zip(TEXTS, results):
        assert len(result["token_ids"]) == 7
        assert result["text"] == llm.tokenizer.decode(result["token_ids"])
        assert llm.generate([text], greedy(7)) == [result]
    assert [r["finish_reason"] for r in results] == ["length"] * 3


def test_a_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    expected = llm.generate(TEXTS, greedy())
    assert llm.generate(ids, greedy()) == expected
    tensors = [torch.tensor(prompt, dtype=torch.int32) for prompt in ids]
    assert llm.generate(tensors, greedy()) == expected  # type: ignore[arg-type]


def test_without_prompts_there_are_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_one_set_of_parameters_for_all_or_one_for_each(llm: LLM) -> None:
    results = llm.generate(TEXTS, [greedy(3), greedy(1), greedy(6)])
    assert [len(result["token_ids"]) for result in results] == [3, 1, 6]


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_wrong_number_of_sampling_params_is_a_value_error(llm: LLM, number: int) -> None:
    with pytest.raises(ValueError, match=f"3 prompts.* {number} sampling_params"):
        llm.generate(TEXTS, [greedy()] * number)


def test_the_callers_parameters_are_never_changed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10**6, temperature=0.5, top_k=3, ignore_eos=True)
    before = copy.deepcopy(params)
    (result,) = llm.generate([[1] * 250], params)
    assert len(result["token_ids"]) == 6  # 256 - 250
    assert params == before


@both_loops
def test_an_eos_is_not_part_of_the_answer(make_llm: MakeLLM, overlap: bool) -> None:
    use_overlap(overlap)
    llm = make_llm()
    (whole,) = llm.generate(["Hello"], greedy(8))
    ids = whole["token_ids"]
    cut = next(i for i in range(2, 8) if ids[i] not in ids[:i])
    llm.eos_token_id = ids[cut]
    (result,) = llm.generate(["Hello"], SamplingParams(max_tokens=8))
    assert result["token_ids"] == ids[:cut]
    assert result["finish_reason"] == "stop"
    assert result["text"] == llm.tokenizer.decode(ids[:cut])
    assert llm.generate(["Hello"], greedy(8)) == [whole]  # ignoring it, it is an ordinary token


@both_loops
def test_an_ignored_eos_may_be_the_last_token(make_llm: MakeLLM, overlap: bool) -> None:
    use_overlap(overlap)
    llm = make_llm()
    (whole,) = llm.generate(["Hello"], greedy(8))
    llm.eos_token_id = whole["token_ids"][-1]
    assert llm.generate(["Hello"], greedy(8)) == [whole]


def test_eos_ids_are_the_union_of_tokenizer_config_and_generation_config(
    tmp_path: Path, make_llm: MakeLLM
) -> None:
    folder = write_model(tmp_path / "m", eos_token_id=EOS_2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_3, 65]}))
    llm = make_llm(folder)
    assert sorted(llm._eos_token_ids) == sorted([EOS, EOS_2, EOS_3, 65])
    llm.eos_token_id = 5
    assert sorted(llm._eos_token_ids) == [5]


def test_uids_count_from_zero_anew_in_each_call(make_llm: MakeLLM) -> None:
    llm = make_llm()
    uids: list[int] = []
    send = llm.send_result
    llm.send_result = lambda replies: (  # type: ignore[method-assign]
        uids.extend(reply.uid for reply in replies),
        send(replies),
    )[1]
    for _ in range(2):
        uids.clear()
        llm.generate(TEXTS, greedy(1))
        assert uids == [0, 1, 2]


@both_loops
def test_all_prompts_arrive_before_the_first_forward(make_llm: MakeLLM, overlap: bool) -> None:
    use_overlap(overlap)
    llm: Any = make_llm(max_running_req=2)
    events: list[Any] = []
    receive, forward = llm.offline_receive_msg, llm._forward
    llm.offline_receive_msg = lambda blocking=False: _noted(events, len, receive(blocking))
    llm._forward = lambda data: (events.append("forward"), forward(data))[1]
    llm.generate([[i + 1] * 3 for i in range(5)], greedy(2))
    assert events[:2] == [5, "forward"]
    assert sum(event for event in events if event != "forward") == 5


def _noted(events: list[Any], note: Any, value: Any) -> Any:
    events.append(note(value))
    return value


@both_loops
def test_it_ends_when_the_scheduler_is_idle_not_by_counting_replies(
    make_llm: MakeLLM, overlap: bool
) -> None:
    use_overlap(overlap)
    llm: Any = make_llm()
    llm.send_result = lambda replies: None
    results = llm.generate(TEXTS, greedy(4))
    assert [result["token_ids"] for result in results] == [[], [], []]
    assert llm.is_idle and llm.prefill_manager.pending_list == []


@both_loops
def test_max_tokens_gives_that_many_replies_and_only_the_last_says_finished(
    make_llm: MakeLLM, overlap: bool
) -> None:
    use_overlap(overlap)
    llm: Any = make_llm()
    seen: dict[int, list[bool]] = {0: [], 1: [], 2: []}
    send = llm.offline_send_result
    llm.offline_send_result = lambda replies: (
        [seen[reply.uid].append(reply.finished) for reply in replies],
        send(replies),
    )[1]
    llm.generate(TEXTS, [greedy(1), greedy(2), greedy(9)])
    assert seen == {0: [True], 1: [False, True], 2: [False] * 8 + [True]}


def test_the_example_every_user_knows_through_the_real_llm(make_llm: MakeLLM) -> None:
    llm: Any = make_llm(
        num_page_override=64, max_running_req=8, max_seq_len_override=128, cache_type="naive"
    )
    ENV.DISABLE_OVERLAP_SCHEDULING.value = True
    trace: list[tuple[Any, ...]] = []
    forward = llm._forward

    def traced(forward_input: Any) -> Any:
        output = forward(forward_input)
        trace.append(
            (
                forward_input.batch.phase,
                [req.uid for req in forward_input.batch.reqs],
                len(llm.prefill_manager.pending_list),
                len(llm.cache_manager.free_slots),
                llm.decode_manager.inflight_tokens,
            )
        )
        return output

    llm._forward = traced
    llm.generate([[i + 1] * n for i, n in enumerate([5, 5, 4, 15, 5])], greedy(8))
    first = [("prefill", [0, 1, 2, 3], 1, 35, 28)] + [
        ("decode", [0, 1, 2, 3], 1, 31 - 4 * i, 24 - 4 * i) for i in range(7)
    ]
    fifth = [("prefill", [4], 0, 59, 7)] + [("decode", [4], 0, 58 - i, 6 - i) for i in range(7)]
    assert trace == first + fifth
    assert len(llm.cache_manager.free_slots) == 64
    llm.cache_manager.check_integrity()


@both_loops
def test_extend_len_before_the_forward_is_what_the_step_computes(
    make_llm: MakeLLM, overlap: bool
) -> None:
    use_overlap(overlap)
    llm: Any = make_llm(max_extend_tokens=6)
    prompts = [[i + 1] * n for i, n in enumerate([5, 9, 1, 14, 2])]
    computed: list[int] = []
    forward = llm._forward

    def observed(forward_input: Any) -> Any:
        if forward_input.batch.is_prefill:
            computed.append(sum(req.extend_len for req in forward_input.batch.reqs))
        return forward(forward_input)

    llm._forward = observed
    llm.generate(prompts, greedy(3))
    assert computed == [6, 6, 6, 6, 6, 1]
    computed.clear()
    llm.generate(prompts, greedy(3))  # the second time, one token for each prompt
    assert sum(computed) == 5
    assert llm.table_manager.available_size == 16


def test_a_wrapped_overlap_loop_sees_the_batch_in_flight(make_llm: MakeLLM) -> None:
    use_overlap(True)
    llm: Any = make_llm()
    in_flight: list[tuple[str, list[int]] | None] = []
    loop = llm.overlap_loop

    def observed(last_data: Any) -> Any:
        batch = last_data[0].batch if last_data else None
        in_flight.append(batch and (batch.phase, [req.uid for req in batch.reqs]))
        return loop(last_data)

    llm.overlap_loop = observed
    llm.generate([[1, 2], [3]], greedy(3))
    assert in_flight == [None, ("prefill", [0, 1]), ("decode", [0, 1]), ("decode", [0, 1])]


def test_decode_batches_of_the_given_sizes_are_padded_and_replayed(make_llm: MakeLLM) -> None:
    prompts = [[i + 1] * (i + 1) for i in range(5)]
    expected = make_llm().generate(prompts, greedy())
    llm: Any = make_llm(cuda_graph_bs=[2, 4])
    sizes: list[tuple[int, int]] = []
    replay = llm.engine.graph_runner.replay
    llm.engine.graph_runner.replay = lambda batch: (
        sizes.append((batch.size, batch.padded_size)),
        replay(batch),
    )[1]
    assert llm.generate(prompts, [greedy(i + 2) for i in range(5)]) == [
        {
            **result,
            "token_ids": result["token_ids"][: i + 2],
            "text": llm.tokenizer.decode(result["token_ids"][: i + 2]),
        }
        for i, result in enumerate(expected)
    ]
    assert sizes == [(4, 4), (3, 4), (2, 2), (1, 2)]  # five at once are too many


def test_the_tokenizer_works_as_users_expect(llm: LLM) -> None:
    ids = llm.tokenizer("Hello").input_ids
    assert ids == llm.tokenizer.encode("Hello") and len(ids) == 5
    assert llm.tokenizer.decode(ids) == "Hello"


def test_many_llms_live_and_die_in_one_process(make_llm: MakeLLM) -> None:
    expected = make_llm().generate(TEXTS, greedy())
    llms = [make_llm(page_size=page_size) for page_size in (1, 4, 16)]
    for llm in llms:
        assert llm.generate(TEXTS, greedy()) == expected
    llms[2].shutdown()
    assert llms[0].generate(TEXTS, greedy()) == expected
    assert make_llm().generate(TEXTS, greedy()) == expected


def test_shutdown_frees_everything(make_llm: MakeLLM) -> None:
    llm = make_llm(cuda_graph_bs=[2])
    llm.generate(TEXTS, greedy())
    refs = [weakref.ref(weight) for weight in llm.engine.model.state_dict().values()]
    refs += [weakref.ref(llm.engine.kv_cache), weakref.ref(llm.engine.page_table)]
    llm.shutdown()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    with pytest.raises(InvalidRequestError, match="shut down"):
        llm.generate(TEXTS)
    llm.shutdown()  # twice is as good as once


def test_an_unknown_option_is_named_with_those_there_are(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no option pagesize.*page_size"):
        LLM(str(tiny_model), pagesize=4)


def test_the_arguments_are_those_of_the_contract() -> None:
    parameters = list(inspect.signature(LLM).parameters.values())
    assert [p.name for p in parameters[:2]] == ["model_path", "dtype"]
    assert parameters[1].default is torch.bfloat16
    assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    names = list(inspect.signature(LLM.generate).parameters)
    assert names[1:] == ["prompts", "sampling_params"]


def test_the_dtype_may_be_given_by_name_or_object(make_llm: MakeLLM) -> None:
    expected = make_llm(dtype="float32").generate(TEXTS, greedy())
    assert make_llm(dtype=torch.float32).generate(TEXTS, greedy()) == expected
    (result,) = make_llm(dtype=torch.bfloat16).generate(["Hello"], greedy())
    assert all(0 <= token < VOCAB_SIZE for token in result["token_ids"])
