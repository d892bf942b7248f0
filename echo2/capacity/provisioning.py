"""The provisioning rule: the smallest pool that keeps the learner as busy as asked, and the κ to publish with.

Invariants: the closed form proposes, the twin decides; a target that no pool reaches is answered with the pool beyond which
the closed form sees no use, with what the largest one gives by the twin, and with what stands in the way; the same arguments
give the same answer.

**The rule.** For every κ from 1 to S + 1 the closed form of `echo2.capacity.slow_end` gives the fewest slots that reach the
target with `RESERVE` standard deviations to spare; the κ that asks for the fewest is the best. Without a reserve it gives a
smaller pool. Between the two, and beyond where it must, the twin is asked by bisection for the fewest slots that reach the
target with each of `SEEDS`. Admission lets (S + 1)·B groups be under way; twice as many slots are the most that is ever
proposed, as some may be held by groups that are already too old.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from echo2.capacity.latencies import Constant, Latency, Lognormal
from echo2.capacity.model import Links, Prediction, Workload, ceiling
from echo2.capacity.pool import SLOT, Pool, PoolUnit, WorkerKind
from echo2.capacity.simulation import SimulationResult, simulate
from echo2.capacity.slow_end import loaded_step_time_s, longest_step_s, needed_slots, predict_pool, slow_end_latency_s

RESERVE = 2.0
"""Standard deviations that the first proposal has to spare."""

SEEDS = (101, 102)
"""Seeds of the simulations that decide; a pool must do with all of them."""

SIMULATED_STEPS = 160
SIMULATED_GROUPS = 100_000
"""Groups generated beyond which a simulation makes do with fewer steps and, where these are the fewest, smaller batches."""

SMALLEST_BATCH = 48
"""Groups of a batch that is never made smaller."""

LARGE_BATCH, LARGE_POOL, LARGE_WORKER = 1024, 256, 128
"""Groups, units and slots of one unit from whose double on a simulation takes a share, since chance evens out among so many."""

MANY_WAVES = 16
"""Waves in which a bundled batch passes through the slots at least, so that bundles are fine enough."""

MOST_INTERVALS = 12
"""κ up to which every one is tried."""

ROUNDING = 1e-6
"""Share of a target that rounding may take."""

AS_GOOD = 0.995
"""Share of the best utilisation that counts as the best where the target is out of reach."""


@dataclass(frozen=True, slots=True)
class Provision:
    """The smallest pool for a target, or for the best utilisation that the closed form holds possible."""

    publish_interval: int
    """κ that asks for the fewest slots, steps."""
    units: int
    """Slots or parts of one, or workers that generate in calls."""
    slots: float
    """Slots that are busy on average while there is work."""
    groups_per_s: float
    """μ: what they complete."""
    reachable: bool
    """Whether this pool reaches the target."""
    prediction: Prediction
    """The closed form for this pool: step time, utilisation, what binds."""
    simulated: SimulationResult
    """The twin for this pool: utilisation, staleness of the trained groups, waste."""
    largest: Largest | None = None
    """Where the target is out of reach and the twin says that more units help all the same: what they do."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest pool that is ever proposed."""

    groups_per_s: float
    utilisation: float
    """By the twin."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of every pool; `workload` has the κ to ask about."""

    workload: Workload
    links: Links
    latency: Latency
    target: float
    unit: PoolUnit

    @property
    def most_units(self) -> int:
        """Units of twice the groups that admission lets be under way; a worker takes one at a time at least, however slowly."""
        groups = (self.workload.staleness_bound + 1) * self.workload.groups_per_batch
        each = max(1.0, self.unit.effective_slots) if self.unit.in_calls else self.unit.effective_slots
        return max(1, math.ceil(2 * groups / each))

    @property
    def most_slots(self) -> float:
        return self.most_units * self.unit.effective_slots

    def needed_units(self, target: float, reserve: float = 0.0) -> int | None:
        """By the closed form; None where no number is enough."""
        each = self.unit.effective_slots
        return needed_slots(self.workload, self.links, self.latency, target, self.most_units, reserve, each)

    def best_utilisation(self) -> float:
        """By the closed form, with as many slots as can be of use."""
        time_s = loaded_step_time_s(self.workload, self.links, self.most_slots, self.latency)
        return self.workload.learner_step_s / time_s

    def reached_by(self, units: int) -> bool:
        """By the twin, with every seed."""
        least = self.target * (1 - ROUNDING)
        return all(self.simulate(units, seed).utilisation >= least for seed in SEEDS)

    def simulate(self, units: int, seed: int) -> SimulationResult:
        slots = units * self.unit.effective_slots
        return simulate_pool(self.workload, self.links, slots, self.latency, self.unit, seed)


def provision(
    workload: Workload,
    links: Links,
    target_utilisation: float,
    *,
    latency: Latency | None = None,
    publish_intervals: Iterable[int] | None = None,
    unit: PoolUnit = SLOT,
) -> Provision:
    """The smallest pool and the best κ for the target. Without `latency` every group takes L.

    `publish_intervals` are the κ to choose from, 1 … S + 1 if None; the workload's own plays no part. The pool is made of
    `unit`s. Raises UserError for a target that is no share.

    26 slots complete 32 groups per second, but only 32 pass a batch of 32 at once through what the snapshot leaves of T:

    >>> pool = provision(Workload(1.0, 32, 4, 1, 0.8, 1.0), Links(2.0, 0.0), target_utilisation=1.0)
    >>> pool.publish_interval, pool.units, pool.groups_per_s, pool.reachable, pool.simulated.staleness_max
    (2, 32, 40.0, True, 4)

    Synchronous training cannot hide T + D + L = 4 s behind any pool; 32 slots are enough for the best:

    >>> pool = provision(Workload(1.0, 32, 0, 1, 1.0, 1.0), Links(2.0, 0.0), target_utilisation=0.97)
    >>> pool.reachable, pool.units, round(pool.prediction.utilisation, 6), pool.prediction.binding.name
    (False, 32, 0.25, 'freshness')
    """
    longest_step_s(workload, target_utilisation)
    latency = Constant(workload.group_latency_s) if latency is None else latency
    allowed = intervals_worth_trying(workload, links) if publish_intervals is None else publish_intervals
    # Of equals the first is taken: one whose snapshots the links can all carry.
    in_order = sorted(allowed, key=lambda κ: links.transfer_s > κ * workload.learner_step_s)
    questions = [_Question(replace(workload, publish_interval=κ), links, latency, target_utilisation, unit) for κ in in_order]
    for reserve in (RESERVE, 0.0):
        proposals = [(n, q) for q in questions if (n := q.needed_units(target_utilisation, reserve))]
        if proposals:
            units, chosen = min(proposals, key=lambda proposal: proposal[0])
            decided = _decided_units(chosen, units)
            if decided is not None:
                return _provision(chosen, decided, reachable=True)
    return _best_to_be_had(questions)


def intervals_worth_trying(workload: Workload, links: Links) -> list[int]:
    """All κ up to a dozen, what the links ask for, and S + 1: between them a longer interval only makes data older."""
    last = workload.staleness_bound + 1
    links_need = (
        ceiling(links.transfer_s / workload.learner_step_s) if links.transfer_s < last * workload.learner_step_s else last
    )
    return sorted({*range(1, min(last, MOST_INTERVALS) + 1), *range(max(1, links_need), min(last, links_need + 2) + 1), last})


@lru_cache(maxsize=256)
def simulate_pool(
    workload: Workload, links: Links, slots: float, latency: Latency, unit: PoolUnit = SLOT, seed: int = SEEDS[0]
) -> SimulationResult:
    """The twin of a pool of equal units with so many effective slots, over enough steps for steady means.

    Latencies are stretched so that μ is exactly what so many slots complete, whatever whole number of units there is. A large
    batch and its pool are scaled down, all the more where S asks for many steps; of a large batch on a small pool, several
    groups count as one that takes as much longer.
    """
    fewest = fewest_steps(workload)
    large_batch = min(LARGE_BATCH, max(SMALLEST_BATCH, SIMULATED_GROUPS // fewest))
    large_pool, large_worker = (large * large_batch // LARGE_BATCH for large in (LARGE_POOL, LARGE_WORKER))
    whole = slots / unit.effective_slots if unit.in_calls else slots
    units, B = max(1, round(whole)), workload.groups_per_batch
    scale = max(1, min(B // large_batch, units // large_pool))
    worker_scale = max(1, min(B // scale // large_batch, unit.slots // large_worker)) if unit.in_calls else 1
    bundle = max(1, min(B // scale // large_batch, int(B / (MANY_WAVES * slots)))) if not unit.in_calls else 1
    count, worker_slots = max(1, round(units / scale)), max(1, round(unit.slots / worker_scale))
    kind = WorkerKind(count, worker_slots, in_calls=True) if unit.in_calls else WorkerKind(1, slots=count)
    share = _busy_share(latency, worker_slots) if unit.in_calls else 1.0
    stretch = count * worker_slots * share * scale * worker_scale / slots * bundle
    latency = latency.scaled_to(latency.mean_s * stretch)
    if bundle > 1 and latency.mean_s:
        latency = Lognormal(latency.mean_s, latency.cv / math.sqrt(bundle))
    scaled = replace(workload, groups_per_batch=max(1, round(B / (scale * worker_scale * bundle))))
    generated = math.ceil(scaled.groups_per_batch / workload.accepted_share)
    steps = max(fewest, min(SIMULATED_STEPS, SIMULATED_GROUPS // generated))
    return simulate(scaled, links, Pool((kind,)), steps, seed, latency=latency, carry="newest")


def fewest_steps(workload: Workload) -> int:
    """Steps after which the head start that S gives has faded from the means."""
    return 4 * (workload.staleness_bound + workload.publish_interval + 1)


def _busy_share(latency: Latency, slots: int) -> float:
    """Share of its slots that a worker in calls keeps busy: the mean latency over that of the slowest group."""
    slowest_s = slow_end_latency_s(latency, slots, slots)
    return latency.mean_s / slowest_s if slowest_s else 1.0


def _decided_units(question: _Question, proposed: int) -> int | None:
    """The fewest units, to a hundredth, that reach the target in every simulation; None where no useful pool does."""
    most = question.most_units
    fewest = question.needed_units(question.target) or 1
    low, high, growth = max(1, fewest * 4 // 5) - 1, proposed, proposed // 8 + 1
    while not question.reached_by(high):
        if high == most:
            return None
        low, high, growth = high, min(most, high + growth), 2 * growth
    while high - low > max(1, proposed // 100):
        middle = (low + high) // 2
        if question.reached_by(middle):
            high = middle
        else:
            low = middle
    return high


def _best_to_be_had(questions: list[_Question]) -> Provision:
    """Where the target is out of reach: the fewest units that the closed form holds as good as any number.

    Workers in calls gain from more units, since each takes fewer groups at a time; how much the twin says.
    """
    goal = AS_GOOD * max(question.best_utilisation() for question in questions)
    good = [(n, q) for q in questions if (n := q.needed_units(min(q.target, goal)))]
    units, chosen = min(good, key=lambda proposal: proposal[0])
    pool = _provision(chosen, units, reachable=False)
    most = _provision(chosen, chosen.most_units, reachable=False)
    if AS_GOOD * most.simulated.utilisation <= pool.simulated.utilisation:
        return pool
    return replace(pool, largest=Largest(most.groups_per_s, most.simulated.utilisation))


def _provision(question: _Question, units: int, reachable: bool) -> Provision:
    slots, mean_s = units * question.unit.effective_slots, question.latency.mean_s
    return Provision(
        publish_interval=question.workload.publish_interval,
        units=units,
        slots=slots,
        groups_per_s=slots / mean_s if mean_s else math.inf,
        reachable=reachable,
        prediction=predict_pool(question.workload, question.links, slots, question.latency),
        simulated=question.simulate(units, SEEDS[0]),
    )
