"""The second tier and saved prefixes with real models: the same bits, nothing computed twice."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import ConfigError, InvalidRequestError, SamplingParams
from minisgl.kernel import native
from minisgl.message import FlushMsg

from tests.integer_kv import INTEGERS
from tests.llm.conftest import MakeLLM
from tests.llm.test_against_transformers import collect_logits
from tests.llm.tiny import write_model

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
exact = pytest.mark.skipif(not native.available(), reason="a promise of the native kernels")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning or worse."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def make_prompts(num_prompts: int = 6, length: int = 60) -> list[list[int]]:
    """Prompts that share their first 20 tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 256, (num_prompts + 1, length), generator=generator).tolist()
    return [ids[0][:20] + row[20:] for row in ids[1:]]


Run = tuple[list[list[int]], list[torch.Tensor], list[int]]


def run(llm: Any, prompts: list[list[int]]) -> Run:
    """One prompt after the other: tokens, logits, and how many prompt tokens were computed."""
    logits, tokens, computed = collect_logits(llm), [], []
    all_logits = []

    def count(record: Any) -> None:
        computed[-1] += record.num_tokens if record.phase == "prefill" else 0

    llm.step_listeners.append(count)
    for prompt in prompts:
        logits.clear()
        computed.append(0)
        tokens.append(llm.generate([prompt], PARAMS)[0]["token_ids"])
        all_logits.append(torch.stack(logits[0]))
        llm.cache_manager.check_integrity()
    llm.step_listeners.remove(count)
    return tokens, all_logits, computed


@exact
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", *INTEGERS])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("has_file", [False, True], ids=["memory", "file"])
def test_what_comes_back_from_the_second_tier_has_the_same_bits(
    make_llm: MakeLLM, tmp_path: Path, page_size: int, kv_dtype: Any, has_file: bool
) -> None:
    fields = {"page_size": page_size, "num_page_override": 80 // page_size, "kv_dtype": kv_dtype}
    where = {"kv_spill_dir": str(tmp_path)} if has_file else {}
    prompts = make_prompts()
    expected, logits, _ = run(make_llm(**fields, cache_type="naive"), prompts)
    llm: Any = make_llm(**fields, kv_spill_bytes=1 << 22, **where)
    run(llm, prompts)  # the pool holds one of them and a bit
    tokens, restored, computed = run(llm, prompts[:-1])
    assert tokens == expected[:-1]
    assert all(torch.equal(a, b) for a, b in zip(restored, logits))
    assert max(computed) <= page_size, "all but the last page came back"


@exact
@pytest.mark.parametrize("kv_dtype", ["float32", *INTEGERS])
@pytest.mark.parametrize("has_tier", [False, True], ids=["plain", "tier"])
def test_saved_prefixes_give_another_run_the_same_bits(
    make_llm: MakeLLM, tmp_path: Path, has_tier: bool, kv_dtype: Any
) -> None:
    fields: dict[str, Any] = {"page_size": 4, "num_page_override": 128, "kv_dtype": kv_dtype}
    if has_tier:
        fields |= {"num_page_override": 20, "kv_spill_bytes": 1 << 22}
    prompts = make_prompts()
    first: Any = make_llm(**fields)
    expected, logits, _ = run(first, prompts)
    num_saved = first.save_prefixes(tmp_path / "kv")
    second: Any = make_llm(**fields)
    assert second.load_prefixes(tmp_path / "kv") == num_saved >= 20 + 6 * 40
    tokens, loaded, computed = run(second, prompts)
    assert tokens == expected and max(computed) <= 4
    assert all(torch.equal(a, b) for a, b in zip(loaded, logits))


def test_a_smaller_pool_takes_the_latest_prefixes(make_llm: MakeLLM, tmp_path: Path) -> None:
    prompts = make_prompts()
    first: Any = make_llm()
    run(first, prompts)
    first.save_prefixes(tmp_path / "kv")
    second: Any = make_llm(num_page_override=80)
    second.load_prefixes(tmp_path / "kv")
    second.cache_manager.check_integrity()
    assert run(second, prompts[-1:])[2] == [1] and run(second, prompts[:1])[2] == [40]


def damaged(good: bytes) -> list[bytes]:
    """Files that differ from a good one somewhere, sampled."""
    rng = random.Random(2)
    flipped = []
    for position in [*range(80), *rng.sample(range(80, len(good)), 60)]:
        new = bytearray(good)
        new[position] ^= 1 << rng.randrange(8)
        flipped.append(bytes(new))
    cut = [good[:size] for size in (0, 1, 11, 75, 76, len(good) // 2, len(good) - 1)]
    return [*flipped, *cut, good + b"x"]


def test_a_damaged_file_is_one_line_in_the_log_and_never_wrong_kv(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts(2)
    llm: Any = make_llm()
    expected = run(llm, prompts)[0]
    llm.save_prefixes(tmp_path / "kv")
    good = (tmp_path / "kv").read_bytes()
    for i, content in enumerate(damaged(good)):
        llm.flush_cache()
        caplog.clear()
        (tmp_path / "kv").write_bytes(content)
        llm.load_prefixes(tmp_path / "kv")
        llm.cache_manager.check_integrity()
        (line,) = warnings_of(caplog)
        assert "ignored the saved prefixes" in line
        if i % 16 == 0:
            assert run(llm, prompts)[0] == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": 2, "num_page_override": 256}, {"kv_dtype": "float16"}, {"kv_dtype": "int8"},
        {"dtype": "float16"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)  # fmt: skip
def test_a_file_of_other_settings_is_ignored(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    first: Any = make_llm()
    run(first, make_prompts(1))
    first.save_prefixes(tmp_path / "kv")
    assert make_llm(**fields).load_prefixes(tmp_path / "kv") == 0
    (line,) = warnings_of(caplog)
    assert "other settings" in line


def test_a_file_of_other_weights_is_ignored_however_alike_they_are(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model(tmp_path / "model")
    first: Any = make_llm(path)
    run(first, make_prompts(1))
    assert first.save_prefixes(tmp_path / "kv") > 0
    weights = path / "model.safetensors"
    content, stat = bytearray(weights.read_bytes()), weights.stat()
    content[len(content) // 2] ^= 1
    os.truncate(weights, 0)
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert make_llm(path).load_prefixes(tmp_path / "kv") == 0
    (line,) = warnings_of(caplog)
    assert "another model" in line


def test_random_weights_are_like_no_others(make_llm: MakeLLM) -> None:
    first, second, third, fourth = (
        make_llm(use_dummy_weight=is_random).engine.fingerprint()
        for is_random in (True, True, False, False)
    )
    assert first != second and third == fourth


def test_kv_prefix_file_is_loaded_at_the_start_and_saved_at_the_end(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, prompts = tmp_path / "kv", make_prompts(2)
    first: Any = make_llm(kv_prefix_file=str(path))
    assert not warnings_of(caplog), "no file yet is no news"
    expected = run(first, prompts)[0]
    first.shutdown()
    second: Any = make_llm(kv_prefix_file=str(path))
    tokens, _, computed = run(second, prompts)
    assert tokens == expected and computed == [1, 1]
    folder = tmp_path / "no"
    folder.mkdir()
    second.config = second.config.__class__(
        **{**vars(second.config), "kv_prefix_file": str(folder / "folder")}
    )
    folder.rmdir()
    second.shutdown()
    (line,) = warnings_of(caplog)
    assert "cannot be saved" in line


def test_prefixes_that_cannot_be_saved_are_a_config_error(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    llm: Any = make_llm()
    with pytest.raises(ConfigError, match=r"cannot be saved to .*no"):
        llm.save_prefixes(tmp_path / "no" / "folder")
    with pytest.raises(ConfigError, match="cannot be saved"):
        llm.save_prefixes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_flush_forgets_both_tiers(make_llm: MakeLLM) -> None:
    llm: Any = make_llm(num_page_override=80, kv_spill_bytes=1 << 22)
    prompts = make_prompts(3)
    run(llm, prompts)
    assert llm.flush_cache() > 0
    assert run(llm, prompts)[2] == [60, 40, 40]
    llm.io.receive = lambda blocking: [FlushMsg()]  # what a server sends
    llm.normal_loop()
    assert llm.cache_manager.num_free_pages == 80
    assert llm.cache_manager.spill.num_free_slots == llm.cache_manager.spill.num_slots


def test_after_the_shutdown_there_is_nothing_to_save(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm: Any = make_llm()
    llm.shutdown()
    for call in (llm.flush_cache, lambda: llm.save_prefixes(tmp_path / "kv")):
        with pytest.raises(InvalidRequestError, match="shut down"):
            call()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_spill_bytes": -1}, "--kv-spill"),
        ({"kv_spill_bytes": 1}, "no room for a page"),
        ({"kv_spill_bytes": True}, "--kv-spill"),
        ({"kv_spill_dir": "/tmp"}, "needs kv_spill_bytes"),
        ({"kv_spill_bytes": 1 << 20, "kv_spill_dir": ""}, "--kv-spill-dir"),
        ({"kv_spill_bytes": 1 << 20, "kv_spill_dir": "/no/such/folder"}, "has no place"),
        ({"kv_spill_bytes": 1 << 20, "cache_type": "naive"}, "--cache-type"),
        ({"kv_prefix_file": "x", "cache_type": "naive"}, "--cache-type"),
        ({"kv_prefix_file": 3}, "--kv-prefix-file"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_config_errors(
    make_llm: MakeLLM, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_llm(**fields)
