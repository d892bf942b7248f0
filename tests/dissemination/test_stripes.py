"""A broadcast among honest workers, with real sockets on loopback."""

import time

import pytest
from broadcasts import CHUNK_BYTES, MB, RUN_ID, TOKEN, fleet, snapshot
from patience import wait_until

from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.manifest import describe, sign, signing_key
from echo2.errors import WaitTimeout


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_everybody_gets_the_same_bytes_and_the_source_sends_little_more_than_one_copy(workers):
    manifest, payload = snapshot(1, 8 * MB + 17)
    with fleet(workers, uplink_bytes_per_s=20 * MB) as run:
        record = run.source.broadcast(manifest, payload).wait(20)
        assert [bytes(peer.wait(1).payload) == payload for peer in run.peers] == [True] * workers
        assert record.sent_bytes < 1.4 * len(payload)
        assert [peer.duplicate_bytes for peer in run.peers] == [0] * workers
        assert list(run.source.events) == []


def test_the_record_tells_when_each_worker_and_chunk_arrived():
    manifest, payload = snapshot(3, 4 * MB)
    with fleet(3, uplink_bytes_per_s=10 * MB) as run:
        record = run.source.broadcast(manifest, payload).wait(20)
    assert (record.version, record.total_bytes) == (3, 4 * MB)
    assert sorted(arrival.worker for arrival in record.arrivals) == ["w0", "w1", "w2"]
    assert 0.3 < record.first_s <= record.median_s <= record.last_s < 5
    for arrival in record.arrivals:
        assert len(arrival.chunk_arrivals_s) == manifest.chunk_count
        assert 0 <= min(arrival.chunk_arrivals_s) < max(arrival.chunk_arrivals_s) <= arrival.done_s
        assert arrival.bytes_per_s == pytest.approx(4 * MB / arrival.done_s)


def test_the_cap_on_the_sources_uplink_is_kept():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(2, uplink_bytes_per_s=5 * MB) as run:
        record = run.source.broadcast(manifest, payload).wait(20)
        assert record.sent_bytes / record.last_s < 5 * MB * 1.1


def test_a_standing_fleet_takes_version_after_version():
    with fleet(3) as run:
        for version in range(5):
            manifest, payload = snapshot(version, 2 * MB)
            run.source.broadcast(manifest, payload).wait(10)
            assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)


def test_a_version_published_again_with_other_bytes_is_taken():
    with fleet(2) as run:
        for seed in (1, 2):
            payload = snapshot(seed, MB)[1]
            manifest = sign(describe(payload, RUN_ID, 7, CHUNK_BYTES), signing_key(TOKEN))
            run.source.broadcast(manifest, payload).wait(10)
            assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)


def test_workers_that_nobody_can_connect_to_receive_and_serve_nothing():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(2, uplink_bytes_per_s=10 * MB) as run:
        hidden = [run.add("h0", serving=False), run.add("h1", serving=False)]
        wait_until(lambda: all(peer.peers == 2 for peer in hidden))
        run.source.broadcast(manifest, payload).wait(20)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert [peer.forwarded_bytes for peer in hidden] == [0, 0]
        assert all(peer.forwarded_bytes > 0 for peer in run.peers[:2])


def test_only_unreachable_workers_are_served_by_the_source():
    manifest, payload = snapshot(1, MB)
    with fleet(0) as run:
        hidden = [run.add("h0", serving=False), run.add("h1", serving=False)]
        wait_until(lambda: len(run.source.workers) == 2)
        run.source.broadcast(manifest, payload).wait(20)
        assert all(bytes(peer.wait(1).payload) == payload for peer in hidden)


def test_a_late_joiner_takes_its_chunks_from_several_peers():
    manifest, payload = snapshot(1, 8 * MB)
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        broadcast = run.source.broadcast(manifest, payload)
        time.sleep(0.6)
        late = run.add("late")
        record = broadcast.wait(20)
        assert bytes(late.wait(5).payload) == payload
        received = [link.received_bytes for link in late._links.values()]
        assert min(received) > 8 * CHUNK_BYTES
        assert sum(received) > 0.6 * len(payload)
        assert record.sent_bytes < 1.5 * len(payload)


def test_who_joins_after_the_end_gets_the_newest_from_its_peers():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(3) as run:
        run.source.broadcast(manifest, payload).wait(10)
        late = run.add("late")
        assert bytes(late.wait(10).payload) == payload
        assert sum(link.received_bytes for link in late._links.values()) > 0.9 * len(payload)


def test_a_newer_version_takes_the_place_of_one_that_waits_and_what_has_begun_is_finished():
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        handed_in = [(*snapshot(version, 4 * MB),) for version in (1, 2, 3)]
        broadcasts = [run.source.broadcast(*pair) for pair in handed_in]
        assert broadcasts[2].wait(20).version == 3
        assert broadcasts[0].wait(1).version == 1
        assert broadcasts[1].wait(1) is None
        assert all(bytes(peer.wait(1).payload) == handed_in[2][1] for peer in run.peers)


def test_a_worker_whose_connection_to_the_source_breaks_goes_on_where_it_was():
    manifest, payload = snapshot(1, 8 * MB)
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        broadcast = run.source.broadcast(manifest, payload)
        time.sleep(0.5)
        run.source.remove("w1")
        broadcast.wait(20)
        wait_until(lambda: len(run.source.workers) == 3)
        assert all(bytes(peer.wait(10).payload) == payload for peer in run.peers)
        assert sum(peer.duplicate_bytes for peer in run.peers) <= 3 * CHUNK_BYTES


def test_waiting_names_who_is_waited_for():
    manifest, payload = snapshot(1, 8 * MB)
    with fleet(2, uplink_bytes_per_s=MB) as run:
        broadcast = run.source.broadcast(manifest, payload)
        with pytest.raises(WaitTimeout, match=r"version 1 .* waiting for w0, w1"):
            broadcast.wait(0.5)


def test_a_worker_without_a_source_says_why_it_has_nothing():
    peer = Peer(RUN_ID, TOKEN, "alone", ("127.0.0.1", 9), host="127.0.0.1")
    peer.start()
    with pytest.raises(WaitTimeout, match=r"127\.0\.0\.1:9"):
        peer.wait(0.5)
    peer.stop()


def test_what_was_published_to_nobody_gives_way_to_what_is_newer():
    with fleet(0) as run:
        old = run.source.broadcast(*snapshot(1, MB))
        manifest, payload = snapshot(2, MB)
        new = run.source.broadcast(manifest, payload)
        first = run.add("first")
        assert bytes(first.wait(10).payload) == payload
        assert new.wait(10).last_s is not None
        assert old.ended
