"""Messages: round trips by value; bytes from a broken or hostile peer are `MessageError`."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    BaseBackendMsg,
    BaseFrontendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    BatchFrontendMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    ErrorReply,
    ExitMsg,
    ExpireBackendMsg,
    FromWire,
    TokenizeMsg,
    UserMsg,
    UserReply,
    to_wire,
)
from minisgl.message.codec import MAX_NESTING, Message, pack, unpack
from minisgl.params import (
    Constraint,
    ErrorKind,
    FinishReason,
    Logprob,
    MessageError,
    PositionLogprobs,
    SamplingParams,
)

FULL_PARAMS = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    ignore_eos=True,
    max_tokens=12,
    min_p=0.05,
    seed=-3,
    stop=("end", "\n\n"),
    stop_token_ids=(1, 2),
    frequency_penalty=0.1,
    presence_penalty=-0.2,
    repetition_penalty=1.1,
    logit_bias={5: -1.5, 6: 2.0},
    logprobs=2,
    prompt_logprobs=0,
    constraint=Constraint("regex", "a|b"),
)
LOGPROBS = PositionLogprobs(Logprob(4, -0.5, b"\xff\x00"), [Logprob(4, -0.5), Logprob(9, -2.5)])
CHAT = [{"role": "user", "content": "Hi", "__type__": "ExitMsg"}]  # a client may send any key

MESSAGES: list[Message] = [
    ExitMsg(),
    AbortBackendMsg(3),
    ExpireBackendMsg(3),
    UserMsg(1, [5, 6, 7], SamplingParams()),
    UserMsg(2**40, [], FULL_PARAMS, group=4, salt="s", priority=-2, deadline=1.5),
    BatchBackendMsg([UserMsg(1, [5], SamplingParams()), AbortBackendMsg(1), ExitMsg()]),
    BatchBackendMsg([BatchBackendMsg([ExitMsg()]), BatchBackendMsg([])]),
    TokenizeMsg(1, "text with \u00e9 and \U0001f600", FULL_PARAMS),
    TokenizeMsg(1, CHAT, SamplingParams()),
    TokenizeMsg(2, [5, 6], SamplingParams(), group=1, salt="s", priority=3, deadline=2.5),
    DetokenizeMsg(1, 17, False),
    DetokenizeMsg(1, 17, True, FinishReason.STOP),
    DetokenizeMsg(1, -1, True, FinishReason.ERROR, "the forward pass failed"),
    DetokenizeMsg(1, -1, True, FinishReason.ERROR, "no", ErrorKind.INVALID, "prompt"),
    DetokenizeMsg(1, 4, False, None, None, ErrorKind.FAILED, None, 9, 8, LOGPROBS, [LOGPROBS] * 2),
    AbortMsg(9),
    BatchTokenizerMsg([DetokenizeMsg(1, 2, False), AbortMsg(1)]),
    UserReply(1, "piece", False),
    UserReply(1, "", True, FinishReason.LENGTH),
    UserReply(1, "ab", False, None, [4, 5], 7, 6, [LOGPROBS], [LOGPROBS, LOGPROBS]),
    ErrorReply(1, "no", "stop"),
    ErrorReply(1, "later", None, ErrorKind.OVERLOADED),
    BatchFrontendMsg([UserReply(1, "a", True), ErrorReply(2, "b")]),
]
FAMILIES = (BaseBackendMsg, BaseTokenizerMsg, BaseFrontendMsg)


def family_of(message: Message) -> type[Message]:
    return next(family for family in FAMILIES if isinstance(message, family))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_dict_and_the_bytes(message: Message) -> None:
    family = family_of(message)
    assert family.decoder(message.encoder()) == message
    assert family.decoder(unpack(pack(message.encoder()))) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_not_of_another_family(message: Message) -> None:
    for family in FAMILIES:
        if not isinstance(message, family):
            with pytest.raises(MessageError):
                family.decoder(message.encoder())


def test_a_message_is_decoded_by_its_own_class_too() -> None:
    encoded = AbortBackendMsg(1).encoder()
    assert AbortBackendMsg.decoder(encoded) == AbortBackendMsg(1)
    with pytest.raises(MessageError, match="not a ExitMsg"):
        ExitMsg.decoder(encoded)


def test_the_encoding_is_a_tagged_dict_of_plain_values() -> None:
    encoded = UserMsg(1, [5, 6], FULL_PARAMS).encoder()
    assert encoded["__type__"] == "UserMsg"
    ids = np.array([5, 6], dtype="<i4").tobytes()
    assert encoded["input_ids"] == {"__type__": "Tensor", "dtype": "int32", "buffer": ids}
    assert encoded["sampling_params"]["__type__"] == "SamplingParams"
    reason = DetokenizeMsg(1, 2, True, FinishReason.STOP).encoder()["finish_reason"]
    assert type(reason) is str and reason == "stop"


def test_token_ids_come_out_as_a_tensor_of_int32() -> None:
    decoded = BaseBackendMsg.decoder(UserMsg(1, [5, 6], SamplingParams()).encoder())
    assert isinstance(decoded, UserMsg)
    assert decoded.input_ids.dtype == torch.int32 and decoded.input_ids.device.type == "cpu"
    assert decoded.input_ids.tolist() == [5, 6]
    decoded.input_ids[0] = 9  # an ordinary, writable tensor
    assert decoded.input_ids.tolist() == [9, 6]


@pytest.mark.parametrize(
    "ids",
    [
        [3, 4],
        (3, 4),
        np.array([3, 4]),
        np.array([3, 4], dtype=np.uint8),
        torch.tensor([3, 4], dtype=torch.int32),
        torch.tensor([3, 4], dtype=torch.int64),
        torch.tensor([3, 9, 4, 9])[::2],
    ],
)
def test_token_ids_go_in_as_a_list_an_array_or_a_tensor(ids: Any) -> None:
    assert UserMsg(1, ids, SamplingParams()).input_ids.tolist() == [3, 4]


@pytest.mark.parametrize(
    "ids",
    [
        "34",
        5,
        None,
        [[1], [2]],
        [[1], [2, 3]],
        [1.5],
        ["a"],
        [True],
        [2**31],
        [-(2**31) - 1],
        [10**5000],
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor(3),
        object(),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_what_is_no_token_id_is_refused(ids: Any) -> None:
    with pytest.raises(MessageError, match="token ids"):
        UserMsg(1, ids, SamplingParams())


def test_messages_compare_by_value() -> None:
    first = UserMsg(1, [1, 2], SamplingParams(stop=["x"]))
    assert first == UserMsg(1, torch.tensor([1, 2]), SamplingParams(stop=("x",)))
    assert first != UserMsg(1, [1, 3], SamplingParams(stop=["x"]))
    assert first != AbortBackendMsg(1) and first != 1
    assert AbortMsg(1) != AbortBackendMsg(1)


def test_a_list_in_a_message_is_not_mistaken_for_messages() -> None:
    decoded = BaseTokenizerMsg.decoder(TokenizeMsg(1, CHAT, SamplingParams()).encoder())
    assert isinstance(decoded, TokenizeMsg) and decoded.text == CHAT


USER = UserMsg(1, [5], SamplingParams()).encoder()

DAMAGED: list[Any] = [
    None,
    5,
    "ExitMsg",
    [],
    [USER],
    {},
    {"__type__": None},
    {"__type__": ["ExitMsg"]},
    {"__type__": "Nothing"},
    {"__type__": "Message"},
    {"__type__": "BaseBackendMsg"},
    {"__type__": "SamplingParams"},
    {"__type__": "Tensor", "dtype": "int32", "buffer": b""},
    {"__type__": "ExitMsg", "extra": 1},
    {"__type__": "ExitMsg", 5: 1},
    {"__type__": "AbortBackendMsg"},
    {"__type__": "AbortBackendMsg", "uid": "1"},
    {"__type__": "AbortBackendMsg", "uid": 1.5},
    {"__type__": "AbortBackendMsg", "uid": None},
    {**USER, "input_ids": [1, 2]},
    {**USER, "input_ids": {"__type__": "Tensor"}},
    {**USER, "input_ids": {"__type__": "Tensor", "dtype": "int64", "buffer": b"12345678"}},
    {**USER, "input_ids": {"__type__": "Tensor", "dtype": "int32", "buffer": b"123"}},
    {**USER, "input_ids": {"__type__": "Tensor", "dtype": "int32", "buffer": "1234"}},
    {**USER, "sampling_params": None},
    {**USER, "sampling_params": {"__type__": "ExitMsg"}},
    {**USER, "sampling_params": {"__type__": "SamplingParams", "temperature": "hot"}},
    {**USER, "sampling_params": {"__type__": "SamplingParams", "stop": 5}},
    {**USER, "sampling_params": {"__type__": "SamplingParams", "validate": 5}},
    {**USER, "salt": USER},
    {**USER, "uid": {"__type__": "Tensor", "dtype": "int32", "buffer": b""}},
    {"__type__": "BatchBackendMsg", "data": None},
    {"__type__": "BatchBackendMsg", "data": USER},
    {"__type__": "BatchBackendMsg", "data": [1]},
    {"__type__": "BatchBackendMsg", "data": [AbortMsg(1).encoder()]},
    {"__type__": "BatchBackendMsg", "data": [{"__type__": "SamplingParams"}]},
]


@pytest.mark.parametrize("data", DAMAGED)
def test_what_is_no_message_is_an_error_and_never_a_crash(data: Any) -> None:
    with pytest.raises(MessageError):
        BaseBackendMsg.decoder(data)


def test_an_error_about_a_message_is_short() -> None:
    with pytest.raises(MessageError) as caught:
        BaseBackendMsg.decoder({"__type__": "x" * 100_000})
    assert len(str(caught.value)) < 200


def test_nesting_is_bounded() -> None:
    message: Message = ExitMsg()
    for _ in range(MAX_NESTING):
        message = BatchBackendMsg([message])
    assert BaseBackendMsg.decoder(message.encoder()) == message
    with pytest.raises(MessageError, match="nested"):
        BaseBackendMsg.decoder(BatchBackendMsg([message]).encoder())


def test_bytes_nested_without_end_are_an_error() -> None:
    for data in (b"\x91" * 200_000 + b"\x01", b"\x81\x01" * 200_000, b"\xdd\xff\xff\xff\xff", b""):
        with pytest.raises(MessageError):
            BaseBackendMsg.decoder(unpack(data))


def decode_or_message_error(data: bytes) -> Message | None:
    try:
        return BaseBackendMsg.decoder(unpack(data))
    except MessageError:
        return None


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_errors(data: bytes) -> None:
    decode_or_message_error(data)


def test_damaged_bytes_of_a_real_message_decode_or_are_an_error() -> None:
    rng = random.Random(2)
    whole = pack(MESSAGES[4].encoder())
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        decoded = decode_or_message_error(bytes(data[: rng.randrange(len(data) + 1)]))
        if decoded is not None:
            assert BaseBackendMsg.decoder(decoded.encoder()) == decoded


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary()
    | st.text(max_size=5)
    | st.sampled_from(["UserMsg", "Tensor", "int32", "SamplingParams"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["__type__", "uid", "input_ids", "sampling_params", "data", "buffer", "x"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(PLAIN, st.sampled_from(["uid", "input_ids", "sampling_params", "salt", "deadline", "data"]))
@settings(max_examples=500, deadline=None)
def test_any_value_in_any_field_decodes_or_is_an_error(value: Any, field: str) -> None:
    for data in (value, {**USER, field: value}, {"__type__": "BatchBackendMsg", "data": value}):
        decode_or_message_error(msgspec.msgpack.encode(data))


# --- bytes for the queues -------------------------------------------------------------------------

POSITION = PositionLogprobs(Logprob(5, -0.5, b"\xc3"), [Logprob(6, None)])


@pytest.mark.parametrize(
    ("message", "family"),
    [
        (BatchTokenizerMsg([]), BaseTokenizerMsg),
        (
            BatchTokenizerMsg(
                [
                    DetokenizeMsg(1, 5, False, logprobs=POSITION, prompt_logprobs=[POSITION]),
                    DetokenizeMsg(2, 6, True, FinishReason.LENGTH),
                    DetokenizeMsg(3, -1, True, FinishReason.ERROR, "why", ErrorKind.TIMEOUT, "p"),
                ]
                * 20
            ),
            BaseTokenizerMsg,
        ),
        (BatchTokenizerMsg([DetokenizeMsg(1, 5, False), AbortMsg(2)]), BaseTokenizerMsg),
        (AbortMsg(2), BaseTokenizerMsg),
        (
            BatchFrontendMsg([UserReply(1, "é", True, FinishReason.STOP, [5], 3, 1, [POSITION])]),
            BaseFrontendMsg,
        ),
        (BatchFrontendMsg([UserReply(1, "a", False), ErrorReply(2, "why")]), BaseFrontendMsg),
        (BatchBackendMsg([AbortBackendMsg(1)]), BaseBackendMsg),
    ],
)
def test_bytes_for_the_queues_come_back_as_the_message(message: Any, family: Any) -> None:
    assert FromWire(family)(to_wire(message)) == message


@pytest.mark.parametrize("family", [BaseTokenizerMsg, BaseFrontendMsg, BaseBackendMsg])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x90\x00",
        b"\x91",
        b"\x91\xc0",
        b"\x91\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\xc1",
        b"\x01",
    ],
)
def test_bytes_that_are_no_message_are_an_error(family: Any, data: bytes) -> None:
    with pytest.raises(MessageError):
        FromWire(family)(data)


def test_a_field_of_a_wrong_type_in_a_list_is_an_error() -> None:
    good = to_wire(BatchTokenizerMsg([DetokenizeMsg(1, 5, False)]))
    with pytest.raises(MessageError, match="uid"):
        FromWire(BaseTokenizerMsg)(good.replace(b"\xa3uid\x01", b"\xa3uid\xa11"))
