"""The fleet under the reconciler: it reaches the plan, keeps to the limits, replaces what is lost, and does not waver."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cloud import PERIOD_S, SimulatedCloud, candidate

from clouds.reconciler import Machine
from echo2.capacity.limits import Limits, Quota
from echo2.config_activation import PaceSection

seeded = settings(derandomize=True, deadline=None, max_examples=25)
PACE = PaceSection()
CHEAP, NEXT, DEAR = candidate("a/n1", 1.0, 1.0), candidate("b/n1", 1.0, 1.5), candidate("c/n1", 1.0, 4.0, spot=False)
HOUR_S = 3600.0


@st.composite
def clouds(draw: st.DrawFn) -> SimulatedCloud:
    """A few offers, a need and limits."""
    offers = [
        candidate(
            f"{draw(st.sampled_from('abc'))}/n{number}",
            draw(st.sampled_from([1.0, 1.5, 4.0])),
            draw(st.integers(1, 12)) / 2,
            spot=draw(st.booleans()),
            start_up_s=draw(st.sampled_from([0.0, 60.0, 300.0])),
        )
        for number in range(draw(st.integers(2, 5)))
    ]
    limits = Limits(
        budget_usd_per_hour=draw(st.sampled_from([float("inf"), 30.0, 10.0, 4.0])),
        quotas=tuple(draw(st.lists(st.sampled_from([Quota("a", 1), Quota("a", 3, spot=True), Quota("b", 2)]), max_size=2))),
        max_domain_share=draw(st.sampled_from([1.0, 1.0, 0.6])),
        min_on_demand_share=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    pace = PaceSection(most_launches=draw(st.sampled_from([1, 2, 8])))
    return SimulatedCloud(offers, draw(st.sampled_from([1.0, 3.0, 6.0])), limits, pace)


def assert_within_limits(cloud: SimulatedCloud) -> None:
    """Budget and quotas hold for everything that is there."""
    there = [machine.offer for machine in cloud.machines.values()]
    prices = {c.offer.name: c.usd_per_hour for c in cloud.candidates}
    assert sum(prices[offer.name] for offer in there) <= cloud.limits.budget_usd_per_hour * (1 + 1e-6)
    for quota in cloud.limits.quotas:
        assert sum(offer.accelerators for offer in there if quota.covers(offer)) <= quota.accelerators
    assert sum(machine.phase == "launching" for machine in cloud.machines.values()) <= cloud.pace.most_launches


def assert_settled(cloud: SimulatedCloud) -> None:
    """The machines are those of the plan, and nothing is done to them."""
    assert cloud.counts() == cloud.memory.plan
    assert {machine.phase for machine in cloud.machines.values()} <= {"ready"}
    assert {action.kind for action in cloud.tick()} <= {"keep"}


@seeded
@given(clouds())
def test_where_the_cloud_obeys_the_fleet_becomes_the_plan_and_rests(cloud) -> None:
    for _ in range(80):
        cloud.tick()
        assert_within_limits(cloud)
    assert_settled(cloud)
    assert len(cloud.launches) == sum(cloud.memory.plan.values()), "nothing is launched that is not kept"


@seeded
@given(clouds(), st.integers(0, 10**6))
def test_faults_never_lead_above_the_limits_and_the_fleet_recovers_from_them(cloud, seed) -> None:
    draw = random.Random(seed)
    cloud.fails = lambda offer: draw.random() < 0.4
    for _ in range(60):
        for name in list(cloud.machines):
            if draw.random() < 0.05:
                cloud.preempt(name)
        if draw.random() < 0.1:
            cloud.demand = replace(cloud.demand, groups_per_s=draw.choice([1.0, 3.0, 6.0]))
        cloud.tick()
        assert_within_limits(cloud)
    cloud.fails = lambda offer: False
    cloud.run(3 * HOUR_S)
    assert_settled(cloud)
    calm = SimulatedCloud(cloud.candidates, cloud.demand.groups_per_s, cloud.limits, cloud.pace)
    calm.run(HOUR_S)
    assert cloud.ready() >= min(cloud.demand.needed_groups_per_s, calm.ready()) * (1 - 1e-6), "as much as without the faults"


@seeded
@given(clouds(), st.integers(0, 10**6))
def test_prices_that_waver_by_less_than_the_least_saving_move_nothing(cloud, seed) -> None:
    draw, plain = random.Random(seed), cloud.candidates
    cloud.limits = replace(cloud.limits, budget_usd_per_hour=float("inf"))
    cloud.run(HOUR_S)
    before, launched = cloud.counts(), len(cloud.launches)
    for _ in range(60):
        cloud.candidates = [repriced(each, draw.uniform(0.96, 1.04)) for each in plain]
        cloud.tick()
    plan = cloud.memory.plan
    if cloud.ready() >= cloud.demand.needed_groups_per_s:
        # What was planned at the plain prices is at most 1.04/0.96 of what is cheapest at any other.
        assert (cloud.counts(), len(cloud.launches)) == (before, launched) and plan == before


def repriced(offered, factor: float):
    price = offered.offer.price_usd_per_hour * factor
    return replace(offered, offer=replace(offered.offer, price_usd_per_hour=price))


def test_prices_that_waver_wildly_change_the_plan_no_oftener_than_the_interval() -> None:
    draw = random.Random(5)
    cloud = SimulatedCloud([CHEAP, NEXT], 4.0, Limits(), PACE)
    changes = []
    for _ in range(400):
        cloud.candidates = [repriced(each, draw.choice([0.2, 1.0, 5.0])) for each in (CHEAP, NEXT)]
        before = cloud.memory.plan
        cloud.tick()
        if cloud.memory.plan != before:
            changes.append(cloud.now_s)
        assert cloud.now_s < 300.0 or cloud.ready() >= 4.0, "what is given up was replaced before"
    assert len(changes) > 3
    assert all(later - earlier >= PACE.change_interval_s for earlier, later in pairwise(changes))


def test_a_lasting_saving_moves_the_fleet_once_and_never_leaves_the_learner_short() -> None:
    cloud = SimulatedCloud([CHEAP, NEXT], 3.0, Limits(), PACE)
    cloud.run(HOUR_S)
    assert cloud.counts() == {CHEAP.offer.name: 3}
    cloud.candidates = [CHEAP, repriced(NEXT, 0.5)]
    for _ in range(120):
        cloud.tick()
        assert cloud.ready() >= 3.0
    assert cloud.counts() == {NEXT.offer.name: 3} and len(cloud.launches) == 6


def test_where_the_limits_leave_no_room_for_both_the_old_goes_first() -> None:
    cloud = SimulatedCloud([CHEAP, NEXT], 3.0, Limits(budget_usd_per_hour=5.0), PACE)
    cloud.run(HOUR_S)
    cloud.candidates = [CHEAP, repriced(NEXT, 0.5)]
    for _ in range(120):
        cloud.tick()
        assert_within_limits(cloud)
        assert cloud.ready() >= 1.0, "not all at a time"
    assert cloud.counts() == {NEXT.offer.name: 3}


def test_a_preempted_machine_is_replaced_at_once_from_the_next_best_offer() -> None:
    cloud = SimulatedCloud([CHEAP, NEXT, DEAR], 3.0, Limits(), PACE)
    cloud.run(HOUR_S)
    cloud.preempt(next(iter(cloud.machines)))
    launch = next(action for action in cloud.tick() if action.kind == "launch")
    assert launch.offer == NEXT.offer
    cloud.run(300.0)
    assert cloud.ready() == 3.0 and cloud.counts() == {CHEAP.offer.name: 2, NEXT.offer.name: 1}


def test_an_offer_that_fails_is_tried_ever_more_rarely_while_others_serve() -> None:
    only_on_demand = Limits(min_on_demand_share=1.0)
    full = candidate("d/n1", 1.0, 1.0, spot=False)
    cloud = SimulatedCloud([full, DEAR], 1.0, only_on_demand, PaceSection(least_saving=0.05))
    cloud.fails = lambda offer: offer == full.offer
    cloud.run(300.0)
    assert cloud.counts() == {DEAR.offer.name: 1} and cloud.ready() == 1.0, "the next offer serves meanwhile"
    cloud.run(12 * HOUR_S)
    tries_s = [at_s for at_s, offer in cloud.launches if offer == full.offer.name]
    pauses_s = [later - earlier for earlier, later in pairwise(tries_s)]
    assert 4 <= len(tries_s) <= 25 and pauses_s == sorted(pauses_s)
    assert pauses_s[-1] >= PACE.longest_block_s
    cloud.fails = lambda offer: False
    cloud.run(3 * HOUR_S)
    assert cloud.counts() == {full.offer.name: 1}
    assert cloud.memory.setbacks == {}, "a machine that stays ends the row"


def test_a_machine_that_nothing_can_replace_is_launched_anew_once_its_offer_is_blocked_no_more() -> None:
    cloud = SimulatedCloud([CHEAP], 2.0, Limits(), PACE)
    cloud.run(HOUR_S)
    cloud.preempt(next(iter(cloud.machines)))
    cloud.run(PACE.first_block_s)
    assert cloud.memory.goal_groups_per_s == 1.0 and len(cloud.launches) == 2, "meanwhile the learner waits"
    cloud.tick()
    assert len(cloud.launches) == 3


def test_a_machine_is_not_given_up_before_it_has_settled() -> None:
    cloud = SimulatedCloud([CHEAP], 2.0, Limits(), PACE)
    cloud.run(150.0)
    cloud.demand = replace(cloud.demand, groups_per_s=0.5)
    cloud.memory = replace(cloud.memory, searched_at_s=-HOUR_S)
    cloud.run(PACE.settled_s - 150.0)
    assert cloud.memory.plan == {CHEAP.offer.name: 1} and cloud.ready() == 2.0
    cloud.run(2 * PERIOD_S)
    assert cloud.ready() == 1.0


def test_a_launch_that_never_gets_ready_is_stopped_and_counts_as_a_setback() -> None:
    cloud = SimulatedCloud([CHEAP, NEXT], 1.0, Limits(), PACE)
    cloud.hangs = lambda offer: offer == CHEAP.offer
    actions = cloud.run(PACE.start_timeout_s + 20 * PERIOD_S)
    (stop,) = [action for action in actions if action.kind == "stop"]
    assert stop.sentence == "it was not ready in 900 s" and stop.offer == CHEAP.offer
    assert cloud.ready() == 1.0 and cloud.memory.setbacks[CHEAP.offer.name].in_a_row == 1


def test_the_page_on_activation_lists_every_figure_of_the_pace() -> None:
    page = (Path(__file__).parents[2] / "docs" / "activation.md").read_text(encoding="utf-8")
    table = page[page.index("\n| rule") :].split("\n\n")[0]
    assert sorted(re.findall(r"\| `(\w+)` \|$", table, re.MULTILINE)) == sorted(PaceSection.model_fields)


def test_a_machine_that_does_not_drain_is_stopped() -> None:
    cloud = SimulatedCloud([CHEAP], 1.0, Limits(), PACE)
    cloud.machines["x"] = Machine("x", CHEAP.offer, "draining", 0.0, draining_since_s=0.0)
    cloud.now_s = PACE.drain_timeout_s
    assert [action.kind for action in cloud.tick() if action.name == "x"] == ["drain"]
    cloud.machines["x"] = replace(cloud.machines["x"], phase="draining")
    assert [action.kind for action in cloud.tick() if action.name == "x"] == ["stop"]


def test_machines_that_are_found_are_adopted() -> None:
    cloud = SimulatedCloud([CHEAP, NEXT], 3.0, Limits(), PACE)
    cloud.machines = {f"found-{n}": Machine(f"found-{n}", CHEAP.offer, "ready", -HOUR_S) for n in range(2)}
    cloud.run(600.0)
    assert len(cloud.launches) == 1 and cloud.counts() == {CHEAP.offer.name: 3}


@pytest.mark.parametrize("gone", ["offer", "need"])
def test_what_is_needed_no_more_drains_and_ends(gone) -> None:
    cloud = SimulatedCloud([CHEAP, NEXT], 3.0, Limits(), PACE)
    cloud.run(HOUR_S)
    if gone == "need":
        cloud.demand = replace(cloud.demand, groups_per_s=1.0)
    else:
        cloud.candidates = [replace(CHEAP, group_latency_s=100.0), NEXT]
    cloud.run(HOUR_S)
    assert cloud.counts() == ({CHEAP.offer.name: 1} if gone == "need" else {NEXT.offer.name: 3})
