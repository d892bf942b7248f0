"""Chunks on arrival, whom missing ones are asked from, and memory that is used again."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.dissemination.broadcast.cipher import ChunkCipher, ChunkRefused, fresh_salt
from echo2.dissemination.broadcast.reception import (
    ASKED_AT_ONCE,
    PATIENCE_S,
    SOURCE,
    CatchUp,
    Reception,
    Rooms,
    bits_of,
    chunks_of,
)
from echo2.dissemination.manifest import describe, sign, signing_key

PAYLOAD = random.Random(0).randbytes(1000)
MANIFEST = sign(describe(PAYLOAD, "run-a", 7, 64), signing_key("secret"))
SALT = fresh_salt()


def cipher(manifest=MANIFEST, token="secret", salt=SALT):
    return ChunkCipher(manifest, token, salt)


def reception():
    return Reception(MANIFEST, cipher(), Rooms().take(len(PAYLOAD)))


def test_chunks_in_any_order_make_the_payload():
    received = reception()
    order = list(range(MANIFEST.chunk_count))
    random.Random(1).shuffle(order)
    for chunk in order:
        assert not received.complete
        assert received.accept(chunk, memoryview(cipher().seal(chunk, memoryview(PAYLOAD))))
    assert received.complete
    assert bytes(received.payload) == PAYLOAD
    assert not received.accept(0, memoryview(b"anything"))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: cipher(salt=fresh_salt()), id="broadcast"),
        pytest.param(lambda: cipher(token="another"), id="token"),
        pytest.param(lambda: cipher(sign(describe(PAYLOAD, "run-b", 7, 64), signing_key("secret"))), id="run"),
        pytest.param(lambda: cipher(sign(describe(PAYLOAD, "run-a", 6, 64), signing_key("secret"))), id="version"),
    ],
)
def test_a_chunk_of_another_kind_is_refused(other):
    received = reception()
    with pytest.raises(ChunkRefused, match="tag"):
        received.accept(3, memoryview(other().seal(3, memoryview(PAYLOAD))))
    assert received.have == 0


def test_a_chunk_in_another_place_or_cut_short_is_refused():
    received = reception()
    sealed = cipher().seal(3, memoryview(PAYLOAD))
    with pytest.raises(ChunkRefused, match="tag"):
        received.accept(4, memoryview(sealed))
    with pytest.raises(ChunkRefused, match="79 bytes instead of 80"):
        received.accept(3, memoryview(sealed[:-1]))


def test_a_chunk_with_a_right_tag_that_the_manifest_does_not_describe_is_refused():
    received = reception()
    with pytest.raises(ChunkRefused, match="digest"):
        received.accept(3, memoryview(cipher().seal(3, memoryview(bytes(1000)))))


@given(st.sets(st.integers(0, 500)))
def test_a_set_of_chunks_survives_as_bits(chunks):
    assert list(chunks_of(bits_of(chunks))) == sorted(chunks)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_everything_wanted_is_asked_once_at_a_time_and_had_in_the_end(data):
    """Peers that have some chunks each, and the source; answers come in any order."""
    count, peers = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 4))
    has = {number: data.draw(st.sets(st.integers(0, count - 1))) for number in range(1, peers + 1)} | {
        SOURCE: set(range(count))
    }
    catch_up, open_asks, had, now_s = CatchUp(), [], set(), 0.0
    catch_up.want((1 << count) - 1)
    for _ in range(3 * count * (peers + 2)):
        now_s += 0.01
        for number, chunks in catch_up.asks(range(1, peers + 1), True, now_s).items():
            open_asks += [(number, chunk) for chunk in chunks]
        assert len({chunk for _, chunk in open_asks}) == len(open_asks)
        assert all(sum(asked == number for asked, _ in open_asks) <= ASKED_AT_ONCE for number in has)
        if not open_asks:
            break
        number, chunk = open_asks.pop(data.draw(st.integers(0, len(open_asks) - 1)))
        if chunk in has[number]:
            had.add(chunk)
            catch_up.got(chunk, now_s)
        else:
            catch_up.lacks(number, [chunk])
    assert had == set(range(count))
    assert catch_up.wanted == 0


def test_a_provider_that_sends_nothing_is_passed_over_for_a_while():
    catch_up = CatchUp()
    catch_up.want(0b1)
    assert catch_up.asks([1], False, 10.0) == {1: [0]}
    assert catch_up.overdue(10.0 + PATIENCE_S / 2) == []
    assert catch_up.overdue(10.1 + PATIENCE_S) == [1]
    assert catch_up.asks([1, 2], False, 10.2 + PATIENCE_S) == {2: [0]}


def test_a_worker_that_was_passed_over_is_asked_nothing_for_a_while():
    catch_up = CatchUp()
    catch_up.want(0b1)
    assert catch_up.asks([1], False, 10.0) == {1: [0]}
    catch_up.pass_over(1, 10.1)
    assert catch_up.asks([1], False, 10.2) == {}
    assert catch_up.asks([1, 2], False, 10.3) == {2: [0]}
    catch_up.gone(2)
    assert catch_up.asks([1], False, 10.2 + 2 * PATIENCE_S) == {1: [0]}


def test_what_somebody_was_asked_who_is_gone_is_asked_of_others():
    catch_up = CatchUp()
    catch_up.want(0b11)
    assert catch_up.asks([1], False, 1.0) == {1: [0, 1]}
    catch_up.gone(1)
    assert catch_up.asks([2], False, 1.1) == {2: [0, 1]}


def test_memory_is_used_again_only_when_nobody_looks_at_it():
    rooms = Rooms()
    first = rooms.take(1000)
    seen = first.toreadonly()
    first[0] = 7
    rooms.give(first)
    second = rooms.take(1000)
    second[0] = 8
    assert seen[0] == 7
    owner = second.obj
    rooms.give(second)
    third = rooms.take(900)
    assert third.obj is owner
    assert len(third) == 900
