"""Selection: how many machines of each offer give the needed throughput at the least cost, within limits.

Invariants: pure functions; the exact selection never costs more than the greedy one; counts are whole numbers that keep to
every limit up to `TOLERANCE`; no plan within the limits is answered with None, a search that found none in time with an error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from echo2.capacity.limits import TOLERANCE, Limits, Quota
from echo2.capacity.offers import Candidate
from echo2.capacity.program import Program
from echo2.errors import WaitTimeout


@dataclass(frozen=True)
class Selection:
    """Counts, one for each candidate."""

    candidates: tuple[Candidate, ...]
    counts: tuple[int, ...]
    limits: Limits
    gap: float = 0.0
    """Share of its cost by which a cheaper selection could undercut it; 0 where it is proven the cheapest."""
    greedy: bool = False
    """Whether the greedy rule made it."""

    @cached_property
    def chosen(self) -> list[tuple[Candidate, int]]:
        """Candidates with a count above 0."""
        return [(c, n) for c, n in zip(self.candidates, self.counts, strict=True) if n]

    @cached_property
    def groups_per_s(self) -> float:
        """Σ νᵢ·nᵢ."""
        return math.fsum(c.effective_groups_per_s * n for c, n in self.chosen)

    @cached_property
    def usd_per_hour(self) -> float:
        """Σ cᵢ·nᵢ: rent and traffic."""
        return math.fsum(c.usd_per_hour * n for c, n in self.chosen)

    @property
    def start_usd(self) -> float:
        """Rent of all starts that it takes from what runs now."""
        return math.fsum(c.start_usd * max(0, n - c.running) for c, n in self.chosen)

    @property
    def cost_usd_per_hour(self) -> float:
        """What is minimised."""
        return self.usd_per_hour + self.start_usd / self.limits.switching_horizon_h

    @cached_property
    def domain_loads(self) -> Mapping[str, float]:
        """Throughput by failure domain."""
        loads: dict[str, float] = defaultdict(float)
        for candidate, count in self.chosen:
            loads[candidate.offer.domain(self.limits.failure_domain)] += candidate.effective_groups_per_s * count
        return loads

    @property
    def on_demand_groups_per_s(self) -> float:
        """Throughput of the machines on demand."""
        return math.fsum(c.effective_groups_per_s * n for c, n in self.chosen if not c.offer.spot)

    def accelerators_under(self, quota: Quota) -> float:
        """Accelerators that count against `quota`."""
        return math.fsum(c.offer.accelerators * n for c, n in self.chosen if quota.covers(c.offer))

    def violations(self, needed_groups_per_s: float) -> list[str]:
        """Limits that it breaks, in words; empty where it keeps to all."""
        limits, broken = self.limits, []
        if self.groups_per_s < needed_groups_per_s * (1 - TOLERANCE):
            broken.append("throughput")
        if self.usd_per_hour > limits.budget_usd_per_hour * (1 + TOLERANCE):
            broken.append("budget")
        broken += [f"quota {q.name}" for q in limits.quotas if self.accelerators_under(q) > q.accelerators + TOLERANCE]
        highest = max(self.domain_loads.values(), default=0.0)
        if limits.caps_domains and highest > self.groups_per_s * limits.max_domain_share + needed_groups_per_s * TOLERANCE:
            broken.append(f"share of one {limits.failure_domain}")
        if self.on_demand_groups_per_s < limits.min_on_demand_share * needed_groups_per_s * (1 - TOLERANCE):
            broken.append("on-demand share")
        if any(n > c.running and not c.launchable for c, n in self.chosen):
            broken.append("launches")
        return broken


def select(
    candidates: Sequence[Candidate], needed_groups_per_s: float, limits: Limits, time_limit_s: float = 10.0
) -> Selection | None:
    """The cheapest selection; None where there is none within the limits.

    When the time is up, the best that was found is taken, be it by HiGHS or by the greedy rule; its gap says how far it may be
    off. So it is where what HiGHS found breaks a limit once its counts are rounded, as those of thousands of machines may.
    Raises WaitTimeout where nothing was found.

    Four machines of 1 group/s for 3 USD beat one of 4 groups/s for 13, and a fifth of these fills the rest:

    >>> from echo2.capacity.offers import Offer
    >>> offers = [Offer("a", 3.0, "x"), Offer("a", 13.0, "y")]
    >>> small, large = (Candidate(o, 1, rate, 1.0, 1.0, 0.0, 0.0, 0.0) for o, rate in zip(offers, (1.0, 4.0)))
    >>> select([small, large], 5.0, Limits()).counts
    (5, 0)
    >>> select([small, large], 5.0, Limits(failure_domain="region", max_domain_share=0.8)).counts
    (1, 1)
    """
    simple = select_greedily(candidates, needed_groups_per_s, limits)
    known_usd_per_hour = math.inf if simple is None else simple.cost_usd_per_hour
    found = Program(candidates, needed_groups_per_s, limits, known_usd_per_hour).solve(time_limit_s)
    exact = None if found.counts is None else Selection(tuple(candidates), found.counts, limits)
    if found.finished and (exact is None or not exact.violations(needed_groups_per_s)):
        return exact
    options = [each for each in (exact, simple) if each is not None and not each.violations(needed_groups_per_s)]
    if not options:
        raise WaitTimeout(
            f"no plan was found among {len(candidates)} offers within activation.time_limit_s = {time_limit_s:g}: raise it"
        )
    best = min(options, key=lambda selection: selection.cost_usd_per_hour)
    dearer_usd_per_hour = max(0.0, best.cost_usd_per_hour - found.bound_usd_per_hour)
    return replace(best, gap=dearer_usd_per_hour / best.cost_usd_per_hour if dearer_usd_per_hour else 0.0)


def select_greedily(candidates: Sequence[Candidate], needed_groups_per_s: float, limits: Limits) -> Selection | None:
    """Machine by machine the one that is cheapest per rollout and keeps to the limits; None where that does not get there.

    The on-demand floor is filled first. A failure domain may hold its share of the needed throughput at most.
    """
    counts = [0] * len(candidates)
    made = Selection(tuple(candidates), tuple(counts), limits, greedy=True)
    ranked = sorted((usd, i, most) for i, c in enumerate(candidates) for usd, most in _prices(c, limits))
    floor_groups_per_s = limits.min_on_demand_share * needed_groups_per_s
    for on_demand, goal in ((True, floor_groups_per_s), (False, needed_groups_per_s)):
        for _, i, most in ranked:
            candidate = candidates[i]
            while (made.on_demand_groups_per_s if on_demand else made.groups_per_s) < goal * (1 - TOLERANCE):
                if counts[i] >= most or (on_demand and candidate.offer.spot) or obstacles(made, candidate, needed_groups_per_s):
                    break
                counts[i] += 1
                made = Selection(made.candidates, tuple(counts), limits, greedy=True)
    return None if made.violations(needed_groups_per_s) else made


def least_cost_usd_per_hour(candidates: Sequence[Candidate], needed_groups_per_s: float, limits: Limits) -> float:
    """What no selection undercuts: the cost if machines could be split, and only what starts cost counted of the limits.

    Infinite where not even that gives the throughput.

    >>> from echo2.capacity.offers import Offer
    >>> offers = [Offer("a", 3.0, "x"), Offer("a", 13.0, "y")]
    >>> small, large = (Candidate(o, 1, rate, 1.0, 1.0, 0.0, 0.0, 0.0) for o, rate in zip(offers, (1.0, 4.0)))
    >>> least_cost_usd_per_hour([replace(small, running=2, launchable=False), large], 4.0, Limits())
    12.5
    """
    missing, cost = needed_groups_per_s, 0.0
    steps = ((usd, most * c.effective_groups_per_s) for c in candidates for usd, most in _prices(c, limits))
    for usd_per_group, groups_per_s in sorted(steps):
        taken = min(missing, groups_per_s)
        cost += 3600 * usd_per_group * taken
        missing -= taken
        if missing <= needed_groups_per_s * TOLERANCE:
            return cost
    return math.inf


def _prices(candidate: Candidate, limits: Limits) -> Iterator[tuple[float, float]]:
    """Cost per group of a machine that is kept and of one that is launched, each with the count up to which it holds."""
    if candidate.running:
        yield candidate.usd_per_group(), candidate.running
    if candidate.launchable:
        yield candidate.usd_per_group(limits.start_usd_per_hour(candidate)), math.inf


def obstacles(selection: Selection, candidate: Candidate, needed_groups_per_s: float) -> list[str]:
    """Limits that one more machine of `candidate` would break, in words with numbers; a domain is measured against what is
    needed or, where that is more, against the throughput with the machine."""
    limits, offer, rate = selection.limits, candidate.offer, candidate.effective_groups_per_s
    broken = []
    for quota in (quota for quota in limits.quotas if quota.covers(offer)):
        used = selection.accelerators_under(quota) + offer.accelerators
        if used > quota.accelerators + TOLERANCE:
            broken.append(f"the quota {quota.name} is {quota.accelerators} accelerators, with one more {used:g}")
    usd_per_hour = selection.usd_per_hour + candidate.usd_per_hour
    if usd_per_hour > limits.budget_usd_per_hour * (1 + TOLERANCE):
        broken.append(f"the budget is {limits.budget_usd_per_hour:.4g} USD/h, with one more {usd_per_hour:.4g}")
    domain = offer.domain(limits.failure_domain)
    total = max(needed_groups_per_s, selection.groups_per_s + rate)
    share = (selection.domain_loads.get(domain, 0.0) + rate) / total
    if limits.caps_domains and share > limits.max_domain_share + TOLERANCE:
        broken.append(f"{limits.failure_domain} {domain} may have {limits.max_domain_share:.0%}, with one more {share:.0%}")
    return broken
