"""What a run's money went into: intervals are split without remainder, by what came of the work that they paid for."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_observations import SETTINGS, KnownRun

from echo2.hub.costs import Use, read_costs, uses_of
from echo2.hub.inspection import costs_of
from echo2.hub.intervals import PaidInterval

OFFER = "nebius/eu-north1/gpu-h100-sxm_1gpu-16vcpu-200gb/spot"


@pytest.fixture
def known(make_run):
    made = KnownRun(make_run(*SETTINGS))
    made.database.execute("INSERT INTO paid_intervals VALUES ('a', ?, 3.6, 940.0, NULL)", (OFFER,))
    made.database.execute("INSERT INTO paid_intervals VALUES ('b', ?, 1.8, 1000.0, NULL)", (OFFER,))
    made.database.execute("INSERT INTO paid_intervals VALUES ('c', 'other', 0.36, 1000.0, 1010.0)")
    for _ in range(6):
        made.step(made.workers)
    yield made
    made.database.close()


def test_the_uses_of_a_run_add_up_to_what_was_paid_and_name_what_was_wasted(known):
    costs = costs_of(known.run)
    # A thousandth of a dollar a second, half of that, and ten seconds of a tenth.
    up_s = known.now_s - 1000.0
    assert costs.usd == pytest.approx(0.001 * (60 + up_s) + 0.0005 * up_s + 0.001)
    assert math.fsum(costs.uses.values()) == pytest.approx(costs.usd)
    assert costs.uses["start"] == pytest.approx(0.06), "a minute of the first worker; the second one was there at once"
    assert costs.uses["never came up"] == pytest.approx(0.001)
    assert costs.uses["trained"] > costs.uses["filtered"] > 0, "every fourth group is filtered"
    useful = costs.uses["trained"] + costs.uses.get("under way", 0.0)
    assert costs.wasted_usd == pytest.approx(costs.usd - useful)
    assert list(costs.uses.values()) == sorted(costs.uses.values(), reverse=True)


def test_the_work_is_counted_for_the_offer_that_made_it(known):
    costs = costs_of(known.run)
    first, other = costs.offers
    assert (first.offer, first.launches, first.running, first.lost) == (OFFER, 2, 2, 0)
    assert (other.offer, other.launches, other.running, other.scored_rollouts) == ("other", 1, 0, 0)
    scored = known.database.value("SELECT COUNT(*) FROM groups WHERE scored_at_s IS NOT NULL")
    assert first.scored_groups == costs.scored_groups == scored and first.scored_rollouts == 2 * scored
    assert costs.trained_rollouts == 6 * 4 * 2 and costs.trained_tokens == costs.trained_rollouts
    assert costs.rates()["usd_per_step"] == pytest.approx(costs.usd / 6)
    assert costs.rates()["usd_per_million_tokens"] == pytest.approx(1e6 * costs.usd / (2 * scored))


def test_a_machine_that_was_lost_wastes_what_was_under_way_and_several_workers_share_one(known):
    known.database.execute("INSERT INTO paid_intervals VALUES ('d', 'two workers', 3.6, ?, NULL)", (known.now_s,))
    before = costs_of(known.run).uses.get("lost", 0.0)
    workers = [known.join(f"d.{number}") for number in range(2)]
    known.step(known.workers)
    version = known.ledger.current_step
    leased_s = known.now_s
    assert known.ledger.lease(workers[0], version, 1)
    known.now_s += 10.0
    known.roster.close_interval("d")
    known.now_s += 1.0
    known.ledger.reopen_leases_of(workers[0])
    known.roster.note("worker ended", "d", "preempted")
    costs = read_costs(known.database)
    lost = next(offer for offer in costs.offers if offer.offer == "two workers")
    assert (lost.lost, lost.running) == (1, 0)
    assert costs.uses["lost"] - before == pytest.approx(0.01), "the lease died with the machine, not when it was noticed"
    assert leased_s + 10.0 == known.database.value("SELECT terminated_at_s FROM paid_intervals WHERE name = 'd'")


def test_a_run_that_paid_for_nothing_has_no_rates(make_run):
    made = KnownRun(make_run(*SETTINGS))
    costs = costs_of(made.run)
    made.database.close()
    assert (costs.usd, costs.wasted_usd, costs.offers) == (0.0, 0.0, ())
    assert set(costs.rates().values()) == {None}


SPANS = st.tuples(st.integers(-50, 150), st.integers(0, 200), st.sampled_from(["trained", "lost", "filtered"]))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(SPANS, max_size=8), st.integers(0, 120), st.integers(0, 100))
def test_every_interval_is_split_without_remainder_however_leases_overlap(spans, registered_s, length_s):
    interval = PaidInterval("m", "o", 36.0, 0.0, float(length_s), False, False, ("w",), float(registered_s))
    uses = uses_of(interval, [Use(began, began + length, what) for began, length, what in spans])
    assert math.fsum(uses.values()) == pytest.approx(interval.usd)
    assert min(uses.values()) >= -1e-12
