"""The closed form for random latencies and a pool of so many slots: what the slow end of a batch adds to a step.

Invariants: pure functions; seconds; no random numbers. With constant latencies and all groups accepted it is the closed form of
`echo2.capacity.model`, with the waves in which a batch passes through fewer slots than it has groups.

**Derivation.** A snapshot's arrival lets the pool start N = κB groups at once.
1. *One group.* A filtered group makes room for another, so a place in a batch is filled after a geometric number of tries. H is
   their sum: one draw with probability α, the sum of two with probability α(1 − α), and so on; a sum of k draws is taken as
   lognormal with mean kL and coefficient of variation cv/√k.
2. *One release.* Places of older releases hold h of the n slots, h = Σ_j out(j·κτ) of an idle pool, j = 1, 2 …; the first n − h
   groups start at once, group m after (m + h)/n − 1 mean tries. Random tries let slots drift apart, constant ones keep them in
   step, in whole waves; the two are blended by exp(−3·cv − 2·(1 − α)). The places still empty x seconds after the arrival are
   out(x) = Σ_m P(H > x − start_m).
3. *The batch.* Batch i = 1 … κ of the release is that of step t = p + S − κ + i. At its start x seconds have passed since the
   arrival, in which r = ⌊x/(κτ)⌋ younger snapshots arrived. The places still empty in all releases must not exceed the
   κ(1 + r) − i batches that the steps up to t do not need:

       Σ_j out(x − (r − j)·κτ) ≤ max( (κ(1 + r) − i)·B , e^−γ )            j = 0, 1, 2 … all releases, youngest first

   Where nothing may be left, the slowest place decides. The expected maximum of many draws lies where e^−γ = 0.56 of them are
   expected to be slower still, exactly so for exponential tails.
4. *The loop.* There are w = S + 1 − κ + i steps from the end of step p − 1 to the start of step t, and P = κ·⌈w/κ⌉ to the
   next loop, of which the others need T each. So x = P·τ − (P − w)·T − T − D, and 3. must hold for every i.
5. *The pace.* The step time is the least τ that also satisfies τ ≥ max(T, D_tx/κ, B·L/(αn(1 − ε))), where ε is the share of
   groups that outlive their version, P(latency > (S + 1)·τ − D − age), over the ages at which a version is leased.
6. *The reserve.* All of this is about means. A pool to be relied on gets z standard deviations more: H has the coefficient of
   variation c = √(α·cv² + 1 − α), so out + zc·√out groups must be within what 3. allows, e^(−γ − zc) where it allows none, and
   5. is to complete B·(1 + zc/√(B(S + 1))) groups, since S + 1 batches even each other out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from echo2.capacity.latencies import Latency, Lognormal
from echo2.capacity.model import Links, Workload
from echo2.errors import UserError

SLOWEST = 0.5615
"""e^−γ: groups expected to be slower than the expected maximum."""

NEGLIGIBLE_GROUPS = 0.02
"""A release of which fewer groups are missing is done, and so are all before it."""

START_POINTS = 16
"""Points at which the starting times of a release are taken."""

LEASE_POINTS = 4
"""Points at which the leases of one version are taken."""

RESERVE = 2.0
"""z: standard deviations that a recommended pool has in reserve."""

HALVINGS = 24
"""Steps of bisection: 24 give seven digits."""


class Tries:
    """The time H from a lease until a group was accepted, over all tries."""

    def __init__(self, latency: Latency, accepted_share: float) -> None:
        self.latency = latency
        """One try."""
        self.mean_s = latency.mean_s / accepted_share
        """Mean of H."""
        self.cv = math.sqrt(accepted_share * latency.cv * latency.cv + 1 - accepted_share)
        """Coefficient of variation of H."""
        self.regularity = math.exp(-3 * latency.cv - 2 * (1 - accepted_share))
        """1 where slots keep step, towards 0 where they drift apart."""
        self._parts: list[tuple[float, Latency]] = []
        share, left, count = accepted_share, 1.0, 1
        while left > 1e-5 and latency.mean_s:
            total = Lognormal(count * latency.mean_s, latency.cv / math.sqrt(count)) if count > 1 else latency
            self._parts.append((share, total))
            left -= share
            share, count = share * (1 - accepted_share), count + 1

    def tail(self, seconds: float) -> float:
        """P(H > `seconds`)."""
        if seconds < 0:
            return 1.0
        return sum(share * (1 - total.share_within(seconds)) for share, total in self._parts)


def slow_end_latency_s(latency: Latency, groups_per_batch: int, slots: int, accepted_share: float = 1.0) -> float:
    """Seconds until an idle pool of `slots` has completed a batch: L at the batch's slow end, waves and tries included.

    Ten groups on four slots need three waves of constant latency:

    >>> from echo2.capacity.latencies import Constant
    >>> round(slow_end_latency_s(Constant(0.8), groups_per_batch=10, slots=4), 6)
    2.4
    """
    missing = _release(Tries(latency, accepted_share), groups_per_batch, slots)
    low_s, high_s = 0.0, max(latency.mean_s, 1e-9)
    while missing(high_s) > SLOWEST:
        low_s, high_s = high_s, 2 * high_s
    return _least(lambda seconds: missing(seconds) <= SLOWEST, low_s, high_s)


def loaded_step_time_s(workload: Workload, links: Links, slots: int, latency: Latency) -> float:
    """τ for a pool of `slots` whose groups take `latency`; the workload's own L plays no part.

    Raises UserError for a pool without slots. Synchronous training with B = 10 on four slots: T + D + 3·L:

    >>> from echo2.capacity.latencies import Constant
    >>> workload = Workload(1.0, 10, 0, 1, 0.8, 1.0)
    >>> round(loaded_step_time_s(workload, Links(2.0, 0.5), slots=4, latency=Constant(0.8)), 6)
    5.9
    """
    if not isinstance(slots, int) or slots < 1:
        raise UserError(f"slots = {slots!r} is not a whole number from 1 up: give the groups that the pool generates at a time")
    keeps_pace = _pace_check(workload, links, slots, Tries(latency, workload.accepted_share))
    low_s = workload.learner_step_s
    if keeps_pace(low_s):
        return low_s
    high_s = 1.5 * low_s
    while not keeps_pace(high_s):
        low_s, high_s = high_s, 1.5 * high_s
    return _least(keeps_pace, low_s, high_s)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A pool and how often to publish for it."""

    publish_interval: int
    """κ, steps."""
    slots: int


def recommended_pool(
    workload: Workload, links: Links, latency: Latency, target_utilisation: float, most: int
) -> Recommendation | None:
    """The smallest pool, up to `most` slots, that reaches the target with a reserve, at the κ that asks for the fewest slots.

    None where `most` slots reach it at no κ; the workload's own L and κ play no part.
    """
    best = None
    for interval in range(1, workload.staleness_bound + 2):
        slots = needed_slots(replace(workload, publish_interval=interval), links, latency, target_utilisation, most, RESERVE)
        if slots is not None and (best is None or slots < best.slots):
            best = Recommendation(interval, slots)
    return best


def needed_slots(
    workload: Workload, links: Links, latency: Latency, target_utilisation: float, most: int, reserve: float = 0.0
) -> int | None:
    """The fewest slots, up to `most`, that reach the target with `reserve` standard deviations; None where `most` do not.

    26 slots complete 32 groups per second, but a batch of 32 must pass at once through what the snapshot leaves of T:

    >>> from echo2.capacity.latencies import Constant
    >>> needed_slots(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0), Constant(0.8), target_utilisation=1.0, most=1000)
    32
    """
    if not 0 < target_utilisation <= 1:
        raise UserError(f"target_utilisation = {target_utilisation!r} is not above 0 and at most 1: give a share of the time")
    longest_s = workload.learner_step_s / target_utilisation * (1 + 1e-9)
    tries = Tries(latency, workload.accepted_share)

    def reaches(slots: int) -> bool:
        return _pace_check(workload, links, slots, tries, reserve)(longest_s)

    if not reaches(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle
    return high


def _pace_check(workload: Workload, links: Links, slots: int, tries: Tries, reserve: float = 0.0) -> Callable[[float], bool]:
    """A function that says whether pool, links and snapshots keep up with steps of so many seconds, with a reserve."""
    κ = workload.publish_interval
    links_s = links.transfer_s / κ * (1 - 1e-9)
    groups = κ * workload.groups_per_batch
    undisturbed = _release(tries, groups, slots)

    def keeps_pace(time_s: float) -> bool:
        missing = _release(tries, groups, slots, min(slots, _older(undisturbed, κ * time_s)))
        return (
            time_s >= links_s
            and _generation_keeps_pace(workload, links, slots, tries, time_s, reserve)
            and all(_batch_is_ready(batch, workload, links, missing, time_s, reserve * tries.cv) for batch in range(1, κ + 1))
        )

    return keeps_pace


def _older(missing: Callable[[float], float], interval_s: float) -> float:
    """Groups of older releases that still hold slots when a snapshot arrives."""
    total, age_s = 0.0, interval_s
    while (still := missing(age_s)) > NEGLIGIBLE_GROUPS:
        total, age_s = total + still, age_s + interval_s
    return total


def _generation_keeps_pace(workload: Workload, links: Links, slots: int, tries: Tries, time_s: float, reserve: float) -> bool:
    """Whether the pool completes B groups in `time_s`, without those that will be too old."""
    work_s = workload.groups_per_batch * tries.mean_s / slots
    life_s = (workload.staleness_bound + 1) * time_s - links.latency_s
    lease_span_s = workload.publish_interval * work_s
    ages_s = [(point + 0.5) / LEASE_POINTS * lease_span_s for point in range(LEASE_POINTS)]
    expiring = sum(1 - tries.latency.share_within(life_s - age_s) for age_s in ages_s) / LEASE_POINTS
    spread = tries.cv / math.sqrt(workload.groups_per_batch * (workload.staleness_bound + 1))
    return time_s * (1 - expiring) >= work_s * (1 + reserve * spread) * (1 - 1e-9)


def _release(tries: Tries, groups: int, slots: int, held: float = 0.0) -> Callable[[float], float]:
    """out(x): how many of `groups` that `slots`, less those `held`, took on at once are not accepted after x seconds."""
    starts_s = [0.0]
    if groups + held > slots:
        points = min(START_POINTS, groups)
        turns = [((point + 0.5) / points * groups + held) / slots for point in range(points)]
        waves = [tries.regularity * math.floor(turn) + (1 - tries.regularity) * max(0.0, turn - 1) for turn in turns]
        starts_s = [tries.mean_s * wave for wave in waves]
    return lambda seconds: groups * sum(tries.tail(seconds - start_s) for start_s in starts_s) / len(starts_s)


def _batch_is_ready(
    batch: int, workload: Workload, links: Links, missing: Callable[[float], float], time_s: float, deviations: float
) -> bool:
    """Whether batch i of an interval is ready in time for steps of `time_s`, even if `deviations`·√ more groups are missing."""
    T, κ = workload.learner_step_s, workload.publish_interval
    w = workload.staleness_bound + 1 - κ + batch
    P = κ * -(-w // κ)
    passed_s = P * time_s - (P - w) * T - T - links.latency_s
    if passed_s < 0:
        return False
    younger = int(passed_s / (κ * time_s))
    allowed = max((κ * (1 + younger) - batch) * workload.groups_per_batch, SLOWEST * math.exp(-deviations))
    age_s = passed_s - younger * κ * time_s
    total = 0.0
    while (still := missing(age_s)) > NEGLIGIBLE_GROUPS:
        total += still
        if total + (deviations * math.sqrt(total) if allowed >= 1 else 0.0) > allowed:
            return False
        age_s += κ * time_s
    return True


def _least(suffices: Callable[[float], bool], low: float, high: float) -> float:
    """The least value that suffices, where `high` does and `low` does not or is 0."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high
