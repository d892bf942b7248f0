"""A source that comes back at the same port, and connections that break at the worst moment."""

import socket
import threading
import time
from contextlib import contextmanager

from broadcasts import CHUNK_BYTES, MB, RUN_ID, TOKEN, fleet, flip_a_bit, snapshot, spoil
from patience import wait_until

from echo2.dissemination.broadcast.cipher import TAG_BYTES
from echo2.dissemination.broadcast.source import Source
from echo2.dissemination.pacing import Pacer


@contextmanager
def restarted(run, *under_way, **options):
    """The fleet's source gives way to a new one, which knows nothing of it; with the broadcast that it begins with, if any."""
    port = run.source.address[1]
    run.source.stop()
    run.source = Source(RUN_ID, TOKEN, host="127.0.0.1", port=port, **options)
    run.source.start()
    broadcast = run.source.broadcast(*under_way) if under_way else None
    wait_until(lambda: len(run.source.workers) == len(run.peers))
    yield broadcast
    # `fleet` stops only the source that it started.
    run.source.stop()


def numbers(run):
    return {member.name: member.number for member in run.source.workers}


def test_workers_keep_their_numbers_and_connections_and_culprits_their_names_when_the_source_comes_back():
    with fleet(4) as run:
        before = numbers(run)
        run.peers.pop(0).stop()
        wait_until(lambda: len(run.source.workers) == 3)
        links = [dict(peer._links) for peer in run.peers]
        with restarted(run, pacer=Pacer(8 * MB)):
            assert numbers(run) == {name: number for name, number in before.items() if name != "w0"}
            assert [dict(peer._links) for peer in run.peers] == links
            spoil(run.peers[1], flip_a_bit)
            manifest, payload = snapshot(1, 4 * MB)
            run.source.broadcast(manifest, payload).wait(10)
            assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
            assert {event.culprit for event in run.source.events if event.kind == "corrupt"} == {"w2"}


def test_a_broadcast_that_a_restart_cut_short_goes_on_where_it_was():
    manifest, payload = snapshot(1, 4 * MB)
    sealed_bytes = len(payload) + TAG_BYTES * manifest.chunk_count
    with fleet(3, uplink_bytes_per_s=4 * MB) as run:
        run.source.broadcast(manifest, payload)
        wait_until(lambda: all(peer.received_bytes > 1.5 * MB for peer in run.peers))
        with restarted(run, manifest, payload) as broadcast:
            broadcast.wait(10)
            assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
            assert [peer.received_bytes for peer in run.peers] == [sealed_bytes] * 3
            assert sum(peer.duplicate_bytes for peer in run.peers) <= 3 * (CHUNK_BYTES + TAG_BYTES)


def test_what_everybody_has_is_not_sent_again_and_a_newcomer_gets_it_from_the_others():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(3) as run:
        run.source.broadcast(manifest, payload).wait(10)
        with restarted(run, manifest, payload) as broadcast:
            record = broadcast.wait(10)
            assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
            assert record.sent_bytes < len(payload) / 10
            late = run.add("late")
            assert bytes(late.wait(10).payload) == payload
            assert sum(link.received_bytes for link in late._links.values()) > 0.9 * len(payload)
            newer, other = snapshot(2, MB)
            run.source.broadcast(newer, other).wait(10)
            assert all(bytes(peer.wait(1).payload) == other for peer in run.peers)


def test_what_a_worker_saw_while_the_source_was_away_is_told_when_it_is_back():
    with fleet(2) as run:
        port, (witness, culprit) = run.source.address[1], run.peers
        run.source.stop()
        wait_until(lambda: not witness.connected)
        witness._loop.call_soon_threadsafe(witness._exchange._report, "corrupt", culprit._number, 1, "chunk 3: changed")
        run.source = Source(RUN_ID, TOKEN, host="127.0.0.1", port=port)
        run.source.start()
        wait_until(lambda: run.kinds("w1") == {"corrupt"})
        run.source.stop()


def test_a_connection_that_breaks_while_a_broadcast_is_told_of_costs_the_others_nothing():
    manifest, payload = snapshot(1, MB)
    with fleet(3) as run:
        links = [worker.link for worker in run.source._workers.values()]

        def break_first():
            links[0]._socket.shutdown(socket.SHUT_RDWR)

        run.source._loop.call_soon_threadsafe(break_first)
        run.source.broadcast(manifest, payload).wait(10)
        assert all(bytes(peer.wait(5).payload) == payload for peer in run.peers)
        run.source.raise_if_failed()


def test_a_worker_that_nobody_trusts_does_not_keep_dialling():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(4, uplink_bytes_per_s=8 * MB) as run:
        spoil(run.peers[0], flip_a_bit)
        run.source.broadcast(manifest, payload).wait(10)
        time.sleep(1.0)
        assert sum(event.kind == "unlinked" for event in run.source.events) <= 6
        assert "corrupt" in run.kinds("w0")


def test_a_receiver_that_stalls_for_a_while_gets_nobody_blamed():
    manifest, payload = snapshot(1, 8 * MB)
    with fleet(4, uplink_bytes_per_s=4 * MB) as run:
        broadcast = run.source.broadcast(manifest, payload)
        wait_until(lambda: run.peers[0].received_bytes > MB)
        run.peers[0]._loop.call_soon_threadsafe(time.sleep, 2.5)
        broadcast.wait(20)
        assert {event.kind for event in run.source.events} <= {"stalled"}
        assert {event.culprit for event in run.source.events} <= {"w0"}


def test_a_worker_that_is_stuck_keeps_no_later_version_from_those_that_the_source_alone_can_serve():
    with fleet(0) as run:
        hidden = [run.add("stuck", serving=False), run.add("well", serving=False)]
        wait_until(lambda: len(run.source.workers) == 2)
        hidden[0]._loop.call_soon_threadsafe(time.sleep, 5.0)
        for version in (1, 2):
            manifest, payload = snapshot(version, 16 * MB)
            run.source.broadcast(manifest, payload)
            assert bytes(hidden[1].wait(3.0).payload) == payload
            time.sleep(1.2)


def test_a_thread_of_the_broadcast_may_be_stopped_by_several_at_once(monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    with fleet(1) as run:
        stopping = [threading.Thread(target=run.peers[0].stop) for _ in range(8)]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
    assert died == []
