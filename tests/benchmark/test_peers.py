"""The arithmetic and the tables of benchmark/peers: no engine is started."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark.peers import protocol, quality, table, works
from benchmark.peers.works import ModelFacts, Work

FAST = Work("fast", "a fast thing", {"work": "decode", "streams": 2, "context": 10, "steps": 4},
            1.5, 2.0, 0.5, 0.6)  # fmt: skip
MEMORY = Work("memory", "memory", {"work": "memory"}, 1.1, 1.0, unit="MB")


def samples(**rows: list[float | None]) -> table.Samples:
    """One row "fast" per engine; underscores stand for spaces and dots."""
    names = {"ours": "minisgl", "lc": "llama.cpp shipped", "ik": "ik_llama.cpp Q4_0"}
    return {names[name]: {"fast": values} for name, values in rows.items()}


def test_the_median_leaves_out_what_failed() -> None:
    assert table.median_of([3.0, None, 1.0]) == 2.0
    assert table.median_of([None]) is None
    assert table.median_of([]) is None


def test_the_best_peer_is_the_one_with_the_best_median_and_never_ourselves() -> None:
    found = samples(ours=[900.0, 900.0], lc=[10.0, 30.0, 12.0], ik=[13.0, 13.0, 1.0])
    assert table.best_peer(FAST, found) == ("ik_llama.cpp Q4_0", 13.0)


def test_the_ratio_is_of_medians_and_those_of_single_rounds_are_kept() -> None:
    found = table.compare(FAST, samples(ours=[20.0, None, 40.0], lc=[10.0, 20.0, 10.0]))
    assert (found.ours, found.theirs, found.ratio) == (30.0, 10.0, 3.0)
    assert found.ratios == (2.0, 4.0)


def test_a_row_without_a_peer_or_without_us_has_no_ratio() -> None:
    assert table.compare(FAST, samples(ours=[1.0])).ratio is None
    alone = table.compare(FAST, samples(ours=[None], lc=[2.0]))
    assert (alone.ours, alone.theirs, alone.ratio) == (None, 2.0, None)


def test_memory_is_compared_with_llama_cpp_on_the_same_file_only() -> None:
    found: table.Samples = {
        "minisgl": {"memory": [110.0]},
        "llama.cpp shipped": {"memory": [100.0]},
        "llama.cpp Q4_0": {"memory": [50.0]},
        "OpenVINO shipped": {"memory": [40.0]},
    }
    compared = table.compare(MEMORY, found)
    assert (compared.peer, compared.ratio) == ("llama.cpp shipped", 1.1)
    assert table.verdict(MEMORY, compared.ratio, None) == "must"


@pytest.mark.parametrize(
    ("ratio", "share", "wanted"),
    [(2.0, 0.6, "aim"), (2.0, 0.59, "must"), (1.5, 0.5, "must"), (1.49, 0.9, "below"),
     (3.0, 0.4, "below"), (3.0, None, "below"), (None, 0.9, "-")],
)  # fmt: skip
def test_a_verdict_needs_the_ratio_and_the_share(
    ratio: float | None, share: float | None, wanted: str
) -> None:
    assert table.verdict(FAST, ratio, share) == wanted


def test_only_peers_far_behind_are_left_out_of_further_rounds() -> None:
    found = samples(ours=[1.0], lc=[59.0], ik=[100.0])
    assert table.hopeless(FAST, found) == ["llama.cpp shipped"]
    assert table.hopeless(FAST, samples(ours=[1.0], lc=[61.0], ik=[100.0])) == []
    assert table.hopeless(FAST, samples(ours=[], lc=[], ik=[])) == []


def test_the_ceiling_is_the_slower_of_reading_and_computing() -> None:
    facts = ModelFacts(weight_bytes=100, layer_ops=10, head_ops=5, kv_bytes=1, attention_ops=2)
    # Two streams of 12 tokens of context on average: 124 bytes, 30 operations and 48 of attention.
    assert works.ceiling_of(FAST, facts, read=124.0, multiply=1e9) == 2.0
    assert works.ceiling_of(FAST, facts, read=1e9, multiply=39.0) == 1.0
    # A prompt of 4 tokens, which see 1 + 2 + 3 + 4: 40 operations, 5 of one head, 20 of attention.
    prompt = Work("prompt", "", {"work": "prefill", "context": 4, "repeats": 1}, 1.0, 1.0)
    assert works.ceiling_of(prompt, facts, read=1e9, multiply=65.0) == 4.0
    assert works.ceiling_of(MEMORY, facts, 1.0, 1.0) is None


def test_values_are_rates_except_for_memory() -> None:
    assert works.value_of(FAST, {"tokens": 30, "seconds": 2.0}) == 15.0
    assert works.value_of(MEMORY, {"peak": 5_000_000, "rss": 1, "pss": 1}) == 5.0
    chat = works.chosen(["chat"])[0]
    assert works.value_of(chat, {"tokens": 999, "seconds": 32.0}) == 2.0


def test_scaled_works_keep_at_least_two_steps() -> None:
    assert {w.job.get("steps", 2) for w in works.chosen(["decode-1", "decode-32"], 0.001)} == {2}
    assert [w.job["is_warm"] for w in works.chosen(["chat"], 1.0, True)] == [True]


def test_tables_are_aligned() -> None:
    text = table.render(["name", "value"], [["a", "1"], ["long name", "1,000"]])
    assert text.splitlines() == [
        "name       value",
        "---------  -----",
        "a              1",
        "long name  1,000",
    ]


def test_the_goals_table_says_what_is_reached() -> None:
    found = samples(ours=[30.0], lc=[10.0])
    text, data = table.goals_table([FAST], found, {"fast": [0.9, 0.75, 0.5]})
    assert data[0]["verdict"] == "aim" and data[0]["share"] == 0.75
    assert text.splitlines()[-1].split()[-1] == "aim"
    assert "3.00 x" in text and "75%" in text


def test_every_engine_gets_the_same_chat() -> None:
    job = {**works.CHAT, "seed": 3}
    first, again = protocol.make_chat(job), protocol.make_chat(job)
    assert first == again and len(first[0]) == 512 and len(first[1]) == 64
    assert all(8 <= request.num_output <= 24 for request in first[1])
    assert protocol.make_chat({**job, "seed": 4}) != first


def test_prompts_of_streams_differ() -> None:
    prompts = protocol.make_prompts({"context": 8, "streams": 3, "seed": 1})
    assert [len(p) for p in prompts] == [8, 8, 8]
    assert len({tuple(p) for p in prompts}) == 3


def test_divergence_and_perplexity_of_a_known_distribution() -> None:
    ids = [0, 1, 1, 0]
    even = np.zeros((4, 2), np.float32)
    skewed = np.log(np.array([[0.25, 0.75]] * 4)).astype(np.float32)
    score = quality.Score()
    score.add(even, skewed, ids)
    row = score.row("x")
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert row["kl"] == pytest.approx(expected, rel=1e-6)
    assert row["perplexity"] == pytest.approx((0.75 * 0.75 * 0.25) ** (-1 / 3), rel=1e-6)
    assert row["positions"] == 4


def test_the_reference_against_itself_diverges_by_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(70, 16)).astype(np.float32)
    score = quality.Score()
    score.add(logits, logits, list(range(16)) * 4 + list(range(6)))
    assert score.row("x")["kl"] == 0.0 and score.row("x")["same_top"] == 1.0
