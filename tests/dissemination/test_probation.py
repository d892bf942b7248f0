"""Who is depended on and who is blamed, when workers, their links or the source itself stand still; on loopback sockets."""

import threading
import time

import pytest
from broadcasts import MB, fleet, snapshot
from hypothesis import given
from hypothesis import strategies as st
from interleavings import in_loop
from patience import wait_until

from echo2.dissemination.broadcast.dealing import SILENT_S
from echo2.dissemination.broadcast.loop_thread import LONGEST_GAP_S, TICK_S, Attention
from echo2.dissemination.broadcast.reception import PATIENCE_S
from echo2.dissemination.broadcast.standing import MOST_PROBATION_VERSIONS, Standing


class Held:
    """Workers whose threads stand still, as if stopped, until `release`."""

    def __init__(self, *peers):
        self._gate = threading.Event()
        for peer in peers:
            peer._loop.call_soon_threadsafe(self._gate.wait, 60)

    def release(self):
        self._gate.set()


def owners(run):
    """Names of the workers that were dealt something to pass on in the newest broadcast."""
    dealing = run.source._latest()[-1][0]
    return {worker.member.name for worker in run.source._workers.values() if dealing._owned.get(worker.member.number)}


def send(run, version, receivers):
    manifest, payload = snapshot(version, 4 * MB)
    run.source.broadcast(manifest, payload)
    for peer in receivers:
        assert bytes(peer.wait(20).payload) == payload


def test_after_a_stall_nothing_is_passed_on_by_a_worker_until_it_has_received_a_version_promptly():
    with fleet(4, uplink_bytes_per_s=8 * MB) as run:
        manifest, payload = snapshot(1, 8 * MB)
        run.source.broadcast(manifest, payload)
        wait_until(lambda: run.peers[0].received_bytes > MB)
        held = Held(run.peers[0])
        try:
            assert all(bytes(peer.wait(20).payload) == payload for peer in run.peers[1:])
            wait_until(lambda: "stalled" in run.kinds("w0"))
            send(run, 2, run.peers[1:])
            assert owners(run) == {"w1", "w2", "w3"}
            time.sleep(2 * SILENT_S)
        finally:
            held.release()
        wait_until(lambda: run.peers[0].delivered(snapshot(2, 4 * MB)[0]))
        run.peers[0].take()
        send(run, 3, run.peers)
        assert owners(run) == {"w1", "w2", "w3"}, "it was silent during the version before"
        wait_until(lambda: run.source._latest()[-1][1].ended)
        send(run, 4, run.peers)
        assert owners(run) == {"w0", "w1", "w2", "w3"}


@pytest.mark.parametrize(("workers", "standing_still"), [(2, 1), (4, 2)])
def test_who_cannot_pass_on_to_workers_that_stand_still_is_not_blamed(workers, standing_still):
    with fleet(workers, uplink_bytes_per_s=4 * MB) as run:
        manifest, payload = snapshot(1, 8 * MB)
        run.source.broadcast(manifest, payload)
        wait_until(lambda: run.peers[0].received_bytes > MB)
        held = Held(*run.peers[:standing_still])
        try:
            assert all(bytes(peer.wait(20).payload) == payload for peer in run.peers[standing_still:])
        finally:
            held.release()
        assert all(bytes(peer.wait(20).payload) == payload for peer in run.peers[:standing_still])
        assert {event.culprit for event in run.source.events} <= {f"w{number}" for number in range(standing_still)}


@pytest.mark.parametrize("still_s", [1.3, 2.5])
def test_who_leaves_out_a_worker_that_woke_up_a_moment_ago_is_not_blamed(still_s):
    with fleet(2, uplink_bytes_per_s=MB) as run:
        manifest, payload = snapshot(1, 6 * MB)
        run.source.broadcast(manifest, payload)
        wait_until(lambda: run.peers[0].received_bytes > MB)
        run.peers[0]._loop.call_soon_threadsafe(time.sleep, still_s)
        assert all(bytes(peer.wait(60).payload) == payload for peer in run.peers)
        assert {event.culprit for event in run.source.events} <= {"w0"}


def test_who_stood_still_since_it_asked_blames_nobody():
    with fleet(3, uplink_bytes_per_s=8 * MB) as run:
        *providers, asker = run.peers
        tick, woke, seen_bytes = asker._exchange.tick, threading.Event(), []

        def stand_still_once_nothing_comes():
            seen_bytes.append(sum(link.received_bytes for link in asker._links.values()))
            asked = any(reception.catch_up.wanted for reception in asker._exchange._receptions.values())
            if asked and not woke.is_set() and seen_bytes[-2:-1] == seen_bytes[-1:]:
                time.sleep(2 * PATIENCE_S)
                tick()
                woke.set()
            tick()

        held = Held(asker)
        manifest, payload = snapshot(1, 4 * MB)
        run.source.broadcast(manifest, payload)
        assert all(bytes(peer.wait(20).payload) == payload for peer in providers)
        silent = Held(*providers)
        try:
            asker._exchange.tick = stand_still_once_nothing_comes
            held.release()
            assert woke.wait(60)
        finally:
            silent.release()
        assert bytes(asker.wait(20).payload) == payload
        assert not [event for event in run.source.events if event.reporter == "w2"]


@pytest.mark.parametrize("workers_s", [0.0, 2.9], ids=["source alone", "whole machine"])
def test_a_source_that_was_kept_from_running_blames_nobody(workers_s):
    with fleet(4, uplink_bytes_per_s=MB) as run:
        manifest, payload = snapshot(1, 3 * MB)
        run.source.broadcast(manifest, payload)
        wait_until(lambda: run.peers[0].received_bytes > MB)
        for peer in run.peers:
            peer._loop.call_soon_threadsafe(time.sleep, workers_s)
        run.source._loop.call_soon_threadsafe(time.sleep, 2.5)
        assert all(bytes(peer.wait(20).payload) == payload for peer in run.peers)
        assert list(run.source.events) == []
        assert not any(worker.standing.on_probation for worker in run.source._workers.values())


def test_a_worker_that_gave_a_version_up_is_not_blamed_for_what_it_was_to_pass_on():
    with fleet(3, uplink_bytes_per_s=2 * MB) as run:
        manifest, payload = snapshot(1, 6 * MB)
        run.source.broadcast(manifest, payload)
        wait_until(lambda: run.peers[0].received_bytes > MB)
        receptions = run.peers[0]._exchange._receptions

        def overtake():
            (number,) = receptions
            receptions[number + 1] = receptions.pop(number)

        in_loop(run.peers[0], overtake)
        assert all(bytes(peer.wait(20).payload) == payload for peer in run.peers[1:])
        assert list(run.source.events) == []


class Boom(Exception):
    """Nobody expects it."""


def tracebacks(caplog):
    return [record for record in caplog.records if record.exc_info and record.exc_info[0] is Boom]


def explode(*_):
    raise Boom


@pytest.mark.parametrize("where", ["reading", "sending", "acknowledged"])
@pytest.mark.parametrize("end", ["source", "worker"])
def test_an_error_that_nobody_expected_ends_one_connection_and_the_others_go_on(caplog, end, where):
    with fleet(4, uplink_bytes_per_s=4 * MB) as run:
        manifest, payload = snapshot(1, 4 * MB)
        run.source.broadcast(manifest, payload)
        wait_until(lambda: run.peers[0].received_bytes > MB / 2)
        thread = run.source if end == "source" else run.peers[1]
        number = run.peers[0]._number
        link = run.source._workers[number].link if end == "source" else thread._links[number]

        def spoil():
            name = {"reading": "_take", "sending": "_write", "acknowledged": "settle"}[where]
            setattr(link, name, explode)

        in_loop(thread, spoil)
        assert all(bytes(peer.wait(20).payload) == payload for peer in run.peers)
        for alive in (run.source, *run.peers):
            alive.raise_if_failed()
        assert link.closed
        (record,) = tracebacks(caplog)
        # By its number, where the news of its name has not come yet.
        assert any(told in record.getMessage() for told in ("w0", f"worker {number} "))
        assert {event.kind for event in run.source.events} <= {"left", "unlinked"}


def test_an_error_while_a_worker_is_welcomed_ends_that_connection_and_the_worker_comes_again(caplog):
    with fleet(2) as run:
        probe = run.source._probe

        async def explode_once(*arguments):
            run.source._probe = probe
            raise Boom

        run.source._probe = explode_once
        run.add("late")
        run.wait_connected()
        send(run, 1, run.peers)
        run.source.raise_if_failed()
        assert len(tracebacks(caplog)) == 1


def test_who_stalls_again_has_to_receive_twice_as_many_versions():
    standing = Standing(lambda: 0.0)
    for needed in (1, 2, 4):
        standing.suspend()
        standing.suspend()
        for _ in range(needed):
            assert standing.on_probation
            standing.received()
        assert not standing.on_probation
    standing.served()
    standing.suspend()
    assert standing.probation_versions == 1
    for _ in range(20):
        standing.probation_versions = 0
        standing.suspend()
    assert standing.probation_versions == MOST_PROBATION_VERSIONS


def test_only_time_in_which_a_stripe_lay_at_a_worker_counts():
    now = [0.0]
    standing = Standing(lambda: now[0])
    now[0] = 5.0
    assert standing.quiet_s == 0.0
    standing.took(1, 0)
    now[0] = 6.0
    standing.took(2, 0)
    assert standing.quiet_s == 1.0
    standing.returned(1, 0, served=True)
    assert standing.quiet_s == 0.0
    now[0] = 7.0
    assert standing.quiet_s == 1.0
    standing.forget(2)
    assert standing.quiet_s == 0.0


@given(st.lists(st.floats(0.0, 100.0), max_size=30))
def test_the_clock_of_a_thread_stands_while_it_is_kept_from_running(gaps_s):
    now = [0.0]
    attention = Attention(lambda: now[0])
    for gap_s in gaps_s:
        before_s = attention.now_s()
        now[0] += gap_s
        assert before_s <= attention.now_s() <= before_s + min(gap_s, LONGEST_GAP_S) + 1e-9
        attention.tick()
    assert attention.now_s() == pytest.approx(sum(min(gap_s, LONGEST_GAP_S) for gap_s in gaps_s))
    assert TICK_S < LONGEST_GAP_S
