"""What is made of streams and times: records, percentiles, workloads."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from minisgl.benchmark import (
    Plan,
    Record,
    RepeatedRequests,
    Request,
    SyntheticRequests,
    parse_requests,
    poisson_arrivals,
    summarise,
)
from minisgl.benchmark.measure import percentile
from minisgl.params import ConfigError
from minisgl.utils.openai_api import ServerError


def data(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode()


def text(piece: str, **more: object) -> bytes:
    return data(choices=[{"index": 0, "delta": {"content": piece}, **more}])


def answered(due: float, *moments: float) -> Record:
    record = Record(0, due)
    for moment in moments:
        record.take(text("x"), moment)
    record.take(b"data: [DONE]", moments[-1])
    record.close(moments[-1])
    return record


def test_a_record_takes_the_moments_of_text_and_nothing_else() -> None:
    record = Record(0, 10.0)
    record.take(b": keep-alive", 10.5)
    record.take(data(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]), 11.0)
    assert record.seconds_to_first is None
    record.take(text("a"), 12.0)
    record.take(text("b"), 12.5)
    record.take(data(choices=[{"index": 0, "delta": {"reasoning_content": "c"}}]), 13.5)
    record.take(text("", finish_reason="length"), 14.0)
    record.take(data(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5}), 14.0)
    record.take(b"data: [DONE]", 14.0)
    record.close(14.5)
    assert (record.seconds_to_first, list(record.gaps)) == (2.0, [0.5, 1.0])
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 5, None)
    assert record.seconds_per_token == (13.5 - 12.0) / 4
    assert (record.finish_reason, record.end) == ("length", 14.5)


@pytest.mark.parametrize("end", [b"", b"data: [DONE]"])
def test_a_stream_is_complete_by_its_end_or_by_a_reason(end: bytes) -> None:
    record = Record(0, 0.0)
    record.take(text("a", finish_reason=None if end else "stop"), 1.0)
    record.take(end, 1.0)
    record.close(1.0)
    assert record.is_complete
    cut = Record(0, 0.0)
    cut.take(text("a"), 1.0)
    with pytest.raises(ServerError, match="ended before"):
        cut.close(1.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'data: {"error": {"message": "gone\\nnow"}}', "gave up: gone now"),
        (b'data: {"error": "gone"}', "gave up: gone"),
        (b'data: {"error": {}}', "no reason given"),
        (b"data: {nonsense", "no chunk"),
        (b'data: {"choices": 3}', "no chunk"),
        (b"data: [1]", "no chunk"),
        (b"data: \xff", "no chunk"),
    ],
)
def test_an_event_that_is_no_text_is_an_error(line: bytes, said: str) -> None:
    with pytest.raises(ServerError, match=said):
        Record(0, 0.0).take(line, 1.0)


def test_fields_that_no_client_knows_are_passed_over() -> None:
    record = Record(0, 0.0)
    record.take(data(id="x", choices=[{"index": 0, "text": "a", "logprobs": {"b": [1]}}], z=1), 1.0)
    record.take(data(choices=[{"index": 0, "text": "b"}], usage=None, error=None), 2.0)
    assert record.num_pieces == 2


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([1.0, 2.0, 4.0], q) for q in (0, 25, 50, 75, 100)] == [1, 1.5, 2, 3, 4]
    assert percentile([3.0], 99) == 3.0
    values = sorted(float(i * i % 97) for i in range(50))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, q) for q in (50, 90, 99)] == pytest.approx(
        [cuts[49], cuts[89], cuts[98]]
    )


def test_a_summary_counts_each_request_once_and_failed_ones_have_no_latency() -> None:
    cut = Record(2, 0.0)
    cut.take(text("x"), 100.0)
    records = [answered(0.0, 1.0, 2.0), answered(1.0, 4.0, 5.0, 6.0), cut]
    for kind in ("429", "429", "timeout"):
        records.append(Record(3, 0.0))
        records[-1].take(text("x"), 0.001)
        records[-1].fail(kind, "no")
    found = summarise(records, 10.0)
    assert (found["num_requests"], found["num_complete"], found["num_cut"]) == (6, 2, 1)
    assert found["errors"] == {"429": 2, "timeout": 1}
    assert found["output_tokens"] == 6 and found["output_tokens_per_second"] == 0.6
    assert found["requests_per_second"] == 0.2 and not found["is_counted_by_server"]
    assert found["time_to_first_token_s"]["p50"] == 3.0
    assert found["time_to_first_token_s"]["max"] == 100.0
    assert found["end_to_end_s"]["mean"] == 3.5 and found["inter_token_s"]["mean"] == 1.0
    json.dumps(found)


def test_a_summary_of_nothing_has_no_latencies() -> None:
    found = summarise([], 0.0)
    assert found["num_requests"] == 0 and found["end_to_end_s"] is None


def test_synthetic_prompts_have_their_lengths_and_their_prefix_and_depend_on_the_seed() -> None:
    made = SyntheticRequests(7, (20, 40), (5, 9), shared_prefix=12)
    asked = [made[i] for i in range(50)]
    words = [(request.prompt or "").split() for request in asked]
    assert {len(w) for w in words} <= set(range(20, 41)) and len({len(w) for w in words}) > 5
    assert len({tuple(w[:12]) for w in words}) == 1 and len({tuple(w[12:]) for w in words}) == 50
    assert {request.max_tokens for request in asked} == set(range(5, 10))
    assert [made[i] for i in reversed(range(50))] == asked[::-1]
    assert SyntheticRequests(8, (20, 40), (5, 9), 12)[0] != made[0]


def test_arrivals_have_their_rate_and_depend_on_the_seed() -> None:
    moments = [m for m, _ in zip(poisson_arrivals(50.0, 1), range(5001))]
    assert moments[0] == 0.0 and moments == sorted(moments)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)  # as of an exponential law
    assert moments[:9] == [m for m, _ in zip(poisson_arrivals(50.0, 1), range(9))]
    assert moments[1] != list(zip(range(2), poisson_arrivals(50.0, 2)))[1][1]
    assert [m for m, _ in zip(poisson_arrivals(float("inf"), 1), range(3))] == [0.0, 0.0, 0.0]


def test_a_file_has_lines_or_objects() -> None:
    assert parse_requests(["a", "b c"], 5, True) == [Request("a", None, 5), Request("b c", None, 5)]
    lines = ['{"prompt": "a", "max_tokens": 3}', '{"messages": [{"role": "user"}], "id": 4}']
    found = parse_requests(lines, None, True)
    assert found == [Request("a", None, 3), Request(None, [{"role": "user"}], None)]
    assert found[0].body(True) == {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert found[0].body(False) == {"prompt": "a", "max_tokens": 3}
    assert RepeatedRequests(found)[3] == found[1]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        '{"prompt": 3}',
        '{"prompt": "a", "messages": [{}]}',
        '{"messages": []}',
        '{"messages": "a"}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": "a", "max_tokens": true}',
        "[1]",
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="prompt 2 of the file"):
        parse_requests(['{"prompt": "a"}', line], None, True)


def test_messages_need_a_chat_and_a_file_needs_prompts() -> None:
    with pytest.raises(ConfigError, match="--api chat"):
        parse_requests(['{"messages": [{"role": "user", "content": "a"}]}'], None, False)
    with pytest.raises(ConfigError, match="empty"):
        parse_requests([], None, True)


def test_a_body_streams_with_usage_and_draws_by_its_number() -> None:
    workload = RepeatedRequests([Request("a", None, 2)])
    plan = Plan(workload, is_chat=False, fields={"model": "m", "temperature": 0.5}, seed=40)
    assert json.loads(plan.body(2)) == {
        "model": "m",
        "temperature": 0.5,
        "prompt": "a",
        "max_tokens": 2,
        "seed": 42,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    greedy = Plan(workload, is_chat=False, fields={"temperature": 0.0})
    assert "seed" not in json.loads(greedy.body(0))
