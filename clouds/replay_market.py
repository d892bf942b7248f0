"""What a replay of spot traces can rent: one kind of machine of a catalog, in the zones that the traces are about.

Invariants: figures and prices are those of `echo2 plan`; what the replay has rented so far is counted in λ as a run's ledger
is; what spot machines of other places would have been is unknown, so there are none.

A trace tells of one kind of machine, so one kind is rented: of those that the catalog has on demand and as spot machines, and
whose groups are fresh enough, the one that is cheapest per rollout as a spot machine. A region costs what the catalog says of
it or, where it says nothing, the mean of the machine's regions. On demand it is to be had in each region at any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from clouds.catalog import read_catalog
from clouds.history import fails_like, learned_rate
from clouds.offers import appraise
from clouds.renting import NOTHING_MEASURED, demand_of, job_of, limits_of, settle
from clouds.traces import TraceSet
from echo2.capacity.activation import Demand
from echo2.capacity.limits import Limits
from echo2.capacity.offers import Candidate, Offer
from echo2.capacity.plan import Plan
from echo2.capacity.relaxations import is_fresh
from echo2.config import Config
from echo2.errors import UserError

MarketName = Literal["both", "spot", "on-demand"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A machine that the catalog has on demand and as a spot machine."""

    spot: tuple[Candidate, ...]
    on_demand: tuple[Candidate, ...]

    @property
    def usd_per_group(self) -> float:
        """Of the cheapest spot machine."""
        return min(map(Candidate.usd_per_group, self.spot))

    def moved(self, spot: bool, region: str, zone: str) -> Candidate:
        """The same machine elsewhere."""
        everywhere = self.spot if spot else self.on_demand
        here = [each for each in everywhere if each.offer.region == region] or everywhere
        price = fmean(each.offer.price_usd_per_hour for each in here)
        offer = replace(here[0].offer, region=region, zone=zone, price_usd_per_hour=price)
        return replace(here[0], offer=offer)


def choose_kind(config: Config, plan: Plan, instance_type: str = "") -> Kind:
    """The kind that is rented, of `activation.catalog`; `instance_type` names it, else it is the cheapest per rollout.

    Raises UserError where there is none.
    """
    offers = read_catalog(Path(config.activation.catalog))
    candidates, _ = appraise(offers, job_of(config, plan, NOTHING_MEASURED), config.activation)
    fresh_s = demand_of(config, plan, 1.0).fresh_s
    found: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if is_fresh(candidate, fresh_s) and instance_type in ("", candidate.offer.instance_type):
            found[candidate.offer.cloud, candidate.offer.instance_type].append(candidate)
    kinds = [
        Kind(tuple(c for c in alike if c.offer.spot), tuple(c for c in alike if not c.offer.spot)) for alike in found.values()
    ]
    both = [kind for kind in kinds if kind.spot and kind.on_demand]
    if not both:
        what = f"no machine {instance_type}" if instance_type else "no machine"
        raise UserError(
            f"catalog {config.activation.catalog} has {what} on demand and as a spot machine that the model fits on "
            f"with D + L ≤ {fresh_s:.4g} s: take another machine, catalog or staleness bound"
        )
    return min(both, key=lambda kind: kind.usd_per_group)


class TracedMarket:
    """One kind of machine in the zones of a set of traces; what is rented there is told to it."""

    def __init__(self, config: Config, plan: Plan, traces: TraceSet, kind: Kind, market: MarketName = "both") -> None:
        regions = sorted({zone.region for zone in traces.zones})
        self.on_demand = [kind.moved(False, region, "") for region in regions] if market != "spot" else []
        self.spot = [kind.moved(True, zone.region, zone.zone) for zone in traces.zones] if market != "on-demand" else []
        self.limits: Limits = limits_of(config.activation)
        self.activation = settle(config, plan, [*self.spot, *self.on_demand], self.limits)
        self.demand: Demand = self.activation.demand
        self._settings = config.activation
        self._hours: dict[tuple[str, str, str, bool], float] = defaultdict(float)
        self._lost: dict[tuple[str, str, str, bool], int] = defaultdict(int)
        self._found = [*self.spot, *self.on_demand]
        self._looked_at_s = 0.0

    def look(self, now_s: float) -> Sequence[Candidate]:
        """All candidates; figures stand for `activation.pace.change_interval_s`, as in a run."""
        if now_s - self._looked_at_s >= self._settings.pace.change_interval_s:
            learned = [replace(each, preemptions_per_hour=self._rate(each)) for each in self.spot]
            learned = [each for each in learned if each.is_of_use]
            self._found, self._looked_at_s = [*learned, *self.on_demand], now_s
        return self._found

    def count(self, offer: Offer, hours: float, lost: int) -> None:
        """So long a machine of the offer was rented since it was last counted, and whether it is lost now."""
        self._hours[fails_like(offer)] += hours
        self._lost[fails_like(offer)] += lost

    def _rate(self, candidate: Candidate) -> float:
        key, prior = fails_like(candidate.offer), candidate.preemptions_per_hour
        return learned_rate(prior, self._settings.prior_h, self._lost[key], self._hours[key])
