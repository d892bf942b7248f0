"""What is rented and why, what is refused and why, and what would have to give: every sentence is true of the plan."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from market import PLACES, all_selections, candidate, markets

from echo2.capacity.activation import Demand, activate
from echo2.capacity.limits import Limits, Quota
from echo2.capacity.relaxations import is_fresh
from echo2.capacity.selection import obstacles, select

seeded = settings(derandomize=True, deadline=None, max_examples=120)
DEMAND = Demand(groups_per_s=4.0, margin=0.25, learner_step_s=10.0, slack_steps=2, members=5)


def demanding(need: float, slack_steps: int = 2) -> Demand:
    return replace(DEMAND, groups_per_s=need, margin=0.0, slack_steps=slack_steps)


def per_1000(usd_per_group: float) -> float:
    return 1000 * usd_per_group / DEMAND.members


def first_number(sentence: str) -> float:
    return float(re.match(r"[\d.,]+", sentence).group().replace(",", ""))


@st.composite
def aged_markets(draw: st.DrawFn):
    """A market in which some offers are too stale for two steps of 10 s."""
    candidates, need, limits = draw(markets())
    ages_s = [draw(st.sampled_from([1.0, 1.0, 1.0, 18.0, 24.0, 45.0])) for _ in candidates]
    return [replace(c, group_latency_s=s) for c, s in zip(candidates, ages_s, strict=True)], need, limits


@seeded
@given(aged_markets())
def test_every_offer_is_chosen_or_refused_and_every_reason_is_true(market) -> None:
    candidates, need, limits = market
    plan = activate(candidates, demanding(need), limits)
    assume(plan.selection is not None)
    chosen = {choice.candidate.offer.name for choice in plan.choices}
    refused = [refusal.offer.name for refusal in plan.refusals]
    assert sorted([*chosen, *refused]) == sorted(c.offer.name for c in candidates)
    dearest = max(choice.candidate.usd_per_group() for choice in plan.choices)
    by_name = {c.offer.name: c for c in candidates}
    for refusal in plan.refusals:
        left = by_name[refusal.offer.name]
        if refusal.reason == "too stale":
            assert left.dissemination_s + left.group_latency_s > 20.0
            assert f"{left.group_latency_s:.4g} s exceeds" in refusal.sentence
            continue
        assert first_number(refusal.sentence) == pytest.approx(per_1000(left.usd_per_group()), rel=1e-3)
        if refusal.reason == "dearer":
            assert left.usd_per_group() >= dearest
        elif refusal.reason == "at a limit":
            more = list(plan.selection.counts)
            more[plan.selection.candidates.index(left)] += 1
            assert replace(plan.selection, counts=tuple(more)).violations(need) or obstacles(plan.selection, left, need)
        elif refusal.reason == "not worth a start":
            assert left.usd_per_group() < dearest and not left.running and left.start_usd > 0
        else:
            assert refusal.reason == "no cheaper plan with it"
            place = plan.selection.candidates.index(left)
            others = all_selections(plan.selection.candidates, limits, 4)
            with_it = [s.cost_usd_per_hour for s in others if s.counts[place] and not s.violations(need)]
            assert min(with_it, default=math.inf) >= plan.selection.cost_usd_per_hour * (1 - 1e-6)


@seeded
@given(aged_markets())
def test_an_impossible_demand_is_answered_with_plans_that_one_change_allows_and_less_would_not(market) -> None:
    candidates, need, limits = market
    plan = activate(candidates, demanding(need), limits)
    assume(plan.selection is None)
    assert plan.choices == () and plan.obstacle
    assert len(plan.refusals) == len(candidates)
    fresh = [c for c in candidates if is_fresh(c, 20.0)]
    assert plan.relaxations or not fresh
    for relaxation in plan.relaxations:
        found, changed = relaxation.selection, relaxation.selection.limits
        assert found.violations(relaxation.needed_groups_per_s) == []
        assert all(is_fresh(c, relaxation.fresh_s) for c, _ in found.chosen)
        if relaxation.name == "all limits together":
            continue
        names = ("budget_usd_per_hour", "quotas", "max_domain_share", "min_on_demand_share")
        differing = [name for name in names if getattr(changed, name) != getattr(limits, name)]
        moved = [relaxation.needed_groups_per_s != need, relaxation.fresh_s != 20.0]
        assert len(differing) + sum(moved) == 1, "one change each"
        if differing:
            less = select(fresh, need, nearer(relaxation, limits))
            assert less is None or (differing == ["max_domain_share"] and is_oversized(less, need))


def is_oversized(selection, need: float) -> bool:
    """Whether it gives more than twice the need, and more than twice its largest machine."""
    return selection.groups_per_s > 2 * max(need, *(c.effective_groups_per_s for c, _ in selection.chosen))


def nearer(relaxation, limits: Limits) -> Limits:
    """The changed limits, one step back towards the original."""
    changed = relaxation.selection.limits
    if changed.budget_usd_per_hour != limits.budget_usd_per_hour:
        return replace(changed, budget_usd_per_hour=changed.budget_usd_per_hour * 0.99)
    if changed.quotas != limits.quotas:
        pairs = zip(changed.quotas, limits.quotas, strict=True)
        return replace(changed, quotas=tuple(replace(new, accelerators=new.accelerators - (new != old)) for new, old in pairs))
    if changed.max_domain_share != limits.max_domain_share:
        return replace(changed, max_domain_share=max(changed.max_domain_share - 0.01, limits.max_domain_share))
    return replace(changed, min_on_demand_share=min(changed.min_on_demand_share + 0.01, limits.min_on_demand_share))


def test_what_is_not_to_be_had_is_refused_and_what_runs_of_it_is_kept() -> None:
    cheap, dear = replace(candidate(1.0, 1.0), launchable=False), candidate(1.0, 2.0, PLACES[3], kind="dear")
    (refusal,) = activate([cheap, dear], demanding(2.0), Limits()).refusals
    assert (refusal.offer, refusal.reason) == (cheap.offer, "not to be had")
    assert activate([replace(cheap, running=1), dear], demanding(2.0), Limits()).selection.counts == (1, 1)


def test_the_margin_is_rented_too_and_the_choice_says_what_it_costs() -> None:
    plan = activate([candidate(1.0, 3.6, running=2)], DEMAND, Limits())
    (choice,) = plan.choices
    assert choice.count == 5 and plan.selection.groups_per_s == 5.0
    assert choice.sentence == "0.2 USD per 1,000 rollouts; 5 × 1 groups/s give 100 % of the throughput; 2 of them run already"
    assert plan.usd_per_1000_rollouts == pytest.approx(0.2)


def test_a_worker_behind_a_slow_link_is_refused_however_cheap_it_is() -> None:
    near = replace(candidate(1.0, 9.0, PLACES[0]), dissemination_s=4.0, group_latency_s=16.0)
    far = replace(candidate(9.0, 1.0, PLACES[3]), dissemination_s=5.0, group_latency_s=16.0)
    plan = activate([near, far], demanding(1.0), Limits())
    assert [choice.candidate for choice in plan.choices] == [near]
    (refusal,) = plan.refusals
    assert refusal.sentence == "D + L = 5 s + 16 s exceeds the (S + 1 − κ)·T = 2 · 10 s that the staleness bound allows"
    alone = activate([far], demanding(1.0), Limits())
    assert "none of 1 offers is fresh enough" in alone.obstacle
    assert [(r.sentence, r.selection.counts) for r in alone.relaxations] == [
        ("S + 1 − κ = 3 in place of 2: raise S by 1, or lower κ", (1,))
    ]


def test_each_limit_has_its_price() -> None:
    cheap, dear = candidate(1.0, 1.0, PLACES[0], spot=True), candidate(1.0, 4.0, PLACES[3], kind="dear")
    floor = activate([cheap, dear], demanding(4.0), Limits(min_on_demand_share=0.25))
    assert dict(floor.limit_costs) == {"at least 25 % on demand": pytest.approx(3.0)}
    cap = activate([cheap, dear], demanding(4.0), Limits(max_domain_share=0.5, failure_domain="cloud"))
    assert dict(cap.limit_costs) == {"at most 50 % in one cloud": pytest.approx(6.0)}
    quota = activate([cheap, dear], demanding(4.0), Limits(quotas=(Quota("a", 3), Quota("c", 9))))
    assert dict(quota.limit_costs) == {"quota a": pytest.approx(3.0)}


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (Limits(budget_usd_per_hour=3.0), "a budget of 8 USD/h in place of 3"),
        (Limits(quotas=(Quota("a", 1),)), "a quota a of 4 accelerators in place of 1"),
        (Limits(max_domain_share=0.3), "100 % of the throughput in one zone in place of 30 %"),
    ],
    ids=["budget", "quota", "cap"],
)
def test_the_change_that_is_offered_is_the_least_one(limits, sentence) -> None:
    plan = activate([candidate(1.0, 2.0)], demanding(4.0), limits)
    assert sentence in [relaxation.sentence for relaxation in plan.relaxations]
    assert "is enough: " in plan.obstacle


def test_the_on_demand_share_is_lowered_as_little_as_needed() -> None:
    spot, demand = candidate(1.0, 1.0, PLACES[0], spot=True), candidate(1.0, 4.0, PLACES[3], kind="dear")
    plan = activate([spot, demand], demanding(4.0), Limits(min_on_demand_share=1.0, quotas=(Quota("c", 3),)))
    assert [r.sentence for r in plan.relaxations] == [
        "a quota c of 4 accelerators in place of 3",
        "75 % of the need on demand in place of 100 %",
        "3 groups/s in place of 4: the learner waits for the rest",
    ]


def test_where_no_single_change_is_enough_all_limits_are_dropped() -> None:
    offers = [candidate(1.0, 2.0, PLACES[0])]
    plan = activate(offers, demanding(4.0), Limits(budget_usd_per_hour=1.0, quotas=(Quota("a", 0),)))
    (relaxation,) = plan.relaxations
    assert relaxation.name == "all limits together" and relaxation.selection.counts == (4,)
    assert math.isinf(relaxation.selection.limits.budget_usd_per_hour)


def test_a_search_that_was_too_short_is_not_taken_for_a_proof_that_there_is_no_plan() -> None:
    # Two clouds with half of the throughput each, at rates of which no multiples but far ones agree.
    draw = random.Random(1)
    offers = [candidate(draw.uniform(1, 2), 1.0, PLACES[3 * (n % 2)], kind=f"m{n}") for n in range(12)]
    limits = Limits(max_domain_share=0.5, failure_domain="cloud")
    plan = activate(offers, demanding(30.0), limits, time_limit_s=0.01)
    assert plan.selection is None
    assert "no choice among 12 offers was found in activation.time_limit_s = 0.01 to give 30 groups/s" in plan.obstacle
    assert {refusal.reason for refusal in plan.refusals} == {"no plan was found in time"}
