"""What crosses the wire arrives equal or is refused as a BodyError, whatever the bytes are."""

import contextlib
import json
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from echo2.protocol import (
    MOST_GROUPS,
    Batch,
    BodyError,
    GroupRollouts,
    Rollout,
    RolloutFailure,
    ScoredRollout,
    TrainingGroup,
    decode_batch,
    decode_group,
    decode_rollout,
    encode_batch,
    encode_group,
    encode_groups,
    encode_rollout,
    split_groups,
)

INT32_MAX = 2**31 - 1
token_ids = st.integers(0, INT32_MAX)
log_probs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def rollouts(draw, member):
    length = draw(st.integers(1, 6))

    def column(elements, dtype):
        return np.array(draw(st.lists(elements, min_size=length, max_size=length)), dtype)

    return Rollout(
        member,
        column(token_ids, np.int32),
        column(log_probs, np.float32),
        column(token_ids, np.int32),
        draw(st.sampled_from(["stop", "length"])),
    )


@st.composite
def parts(draw, member):
    whole = draw(rollouts(member))
    return replace(whole, finish_reason=draw(st.sampled_from([None, whole.finish_reason])), start=draw(st.integers(0, 2**40)))


@st.composite
def groups(draw):
    members = draw(st.lists(st.integers(0, 63), unique=True, max_size=4))
    failed = draw(st.integers(0, len(members)))
    return GroupRollouts(
        draw(st.integers(0, 2**53)),
        draw(st.integers(1, 1000)),
        tuple(draw(parts(member)) for member in members[failed:]),
        tuple(RolloutFailure(member=member, reason=draw(texts)) for member in members[:failed]),
    )


@st.composite
def batches(draw):
    def group(group_id):
        members = draw(st.lists(st.integers(0, 63), unique=True, max_size=3))
        reward = st.floats(allow_nan=False, allow_infinity=False)
        scored = tuple(ScoredRollout(draw(rollouts(member)), draw(reward), draw(texts)) for member in members)
        return TrainingGroup(group_id, tuple(draw(st.lists(token_ids, max_size=4))), scored)

    scored = draw(st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=3))
    return Batch(draw(st.integers(0, 2**53)), tuple(group(group_id) for group_id in range(draw(st.integers(0, 3)))), scored)


def plain(value):
    """A message as nested tuples that can be compared, with the number format of every array."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), *value.tolist())
    if is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in fields(value))
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


ROLLOUT = Rollout(3, np.array([5, 6, 2], np.int32), np.array([-0.5, -1, 0], np.float32), np.array([1, 1, 2], np.int32), "stop")
OTHER = Rollout(4, np.array([7], np.int32), np.array([-2], np.float32), np.array([2], np.int32), "length")
GROUP = GroupRollouts(17, 2, (ROLLOUT, OTHER), (RolloutFailure(member=0, reason="prompt too long"),))
BATCH = Batch(
    9, (TrainingGroup(17, (1, 2), (ScoredRollout(ROLLOUT, 0.5, "w"), ScoredRollout(OTHER, 1.0, "v"))),), {"reward": 0.75}
)
CODECS = {
    "group": (encode_group, decode_group, GROUP),
    "batch": (encode_batch, decode_batch, BATCH),
    "rollout": (encode_rollout, decode_rollout, ROLLOUT),
}
every_codec = pytest.mark.parametrize(("encode", "decode", "message"), CODECS.values(), ids=CODECS)


@given(groups())
def test_a_group_arrives_as_it_was_sent(group):
    assert plain(decode_group(encode_group(group))) == plain(group)


@given(batches())
def test_a_batch_arrives_as_it_was_sent(batch):
    assert plain(decode_batch(encode_batch(batch))) == plain(batch)


@given(rollouts(member=5))
def test_a_rollout_is_read_as_it_was_kept(rollout):
    assert plain(decode_rollout(encode_rollout(rollout))) == plain(rollout)


def test_the_oldest_version_of_a_group_is_that_of_its_oldest_token():
    assert BATCH.groups[0].oldest_version == 1


@every_codec
def test_a_body_cut_short_anywhere_is_refused(encode, decode, message):
    body = encode(message)
    for length in range(len(body)):
        with pytest.raises(BodyError):
            decode(body[:length])
    with pytest.raises(BodyError):
        decode(body + b"\0")


def test_impossible_rollouts_are_refused():
    for name, value in (
        ("log_probs", [-1.0, float("nan"), -1.0]),
        ("log_probs", [-1.0, float("-inf"), -1.0]),
        ("log_probs", [-1.0, float("inf"), -1.0]),
        ("log_probs", [-1.0, 0.5, -1.0]),
        ("log_probs", [-1.0]),
        ("token_ids", [-1, 2, 3]),
        ("versions", [0, -1, 0]),
        ("versions", [0, 0]),
    ):
        columns = {"token_ids": ROLLOUT.token_ids, "log_probs": ROLLOUT.log_probs, "versions": ROLLOUT.versions}
        columns[name] = np.array(value, columns[name].dtype)
        body = encode_group(GroupRollouts(0, 1, (Rollout(0, *columns.values(), "stop"),)))
        with pytest.raises(BodyError):
            decode_group(body)
    for reason in ("eos", "", "STOP"):
        body = encode_group(GroupRollouts(0, 1, (Rollout(0, ROLLOUT.token_ids, ROLLOUT.log_probs, ROLLOUT.versions, reason),)))
        with pytest.raises(BodyError, match=r"finish.reason"):
            decode_group(body)


def test_an_empty_completion_is_refused():
    nothing = np.zeros(0, np.int32)
    body = encode_group(GroupRollouts(0, 1, (Rollout(0, nothing, nothing.astype(np.float32), nothing, "stop"),)))
    with pytest.raises(BodyError, match="lengths"):
        decode_group(body)


def test_a_member_that_occurs_twice_is_refused():
    failure = RolloutFailure(member=ROLLOUT.member, reason="")
    for twice in (GroupRollouts(0, 1, (ROLLOUT, ROLLOUT)), GroupRollouts(0, 1, (ROLLOUT,), (failure,))):
        with pytest.raises(BodyError, match="twice"):
            decode_group(encode_group(twice))


MEMBERS = {"members": [3, 4], "finish_reasons": ["stop", "length"]}
TENSORS = {
    "token_ids": np.array([5, 6, 2, 7], np.int32),
    "log_probs": np.full(4, -1.0, np.float32),
    "versions": np.zeros(4, np.int32),
}
DESCRIBED_GROUP = {"group_id": 17, "prompt_token_ids": [1], **MEMBERS, "rewards": [0.0, 1.0], "worker_ids": ["a", "b"]}
HEADERS = {
    decode_group: {"group_id": 17, "attempt": 1, "starts": [0, 6], "failures": [], **MEMBERS},
    decode_batch: {"step": 0, "scored": {}, "groups": [DESCRIBED_GROUP]},
    decode_rollout: {"members": [3], "finish_reasons": ["stop"]},
}
every_decoder = pytest.mark.parametrize("decode", HEADERS)


def body_for(decode, tensors=(), **header):
    """A body that `decode` reads, but with some tensors and header fields replaced, or left out where "absent"."""
    lengths = np.array([4] if decode is decode_rollout else [3, 1], np.int32)
    tensors = {"lengths": lengths} | TENSORS | dict(tensors)
    tensors = {name: value for name, value in tensors.items() if not isinstance(value, str)}
    said = {name: value for name, value in (HEADERS[decode] | header).items() if value != "absent"}
    return save(tensors, {"echo2": json.dumps(said)})


@every_decoder
def test_a_body_put_together_by_hand_is_read(decode):
    assert plain(decode(body_for(decode)))


def test_numbers_of_another_kind_or_shape_are_refused():
    for name, value in (
        ("token_ids", np.array([5, 6, 2, 7], np.float32)),
        ("token_ids", np.array([5, 6, 2, 2**40], np.int64)),
        ("token_ids", np.ones((4, 2), np.int32)),
        ("log_probs", np.full((4, 1), -1.0, np.float32)),
        ("log_probs", np.full(4, -1, np.int32)),
        ("versions", np.zeros((4, 3), np.int32)),
        ("versions", np.array([0.5, 0.5, 0.5, 0.5], np.float64)),
        ("lengths", np.array([3.0, 1.0], np.float32)),
        ("lengths", np.array([float("nan"), 1.0], np.float32)),
        ("lengths", np.array([[3], [1]], np.int32)),
        ("lengths", np.array(4, np.int32)),
        ("lengths", np.array([True, True])),
        ("lengths", "absent"),
    ):
        with pytest.raises(BodyError):
            decode_group(body_for(decode_group, {name: value}))


odd_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.just("absent"), st.just(10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=5,
)
described_group = st.fixed_dictionaries({}, optional=dict.fromkeys(DESCRIBED_GROUP, odd_values))


def refuses_or_reads(decode, body):
    """Any error but BodyError fails the test."""
    with contextlib.suppress(BodyError):
        decode(body)


@every_decoder
@given(data=st.data())
def test_a_header_of_any_content_is_read_or_refused(decode, data):
    header = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(HEADERS[decode], odd_values)))
    refuses_or_reads(decode, body_for(decode, **header))


@given(parts=st.lists(described_group, max_size=2))
@example(parts=[{"members": 2}])
@example(parts=[{"worker_ids": "absent"}])
def test_described_groups_of_any_content_are_read_or_refused(parts):
    refuses_or_reads(decode_batch, body_for(decode_batch, groups=[DESCRIBED_GROUP | part for part in parts]))


@pytest.mark.parametrize(("decode", "field"), [(decode, field) for decode, header in HEADERS.items() for field in header])
def test_a_header_field_of_another_kind_is_refused(decode, field):
    for value in (None, -2, float("inf"), 10**400, "absent", "ab", [[1], [2]], {"3": "x"}):
        with pytest.raises(BodyError):
            decode(body_for(decode, **{field: value}))


@pytest.mark.parametrize("number", [2**63, -1, 1.5, "1", True])
@pytest.mark.parametrize("field", ["group_id", "attempt"])
def test_a_number_that_no_lease_can_have_is_refused(field, number):
    with pytest.raises(BodyError):
        decode_group(body_for(decode_group, **{field: number}))


@every_decoder
def test_a_header_nested_without_end_is_refused(decode):
    with pytest.raises(BodyError):
        decode(save(TENSORS | {"lengths": np.array([4], np.int32)}, {"echo2": "[" * 200_000}))


@every_decoder
@given(body=st.binary(max_size=200))
@example(body=(2).to_bytes(8, "little") + b"{}")
@example(body=(2**63).to_bytes(8, "little") + b"{}")
@example(body=(21).to_bytes(8, "little") + b'{"__metadata__":null}')
@example(body=(3).to_bytes(8, "little") + b"{ }")
def test_random_bytes_are_refused(decode, body):
    with pytest.raises(BodyError):
        decode(body)


@every_codec
@settings(max_examples=400)
@given(data=st.data())
def test_a_body_with_flipped_bytes_is_read_or_refused(encode, decode, message, data):
    body = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    refuses_or_reads(decode, bytes(body))


@given(st.integers(1, 4), st.binary(max_size=20), st.data())
def test_groups_in_one_body_are_split_where_they_were_joined_and_nowhere_else(count, more, data):
    body = encode_groups([GROUP] * count)
    assert [plain(decode_group(part)) for part in split_groups(body)] == [plain(GROUP)] * count
    damaged = body[: data.draw(st.integers(0, len(body) - 1))] + more
    with contextlib.suppress(BodyError):
        parts = split_groups(damaged)
        assert b"".join(len(part).to_bytes(8, "little") + part for part in parts) == damaged


def test_a_body_of_nothing_or_of_more_groups_than_may_be_is_refused():
    for body in (b"", bytes(8 * (MOST_GROUPS + 1))):
        with pytest.raises(BodyError, match=f"1 to {MOST_GROUPS} whole groups"):
            split_groups(body)
