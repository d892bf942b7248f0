"""What an offer comes to for a run: effective throughput, cost, names."""

from __future__ import annotations

import doctest
import math
import random
from dataclasses import replace

import pytest
from market import candidate

from echo2.capacity import limits, offers, selection
from echo2.capacity.offers import Candidate, Offer
from echo2.errors import UserError


@pytest.mark.parametrize("module", [offers, limits, selection], ids=lambda module: module.__name__)
def test_doctests_hold(module) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_effective_throughput_is_what_a_machine_completes_over_its_lives() -> None:
    machine = replace(candidate(2.0, 1.0), preemptions_per_hour=3.0, start_up_s=400.0, group_latency_s=90.0)
    draw = random.Random(1)
    lives_s = [draw.expovariate(3.0 / 3600) for _ in range(200_000)]
    groups = sum(2.0 * max(0.0, life_s - 90.0) for life_s in lives_s)
    paid_s = sum(life_s + 400.0 for life_s in lives_s)
    assert machine.effective_groups_per_s == pytest.approx(groups / paid_s, rel=0.01)
    assert candidate(2.0, 1.0).effective_groups_per_s == 2.0, "a machine that stays up loses nothing"


def test_cost_per_group_holds_rent_traffic_and_the_share_of_a_start() -> None:
    machine = replace(candidate(0.5, 3.0, start_up_s=1200.0), traffic_usd_per_hour=0.6)
    assert machine.usd_per_hour == 3.6 and machine.start_usd == 1.0
    assert machine.usd_per_group() == pytest.approx(3.6 / 1800)
    assert machine.usd_per_group(0.9) == pytest.approx(4.5 / 1800)


def test_a_domain_without_zones_is_the_region() -> None:
    offer = Offer("b", 1.0, "south", "", "m", "G", 1)
    assert [offer.domain(level) for level in ("zone", "region", "cloud")] == ["b/south", "b/south", "b"]
    assert replace(offer, zone="s1").domain("zone") == "b/south/s1"


def test_offers_that_differ_in_anything_that_is_rented_have_names_of_their_own() -> None:
    base = Offer("a", 1.0, "north", "n1", "m", "G", 1)
    others = [replace(base, cloud="b"), replace(base, region="south"), replace(base, zone="n2"), replace(base, spot=True)]
    assert len({offer.name for offer in (base, *others, replace(base, instance_type="l"))}) == 6


@pytest.mark.parametrize("change", [{"groups_per_s": 0.0}, {"groups_per_s": math.inf}, {"start_up_s": -1.0}, {"workers": 0}])
def test_figures_that_cannot_be_are_refused_with_the_offer(change) -> None:
    values = {name: getattr(candidate(1.0, 1.0), name) for name in Candidate.__slots__} | change
    with pytest.raises(UserError, match="a/north/north-1/m"):
        Candidate(**values)
