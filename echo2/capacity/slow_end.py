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

       Σ_j out(x − (r − j)·κτ) ≤ (κ(1 + r) − i)·B + e^−γ            j = 0, 1, 2 … all releases, youngest first

   Where nothing may be left, the slowest place decides. The expected maximum of many draws lies where e^−γ = 0.56 of them are
   expected to be slower still, exactly so for exponential tails.
4. *The loop.* There are w = S + 1 − κ + i steps from the end of step p − 1 to the start of step t, and P = κ·⌈w/κ⌉ to the
   next loop, of which the others need T each. So x = P·τ − (P − w)·T − T − D, and 3. must hold for every i.
5. *The pace.* The step time is the least τ that also satisfies τ ≥ max(T, D_tx/κ, B·L/(αn(1 − ε))), where ε is the share of
   groups that outlive their version, P(latency > (S + 1)·τ − D − age), over the ages at which a version is leased. Where
   D_tx > κT the links take the newest snapshot of those that wait, so κ acts as a multiple of itself: the one with the least τ.
6. *The reserve.* All of this is about means. A pool to be relied on gets z standard deviations more: H has the coefficient of
   variation c = √(α·cv² + 1 − α), so out + zc·√out groups must be within what 3. allows, e^(−γ − zc) where it allows none, and
   5. is to complete B·(1 + zc/√(B(S + 1))) groups, since S + 1 batches even each other out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from echo2.capacity.latencies import Latency, Lognormal
from echo2.capacity.model import TOLERANCE, Condition, Links, Prediction, Workload, required_throughput
from echo2.errors import UserError

SLOWEST = 0.5615
"""e^−γ: groups expected to be slower than the expected maximum."""

NEGLIGIBLE_GROUPS = 0.02
"""A release of which fewer groups are missing is done, and so are all before it."""

START_POINTS = 16
"""Points at which the starting times of a release are taken."""

MOST_RELEASES = 1024
"""Releases under way that are looked at one by one; of more, one in the midst of several stands for all of them."""

LEASE_POINTS = 4
"""Points at which the leases of one version are taken."""

NEGLIGIBLE_TRIES, MOST_TRIES = 1e-5, 400
"""Share of the places that need more tries than are looked at, and the most tries that are."""

TAIL_POINTS = 1024
"""Points of the table of P(H > x)."""

JOINT = 0.01
"""Relative difference of step times below which terms are said to bind together."""

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
        self._tail: Callable[[float], float] = lambda seconds: 1 - latency.share_within(seconds)
        if accepted_share < 1 and latency.mean_s:
            self._tail = _tail_of_sums(latency, accepted_share)

    def tail(self, seconds: float) -> float:
        """P(H > `seconds`)."""
        return 1.0 if seconds < 0 else self._tail(seconds)


@lru_cache(maxsize=64)
def _tail_of_sums(latency: Any, accepted_share: float) -> Callable[[float], float]:
    """P(H > x) between points of a table, which are so close that the slow end is right to a fraction of a percent."""
    parts: list[tuple[float, Latency]] = []
    share, left, count = accepted_share, 1.0, 1
    while left > NEGLIGIBLE_TRIES and count <= MOST_TRIES:
        total = Lognormal(count * latency.mean_s, latency.cv / math.sqrt(count)) if count > 1 else latency
        parts.append((share, total))
        left -= share
        share, count = share * (1 - accepted_share), count + 1
    spread = 1 + latency.cv * latency.cv
    step_s = latency.mean_s * (count + 8 * math.sqrt(count) * spread) / TAIL_POINTS
    table = [sum(share * (1 - total.share_within(point * step_s)) for share, total in parts) for point in range(TAIL_POINTS)]

    def tail(seconds: float) -> float:
        place = seconds / step_s
        if place >= TAIL_POINTS - 1:
            return 0.0
        low = int(place)
        return table[low] + (place - low) * (table[low + 1] - table[low])

    return tail


def slow_end_latency_s(latency: Latency, groups_per_batch: int, slots: float, accepted_share: float = 1.0) -> float:
    """Seconds until an idle pool of `slots` has completed a batch: L at the batch's slow end, waves and tries included.

    Ten groups on four slots need three waves of constant latency:

    >>> from echo2.capacity.latencies import Constant
    >>> round(slow_end_latency_s(Constant(0.8), groups_per_batch=10, slots=4), 6)
    2.4
    """
    missing = _release(Tries(latency, accepted_share), groups_per_batch, slots)
    return _least_from(lambda seconds: missing(seconds) <= SLOWEST, 0.0, first_s=max(latency.mean_s, 1e-9))


def loaded_step_time_s(workload: Workload, links: Links, slots: float, latency: Latency) -> float:
    """τ for a pool of `slots` whose groups take `latency`; the workload's own L plays no part.

    Raises UserError for a pool without slots. Synchronous training with B = 10 on four slots: T + D + 3·L:

    >>> from echo2.capacity.latencies import Constant
    >>> workload = Workload(1.0, 10, 0, 1, 0.8, 1.0)
    >>> round(loaded_step_time_s(workload, Links(2.0, 0.5), slots=4, latency=Constant(0.8)), 6)
    5.9
    """
    _check_slots(slots)
    return _carried(workload, links, slots, Tries(latency, workload.accepted_share))[1]


def predict_pool(workload: Workload, links: Links, slots: float, latency: Latency) -> Prediction:
    """Step time, utilisation, what binds and by how much, for a pool of `slots` whose groups take `latency`.

    As `loaded_step_time_s`, term by term. 26 slots complete 32.5 groups per second, enough for 32, but a batch of 32 passes
    through them in two waves; the loop has 4 steps for T + D + 2·L = 4.6 s:

    >>> from echo2.capacity.latencies import Constant
    >>> prediction = predict_pool(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0), slots=26, latency=Constant(0.8))
    >>> prediction.binding.name, round(prediction.step_time_s, 6), round(prediction.slack, 6)
    ('freshness', 1.15, -0.6)
    """
    _check_slots(slots)
    tries = Tries(latency, workload.accepted_share)
    carried, _ = _carried(workload, links, slots, tries)
    return _predict(_Pace(carried, links, slots, tries))


def _carried(workload: Workload, links: Links, slots: float, tries: Tries) -> tuple[Workload, float]:
    """The workload with κ as the links carry it, and its τ."""
    best, best_s = workload, math.inf
    for carried in reversed(list(_as_carried(workload, links))):
        if links.transfer_s / carried.publish_interval < best_s:
            time_s = _least_from(_Pace(carried, links, slots, tries).is_kept, workload.learner_step_s)
            best, best_s = (carried, time_s) if time_s <= best_s else (best, best_s)
    return best, best_s


def _as_carried(workload: Workload, links: Links) -> Iterator[Workload]:
    """κ and, where the links cannot carry every snapshot, its multiples up to the first that they can."""
    κ = workload.publish_interval
    for interval in range(κ, workload.staleness_bound + 2, κ):
        yield replace(workload, publish_interval=interval)
        if links.transfer_s <= interval * workload.learner_step_s:
            return


def _predict(pace: _Pace) -> Prediction:
    """What the closed form says if the links carry every snapshot."""
    workload, links, slots, latency = pace.workload, pace.links, pace.slots, pace.tries.latency
    T, κ = workload.learner_step_s, workload.publish_interval
    groups_per_s = slots / latency.mean_s if latency.mean_s else math.inf
    generation_s = _least_from(pace.pool_keeps_up, T)
    # A pool that is too slow also lets groups grow too old: what it would need is told in proportion.
    slower = generation_s / T if generation_s > T else 0.0
    needed_groups_per_s = groups_per_s * slower or required_throughput(workload) / (1 - pace.expiring_share(T))
    hidden_s = (workload.staleness_bound + 1 - κ) * T
    terms = (
        Condition("learner", T, needed=T, available=T, unit="s"),
        Condition("generation", generation_s, needed_groups_per_s, groups_per_s, "groups/s"),
        Condition("links", links.transfer_s / κ, needed=links.transfer_s, available=κ * T, unit="s"),
        Condition("freshness", _least_from(pace.batches_are_fresh, T), pace.freshness_needs_s(), hidden_s, "s"),
    )
    slowest_s = max(term.step_time_s for term in terms)
    # Of terms that bind together links come first, which nothing else lifts, then generation, whose lack delays freshness too.
    by_cause = (terms[2], terms[1], terms[3])
    waiting = [term for term in by_cause if term.step_time_s > max(T * (1 + TOLERANCE), slowest_s * (1 - JOINT))]
    binding = waiting[0] if waiting else terms[0]
    return Prediction(slowest_s, T / slowest_s, binding, terms, carried_interval=κ)


def reaches(workload: Workload, links: Links, slots: float, latency: Latency, target_utilisation: float) -> bool:
    """Whether the learner is as busy as that: U of `predict_pool` against the target, at a fraction of its cost.

    Raises UserError for a target that is no share.

    >>> from echo2.capacity.latencies import Constant
    >>> [reaches(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0), slots, Constant(0.8), 1.0) for slots in (31, 32)]
    [False, True]
    """
    longest_s, tries = longest_step_s(workload, target_utilisation), Tries(latency, workload.accepted_share)
    return any(_Pace(carried, links, slots, tries).is_kept(longest_s) for carried in _as_carried(workload, links))


def needed_slots(
    workload: Workload,
    links: Links,
    latency: Latency,
    target_utilisation: float,
    most: int,
    reserve: float = 0.0,
    slots_each: float = 1.0,
) -> int | None:
    """The fewest slots, up to `most`, that reach the target with `reserve` standard deviations; None where `most` do not.

    Counted in units of `slots_each`.

    26 slots complete 32 groups per second, but a batch of 32 must pass at once through what the snapshot leaves of T:

    >>> from echo2.capacity.latencies import Constant
    >>> needed_slots(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0), Constant(0.8), target_utilisation=1.0, most=1000)
    32
    """
    longest_s = longest_step_s(workload, target_utilisation)
    tries = Tries(latency, workload.accepted_share)

    def suffice(units: int) -> bool:
        slots = units * slots_each
        return any(_Pace(carried, links, slots, tries, reserve).is_kept(longest_s) for carried in _as_carried(workload, links))

    return least_integer(suffice, 1, most)


def longest_step_s(workload: Workload, target_utilisation: float) -> float:
    """T/U, with a margin for rounding; raises UserError for a target that is no share."""
    if not 0 < target_utilisation <= 1:
        raise UserError(f"target_utilisation = {target_utilisation!r} is not above 0 and at most 1: give a share of the time")
    return workload.learner_step_s / target_utilisation * (1 + 1e-9)


def least_integer(suffices: Callable[[int], bool], least: int, most: int) -> int | None:
    """The least whole number from `least` to `most` that suffices, where all above it do; None where `most` does not."""
    if not suffices(most):
        return None
    low, high = least - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


class _Pace:
    """Whether pool, links and snapshots keep up with steps of so many seconds, with `reserve` standard deviations to spare."""

    def __init__(self, workload: Workload, links: Links, slots: float, tries: Tries, reserve: float = 0.0) -> None:
        self.workload, self.links, self.slots, self.tries, self.reserve = workload, links, slots, tries, reserve
        self.released = workload.publish_interval * workload.groups_per_batch
        self.undisturbed = _release(tries, self.released, slots)

    def is_kept(self, time_s: float) -> bool:
        """Whether all three do."""
        links_s = self.links.transfer_s / self.workload.publish_interval * (1 - 1e-9)
        return time_s >= links_s and self.pool_keeps_up(time_s) and self.batches_are_fresh(time_s)

    def pool_keeps_up(self, time_s: float) -> bool:
        """Whether the pool completes B groups in `time_s`, without those that will be too old."""
        workload, tries = self.workload, self.tries
        work_s = workload.groups_per_batch * tries.mean_s / self.slots
        spread = tries.cv / math.sqrt(workload.groups_per_batch * (workload.staleness_bound + 1))
        return time_s * (1 - self.expiring_share(time_s)) >= work_s * (1 + self.reserve * spread) * (1 - 1e-9)

    def expiring_share(self, time_s: float) -> float:
        """ε: share of the groups that outlive their version where steps take `time_s`."""
        workload, tries = self.workload, self.tries
        life_s = (workload.staleness_bound + 1) * time_s - self.links.latency_s
        lease_span_s = self.released * tries.mean_s / self.slots
        ages_s = [(point + 0.5) / LEASE_POINTS * lease_span_s for point in range(LEASE_POINTS)]
        return sum(1 - tries.latency.share_within(life_s - age_s) for age_s in ages_s) / LEASE_POINTS

    def batches_are_fresh(self, time_s: float) -> bool:
        """Whether every batch of an interval is ready in time, even if `reserve` deviations more groups are missing."""
        passed_s = [self._passed_s(batch, time_s) for batch in range(1, self.workload.publish_interval + 1)]
        if min(passed_s) < 0:
            return False
        missing = self._missing(time_s)
        return all(self._is_filled(batch, seconds, missing, time_s) for batch, seconds in enumerate(passed_s, 1))

    def _passed_s(self, batch: int, time_s: float) -> float:
        """From the snapshot's arrival to the start of the step that takes batch i of its interval."""
        T, κ = self.workload.learner_step_s, self.workload.publish_interval
        w = self.workload.staleness_bound + 1 - κ + batch
        P = κ * -(-w // κ)
        return P * time_s - (P - w) * T - T - self.links.latency_s

    def freshness_needs_s(self) -> float:
        """What (S + 1 − κ)·T must exceed for a learner that never waits: D and the wait for the slowest batch."""
        T, missing = self.workload.learner_step_s, self._missing(self.workload.learner_step_s)
        waits_s = []
        for batch in range(1, self.workload.publish_interval + 1):
            filled = partial(self._is_filled, batch, missing=missing, time_s=T)
            waits_s.append(_least_from(filled, 0.0, first_s=self.tries.mean_s) - (batch - 1) * T)
        return self.links.latency_s + max(waits_s)

    def _missing(self, time_s: float) -> Callable[[float], float]:
        """out(x) of a release that finds slots held by older ones, of which one came every κ steps of `time_s`."""
        interval_s = self.workload.publish_interval * time_s
        together = self._looked_at_together(interval_s)
        held, age_s = 0.0, interval_s * (together + 1) / 2
        while held < self.slots and (still := self.undisturbed(age_s)) > NEGLIGIBLE_GROUPS:
            held, age_s = held + together * still, age_s + together * interval_s
        return _release(self.tries, self.released, self.slots, min(self.slots, held))

    def _is_filled(self, batch: int, passed_s: float, missing: Callable[[float], float], time_s: float) -> bool:
        """Whether batch i of an interval has no empty place `passed_s` after the snapshot's arrival."""
        interval_s, deviations = self.workload.publish_interval * time_s, self.reserve * self.tries.cv
        younger = int(passed_s / interval_s)
        spare_batches = self.workload.publish_interval * (1 + younger) - batch
        allowed = spare_batches * self.workload.groups_per_batch + SLOWEST * math.exp(-deviations)
        together = self._looked_at_together(interval_s)
        age_s, total = passed_s - younger * interval_s + interval_s * (together - 1) / 2, 0.0
        while (still := missing(age_s)) > NEGLIGIBLE_GROUPS:
            total += together * still
            if total + (deviations * math.sqrt(total) if allowed >= 1 else 0.0) > allowed:
                return False
            age_s += together * interval_s
        return True

    def _looked_at_together(self, interval_s: float) -> int:
        """How many releases in a row count like the one in their midst, where one came every `interval_s`."""
        span_s = self.tries.mean_s * (1 + self.released / self.slots)
        return max(1, int(span_s / (MOST_RELEASES * interval_s)))


def _release(tries: Tries, groups: int, slots: float, held: float = 0.0) -> Callable[[float], float]:
    """out(x): how many of `groups` that `slots`, less those `held`, took on at once are not accepted after x seconds."""
    starts_s = [0.0]
    if groups + held > slots:
        points = min(START_POINTS, groups)
        turns = [((point + 0.5) / points * groups + held) / slots for point in range(points)]
        waves = [tries.regularity * math.floor(turn) + (1 - tries.regularity) * max(0.0, turn - 1) for turn in turns]
        starts_s = [tries.mean_s * wave for wave in waves]
    return lambda seconds: groups * sum(tries.tail(seconds - start_s) for start_s in starts_s) / len(starts_s)


def _least_from(suffices: Callable[[float], bool], low: float, first_s: float = 0.0) -> float:
    """The least value from `low` on that suffices, seven digits of it; `first_s` is a first guess where `low` is 0."""
    if suffices(low):
        return low
    high = max(1.5 * low, first_s)
    while not suffices(high):
        low, high = high, 1.5 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


def _check_slots(slots: float) -> None:
    if not (math.isfinite(slots) and slots > 0):
        raise UserError(f"slots = {slots!r} is not a finite number above 0: give the groups that the pool generates at a time")
