"""A broadcast among workers that die, stall, lag, lie or do not belong, with real sockets on loopback."""

import asyncio
import hashlib
import signal
import socket
import time
from contextlib import suppress

import pytest
from broadcasts import CHUNK_BYTES, MB, RUN_ID, TOKEN, fleet, flip_a_bit, snapshot, spoil
from patience import wait_until

from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.broadcast.relay import Credit
from echo2.dissemination.broadcast.wire import (
    HEADER,
    LENGTH,
    MAGIC,
    MAX_DATA_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Kind,
    WireError,
    connection_key,
    dial,
)
from echo2.dissemination.manifest import describe, sign, signing_key
from echo2.errors import WaitTimeout


def test_a_relay_killed_halfway_costs_nobody_a_chunk_and_little_twice():
    manifest, payload = snapshot(1, 8 * MB)
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        victim = run.add_process("victim")
        run.wait_connected()
        broadcast = run.source.broadcast(manifest, payload)
        time.sleep(0.5)
        victim.kill()
        record = broadcast.wait(10)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert sum(peer.duplicate_bytes for peer in run.peers) <= 4 * (CHUNK_BYTES + 16)
        assert record.last_s < 3.0
        assert "left" in run.kinds("victim")


def test_a_relay_that_stalls_is_passed_over_within_two_seconds_and_finishes_when_it_wakes():
    manifest, payload = snapshot(1, 8 * MB)
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        sleeper = run.add_process("sleeper")
        run.wait_connected()
        broadcast = run.source.broadcast(manifest, payload)
        time.sleep(0.5)
        sleeper.send_signal(signal.SIGSTOP)
        assert all(bytes(peer.wait(3.5).payload) == payload for peer in run.peers)
        wait_until(lambda: "stalled" in run.kinds("sleeper"))
        stalls = [event for event in run.source.events if event.kind == "stalled"]
        assert {(event.culprit, event.reporter) for event in stalls} == {("sleeper", "source")}, "nobody asks it for anything"
        sleeper.send_signal(signal.SIGCONT)
        broadcast.wait(10)
        assert sleeper.stdout.readline().split() == ["1", hashlib.sha256(payload).hexdigest()]


def test_a_receiver_that_lags_holds_up_nobody_and_catches_up():
    manifest, payload = snapshot(1, 6 * MB)
    with fleet(3, uplink_bytes_per_s=12 * MB) as run:
        slow = run.add("slow")
        run.wait_connected()
        take = slow._exchange._chunk
        slow._exchange._chunk = lambda link, frame: (time.sleep(0.04), take(link, frame))[1]
        broadcast = run.source.broadcast(manifest, payload)
        assert all(bytes(peer.wait(10).payload) == payload for peer in run.peers[:3])
        assert slow.delivered(manifest) is None, "it takes 40 ms for each of 184 chunks"
        assert bytes(slow.wait(30).payload) == payload
        broadcast.wait(5)


def test_a_relay_that_flips_a_bit_is_named_and_costs_nobody_a_chunk():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(4, uplink_bytes_per_s=8 * MB) as run:
        spoil(run.peers[0], flip_a_bit)
        run.source.broadcast(manifest, payload).wait(10)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert "corrupt" in run.kinds("w0")
        assert {event.culprit for event in run.source.events if event.kind == "corrupt"} == {"w0"}


def test_a_relay_that_sends_chunks_of_the_version_before_in_place_of_these_is_named():
    old_manifest, old = snapshot(1, 4 * MB)
    manifest, payload = snapshot(2, 4 * MB)
    kept = {}

    def keep(honest, broadcast, chunk, body, targets):
        kept[len(kept)] = bytes(body)
        honest(broadcast, chunk, body, targets)

    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        spoil(run.peers[0], keep)
        run.source.broadcast(old_manifest, old).wait(10)
        [peer.wait(1) for peer in run.peers]
        replay = lambda honest, broadcast, chunk, body, targets: honest(broadcast, chunk, memoryview(kept[0]), targets)  # noqa: E731
        spoil(run.peers[0], replay)
        run.source.broadcast(manifest, payload).wait(10)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert "corrupt" in run.kinds("w0")


def test_a_relay_that_replays_a_broadcast_that_is_over_is_named(monkeypatch):
    monkeypatch.setattr("echo2.dissemination.broadcast.exchange.OVER_S", 0.0)
    numbers = []
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        spoil(run.peers[0], lambda honest, broadcast, *rest: (numbers.append(broadcast), honest(broadcast, *rest)))
        for version in range(3):
            run.source.broadcast(*snapshot(version, 2 * MB)).wait(10)
        spoil(run.peers[0], lambda honest, broadcast, *rest: (honest(numbers[0], *rest), honest(broadcast, *rest)))
        manifest, payload = snapshot(3, 2 * MB)
        run.source.broadcast(manifest, payload).wait(10)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        wait_until(lambda: "replayed" in run.kinds("w0"))


def test_a_relay_that_claims_to_have_forwarded_what_it_kept_is_named():
    manifest, payload = snapshot(1, 8 * MB)

    def keep_back(honest, broadcast, chunk, body, targets):
        liar._exchange._credit(Credit(broadcast, chunk, 0.001, ()))

    with fleet(4, uplink_bytes_per_s=4 * MB) as run:
        liar = run.peers[0]
        spoil(liar, keep_back)
        record = run.source.broadcast(manifest, payload).wait(15)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert "withheld" in run.kinds("w0")
        assert record.last_s < 5.0


class Trickle:
    """Allows a byte a second or so."""

    def take(self, wanted):
        return 1 if int(time.monotonic() * 1000) % 1000 < 2 else 0

    def give_back(self, length):
        assert length in (0, 1)


def test_a_relay_that_trickles_is_passed_over():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(4, uplink_bytes_per_s=8 * MB) as run:
        trickler = run.peers[0]
        for link in trickler._links.values():
            link._allowance = Trickle()
        record = run.source.broadcast(manifest, payload).wait(10)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert "stalled" in run.kinds("w0")
        assert record.last_s < 4.0


@pytest.mark.parametrize(("run_id", "token"), [(RUN_ID, "another token"), ("run-b", TOKEN)], ids=["token", "run"])
def test_who_holds_another_token_or_is_of_another_run_is_refused_by_source_and_workers(run_id, token):
    manifest, payload = snapshot(1, MB)
    with fleet(2) as run:
        stranger = Peer(run_id, token, "stranger", run.source.address, host="127.0.0.1")
        stranger.start()
        wait_until(lambda: "refused" in run.kinds("127.0.0.1"))
        run.source.broadcast(manifest, payload).wait(10)
        with pytest.raises(WaitTimeout, match="closed the connection before both had proved their token"):
            stranger.wait(0.3)
        worker = run.source.workers[0]
        with pytest.raises(WireError):
            asyncio.run(dial(worker.host, worker.port, connection_key(token, run_id), {"number": 9}))
        assert {member.name for member in run.source.workers} == {"w0", "w1"}
        assert [peer.peers for peer in run.peers] == [1, 1]
        stranger.stop()


GREETINGS = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "no JSON": b"{" * 50,
    "a list": b"[1]",
    "nested without end": b"[" * 60_000,
    "numbers as names": b'{"name": [], "port": {}}',
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
def test_whatever_strangers_say_the_broadcast_goes_on_and_they_are_told_of_once(greeting):
    manifest, payload = snapshot(1, MB)
    sent = greeting if greeting.startswith(b"GET") else MAGIC + LENGTH.pack(len(greeting)) + greeting
    with fleet(2) as run:
        ports = [run.source.address[1], *(member.port for member in run.source.workers)]
        for port in ports * 3:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(sent + bytes(NONCE_BYTES + PROOF_BYTES))
                stranger.settimeout(5.0)
                with suppress(ConnectionError):
                    while stranger.recv(4096):
                        pass
        run.source.broadcast(manifest, payload).wait(10)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert [event.kind for event in run.source.events if event.culprit == "127.0.0.1"] == ["refused"]


def test_a_manifest_that_is_not_this_runs_is_never_handed_over():
    payload = snapshot(1, MB)[1]
    forged = sign(describe(payload, RUN_ID, 1, CHUNK_BYTES), signing_key("another token"))
    with fleet(2) as run:
        run.source.broadcast(forged, payload)
        with pytest.raises(WaitTimeout, match="not signed with this run's token"):
            run.peers[0].wait(1.0)


def test_a_payload_that_is_not_what_the_manifest_says_is_never_handed_over():
    manifest, payload = snapshot(1, MB)
    with fleet(2) as run:
        run.source.broadcast(manifest, payload[:-1] + b"x")
        with pytest.raises(WaitTimeout):
            run.peers[0].wait(1.0)
        assert "corrupt" in run.kinds("source")


def test_a_connection_between_two_workers_that_breaks_costs_nobody_a_chunk():
    manifest, payload = snapshot(1, 8 * MB)
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        broadcast = run.source.broadcast(manifest, payload)
        time.sleep(0.4)
        one, other = run.peers[0], run.peers[1]._number
        one._loop.call_soon_threadsafe(one._links[other].close)
        record = broadcast.wait(10)
        assert all(bytes(peer.wait(1).payload) == payload for peer in run.peers)
        assert record.last_s < 4.0
        wait_until(lambda: all(peer.peers == 2 for peer in run.peers))


def test_workers_go_on_without_the_source_when_together_they_have_everything():
    manifest, payload = snapshot(1, 4 * MB)
    with fleet(3) as run:
        run.source.broadcast(manifest, payload).wait(10)
        late = run.add("late")
        wait_until(lambda: late.peers == 3)
        wait_until(lambda: len(late._exchange._receptions) == 1)
        run.source.stop()
        assert bytes(late.wait(10).payload) == payload


def test_a_worker_that_announces_an_oversized_chunk_is_cut_off():
    with fleet(2) as run:
        link = next(iter(run.peers[0]._links.values()))
        run.peers[0]._loop.call_soon_threadsafe(link._socket.send, HEADER.pack(Kind.CHUNK, 0, MAX_DATA_BYTES + 1, 1))
        wait_until(lambda: link.closed)
        wait_until(lambda: [peer.peers for peer in run.peers] == [1, 1])


def test_a_worker_that_sends_nonsense_to_the_source_loses_its_connection_and_no_more():
    manifest, payload = snapshot(1, MB)
    with fleet(3) as run:
        run.source.broadcast(manifest, payload).wait(10)
        number = run.source._last_number
        for kind in (Kind.CREDIT, Kind.DONE, Kind.REPORT):
            peer = run.peers[0]
            peer._loop.call_soon_threadsafe(peer._exchange.source.send, kind, number, 0, b"xyz")
            wait_until(lambda: len(run.source.workers) == 2)
            wait_until(lambda: len(run.source.workers) == 3 and run.peers[0].connected)
        assert sum(event.kind == "malformed" for event in run.source.events) == 3
        newer, other = snapshot(2, MB)
        run.source.broadcast(newer, other).wait(10)
        wait_until(lambda: all(peer.take() is not None for peer in run.peers[1:]))
