"""The pool that a selection rents, in the twin: what the run does with just these machines, their latencies and preemptions.

Invariants: a machine has the slots that make its μ at its L, or a share of them where the batch is scaled down to the same
share of itself; the same arguments give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echo2.capacity.latencies import Latency
from echo2.capacity.model import Links, Workload
from echo2.capacity.offers import Candidate
from echo2.capacity.pool import Pool, WorkerKind
from echo2.capacity.provisioning import SEEDS, SIMULATED_GROUPS, SIMULATED_STEPS, fewest_steps
from echo2.capacity.selection import Selection
from echo2.capacity.simulation import SimulationResult, simulate
from echo2.capacity.terms import call_slots


def mean_latency_s(selection: Selection) -> float:
    """L over all groups that the selection's machines complete."""
    rates = [(count * candidate.effective_groups_per_s, candidate.group_latency_s) for candidate, count in selection.chosen]
    return sum(rate * latency_s for rate, latency_s in rates) / sum(rate for rate, _ in rates)


def simulate_selection(
    selection: Selection,
    workload: Workload,
    links: Links,
    latency: Latency,
    *,
    in_calls: bool = False,
    detection_s: float = 0.0,
    seeds: Sequence[int] = SEEDS[:1],
) -> list[SimulationResult]:
    """The twin for each seed; `latency` gives the shape, each machine its mean. A lost machine is noticed after `detection_s`.

    All machines start at once; the steps in which they come up are not measured. A batch too large to be simulated for so many
    steps is scaled down, and the slots of each machine with it.
    """
    kinds = [worker_kind(candidate, count, links, latency, in_calls, detection_s) for candidate, count in selection.chosen]
    fewest = fewest_steps(workload)
    scale = max(1.0, fewest * workload.groups_per_batch / SIMULATED_GROUPS)
    if scale > 1:
        workload = replace(workload, groups_per_batch=max(1, round(workload.groups_per_batch / scale)))
        kinds = [_scaled_down(kind, scale) for kind in kinds]
    steps = max(fewest, min(SIMULATED_STEPS, SIMULATED_GROUPS // workload.groups_per_batch))
    return [simulate(workload, links, Pool(tuple(kinds)), steps, seed, latency=latency, carry="newest") for seed in seeds]


def _scaled_down(kind: WorkerKind, scale: float) -> WorkerKind:
    """With so much fewer slots, and exactly so much less throughput."""
    slots = max(1, round(kind.slots / scale))
    return replace(kind, slots=slots, speed=kind.speed * kind.slots / scale / slots)


def worker_kind(
    candidate: Candidate, count: int, links: Links, latency: Latency, in_calls: bool, detection_s: float
) -> WorkerKind:
    """Machines or, where engines work in calls, workers of an offer; `speed` makes μ exact whatever whole slots there are."""
    workers = candidate.workers if in_calls else 1
    rate, own = candidate.groups_per_s / workers, latency.scaled_to(candidate.group_latency_s)
    slots = call_slots(own, rate) if in_calls else max(1, round(rate * candidate.group_latency_s))
    speed = latency.mean_s / candidate.group_latency_s if in_calls else rate * latency.mean_s / slots
    return WorkerKind(
        count=count * workers,
        slots=slots,
        in_calls=in_calls,
        speed=speed,
        added_fixed_s=max(0.0, candidate.dissemination_s - links.latency_s),
        start_up_s=candidate.start_up_s,
        preemptions_per_hour=candidate.preemptions_per_hour,
        detection_s=detection_s,
        price_usd_per_hour=candidate.offer.price_usd_per_hour / workers,
    )
