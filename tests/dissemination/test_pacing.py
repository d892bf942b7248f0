"""One cap for all who send by an uplink: kept whatever they do, and nobody left out."""

import asyncio
import heapq
import sys
import threading
import time

import pytest
from broadcasts import CHUNK_BYTES, MB, fleet, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.dissemination.pacing import BURST_S, LEAST_PIECE_BYTES, MOST_PIECE_BYTES, Allowance, Pacer
from echo2.hub.uplink import Uplink


class Timeline:
    """A clock that passes from one planned call to the next, in order."""

    def __init__(self):
        self.now_s = 0.0
        self._calls = []
        self._serial = 0

    def clock(self):
        return self.now_s

    def call_later(self, seconds, call):
        self._serial += 1
        heapq.heappush(self._calls, (self.now_s + seconds, self._serial, call))

    def run(self):
        while self._calls:
            self.now_s, _, call = heapq.heappop(self._calls)
            call()


class Waiter:
    """Waits for each of its pieces, as an HTTP stream does."""

    def __init__(self, name, timeline, pacer, log, plan):
        self._name, self._timeline, self._pacer, self._log = name, timeline, pacer, log
        self._plan = iter(plan)
        self._next()

    def _next(self):
        pause_s, share = next(self._plan, (None, None))
        if pause_s is not None:
            self._timeline.call_later(pause_s, lambda: self._ask(max(1, int(share * self._pacer.piece_bytes))))

    def _ask(self, length):
        self._timeline.call_later(self._pacer.reserve(length), lambda: self._leave(length))

    def _leave(self, length):
        self._log.append((self._timeline.now_s, self._name, length))
        self._next()


class Refused:
    """Is refused and called again, as the broadcast's links are; its sockets take only a share of what is allowed."""

    def __init__(self, name, timeline, pacer, log, plan):
        self._name, self._timeline, self._log = name, timeline, log
        self._piece_bytes = pacer.piece_bytes
        self._allowance = Allowance(pacer, timeline.call_later, self._try)
        self._plan = list(reversed(plan))
        self._wanting = False
        self._next()

    def _next(self):
        if self._plan:
            self._timeline.call_later(self._plan[-1][0], self._want)

    def _want(self):
        self._wanting = True
        self._try()

    def _try(self):
        if not self._wanting:
            return
        allowed = self._allowance.take(2 * self._piece_bytes)
        if allowed:
            _, share = self._plan.pop()
            sent = int(share * allowed)
            self._allowance.give_back(allowed - sent)
            self._log.append((self._timeline.now_s, self._name, sent))
            self._wanting = False
            self._next()


RUNS = st.tuples(st.sampled_from([0.0, 0.001, 0.03, 0.3]), st.integers(1, 12), st.sampled_from([0.0, 0.3, 1.0, 1.0]))
PLANS = st.lists(RUNS, max_size=4).map(
    lambda runs: [(pause_s if place == 0 else 0.0, share) for pause_s, count, share in runs for place in range(count)]
)
"""Pauses, and the shares of a piece that are sent after them: a pause, then several pieces at once."""


@given(
    rate=st.sampled_from([2e4, 1e6, 2e8]),
    waiting=st.lists(PLANS, max_size=3),
    refused=PLANS,
    began_s=st.sampled_from([0.0, 9.0]),
)
@settings(max_examples=200, deadline=None)
def test_no_span_of_time_carries_more_than_the_cap_whatever_is_asked_for(rate, waiting, refused, began_s):
    timeline, log = Timeline(), []
    pacer = Pacer(rate, timeline.clock)
    timeline.now_s = began_s
    for number, plan in enumerate(waiting):
        Waiter(number, timeline, pacer, log, plan)
    Refused("refused", timeline, pacer, log, refused)
    timeline.run()
    assert len(log) == len(refused) + sum(map(len, waiting)), "everybody got on"
    burst_bytes = max(rate * BURST_S, pacer.piece_bytes)
    for first, (start_s, _, _) in enumerate(log):
        total = 0
        for at_s, _, length in log[first:]:
            total += length
            assert total <= rate * (at_s - start_s) + burst_bytes + pacer.piece_bytes + 1e-3


@pytest.mark.parametrize("waiters", [1, 3])
def test_all_who_have_always_something_to_send_get_the_same_share(waiters):
    timeline, log = Timeline(), []
    pacer = Pacer(1e6, timeline.clock)
    for number in range(waiters):
        Waiter(number, timeline, pacer, log, [(0.0, 1.0)] * 100)
    Refused("refused", timeline, pacer, log, [(0.0, 1.0)] * 100)
    timeline.run()
    sent = [sum(length for at_s, name, length in log if name == user and at_s <= 0.9) for user in (*range(waiters), "refused")]
    assert max(sent) - min(sent) <= 2 * pacer.piece_bytes
    assert sum(sent) == pytest.approx(0.9 * 1e6, abs=2 * pacer.piece_bytes)


def test_who_has_nothing_to_send_any_more_takes_nothing_from_the_others():
    timeline = Timeline()
    pacer = Pacer(1e6, timeline.clock)
    allowance = Allowance(pacer, timeline.call_later, lambda: None)
    assert allowance.take(10_000) == 0
    timeline.run()
    assert timeline.now_s == 0.01
    timeline.now_s = 5.0
    whole_burst = [pacer.reserve(10_000) for _ in range(5)]
    assert whole_burst == pytest.approx([0, 0, 0, 0, 0.01])
    assert allowance.take(10_000) == 0


def test_what_is_not_sent_is_left_to_the_others():
    """The refused one sends half of what it is allowed, so that the other one has two thirds of the cap."""
    timeline, log = Timeline(), []
    pacer = Pacer(1e6, timeline.clock)
    Waiter("waiter", timeline, pacer, log, [(0.0, 1.0)] * 200)
    Refused("refused", timeline, pacer, log, [(0.0, 0.5)] * 200)
    timeline.run()
    within = {user: sum(length for at_s, name, length in log if name == user and at_s <= 1.0) for user in ("waiter", "refused")}
    assert sum(within.values()) == pytest.approx(1e6, rel=0.03)
    assert within["waiter"] == pytest.approx(2 * within["refused"], rel=0.03)


def test_pieces_are_neither_tiny_nor_huge():
    assert [Pacer(rate).piece_bytes for rate in (1.0, 1e6, 1e10)] == [LEAST_PIECE_BYTES, 10_000, MOST_PIECE_BYTES]


def test_threads_that_ask_at_the_same_moment_are_served_one_after_the_other():
    pacer, waits_s, threads, asks = Pacer(1e6, lambda: 0.0), [], 4, 5000
    together = threading.Barrier(threads)

    def ask():
        together.wait()
        own_s = [pacer.reserve(1000) for _ in range(asks)]
        waits_s.extend(own_s)

    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        askers = [threading.Thread(target=ask) for _ in range(threads)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    finally:
        sys.setswitchinterval(former)
    assert sorted(waits_s) == pytest.approx([0.001 * (place + 1) for place in range(threads * asks)])


def test_the_broadcast_and_http_together_keep_the_cap_and_neither_waits_for_the_other_to_end():
    cap, each = 4 * MB, 3 * MB
    manifest, payload = snapshot(1, each)
    sent_s = []

    async def stream(uplink):
        async for part in uplink.paced([bytes(CHUNK_BYTES)] * (each // CHUNK_BYTES)):
            sent_s.append((time.monotonic(), len(part)))

    with fleet(1, uplink_bytes_per_s=cap) as run:
        began_s = time.monotonic()
        http = threading.Thread(target=lambda: asyncio.run(stream(Uplink(run.pacer))))
        http.start()
        record = run.source.broadcast(manifest, payload).wait(20)
        ended_s = time.monotonic()
        http.join()
        both_s = max(time.monotonic(), ended_s) - began_s
    assert both_s >= (each + each // CHUNK_BYTES * CHUNK_BYTES) / cap - BURST_S
    http_meanwhile = sum(length for at_s, length in sent_s if at_s <= ended_s)
    broadcast_at_least = each if sent_s[-1][0] >= ended_s else (sent_s[-1][0] - began_s) * cap - each
    assert http_meanwhile > each / 4 and broadcast_at_least > each / 4
    assert record.sent_bytes >= each
