"""Dials: how far each number that a user can turn must go, or may go, for the target, all others as they are; and what D would
be if versions travelled in another way.

Invariants: a dial's limit is the value nearest to a stalling learner that still reaches the goal, by the closed form of
`echo2.capacity.slow_end`; the goal is the target or, where the dial alone cannot reach it, the best that the dial can do; a
dial that does nothing for the utilisation has no limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from echo2.capacity.latencies import Latency
from echo2.capacity.model import Links, Prediction, Workload, required_throughput
from echo2.capacity.pool import unit_of_slots
from echo2.capacity.provisioning import intervals_worth_trying
from echo2.capacity.slow_end import least_integer, loaded_step_time_s, longest_step_s, predict_pool, reaches
from echo2.capacity.transfer import Transfer, variations

GAIN = 1.005
"""Utilisation over the present one from which a dial is said to do something."""

AS_GOOD = 0.998
"""Share of the best utilisation that counts as the best."""

MOST_BOUND = 256
"""Greatest S that is tried."""

GREATEST_BATCH = 64
"""Greatest batch that is tried, in present ones."""

HALVINGS = 20

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Situation:
    """What the closed form is asked about."""

    workload: Workload
    links: Links
    slots: float
    latency: Latency

    @property
    def utilisation(self) -> float:
        """U = T/τ."""
        return self.workload.learner_step_s / loaded_step_time_s(self.workload, self.links, self.slots, self.latency)

    def reaches(self, utilisation: float) -> bool:
        """Whether U is that high."""
        return reaches(self.workload, self.links, self.slots, self.latency, utilisation)

    def predict(self) -> Prediction:
        """Step time, utilisation, what binds."""
        return predict_pool(self.workload, self.links, self.slots, self.latency)


@dataclass(frozen=True, slots=True)
class Dial:
    """One dial, its value and its limit."""

    symbol: str
    unit: str
    value: float
    at_most: bool
    """Whether the learner stalls above the limit rather than below."""
    limit: float | None
    """The limit; None where turning this dial does nothing for the utilisation."""
    at_limit: Prediction | None
    """What the closed form says there; None where there is no limit."""
    reaches_target: bool
    """Whether this dial alone, at its limit, reaches the target."""


def dials(now: Situation, target_utilisation: float) -> tuple[Dial, ...]:
    """S, κ, D, L, μ and B. D keeps the shares of its parts, L its spread, and T grows with B; the pool keeps its slots.

    At κ = 3 freshness binds, D + L = 2.8 s > 2 s. S = 5, κ = 2, D = 1.2 s, or a batch that takes the learner longer would do, a
    larger pool would not:

    >>> from echo2.capacity.latencies import Constant
    >>> now = Situation(Workload(1.0, 32, 4, 3, 0.8, 1.0), Links(2.0, 0.0), 96, Constant(0.8))
    >>> for dial in dials(now, target_utilisation=1.0):
    ...     print(dial.symbol, None if dial.limit is None else round(dial.limit, 3), dial.reaches_target)
    S 5 True
    κ 2 True
    D 1.2 True
    L 0.0 True
    μ None False
    B 45 True
    """
    workload, links, latency = now.workload, now.links, now.latency
    longest_step_s(workload, target_utilisation)
    search = _Search(now, target_utilisation)
    S, κ, T, B = workload.staleness_bound, workload.publish_interval, workload.learner_step_s, workload.groups_per_batch
    longest_s = 2 * (S + 2) * T
    mean_s = latency.mean_s

    def with_batch(groups: int) -> Situation:
        return replace(now, workload=replace(workload, groups_per_batch=groups, learner_step_s=T / B * groups))

    def with_dissemination(seconds: float) -> Situation:
        share = links.transfer_s / links.latency_s if links.latency_s else 0.0
        return replace(now, links=Links(seconds * share, seconds * (1 - share)))

    return (
        search.least("S", "steps", S, lambda S: replace(now, workload=replace(workload, staleness_bound=S)), κ - 1, MOST_BOUND),
        search.interval(),
        search.greatest("D", "s", links.latency_s, with_dissemination, max(links.latency_s, longest_s)),
        search.greatest("L", "s", mean_s, lambda s: replace(now, latency=latency.scaled_to(s)), max(mean_s, longest_s)),
        search.least_pool(),
        search.least("B", "groups", B, with_batch, 1, GREATEST_BATCH * B),
    )


@dataclass(frozen=True, slots=True)
class Outlook:
    """D if versions travelled in another way, and what the closed form makes of it."""

    name: str
    links: Links
    utilisation: float


def outlooks(now: Situation, transfer: Transfer | None, workers: int) -> tuple[Outlook, ...]:
    """As it is, and the `variations` of `transfer` with D_tx in proportion to theirs; none where that is not known.

    A D_tx that was measured as 8 s where T* lets expect 5.87 s stays in that proportion:

    >>> from echo2.capacity.latencies import Constant
    >>> now = Situation(Workload(10.0, 32, 4, 1, 0.8, 1.0), Links(8.0, 1.0), 96, Constant(0.8))
    >>> link = Transfer(1e9, 1e8, True, True, 50e6, 12.5e6)
    >>> for outlook in outlooks(now, link, 8):
    ...     print(outlook.name, round(outlook.links.latency_s, 2))
    as planned, 8 workers 9.0
    16 workers 10.6
    source uplink of 100 MB/s 7.0
    in full, 1 GB 81.0
    each from the hub 22.82
    """
    if transfer is None or not now.links.transfer_s:
        return ()
    scale = now.links.transfer_s / transfer.seconds(workers)
    found = []
    for variation in variations(transfer, workers):
        links = Links(scale * variation.transfer.seconds(variation.workers), now.links.fixed_s)
        then = replace(now, links=links, slots=now.slots * variation.workers / workers)
        found.append(Outlook(variation.name, links, then.utilisation))
    return tuple(found)


class _Search:
    """Looks for the limits of dials around one situation."""

    def __init__(self, now: Situation, target: float) -> None:
        self.now, self.target = now, target
        self.present = now.utilisation

    def least(self, symbol: str, unit: str, value: int, at: Callable[[int], Situation], least: int, most: int) -> Dial:
        """A dial of whole numbers of which more is better."""
        goal = self._goal(at(most))
        limit = None if goal is None else least_integer(lambda number: at(number).reaches(goal), least, most)
        return self._dial(symbol, unit, value, limit, at, at_most=False)

    def least_pool(self) -> Dial:
        """μ, in whole slots or, where few are enough, in parts of one."""
        now, mean_s = self.now, self.now.latency.mean_s
        each = unit_of_slots(required_throughput(now.workload) * mean_s).effective_slots
        most = max(now.slots, 2 * (now.workload.staleness_bound + 1) * now.workload.groups_per_batch)
        dial = self.least("μ", "groups/s", 1, lambda units: replace(now, slots=units * each), 1, math.ceil(most / each))
        rate = 1 / mean_s if mean_s else math.inf
        return replace(dial, value=now.slots * rate, limit=None if dial.limit is None else dial.limit * each * rate)

    def interval(self) -> Dial:
        """κ, of those worth trying: the first that links can carry, or else the first of all."""
        workload, links = self.now.workload, self.now.links

        def at(interval: int) -> Situation:
            return replace(self.now, workload=replace(workload, publish_interval=interval))

        each = {interval: at(interval).utilisation for interval in intervals_worth_trying(workload, links)}
        goal = self._goal(at(max(each, key=lambda interval: each[interval])))
        good = [] if goal is None else [interval for interval in each if at(interval).reaches(goal)]
        carried = [interval for interval in good if interval * workload.learner_step_s >= links.transfer_s]
        limit = next(iter(carried or good), None)
        return self._dial("κ", "steps", workload.publish_interval, limit, at, at_most=False)

    def greatest(self, symbol: str, unit: str, value: float, at: Callable[[float], Situation], most: float) -> Dial:
        """A dial of seconds of which less is better."""
        goal = self._goal(at(0.0))
        limit = None
        if goal is not None:
            low, high = 0.0, most
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if at(middle).reaches(goal) else (low, middle)
            limit = low
        return self._dial(symbol, unit, value, limit, at, at_most=True)

    def _goal(self, best: Situation) -> float | None:
        """The utilisation to look for, given what the dial can do at its best; None where that is nothing."""
        if best.reaches(self.target):
            return self.target
        can = best.utilisation
        return can * AS_GOOD if can > self.present * GAIN else None

    def _dial(
        self, symbol: str, unit: str, value: Number, limit: Number | None, at: Callable[[Number], Situation], at_most: bool
    ) -> Dial:
        if limit is None:
            return Dial(symbol, unit, value, at_most, None, None, reaches_target=False)
        return Dial(symbol, unit, value, at_most, limit, at(limit).predict(), at(limit).reaches(self.target))
