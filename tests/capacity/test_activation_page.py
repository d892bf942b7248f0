"""The page on activation: its symbols are fields, its reasons those that are given, its example what the code computes."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from clouds import offers as appraising
from echo2.capacity import activation, relaxations
from echo2.capacity.activation import Demand, activate
from echo2.capacity.limits import Limits, Quota
from echo2.capacity.offers import Candidate, Offer
from echo2.capacity.relaxations import is_fresh
from echo2.capacity.selection import Selection, select, select_greedily
from echo2.capacity.tables import number

PAGE = (Path(__file__).parents[2] / "docs" / "activation.md").read_text(encoding="utf-8")
CLASSES = {kind.__name__: kind for kind in (Offer, Candidate, Demand, Limits, Quota, Selection)}
DEMAND = Demand(groups_per_s=4.0, margin=0.05, learner_step_s=60.0, slack_steps=4, members=8)
LIMITS = Limits(max_domain_share=0.7)


def rows(head: str) -> list[list[str]]:
    """Cells of the table whose head begins so, without head and rule."""
    table = PAGE[PAGE.index(f"\n| {head}") + 1 :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def offered() -> list[Candidate]:
    """The example's offers, as the page lists them."""
    found = []
    for name, *figures in rows("offer | *p*"):
        price, traffic, rate, preemptions, start_up, latency, dissemination = map(float, figures)
        place, _, spot = name.partition(" ")
        cloud, zone = place.split("/")
        offer = Offer(cloud, price, cloud, zone, "m", "G", 1, spot=spot == "spot")
        found.append(Candidate(offer, 1, rate, latency, dissemination, preemptions, start_up, traffic))
    return found


def fresh() -> list[Candidate]:
    return [candidate for candidate in offered() if is_fresh(candidate, DEMAND.fresh_s)]


@pytest.mark.parametrize(("symbol", "field"), [(row[0], row[-1].strip("`")) for row in rows("symbol")])
def test_every_symbol_is_a_field(symbol, field) -> None:
    kind, name = field.split(".")
    names = {*vars(CLASSES[kind]), *(each.name for each in fields(CLASSES[kind]))}
    assert name in names, f"{symbol} is said to be {field}"


def test_the_figures_of_the_offers_are_computed() -> None:
    for candidate, (_, *shown) in zip(offered(), rows("offer | *ν*"), strict=True):
        per_1000 = DEMAND.usd_per_1000_rollouts(candidate.usd_per_group())
        started = DEMAND.usd_per_1000_rollouts(candidate.usd_per_group(LIMITS.start_usd_per_hour(candidate)))
        figures = (candidate.effective_groups_per_s, candidate.usd_per_hour, candidate.start_usd, per_1000, started)
        assert shown == [number(figure) for figure in figures]


def test_the_choices_of_the_example_are_those_of_the_code() -> None:
    candidates, needed = fresh(), DEMAND.needed_groups_per_s
    assert needed == pytest.approx(4.2) and len(candidates) == 3
    free, floor = replace(LIMITS, max_domain_share=1.0), replace(LIMITS, min_on_demand_share=0.2)
    found = [
        select(candidates, needed, LIMITS),
        select_greedily(candidates, needed, LIMITS),
        select(candidates, needed, free),
        select(candidates, needed, floor),
    ]
    for selection, (_, *shown) in zip(found, rows("choice"), strict=True):
        figures = (selection.groups_per_s, selection.usd_per_hour, selection.cost_usd_per_hour)
        assert shown == [*map(str, selection.counts), *map(number, figures)]
    assert f"the plan costs {number(found[0].cost_usd_per_hour - found[2].cost_usd_per_hour)} USD/h more" in PAGE
    (refusal,) = (r for r in activate(offered(), DEMAND, LIMITS).refusals if r.reason == "too stale")
    assert refusal.offer.name.startswith("c/") and f"up to {number(offered()[-1].age_s)} s old" in PAGE


def test_the_example_of_hysteresis_is_so() -> None:
    running = replace(fresh()[0], running=5)
    stays = {}
    said = r"At \*p\* = ([\d.]+).*?costs ([\d.]+) USD,[^.]*? saves ([\d.]+) USD"
    for price, start, saved in re.findall(said, PAGE, re.DOTALL):
        other = replace(running, running=0, offer=replace(running.offer, zone="w2", price_usd_per_hour=float(price)))
        assert (start, saved) == (number(other.start_usd), number(running.usd_per_hour - other.usd_per_hour))
        stays[price] = select([running, other], DEMAND.needed_groups_per_s, Limits()).counts
    assert stays == {"1.15": (5, 0), "1.05": (0, 5)}


def test_the_reasons_and_changes_on_the_page_are_those_that_are_given() -> None:
    given = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (activation, relaxations, appraising))
    for reason in ", ".join(reasons for reasons, _ in rows("reason")).split(", "):
        assert f'"{reason}"' in given
    for change, _ in rows("change"):
        assert change.replace(" failure domain", "").replace("a quota", "the quota") in given
