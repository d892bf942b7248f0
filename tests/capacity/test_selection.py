"""The cheapest selection against every selection there is, the greedy rule, and its limits."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from market import PLACES, QUOTAS, candidate, cheapest_by_trying, markets

from echo2.capacity.limits import Limits, Quota
from echo2.capacity.offers import Offer
from echo2.capacity.program import Program
from echo2.capacity.selection import Selection, least_cost_usd_per_hour, select, select_greedily
from echo2.errors import WaitTimeout

seeded = settings(derandomize=True, deadline=None, max_examples=150)


@seeded
@given(markets())
def test_the_exact_selection_is_the_cheapest_of_all(market) -> None:
    candidates, need, limits = market
    found, least = select(candidates, need, limits), cheapest_by_trying(candidates, need, limits)
    if found is None:
        assert least == math.inf
        return
    assert found.violations(need) == [] and found.gap == 0.0
    assert found.cost_usd_per_hour <= least * (1 + 1e-6)
    if max(found.counts) <= 5:
        assert found.cost_usd_per_hour == pytest.approx(least, rel=1e-6)


@seeded
@given(markets(most=3), st.lists(st.booleans(), min_size=3, max_size=3))
def test_machines_that_cannot_be_launched_are_kept_at_most(market, launchable) -> None:
    candidates, need, limits = market
    candidates = [replace(c, launchable=each) for c, each in zip(candidates, launchable, strict=False)]
    for choose in (select, select_greedily):
        found = choose(candidates, need, limits)
        if found is not None:
            assert all(n <= c.running or c.launchable for c, n in found.chosen)
    least, found = cheapest_by_trying(candidates, need, limits), select(candidates, need, limits)
    assert (found is None or found.cost_usd_per_hour <= least * (1 + 1e-6)) and (found is not None or least == math.inf)


@seeded
@given(markets(most=8))
def test_the_greedy_selection_keeps_to_the_limits_and_never_beats_the_exact_one(market) -> None:
    candidates, need, limits = market
    simple = select_greedily(candidates, need, limits)
    assume(simple is not None)
    assert simple.violations(need) == []
    assert select(candidates, need, limits).cost_usd_per_hour <= simple.cost_usd_per_hour * (1 + 1e-6)


@seeded
@given(st.integers(0, 10**6))
def test_no_offer_that_a_cheapest_selection_needs_is_left_out_beforehand(seed) -> None:
    draw = random.Random(seed)
    places = [("a", "north", f"north-{number}") for number in range(8)]
    candidates = [
        candidate(draw.choice([1.0, 2.0]), draw.choice([1.0, 1.1, 1.2, 1.3, 2.0, 2.5]), draw.choice(places), kind=f"m{number}")
        for number in range(10)
    ]
    limits = Limits(
        max_domain_share=draw.choice([0.25, 0.34, 0.5, 0.7, 1.0]),
        budget_usd_per_hour=draw.choice([math.inf, 9.0]),
        quotas=draw.choice([(), (Quota("a", 5),)]),
    )
    need = draw.choice([3.0, 4.0, 6.0, 9.0])
    whole = Program(candidates, need, limits)
    whole.columns = [replace_column(whole, index) for index in range(len(candidates))]
    reference, found = whole.solve(10.0), select(candidates, need, limits)
    assert (found is None) == (reference.counts is None)
    if found is not None:
        cost = Selection(tuple(candidates), reference.counts, limits).cost_usd_per_hour
        assert found.cost_usd_per_hour == pytest.approx(cost, rel=1e-6)


def replace_column(program: Program, index: int):
    """The column of new machines of one candidate, as if none had been left out."""
    chosen = program.candidates[index]
    return replace(program.columns[0], index=index, candidate=chosen, usd_per_hour=chosen.usd_per_hour, most=math.inf)


def test_alike_offers_are_left_out_where_there_are_more_than_the_cap_can_use() -> None:
    many = [candidate(1.0, 1.0 + number / 100, ("a", "r", f"z{number}"), kind="m") for number in range(40)]
    assert len(Program(many, 20.0, Limits()).columns) == 1
    capped = Program(many, 20.0, Limits(max_domain_share=0.5)).columns
    # (20 − 1)/(0.5·20 − 1) = 2.1: an offer with three cheaper ones is in no cheapest selection.
    assert [column.index for column in capped] == [0, 1, 2]
    dear = [*many, candidate(30.0, 90.0, ("b", "r", "z"), kind="large")]
    assert len(Program(dear, 20.0, Limits(max_domain_share=0.5), known_usd_per_hour=21.0).columns) == 3


@pytest.mark.parametrize("share", [Fraction(1, 2), Fraction(1, 3), Fraction(2, 5)])
def test_the_cap_holds_to_the_letter_in_exact_arithmetic(share) -> None:
    places = [("a", "r", f"z{number}") for number in range(5)]
    candidates = [candidate(rate, usd, place) for place in places for rate, usd in ((1.0, 1.0), (4.0, 3.5))]
    found = select(candidates, 10.0, Limits(max_domain_share=float(share)))
    loads = {
        place[2]: sum(Fraction(c.groups_per_s) * n for c, n in found.chosen if c.offer.zone == place[2]) for place in places
    }
    assert sum(loads.values()) >= 10
    assert all(load <= share * sum(loads.values()) for load in loads.values())


def test_what_runs_is_kept_unless_another_offer_saves_more_than_its_start_costs() -> None:
    dear = candidate(1.0, 1.2, PLACES[0], running=3, start_up_s=600.0, kind="dear")
    cheap = candidate(1.0, 1.0, PLACES[3], start_up_s=1200.0, kind="cheap")
    # A start costs 1/3 USD, a machine saves 0.2 USD an hour: an hour is too short, two hours are enough.
    assert select([dear, cheap], 3.0, Limits(switching_horizon_h=1.0)).counts == (3, 0)
    assert select([dear, cheap], 3.0, Limits(switching_horizon_h=2.0)).counts == (0, 3)
    grown = select([dear, cheap], 5.0, Limits(switching_horizon_h=1.0))
    assert grown.counts == (3, 2), "what is added is what is cheapest with its start"
    assert grown.start_usd == pytest.approx(2 / 3)


def test_an_offer_outside_a_quota_stays_beside_a_cheaper_one_under_it() -> None:
    under, outside = candidate(1.0, 1.0, PLACES[0], kind="under"), candidate(1.0, 1.5, PLACES[3], kind="outside")
    assert select([under, outside], 3.0, Limits(quotas=(Quota("a", 2),))).counts == (2, 1)
    large = candidate(1.0, 0.9, PLACES[0], gpus=2, kind="large")
    assert select([under, large], 3.0, Limits(quotas=(Quota("a", 4),))).counts == (2, 1), "it takes two accelerators each"


def test_a_quota_covers_what_it_names_and_nothing_else() -> None:
    offer = Offer("a", 1.0, "north", "n1", "m", "H100", 8, spot=True)
    covering = [Quota("a", 1), Quota("a", 1, "north"), Quota("a", 1, "", "H100"), Quota("a", 1, "north", "H100", True)]
    assert all(quota.covers(offer) for quota in covering)
    others = [Quota("b", 1), Quota("a", 1, "south"), Quota("a", 1, "", "A100"), Quota("a", 1, spot=False)]
    assert not any(quota.covers(offer) for quota in others)
    assert len({quota.name for quota in (*covering, *others)}) == 8


@pytest.mark.parametrize("limits", [Limits(budget_usd_per_hour=1.0), Limits(quotas=(QUOTAS[1],)), Limits(max_domain_share=0.9)])
def test_what_cannot_be_kept_to_gives_no_selection(limits) -> None:
    assert select([candidate(1.0, 1.0, spot=True)], 2.0, limits) is None
    assert select_greedily([candidate(1.0, 1.0, spot=True)], 2.0, limits) is None
    assert select([], 2.0, limits) is None


def test_shares_that_only_hundreds_of_machines_would_balance_are_no_plan() -> None:
    unequal = [candidate(1.0, 1.0, PLACES[0]), candidate(1.01, 1.0, PLACES[3], kind="other")]
    assert select(unequal, 2.0, Limits(max_domain_share=0.5, failure_domain="cloud"), time_limit_s=5.0) is None
    nearly = select(unequal, 2.0, Limits(max_domain_share=0.51, failure_domain="cloud"))
    assert nearly.counts == (1, 1)


@pytest.mark.parametrize("seed", range(12))
def test_halves_that_few_plans_meet_are_met_by_one_no_dearer_than_the_plan_that_is_known(seed) -> None:
    draw = random.Random(seed)
    twins = [candidate(1.37, 4.0, place, kind="twin") for place in (PLACES[0], PLACES[3])]
    others = [candidate(draw.uniform(0.1, 9), draw.uniform(1, 9), PLACES[3 * (n % 2)], kind=f"m{n}") for n in range(3)]
    found = select([*others, *twins], 10.0, Limits(max_domain_share=0.5, failure_domain="cloud"))
    assert found.violations(10.0) == [] and found.cost_usd_per_hour <= 8 * 4.0 * (1 + 1e-6)


def test_counts_that_break_a_limit_once_they_are_rounded_are_no_selection() -> None:
    rates = (2.965488058019691, 6.196072420702041, 1.358407877339405, 68.5346321614177)
    candidates = [candidate(rate, 3.0, PLACES[3 * (n % 2)], kind=f"m{n}") for n, rate in enumerate(rates)]
    try:
        found = select(candidates, 0.5, Limits(max_domain_share=0.5), time_limit_s=2.0)
    except WaitTimeout:
        return
    assert found is None or found.violations(0.5) == []


def test_when_time_is_up_the_greedy_selection_stands_in_and_says_how_far_off_it_may_be() -> None:
    draw = random.Random(3)
    candidates = [
        candidate(draw.uniform(1, 9), draw.uniform(1, 9), ("a", "r", f"z{n % 50}"), spot=n % 3 > 0, kind=f"m{n}")
        for n in range(1500)
    ]
    limits = Limits(max_domain_share=0.1, min_on_demand_share=0.3)
    hurried, simple = select(candidates, 90.0, limits, time_limit_s=1e-4), select_greedily(candidates, 90.0, limits)
    assert hurried.cost_usd_per_hour <= simple.cost_usd_per_hour and hurried.violations(90.0) == []
    assert 0 < hurried.gap <= 1
    with pytest.raises(WaitTimeout, match=r"1500 offers.*time_limit_s = 0\.0001"):
        select(candidates, 90.0, replace(limits, budget_usd_per_hour=0.5 * simple.usd_per_hour), time_limit_s=1e-4)


@seeded
@given(markets())
def test_no_selection_undercuts_the_cost_of_machines_that_could_be_split(market) -> None:
    candidates, needed, limits = market
    least = least_cost_usd_per_hour(candidates, needed, limits)
    found = select(candidates, needed, limits)
    assert found is None or least <= found.cost_usd_per_hour * (1 + 1e-6)
    rate, usd = candidates[0].effective_groups_per_s, candidates[0].usd_per_hour
    fixed = replace(candidates[0], running=1, launchable=False)
    assert least_cost_usd_per_hour([fixed], rate / 2, limits) == pytest.approx(usd / 2)
    assert least_cost_usd_per_hour([fixed], 2 * rate, limits) == math.inf
