"""What a run cost, and what the same rollouts would have cost elsewhere.

Invariants: what was paid is the ledger's; what would have been paid is at the catalog's prices; where a figure cannot be told,
the reason is.

Three comparisons, each without traffic. The same machines on demand: their hours, at the price of the same machine on demand
in the same place, else the cheapest place of that cloud. Any cloud on demand: their hours by kind of accelerator, at the least
price per accelerator on demand. The learner's own machine: as long as the machine `activation.learner_offer` needs for as many
scored groups, at its μ as measured on that kind of accelerator, else by the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clouds.catalog import read_catalog
from clouds.offers import appraise
from clouds.renting import Measured, job_of
from echo2.capacity.offers import Offer
from echo2.capacity.plan import make_plan
from echo2.capacity.tables import money, number, percent, quantity, table
from echo2.config import Config
from echo2.errors import UserError
from echo2.hub.costs import USEFUL, Costs


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same rollouts made in another way."""

    name: str
    usd: float | None
    """None where it cannot be told."""
    sentence: str
    """On what the figure rests, or why there is none."""


def alternatives(costs: Costs, config: Config, measured: Measured) -> list[Alternative]:
    """What the same rollouts would have cost; empty without `activation.catalog`. Raises UserError where it cannot be read."""
    if not config.activation.catalog:
        return []
    offers = read_catalog(Path(config.activation.catalog))
    ways: dict[str, Callable[[], tuple[float, str]]] = {
        "same machines on demand": lambda: _same_on_demand(costs, offers),
        "any cloud on demand": lambda: _any_on_demand(costs, offers),
        "the learner's own machine": lambda: _on_learner(costs, offers, config, measured),
    }
    found = []
    for name, way in ways.items():
        try:
            found.append(Alternative(name, *way()))
        except UserError as reason:
            found.append(Alternative(name, None, str(reason)))
    return found


def _same_on_demand(costs: Costs, offers: Sequence[Offer]) -> tuple[float, str]:
    usd = 0.0
    for cost in costs.offers:
        rented = _offer_of(cost.offer, offers)
        kind = (rented.cloud, rented.instance_type)
        alike = [offer for offer in offers if not offer.spot and (offer.cloud, offer.instance_type) == kind]
        if not alike:
            raise UserError(f"the catalog has no {rented.instance_type} of {rented.cloud} on demand")
        nearest = min(alike, key=lambda o: (o.region != rented.region, o.zone != rented.zone, o.price_usd_per_hour))
        usd += cost.hours * nearest.price_usd_per_hour
    return usd, f"{quantity(costs.hours, 'machine hours')} at the catalog's price on demand"


def _any_on_demand(costs: Costs, offers: Sequence[Offer]) -> tuple[float, str]:
    usd, told = 0.0, dict[str, None]()
    for cost in costs.offers:
        rented = _offer_of(cost.offer, offers)
        alike = [offer for offer in offers if not offer.spot and offer.accelerator == rented.accelerator]
        if not alike:
            raise UserError(f"the catalog has no {rented.accelerator} on demand")
        cheapest = min(alike, key=lambda offer: offer.price_usd_per_hour / offer.accelerators)
        usd += cost.hours * rented.accelerators * cheapest.price_usd_per_hour / cheapest.accelerators
        told[cheapest.name] = None
    return usd, f"the same accelerators where they are cheapest: {', '.join(told)}"


def _on_learner(costs: Costs, offers: Sequence[Offer], config: Config, measured: Measured) -> tuple[float, str]:
    name = config.activation.learner_offer
    if not name:
        raise UserError("activation.learner_offer does not say what the learner's machine is")
    offer = _offer_of(name, offers)
    # Quotas and places are about what is rented, which the learner's machine is not.
    settings = config.activation.model_copy(update={"quotas": (), "places": ()})
    candidates, _ = appraise([offer], job_of(config, make_plan(config), measured), settings, measured.rentals, measured.where)
    rate = candidates[0].groups_per_s
    hours = costs.scored_groups / rate / 3600
    source = candidates[0].provenance["μ"]
    return hours * offer.price_usd_per_hour, f"{quantity(hours, 'hours')} of {name}, {number(rate)} groups/s: {source}"


def _offer_of(name: str, offers: Sequence[Offer]) -> Offer:
    found = next((offer for offer in offers if offer.name == name), None)
    if found is None:
        raise UserError(f"{name} is not in the catalog")
    return found


def describe_costs(run_id: str, costs: Costs, others: Sequence[Alternative], budget_usd: float) -> dict[str, Any]:
    """Everything, for JSON."""
    return asdict(costs) | {
        "run_id": run_id,
        "rates": costs.rates(),
        "wasted_usd": costs.wasted_usd,
        "budget_usd": budget_usd or None,
        "alternatives": [asdict(other) for other in others],
    }


def render_costs(run_id: str, costs: Costs, others: Sequence[Alternative], budget_usd: float) -> str:
    """Everything, as text without a final line break."""
    sections = [
        f"Money of run {run_id}: {_usd(costs.usd)} of rent for {quantity(costs.hours, 'machine hours')}",
        table(("figure", "value", ""), _figure_rows(costs, budget_usd)),
    ]
    if costs.offers:
        columns = ("offer", "launches", "lost", "running", "hours", "USD", "scored rollouts", "USD per 1,000 of them")
        sections.append(table(columns, _offer_rows(costs)))
        sections.append(table(("what came of it", "USD", "share", ""), _use_rows(costs)))
    if others:
        sections.append(table(("the same rollouts", "USD", "paid of that", ""), (_other_row(other, costs) for other in others)))
    return "\n\n".join(sections)


def _usd(value: float | None) -> str:
    return "–" if value is None else f"{money(value)} USD"


def _figure_rows(costs: Costs, budget_usd: float) -> Iterator[tuple[str, ...]]:
    units = {
        "usd_per_step": ("per step", f"{costs.steps} steps"),
        "usd_per_1000_scored_rollouts": ("per 1,000 rollouts", f"{costs.scored_rollouts} were scored"),
        "usd_per_1000_trained_rollouts": ("… that were trained", f"{costs.trained_rollouts} of them"),
        "usd_per_million_tokens": ("per million tokens", f"{costs.tokens} of completions"),
        "usd_per_million_trained_tokens": ("… that were trained", f"{costs.trained_tokens} of them"),
    }
    for name, value in costs.rates().items():
        label, counted = units[name]
        yield label, "–" if value is None else f"{number(value)} USD", counted
    share = f"{percent(costs.wasted_usd / costs.usd)} of what was paid" if costs.usd else "nothing was paid"
    yield "waste", _usd(costs.wasted_usd), share
    if budget_usd:
        yield "budget", _usd(budget_usd), f"{_usd(max(0.0, budget_usd - costs.usd))} are left"
    if costs.running:
        yield "paid for still", str(costs.running), "machines, counted up to the last sign of life in the ledger"


def _offer_rows(costs: Costs) -> Iterator[tuple[str, ...]]:
    for cost in costs.offers:
        each = number(1000 * cost.usd / cost.scored_rollouts) if cost.scored_rollouts else "–"
        counts = map(str, (cost.launches, cost.lost, cost.running))
        yield cost.offer, *counts, number(cost.hours), money(cost.usd), str(cost.scored_rollouts), each


def _use_rows(costs: Costs) -> Iterator[tuple[str, ...]]:
    for use, usd in costs.uses.items():
        share = percent(usd / costs.usd) if costs.usd else "–"
        yield use, money(usd), share, "" if use in USEFUL else "waste"


def _other_row(other: Alternative, costs: Costs) -> tuple[str, ...]:
    if other.usd is None:
        return other.name, "–", "–", other.sentence
    share = percent(costs.usd / other.usd) if other.usd and math.isfinite(other.usd) else "–"
    return other.name, money(other.usd), share, other.sentence
