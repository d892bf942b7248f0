"""The twin: hub, workers and learner simulated event by event, by the rules that the ledger keeps.

Invariants, each held by a test:
- Leases are given by `echo2.capacity.admission`, the module that the hub uses; live groups never exceed a worker's limit.
- No group with staleness > S is trained; what grows too old is dropped at the end of a step, finished or not, and makes room.
- Counts add up: groups leased = trained + filtered + expired + open.
- A lost worker's leases stay its own until its loss is noticed: they take up room, and grow too old, until then.
- The same arguments give the same result, to the last digit.

The pipeline: a worker's free slot takes a lease as soon as admission allows, an open lease of a lost worker first. A group
keeps the version that it was leased with. Once scored it is filtered with probability 1 − α, else it is ready; the learner
takes B ready groups, oldest version first, as soon as it is free. After every κ-th step a snapshot enters the links, that carry
one at a time for D_tx; D_fix later the workers lease with it. `carry` says which snapshots the links take: "every" one in turn,
as the closed form has it, or only the "newest" of those that wait. Workers hold version 0 when they come up first.

A worker fills each slot as it gets free; one that generates in calls takes leases, and changes its version, only when all its
slots are free.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.capacity.latencies import Constant, Latency
from echo2.capacity.model import Links, Workload
from echo2.capacity.pool import Pool
from echo2.capacity.twin import ENDLESS, Carry, Twin
from echo2.errors import UserError

WARM_UP_SHARE = 0.25
"""Share of the steps that are simulated but not measured: the head start of S steps and the filling of the pipeline."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What the twin observed. Means are over the steps after the warm-up, counts over the whole simulation."""

    step_time_s: float
    """Mean time from the end of a step to the end of the next."""
    utilisation: float
    """Share of time in which the learner works."""
    staleness_mean: float
    """Mean staleness of the trained groups, in steps."""
    staleness_max: int
    """Greatest staleness of any group trained, warm-up included."""
    staleness_shares: tuple[float, ...]
    """Shares of the trained groups with staleness 0, 1, … S."""
    waste_share: float
    """Share of the generated groups that were never trained: filtered, expired or lost with their worker."""
    step_times_s: tuple[float, ...]
    """Every step's time, warm-up included; the first counts from time 0."""
    warm_up_steps: int
    """Steps that the means leave out."""
    leased: int
    """Groups ever leased; a lease given again does not count again."""
    trained: int
    filtered: int
    expired: int
    open: int
    """Groups leased or ready at the end."""
    lost: int
    """Attempts lost to preemptions."""
    usd_per_step: float
    """Rent of the pool per measured step."""


def simulate(
    workload: Workload,
    links: Links,
    pool: Pool,
    steps: int,
    seed: int,
    *,
    latency: Latency | None = None,
    learner_step: Latency | None = None,
    carry: Carry = "every",
    total_steps: int | None = None,
) -> SimulationResult:
    """Simulate `steps` learner steps. Without `latency` and `learner_step` every group takes L and every step T.

    `total_steps` bounds admission as the run's length does; None lets the run go on, so that the last steps are like the rest.
    Raises UserError for numbers that cannot be: steps below 2 or above `total_steps`, steps that take no time, preemptions
    that let no group be finished.

    Synchronous training, S = 0 and κ = 1, pays every latency at every step, T + D + L = 1 + 2.5 + 0.8:

    >>> from echo2.capacity.pool import WorkerKind
    >>> links, pool = Links(transfer_s=2.0, fixed_s=0.5), Pool((WorkerKind(count=4, slots=8),))
    >>> result = simulate(Workload(1.0, 32, 0, 1, 0.8, 1.0), links, pool, steps=40, seed=0)
    >>> round(result.step_time_s, 9), result.staleness_shares
    (4.3, (1.0,))
    """
    last = ENDLESS if total_steps is None else total_steps
    if not isinstance(steps, int) or not isinstance(last, int) or not 2 <= steps <= last:
        bound = "" if total_steps is None else f" to total_steps = {total_steps}"
        raise UserError(f"steps = {steps!r} cannot be simulated: give a whole number from 2{bound}")
    if carry not in ("every", "newest"):
        raise UserError(f"carry = {carry!r} is unknown: choose 'every' or 'newest'")
    if learner_step is not None and learner_step.mean_s <= 0:
        raise UserError("learner_step takes 0 s on average, so that a step has no length: give seconds above 0")
    twin = Twin(
        workload,
        links,
        pool.kinds,
        latency if latency is not None else Constant(workload.group_latency_s),
        learner_step if learner_step is not None else Constant(workload.learner_step_s),
        carry,
        seed,
    )
    twin.run(steps, last)
    return _result(twin, steps)


def _result(twin: Twin, steps: int) -> SimulationResult:
    """Means over a whole number of publish intervals after the warm-up, as far as there are that many steps."""
    workload, ends_s = twin.workload, twin.step_ends_s
    measured = steps - max(1, round(steps * WARM_UP_SHARE))
    measured -= measured % workload.publish_interval if measured > workload.publish_interval else 0
    first = steps - measured
    span_s = ends_s[-1] - ends_s[first - 1]
    trained = steps * workload.groups_per_batch
    staleness = [
        sum(counts) / (measured * workload.groups_per_batch) for counts in zip(*twin.staleness_counts[first:steps], strict=True)
    ]
    wasted = twin.filtered + twin.expired + twin.lost
    return SimulationResult(
        step_time_s=span_s / measured,
        utilisation=sum(twin.worked_s[first:steps]) / span_s,
        staleness_mean=sum(age * share for age, share in enumerate(staleness)),
        staleness_max=twin.staleness_max,
        staleness_shares=tuple(staleness),
        waste_share=wasted / (wasted + trained),
        step_times_s=tuple(end_s - start_s for start_s, end_s in zip([0.0, *ends_s], ends_s, strict=False)),
        warm_up_steps=first,
        leased=twin.leased,
        trained=trained,
        filtered=twin.filtered,
        expired=twin.expired,
        open=twin.live - trained,
        lost=twin.lost,
        usd_per_step=(twin.paid_usd[-1] - twin.paid_usd[first - 1]) / measured,
    )
