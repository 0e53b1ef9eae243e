"""Mixed batches on real models: the same bits as prompts on their own, wherever a prompt meets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.mixed import Load

from minisgl.core import SamplingParams
from minisgl.env import ENV
from minisgl.kernel import native
from minisgl.llm import LLM
from minisgl.message import UserMsg

from tests.llm.conftest import MakeLLM
from tests.llm.test_against_transformers import collect_logits
from tests.llm.tiny import write_model

pytestmark = pytest.mark.skipif(not native.available(), reason="a promise of the native kernels")

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Three that come first, and three longer ones, of which one begins like another."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocab_size, (6, 90), generator=generator).tolist()
    return [ids[0][:9], ids[1][:30], ids[2][:1], ids[3], ids[4][:70], ids[3][:50] + ids[5][:20]]


def run(llm: Any, prompts: Sequence[list[int]]) -> tuple[dict[int, torch.Tensor], list[str]]:
    """Logits (tokens, vocabulary) of each prompt, and the phases of all steps.

    The first three prompts come at once, the others one after the other while those decode.
    """
    logits, phases = collect_logits(llm), []
    llm.step_listeners.append(lambda record: phases.append(record.phase))
    receive = type(llm).receive_msg

    def receiving(blocking: bool = False) -> list[Any]:
        msgs, uid = list(receive(llm, blocking)), 3 + len(phases) // 3
        if len(phases) % 3 == 2 and uid < len(prompts):
            msgs.append(UserMsg(uid, prompts[uid], PARAMS))
        return msgs

    llm.receive_msg = receiving
    llm.generate(prompts[:3], PARAMS)
    llm.cache_manager.check_integrity()
    return {uid: torch.stack(rows) for uid, rows in logits.items()}, phases


def check(expected: dict[int, torch.Tensor], llm: Any, prompts: Sequence[list[int]]) -> None:
    logits, phases = run(llm, prompts)
    assert phases.count("mixed") >= 3
    for uid, rows in expected.items():
        assert rows.shape[0] == PARAMS.max_tokens and torch.equal(logits[uid], rows), uid


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("fields", [{}, {"page_size": 16, "num_page_override": 64}], ids=str)
def test_mixing_changes_no_bit(
    make_llm: MakeLLM, chunk: int, overlap: bool, fields: dict[str, int]
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    prompts = make_prompts(256)
    expected, phases = run(make_llm(), prompts)
    assert "mixed" not in phases
    check(expected, make_llm(mixed_chunk=chunk, num_threads=2, **fields), prompts)


def test_mixing_changes_no_bit_where_attention_sees_a_window(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    path = write_model(tmp_path / "m", sliding_window=16, **changes)
    prompts = make_prompts(256)
    expected, _ = run(make_llm(path), prompts)
    check(expected, make_llm(path, mixed_chunk=7), prompts)


def test_mixing_changes_no_bit_of_the_default_model() -> None:
    prompts = make_prompts(49152)
    expected: dict[int, torch.Tensor] = {}
    for chunk in (0, 16):
        with LLM("default", dtype="auto", num_page_override=1024, mixed_chunk=chunk) as llm:
            if chunk:
                check(expected, llm, prompts)
            else:
                expected, _ = run(llm, prompts)


def test_the_benchmark_sees_the_same_answers_and_lets_the_newcomer_in(make_llm: MakeLLM) -> None:
    load = Load(Namespace(streams=3, context=4, answer=12, after=3, prompt=60), 256)
    plain, mixed = load.run(make_llm()), load.run(make_llm(mixed_chunk=16))
    assert plain.answers == mixed.answers and [len(a) for a in mixed.answers.values()] == [12] * 4
    assert min(mixed.worst_gap, mixed.first_token, mixed.throughput) > 0
