"""The integer program whose solution is the cheapest selection, solved by HiGHS.

Invariants: what is left out beforehand is in no way needed for a cheapest selection; throughput is in units of what is needed.

**Program.** With nᵢ = keptᵢ + newᵢ machines of offer i, its ν, c, rent of a start k and a accelerators, rᵢ of it running, H
hours over which a start counts, R the needed throughput, Q quotas, budget M, share φ of a failure domain d, on-demand share f:

    minimise  Σ cᵢ·nᵢ + Σ kᵢ/H · newᵢ                    USD per hour
    Σ νᵢ·nᵢ ≥ R                                          throughput
    Σ_{i in d} νᵢ·nᵢ ≤ φ · Σ νᵢ·nᵢ                       every failure domain d
    Σ_{i on demand} νᵢ·nᵢ ≥ f · R                        on-demand floor
    Σ_{i in q} aᵢ·nᵢ ≤ Q_q                               every quota q
    Σ cᵢ·nᵢ ≤ M                                          budget
    0 ≤ keptᵢ ≤ rᵢ,  newᵢ ≥ 0,  all whole               newᵢ = 0 where none can be launched

HiGHS solves it by branch and bound, to a gap of 0 if time allows.

**Offers left out beforehand.** Two new machines are alike if they have the same ν, fall under the same quotas with as many
accelerators, and are both on demand or both spot. Exchanging one for a cheaper one that is alike changes nothing but domains.
Take, of all cheapest plans, one in which no such exchange is possible. A machine of it with ν in domain d' whose cheaper likes
stand in K other domains then finds each of these too full for it, each above φt − ν of the throughput t, so K·(φt − ν) + ν < t.
As t ≥ R, an offer with K ≥ (R − ν)/(φR − ν) cheaper likes in other domains, or one in its own, is in no such plan (φR > ν).

A plan with a machine of ν has t ≥ ν/φ, since its domain has at least ν. The rest of t costs at least the lowest c/ν of all for
each group per second. So where some plan is known to cost C, an offer is left out for which c + k/H and this rest exceed C.

All columns have finite bounds, from C or else from `MOST_EXCESS`: shares that only hundreds of machines would balance are no
plan, and HiGHS was seen to crash and to search without end where the throughput is unbounded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echo2.capacity.limits import TOLERANCE, Limits
from echo2.capacity.offers import Candidate
from echo2.errors import UserError

SOLVED, NO_SOLUTION = 0, 2
"""Status codes of scipy's `milp`; the others say that the time is up, or that it failed."""

ROUNDING = 0.1 * TOLERANCE
"""What every limit gives way, so that one that is met to the letter is not missed by the last digit of its figures."""

MOST_EXCESS = 10.0
"""Times the need, or what the cap asks for beside the largest machine, that a selection gives at most where none is known."""


@dataclass(frozen=True, slots=True)
class _Column:
    """Machines of one candidate that are kept, or that are launched."""

    index: int
    candidate: Candidate
    usd_per_hour: float
    most: float


@dataclass(slots=True)
class _Rows:
    """Sparse rows of a linear program."""

    values: list[float] = field(default_factory=list)
    places: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """low ≤ Σ value · column ≤ high."""
        for column, value in entries:
            self.values.append(value)
            self.places[0].append(len(self.low))
            self.places[1].append(column)
        self.low.append(low)
        self.high.append(high)


@dataclass(frozen=True, slots=True)
class Solution:
    """What HiGHS found."""

    counts: tuple[int, ...] | None
    """Machines of each candidate; None where none were found."""
    bound_usd_per_hour: float
    """No selection costs less; infinite where there is none within the limits."""
    finished: bool
    """Whether the search came to its end, in time and without an error."""


class Program:
    """The program in the form that HiGHS takes."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        needed_groups_per_s: float,
        limits: Limits,
        known_usd_per_hour: float = math.inf,
    ) -> None:
        """Some selection is known to cost `known_usd_per_hour`."""
        self.candidates, self.needed, self.limits = candidates, needed_groups_per_s, limits
        kept = [_Column(i, c, c.usd_per_hour, float(c.running)) for i, c in enumerate(candidates) if c.running]
        launched = list(self._worth_launching())
        lowest = min((c.candidate.usd_per_group() * 3600 for c in (*kept, *launched)), default=0.0)
        most = known_usd_per_hour * (1 + TOLERANCE)
        self.columns = [*kept, *(column for column in launched if self._least_usd_per_hour(column, lowest) <= most)]
        largest = max((column.candidate.effective_groups_per_s for column in self.columns), default=0.0)
        self.most_groups_per_s = MOST_EXCESS * max(needed_groups_per_s, largest / limits.max_domain_share)
        if lowest * self.most_groups_per_s > most:
            self.most_groups_per_s = most / lowest

    def solve(self, time_limit_s: float) -> Solution:
        """Raises UserError where scipy is missing."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csc_array
        except ModuleNotFoundError:
            raise UserError("choosing offers needs scipy, which is not installed: pip install '.[learner]'") from None
        if not self.columns:
            return Solution(None, math.inf, finished=True)
        rows, total = self._rows(), len(self.columns)
        # With a cap the last column is the throughput, in which the rows of the domains are sparse.
        shares = int(self.limits.caps_domains)
        largest_load = self.limits.max_domain_share * self.most_groups_per_s + self.needed * TOLERANCE
        most = [min(column.most, largest_load // column.candidate.effective_groups_per_s) for column in self.columns]
        matrix = csc_array((rows.values, rows.places), shape=(len(rows.low), total + shares))
        # With presolve, HiGHS was seen to call programs impossible whose cap leaves little room, and dearer plans the cheapest.
        found = milp(
            [column.usd_per_hour for column in self.columns] + [0.0] * shares,
            integrality=[1] * total + [0] * shares,
            bounds=Bounds(0.0, most + [self.most_groups_per_s / self.needed] * shares),
            constraints=LinearConstraint(matrix, rows.low, rows.high),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0, "presolve": False},
        )
        if found.status == NO_SOLUTION:
            return Solution(None, math.inf, finished=True)
        counts = None if found.x is None else self._counts(found.x.tolist())
        return Solution(counts, max(0.0, found.mip_dual_bound or 0.0), finished=found.status == SOLVED)

    def _counts(self, values: Sequence[float]) -> tuple[int, ...]:
        counts = [0] * len(self.candidates)
        for column, value in zip(self.columns, values, strict=False):
            counts[column.index] += round(value)
        return tuple(counts)

    def _rows(self) -> _Rows:
        limits, rows = self.limits, _Rows()
        rates = [column.candidate.effective_groups_per_s / self.needed for column in self.columns]
        offers = [column.candidate.offer for column in self.columns]
        rows.add(enumerate(rates), 1.0 - ROUNDING, math.inf)
        if limits.caps_domains:
            throughput = len(self.columns)
            rows.add([*enumerate(rates), (throughput, -1.0)], 0.0, 0.0)
            domains: dict[str, list[tuple[int, float]]] = defaultdict(list)
            for place, offer in enumerate(offers):
                domains[offer.domain(limits.failure_domain)].append((place, rates[place]))
            for entries in domains.values():
                rows.add([*entries, (throughput, -limits.max_domain_share)], -math.inf, ROUNDING)
        if limits.min_on_demand_share:
            on_demand = [(place, rates[place]) for place, offer in enumerate(offers) if not offer.spot]
            rows.add(on_demand, limits.min_on_demand_share - ROUNDING, math.inf)
        for quota in limits.quotas:
            covered = [(place, offer.accelerators) for place, offer in enumerate(offers) if quota.covers(offer)]
            rows.add(covered, -math.inf, quota.accelerators)
        if limits.budget_usd_per_hour < math.inf:
            prices = [(place, column.candidate.usd_per_hour) for place, column in enumerate(self.columns)]
            rows.add(prices, -math.inf, limits.budget_usd_per_hour * (1 + ROUNDING))
        return rows

    def _worth_launching(self) -> Iterable[_Column]:
        """Columns of new machines, without those that the module's argument leaves out."""
        alike: dict[tuple[object, ...], list[_Column]] = defaultdict(list)
        for index, candidate in enumerate(self.candidates):
            if not candidate.launchable:
                continue
            offer, usd = candidate.offer, candidate.usd_per_hour + self.limits.start_usd_per_hour(candidate)
            quotas = tuple(offer.accelerators if quota.covers(offer) else 0 for quota in self.limits.quotas)
            key = (candidate.effective_groups_per_s, offer.spot and self.limits.min_on_demand_share > 0, quotas)
            alike[key].append(_Column(index, candidate, usd, math.inf))
        for columns in alike.values():
            columns.sort(key=lambda column: (column.usd_per_hour, column.candidate.usd_per_hour, column.index))
            seen: list[tuple[float, str]] = []
            for column in columns:
                usd, domain = column.candidate.usd_per_hour, column.candidate.offer.domain(self.limits.failure_domain)
                cheaper = {other for price, other in seen if price <= usd or self.limits.budget_usd_per_hour == math.inf}
                if not self._is_superfluous(column.candidate.effective_groups_per_s, domain, cheaper):
                    yield column
                seen.append((usd, domain))

    def _is_superfluous(self, rate: float, domain: str, cheaper: set[str]) -> bool:
        """Whether cheaper likes in these domains make up for an offer in `domain`."""
        if not cheaper or not self.limits.caps_domains:
            return bool(cheaper)
        spare = self.limits.max_domain_share * self.needed - rate
        return domain in cheaper or (spare > self.needed * TOLERANCE and len(cheaper) * spare >= self.needed - rate)

    def _least_usd_per_hour(self, column: _Column, lowest_usd: float) -> float:
        """Of a plan with a machine of this column, where a group per second costs at least `lowest_usd` an hour."""
        rate = column.candidate.effective_groups_per_s
        total = max(self.needed, rate / self.limits.max_domain_share)
        return column.usd_per_hour + (total - rate) * lowest_usd
