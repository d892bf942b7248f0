"""The provisioning rule: the smallest pool that keeps the learner as busy as asked, and the κ to publish with.

Invariants: the closed form proposes, the twin decides; a target that no pool reaches is answered with the best that can be had
and with what stands in its way; the same arguments give the same answer.

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

from echo2.capacity.latencies import Constant, Latency
from echo2.capacity.model import Links, Prediction, Workload
from echo2.capacity.pool import Pool, WorkerKind
from echo2.capacity.simulation import SimulationResult, simulate
from echo2.capacity.slow_end import longest_step_s, needed_slots, predict_pool

RESERVE = 2.0
"""Standard deviations that the first proposal has to spare."""

SEEDS = (101, 102)
"""Seeds of the simulations that decide; a pool must do with all of them."""

SIMULATED_STEPS = 160
SIMULATED_GROUPS = 100_000
"""Groups beyond which a simulation makes do with fewer steps."""

LARGE_BATCH, LARGE_POOL = 1024, 256
"""Groups and slots from whose double on a simulation takes a share of both, since chance evens out among so many."""

ROUNDING = 1e-6
"""Share of a target that rounding may take."""

AS_GOOD = 0.995
"""Share of the best utilisation that counts as the best where the target is out of reach."""


@dataclass(frozen=True, slots=True)
class Provision:
    """The smallest pool for a target, or for the best utilisation that can be had."""

    publish_interval: int
    """κ that asks for the fewest slots, steps."""
    slots: int
    """Groups that the pool must generate at a time."""
    groups_per_s: float
    """μ: what so many slots complete while none is idle."""
    reachable: bool
    """Whether this pool reaches the target."""
    prediction: Prediction
    """The closed form for this pool: step time, utilisation, what binds."""
    simulated: SimulationResult
    """The twin for this pool: utilisation, staleness of the trained groups, waste."""


def provision(
    workload: Workload,
    links: Links,
    target_utilisation: float,
    *,
    latency: Latency | None = None,
    publish_intervals: Iterable[int] | None = None,
) -> Provision:
    """The smallest pool and the best κ for the target. Without `latency` every group takes L.

    `publish_intervals` are the κ to choose from, 1 … S + 1 if None; the workload's own plays no part. Raises UserError for a
    target that is no share.

    26 slots complete 32 groups per second, but only 32 pass a batch of 32 at once through what the snapshot leaves of T:

    >>> pool = provision(Workload(1.0, 32, 4, 1, 0.8, 1.0), Links(2.0, 0.0), target_utilisation=1.0)
    >>> pool.publish_interval, pool.slots, pool.groups_per_s, pool.reachable, pool.simulated.staleness_max
    (2, 32, 40.0, True, 4)

    Synchronous training cannot hide T + D + L = 4 s behind any pool; 32 slots are enough for the best:

    >>> pool = provision(Workload(1.0, 32, 0, 1, 1.0, 1.0), Links(2.0, 0.0), target_utilisation=0.97)
    >>> pool.reachable, pool.slots, round(pool.prediction.utilisation, 6), pool.prediction.binding.name
    (False, 32, 0.25, 'freshness')
    """
    longest_step_s(workload, target_utilisation)
    latency = Constant(workload.group_latency_s) if latency is None else latency
    allowed = range(1, workload.staleness_bound + 2) if publish_intervals is None else publish_intervals
    # Of equals the first is taken: one whose snapshots the links can all carry.
    in_order = sorted(allowed, key=lambda κ: links.transfer_s > κ * workload.learner_step_s)
    choices = [replace(workload, publish_interval=κ) for κ in in_order]
    most = most_slots(workload)
    for reserve in (RESERVE, 0.0):
        proposals = [(n, w) for w in choices if (n := needed_slots(w, links, latency, target_utilisation, most, reserve))]
        if not proposals:
            continue
        slots, chosen = min(proposals, key=lambda proposal: proposal[0])
        decided = _decided_slots(chosen, links, latency, target_utilisation, slots)
        if decided is not None:
            return _provision(chosen, links, latency, decided, reachable=True)
    return _best_to_be_had(choices, links, latency, target_utilisation)


def most_slots(workload: Workload) -> int:
    """2·(S + 1)·B: slots beyond these stay idle, or hold what is too old."""
    return 2 * (workload.staleness_bound + 1) * workload.groups_per_batch


def simulate_pool(workload: Workload, links: Links, slots: int, latency: Latency, seed: int = SEEDS[0]) -> SimulationResult:
    """The twin of a pool of equal slots over enough steps for steady means; a large batch and its pool are scaled down."""
    scale = max(1, min(workload.groups_per_batch // LARGE_BATCH, slots // LARGE_POOL))
    scaled = replace(workload, groups_per_batch=round(workload.groups_per_batch / scale))
    fewest = 4 * (workload.staleness_bound + workload.publish_interval + 1)
    steps = max(fewest, min(SIMULATED_STEPS, SIMULATED_GROUPS // scaled.groups_per_batch))
    pool = Pool((WorkerKind(1, slots=round(slots / scale)),))
    return simulate(scaled, links, pool, steps, seed, latency=latency, carry="newest")


def _decided_slots(workload: Workload, links: Links, latency: Latency, target: float, proposed: int) -> int | None:
    """The fewest slots, to a hundredth, that reach the target in every simulation; None where no useful pool does."""
    most, least = most_slots(workload), target * (1 - ROUNDING)

    def reaches(slots: int) -> bool:
        return all(simulate_pool(workload, links, slots, latency, seed).utilisation >= least for seed in SEEDS)

    fewest = needed_slots(workload, links, latency, target, most) or 1
    low, high = max(1, fewest * 4 // 5) - 1, proposed
    while not reaches(high):
        if high == most:
            return None
        low, high = high, min(most, high + high // 8 + 1)
    while high - low > max(1, proposed // 100):
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle
    return high


def _best_to_be_had(choices: list[Workload], links: Links, latency: Latency, target: float) -> Provision:
    """Where the target is out of reach: the fewest slots that are as good as any number."""
    goal = AS_GOOD * max(predict_pool(w, links, most_slots(w), latency).utilisation for w in choices)
    good = [(n, w) for w in choices if (n := needed_slots(w, links, latency, min(target, goal), most_slots(w)))]
    slots, chosen = min(good, key=lambda proposal: proposal[0])
    return _provision(chosen, links, latency, slots, reachable=False)


def _provision(workload: Workload, links: Links, latency: Latency, slots: int, reachable: bool) -> Provision:
    return Provision(
        publish_interval=workload.publish_interval,
        slots=slots,
        groups_per_s=slots / latency.mean_s if latency.mean_s else math.inf,
        reachable=reachable,
        prediction=predict_pool(workload, links, slots, latency),
        simulated=simulate_pool(workload, links, slots, latency),
    )
