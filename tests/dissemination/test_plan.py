"""The bound of a broadcast, its money, and chunks dealt by credit, in a simulation of links without TCP."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.dissemination.broadcast.plan import Dealer, Origin, Receiver, fluid_bound_s, plan_broadcast

MBIT = 1e6 / 8
CHUNK_BYTES = 64 * 1024
LATENCY_S = 0.025


class SimulatedBroadcast:
    """Store and forward over FIFO links; `finish_s` is when the last receiver has everything."""

    def __init__(self, total_bytes, source_mbps, uplinks_mbps, downlink_mbps, chunk_bytes=CHUNK_BYTES):
        self.chunk_bytes = chunk_bytes
        self.uplinks, self.source, self.downlink = [u * MBIT for u in uplinks_mbps], source_mbps * MBIT, downlink_mbps * MBIT
        self.count = len(uplinks_mbps)
        self.chunks = total_bytes // chunk_bytes
        self.dealer = Dealer(self.chunks, chunk_bytes, self.count, self.source, LATENCY_S)
        for worker, uplink in enumerate(self.uplinks):
            if uplink:
                self.dealer.add_owner(worker)
        self.events, self.order = [], itertools.count()
        self.busy, self.direct = False, []
        self.up_free, self.down_free = [0.0] * self.count, [0.0] * self.count
        self.copies = [[0] * self.chunks for _ in range(self.count)]
        self.finish_s = 0.0

    def at(self, when_s, call, *arguments):
        heapq.heappush(self.events, (when_s, next(self.order), call, arguments))

    def run(self):
        self.pump(0.0)
        while self.events:
            when_s, _, call, arguments = heapq.heappop(self.events)
            call(when_s, *arguments)
        return self.finish_s

    def send(self, now_s, receiver, chunk, arrived):
        self.busy = True
        sent_s = now_s + self.chunk_bytes / self.source
        self.at(sent_s + LATENCY_S, self.arrive, receiver, chunk, arrived)
        self.at(sent_s, self.source_free)

    def source_free(self, now_s):
        self.busy = False
        self.pump(now_s)

    def pump(self, now_s):
        if self.busy:
            return
        if self.direct:
            chunk, receiver = self.direct.pop()
            self.send(now_s, receiver, chunk, None)
        elif deal := self.dealer.deal(source_idle=True):
            if deal.owner is None:
                self.direct = [(deal.chunk, receiver) for receiver in range(self.count)]
                self.pump(now_s)
            else:
                self.send(now_s, deal.owner, deal.chunk, self.forward)

    def arrive(self, now_s, receiver, chunk, arrived):
        self.down_free[receiver] = max(now_s, self.down_free[receiver]) + self.chunk_bytes / self.downlink
        self.at(self.down_free[receiver], self.have, receiver, chunk, arrived)

    def have(self, now_s, receiver, chunk, arrived):
        self.copies[receiver][chunk] += 1
        self.finish_s = max(self.finish_s, now_s)
        if arrived:
            arrived(now_s, receiver, chunk)

    def forward(self, now_s, owner, chunk):
        begin_s = max(now_s, self.up_free[owner])
        for receiver in set(range(self.count)) - {owner}:
            self.up_free[owner] = max(now_s, self.up_free[owner]) + self.chunk_bytes / self.uplinks[owner]
            self.at(self.up_free[owner] + LATENCY_S, self.arrive, receiver, chunk, None)
        self.at(self.up_free[owner] + LATENCY_S, self.credit, owner, chunk, self.up_free[owner] - begin_s)

    def credit(self, now_s, owner, chunk, service_s):
        self.dealer.credit(owner, chunk, service_s)
        self.pump(now_s)


FLEETS = {
    "equal": (200, [200] * 8, 200),
    "equal, 16 workers": (200, [200] * 16, 200),
    "asymmetric": (500, [100] * 8, 500),
    "unequal": (300, [20, 40, 80, 120, 160, 200, 300, 400], 500),
    "one slow": (200, [200] * 7 + [25], 200),
    "two unreachable": (200, [200] * 6 + [0] * 2, 200),
}


@pytest.mark.parametrize("name", FLEETS)
def test_dealing_by_credit_stays_close_to_the_bound(name):
    source, uplinks, downlink = FLEETS[name]
    simulation = SimulatedBroadcast(64_000_000, source, uplinks, downlink)
    receivers = [Receiver(uplink, downlink, reachable=uplink > 0) for uplink in uplinks]
    bound_s = fluid_bound_s(simulation.chunks * CHUNK_BYTES, Origin(source), receivers) / MBIT
    assert 1.0 <= simulation.run() / bound_s <= 1.10
    assert all(count == 1 for row in simulation.copies for count in row)


@pytest.mark.parametrize("megabytes_and_chunk", [(64, 16 * 1024), (256, 256 * 1024), (1000, 1024 * 1024)])
def test_dealing_by_credit_stays_close_to_the_bound_whatever_the_chunks(megabytes_and_chunk):
    megabytes, chunk_bytes = megabytes_and_chunk
    simulation = SimulatedBroadcast(megabytes * 1_000_000, 500, [100] * 16, 500, chunk_bytes)
    bound_s = fluid_bound_s(simulation.chunks * chunk_bytes, Origin(500), [Receiver(100, 500)] * 16) / MBIT
    assert 1.0 <= simulation.run() / bound_s <= 1.10
    assert all(count == 1 for row in simulation.copies for count in row)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1, 1e4), st.lists(st.floats(1, 1e4), min_size=1, max_size=12), st.integers(1, 40), st.sampled_from([4096, 2**20])
)
def test_whatever_the_links_everybody_gets_every_chunk_once(source, uplinks, chunks, chunk_bytes):
    simulation = SimulatedBroadcast(chunks * chunk_bytes, source, uplinks, 1e4, chunk_bytes)
    simulation.run()
    assert all(count == 1 for row in simulation.copies for count in row)


def test_an_owner_without_credit_gets_a_bounded_backlog_and_the_source_sends_the_rest():
    dealer = Dealer(1000, CHUNK_BYTES, 4, 25e6, LATENCY_S)
    dealer.add_owner(7)
    deals = [dealer.deal(source_idle=True) for _ in range(100)]
    assert 1 <= sum(deal.owner == 7 for deal in deals) <= 4
    assert all(deal.owner is None for deal in deals[10:])


def test_a_busy_source_waits_rather_than_send_to_everybody():
    dealer = Dealer(10, CHUNK_BYTES, 4, 25e6, LATENCY_S)
    assert dealer.deal(source_idle=False) is None
    assert dealer.deal(source_idle=True).owner is None


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 60), st.integers(1, 12))
def test_every_chunk_is_dealt_once_in_order_whoever_comes_and_goes(data, chunks, receivers):
    dealer = Dealer(chunks, CHUNK_BYTES, receivers, 1e6)
    dealt, held = [], {}
    for _ in range(120):
        action = data.draw(st.sampled_from(["deal", "deal", "deal", "credit", "add", "remove"]))
        owner = data.draw(st.integers(0, receivers - 1))
        if action == "add":
            dealer.add_owner(owner)
            held.setdefault(owner, set())
        elif action == "remove":
            assert dealer.remove_owner(owner) == held.pop(owner, set())
        elif action == "credit" and held.get(owner):
            assert dealer.credit(owner, held[owner].pop(), data.draw(st.floats(1e-3, 10)))
        elif deal := dealer.deal(source_idle=data.draw(st.booleans())):
            dealt.append(deal.chunk)
            if deal.owner is not None:
                held[deal.owner].add(deal.chunk)
        assert all(dealer.backlog(known) == chunks_held for known, chunks_held in held.items())
    assert dealt == list(range(len(dealt)))
    assert dealer.dealt == len(dealt)


def test_an_owner_that_seemed_slow_is_tried_again():
    dealer = Dealer(1000, CHUNK_BYTES, 4, 25e6, LATENCY_S)
    dealer.add_owner(7, service_s=30.0)
    owners = [dealer.deal(source_idle=True).owner for _ in range(100)]
    assert owners[0] is None
    assert 7 in owners


def test_a_credit_that_was_not_due_is_refused():
    dealer = Dealer(10, CHUNK_BYTES, 2, 1e6)
    dealer.add_owner(1)
    assert not dealer.credit(1, 3, 0.1)
    assert not dealer.credit(2, 0, 0.1)
    assert dealer.service_s == {}


def test_the_bound_names_what_binds():
    wide = Receiver(200 * MBIT, 200 * MBIT)
    equal = plan_broadcast(64_000_000, Origin(200 * MBIT), [wide] * 8)
    assert (equal.binding, equal.bound_s, equal.star_s) == ("source uplink", pytest.approx(2.56), pytest.approx(8 * 2.56))
    narrow = plan_broadcast(64_000_000, Origin(200 * MBIT), [wide, Receiver(200 * MBIT, 10 * MBIT)])
    assert (narrow.binding, narrow.bound_s) == ("slowest downlink", pytest.approx(51.2))
    uplinks = plan_broadcast(64_000_000, Origin(500 * MBIT), [Receiver(100 * MBIT, 500 * MBIT)] * 8)
    assert (uplinks.binding, uplinks.bound_s) == ("sum of uplinks", pytest.approx(8 * 64e6 / (1300 * MBIT)))


def test_uplinks_of_unreachable_workers_do_not_count_and_a_store_does():
    receivers = [Receiver(100 * MBIT, 500 * MBIT)] * 4 + [Receiver(1000 * MBIT, 500 * MBIT, reachable=False)] * 2
    without = fluid_bound_s(60_000_000, Origin(200 * MBIT), receivers)
    assert without == pytest.approx(6 * 60e6 / (600 * MBIT))
    assert fluid_bound_s(60_000_000, Origin(200 * MBIT), receivers, Origin(300 * MBIT)) == pytest.approx(without * 600 / 900)


def test_egress_is_paid_where_the_bytes_leave():
    receivers = [Receiver(200 * MBIT, 200 * MBIT, egress_usd_per_gb=0.01)] * 8
    plan = plan_broadcast(1_000_000_000, Origin(200 * MBIT, egress_usd_per_gb=0.09), receivers)
    assert plan.egress_usd == pytest.approx(0.09 + 7 * 0.01)
    assert plan.star_egress_usd == pytest.approx(8 * 0.09)
    store = Origin(800 * MBIT, egress_usd_per_gb=0.05)
    helped = plan_broadcast(1_000_000_000, Origin(100 * MBIT, 0.09), [Receiver(10 * MBIT, 200 * MBIT)] * 8, store)
    sent_gb = 8 - 8 * 10 * MBIT * helped.bound_s / 1e9
    source_gb = min(sent_gb, 100 * MBIT * helped.bound_s / 1e9)
    assert helped.egress_usd == pytest.approx(source_gb * 0.09 + (sent_gb - source_gb + (8 - sent_gb) / 7) * 0.05, rel=0.2)
