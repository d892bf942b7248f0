"""The cap on what the hub sends of snapshots: kept, shared evenly, and used to the full."""

import asyncio
import heapq
import time

import pytest

from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.pacing import BURST_S, LEAST_PIECE_BYTES, Pacer
from echo2.hub.uplink import Uplink


class Time:
    """A clock that passes only while somebody sleeps, and wakes sleepers in order, each `late_s` after its time."""

    def __init__(self, late_s=0.0):
        self.now_s = 0.0
        self._late_s = late_s
        self._sleepers = []
        self._serial = 0

    def clock(self):
        return self.now_s

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        self._serial += 1
        heapq.heappush(self._sleepers, (self.now_s + seconds + self._late_s, self._serial, woken))
        await woken

    async def pass_until(self, tasks):
        """Wake one sleeper after the other until every task is done."""
        while not all(task.done() for task in tasks):
            for _ in range(3):
                await asyncio.sleep(0.001)  # the pieces come from threads
            if self._sleepers:
                self.now_s, _, woken = heapq.heappop(self._sleepers)
                woken.set_result(None)


def sent(streams, bytes_per_s, late_s=0.0):
    """(time, stream, length) of everything sent when `streams`, lists of pieces, run at the same time; and what came out."""
    clock, log = Time(late_s), []
    received = [b""] * len(streams)

    async def send(uplink, number):
        async for part in uplink.paced(streams[number]):
            log.append((clock.now_s, number, len(part)))
            received[number] += part

    async def main():
        uplink = Uplink(Pacer(bytes_per_s, clock.clock) if bytes_per_s else None, clock.sleep)
        tasks = [asyncio.create_task(send(uplink, number)) for number in range(len(streams))]
        await clock.pass_until(tasks)

    asyncio.run(main())
    return log, received


def test_no_span_of_time_carries_more_than_the_cap_allows():
    log, received = sent([[b"x" * 30_000, b"y" * 5_000]], bytes_per_s=100_000)
    assert received == [b"x" * 30_000 + b"y" * 5_000]
    for first, (start_s, _, _) in enumerate(log):
        total = 0
        for at_s, _, length in log[first:]:
            total += length
            assert total <= 100_000 * (at_s - start_s + BURST_S) + log[first][2] + 1e-6
    assert log[-1][0] == pytest.approx(0.35, abs=BURST_S + 0.001)


def test_streams_at_the_same_time_share_the_cap_evenly():
    log, _ = sent([[bytes(20_000)] for _ in range(4)], bytes_per_s=100_000)
    halfway = [sum(length for at_s, number, length in log if number == n and at_s <= 0.4) for n in range(4)]
    assert max(halfway) - min(halfway) <= 2000
    assert log[-1][0] == pytest.approx(0.8, abs=BURST_S + 0.001)


def test_waking_late_costs_no_throughput():
    log, _ = sent([[bytes(50_000)]], bytes_per_s=100_000, late_s=0.005)
    assert log[-1][0] == pytest.approx(0.5, abs=BURST_S + 0.01)


def test_a_pause_is_not_made_up_for_beyond_the_burst():
    async def main():
        clock = Time()
        uplink = Uplink(Pacer(100_000, clock.clock), clock.sleep)
        clock.now_s = 60.0
        task = asyncio.create_task(collect(uplink.paced([bytes(50_000)])))
        await clock.pass_until([task])
        return clock.now_s - 60.0

    async def collect(parts):
        return [part async for part in parts]

    assert 0.5 - BURST_S <= asyncio.run(main()) <= 0.5 - BURST_S / 2


def test_without_a_cap_pieces_pass_as_they_are():
    log, _ = sent([[bytes(70_000), bytes(3)]], bytes_per_s=0)
    assert log == [(0.0, 0, 70_000), (0.0, 0, 3)]


def test_a_tiny_cap_still_sends_pieces_of_some_size():
    log, _ = sent([[bytes(3000)]], bytes_per_s=100)
    assert [length for _, _, length in log] == [LEAST_PIECE_BYTES, LEAST_PIECE_BYTES, 3000 - 2 * LEAST_PIECE_BYTES]


def test_a_capped_hub_delivers_snapshots_whole_and_keeps_the_cap_by_both_ways_together(make_run, serve, publish):
    cap = 400_000
    run = make_run(f"dissemination.uplink_bytes_per_s={cap}")
    _, client = serve(run)
    welcome = client.register("w")
    peer = Peer(run.run_id, run.token, "w", ("127.0.0.1", welcome.broadcast_port), host="127.0.0.1")
    peer.start()
    payload = bytes(range(256)) * 1000
    began_s = time.monotonic()
    publish(run, client, 0, payload)
    (manifest,) = client.snapshot_route(None, 0.0)
    assert b"".join(client.stream_snapshot(manifest, 0, manifest.chunk_count)) == payload
    assert bytes(peer.wait(20).payload) == payload
    assert time.monotonic() - began_s >= 2 * len(payload) / cap - BURST_S
    peer.stop()
