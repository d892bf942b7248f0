"""Limits: what a choice of offers must keep to.

Invariants: frozen values; what is not set limits nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo2.capacity.offers import Candidate, DomainName, Offer

TOLERANCE = 1e-6
"""Share by which rounding may miss a limit: what HiGHS takes as feasible."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How many accelerators may be rented of the offers that it covers."""

    cloud: str
    accelerators: int
    region: str = ""
    """Empty for all regions."""
    accelerator: str = ""
    """Empty for all kinds."""
    spot: bool | None = None
    """None for spot and on demand together."""

    @property
    def name(self) -> str:
        """For messages.

        >>> Quota("aws", 8, "us-east-1", "H100", spot=True).name
        'aws us-east-1 H100 spot'
        """
        market = {None: "", True: "spot", False: "on-demand"}[self.spot]
        return " ".join(part for part in (self.cloud, self.region, self.accelerator, market) if part)

    def covers(self, offer: Offer) -> bool:
        """Whether machines of this offer count."""
        return (
            offer.cloud == self.cloud
            and self.region in ("", offer.region)
            and self.accelerator in ("", offer.accelerator)
            and self.spot in (None, offer.spot)
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a selection must keep to."""

    budget_usd_per_hour: float = math.inf
    """M."""
    quotas: tuple[Quota, ...] = ()
    failure_domain: DomainName = "zone"
    max_domain_share: float = 1.0
    """φ; 1 sets no cap."""
    min_on_demand_share: float = 0.0
    """f, of the needed throughput."""
    switching_horizon_h: float = 1.0
    """H."""

    @property
    def caps_domains(self) -> bool:
        """Whether φ is below 1."""
        return self.max_domain_share < 1

    def start_usd_per_hour(self, candidate: Candidate) -> float:
        """k/H: what one start adds to the cost."""
        return candidate.start_usd / self.switching_horizon_h
