"""A worker's follower with a broadcast beside its source."""

import time

import pytest
from broadcasts import RUN_ID, TOKEN, snapshot

from echo2.dissemination.broadcast.arrivals import BroadcastArrivals
from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.broadcast.source import Source
from echo2.dissemination.manifest import describe, sign, signing_key
from echo2.dissemination.pacing import Pacer

KEY = signing_key(TOKEN)


@pytest.fixture
def source():
    source = Source(RUN_ID, TOKEN, host="127.0.0.1")
    source.start()
    yield source
    source.stop()


@pytest.fixture
def arrivals(source):
    joined = []

    def join(name="w", address=None):
        peer = Peer(RUN_ID, TOKEN, name, address or source.address, host="127.0.0.1")
        joined.append(BroadcastArrivals(peer))
        return joined[-1]

    yield join
    for one in joined:
        one.close()


def never():
    return False


def test_what_is_broadcast_arrives_under_its_manifest(source, arrivals):
    manifest, payload = snapshot(1, 300_000)
    receiving = [arrivals(name) for name in ("a", "b", "c")]
    source.broadcast(manifest, payload)
    for one in receiving:
        assert one.payload(manifest, never) == payload
        assert one.payload(manifest, never) == payload, "it can be asked for again"


def test_nobody_waits_for_what_another_version_has_overtaken(source, arrivals):
    (old, _), (new, payload) = snapshot(1, 300_000), snapshot(2, 300_000)
    one = arrivals()
    source.broadcast(new, payload)
    assert one.payload(new, never) == payload
    began = time.monotonic()
    assert one.payload(old, never) is None
    assert time.monotonic() - began < 1


def test_two_that_arrived_meanwhile_are_both_there(source, arrivals):
    one = arrivals()
    snapshots = [snapshot(version, 300_000) for version in (1, 2)]
    for manifest, payload in snapshots:
        source.broadcast(manifest, payload).wait(10)
    for manifest, payload in snapshots:
        assert one.payload(manifest, never) == payload


def test_a_lower_version_that_a_resumed_learner_made_later_is_taken(source, arrivals):
    one = arrivals()
    for version in (7, 6):
        manifest, payload = snapshot(version, 300_000)
        source.broadcast(manifest, payload)
        assert one.payload(manifest, never) == payload


def test_nobody_waits_for_a_payload_in_another_form_than_is_broadcast(source, arrivals):
    whole, payload = snapshot(1, 300_000)
    part = sign(describe(payload[:200_000], RUN_ID, 1, 1024).model_copy(update={"created_unix_s": whole.created_unix_s}), KEY)
    one = arrivals()
    source.broadcast(part, payload[:200_000]).wait(10)
    began = time.monotonic()
    assert one.payload(whole, never) is None
    assert time.monotonic() - began < 0.5


def test_what_was_not_announced_is_waited_for_once_and_not_for_each_payload_again(source, arrivals):
    one = arrivals()
    began = time.monotonic()
    for version in range(6):
        assert one.payload(snapshot(version, 1000)[0], never) is None
    assert time.monotonic() - began < 4


def test_nobody_waits_for_a_source_that_is_away_or_brings_nothing(source, arrivals, monkeypatch, caplog):
    monkeypatch.setattr("echo2.dissemination.broadcast.arrivals.CONNECT_S", 0.3)
    monkeypatch.setattr("echo2.dissemination.broadcast.arrivals.STALL_S", 0.6)
    manifest, payload = snapshot(1, 300_000)
    lonely = arrivals("lonely", address=("127.0.0.1", 1))
    assert lonely.payload(manifest, never) is None
    assert lonely.payload(manifest, never) is None
    assert caplog.text.count("version 1 is fetched from the hub") == 1
    idle = arrivals("idle")
    assert idle.payload(manifest, never) is None
    source.broadcast(manifest, payload)
    assert idle.payload(manifest, never) == payload
    assert "the broadcast brings snapshots again" in caplog.text


def test_a_worker_that_leaves_does_not_wait(arrivals):
    manifest, _ = snapshot(1, 300_000)
    assert arrivals().payload(manifest, lambda: True) is None


def test_what_was_broadcast_to_nobody_reaches_those_who_come_later(source, arrivals):
    manifest, payload = snapshot(1, 300_000)
    source.broadcast(manifest, payload)
    time.sleep(0.5)
    for one in [arrivals(name) for name in ("a", "b", "c")]:
        assert one.payload(manifest, never) == payload


@pytest.mark.parametrize("cap", [None, 2e6])
def test_a_bound_is_told_only_where_the_uplink_is_known(arrivals, cap):
    capped = Source(RUN_ID, TOKEN, host="127.0.0.1", pacer=Pacer(cap) if cap else None)
    capped.start()
    one = arrivals(address=capped.address)
    manifest, payload = snapshot(1, 300_000)
    broadcast = capped.broadcast(manifest, payload)
    assert one.payload(manifest, never) == payload
    record = broadcast.wait(10)
    capped.stop()
    assert record.bound_s == (0 if cap is None else pytest.approx(300_000 / cap))
    assert ("dissemination/bound_s" in record.metrics) == (cap is not None)
