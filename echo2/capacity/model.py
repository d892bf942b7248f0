"""The capacity model: how long a learner step takes, and what makes it so, from a handful of measured terms.

Invariants: pure functions of frozen dataclasses; times in seconds, throughputs in groups per second; impossible numbers are
refused with a UserError that names them.

Symbols: T seconds of learner work per step, B groups per step, S staleness bound, κ publish interval (both in steps), L seconds
from a lease to its scored group, α accepted share of the generated groups, D = D_tx + D_fix dissemination latency, μ groups per
second that the pool completes.

**Recurrence.** Step t starts at s_t, ends at e_t = s_t + T and needs a batch made by version p(t) = κ·⌈(t − S)/κ⌉ or newer:

    X_p = max(e_{p−1}, X_{p−κ} + D_tx)                 snapshot p enters the links, which carry every snapshot in turn
    A_t = max(X_{p(t)} + D + L, A_{t−1} + B/(αμ))      batch t is ready
    s_t = max(e_{t−1}, A_t)

**Closed form.** With g = max(T, B/(αμ)), w = S + 2 − κ and P = κ·⌈w/κ⌉ the long-run step time is

    τ = max( g , D_tx/κ , (T + D + L + (P − w)·g) / P )            U = T/τ

A snapshot made at the end of step p − 1 first decides the start of step p − 1 + w, and only every κ-th step makes one, so the
freshness loop spans P steps: T + D + L over w of them, the pace g over the rest. All other loops of the recurrence are averages
of these three.

**How exact it is.** For the recurrence it is exact for every S, κ ≤ S + 1 and all terms: over 4,000 random cases (S ≤ 8, links
faster and slower than κT) the mean over whole loops, once the start-up has faded, agreed to 1e-9. A run of n steps from a cold
start differs from n·τ by a constant: it is early by at most (S + 1)·τ, the head start that S gives, and late by at most
T + D + L + B/(αμ). The recurrence itself takes latencies as constant and the pool as never stopping: give L at the slow end of
a batch, not its mean, and count in L the waiting for a slot where B exceeds the pool's slots and S = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from echo2.errors import UserError

ConditionName = Literal["learner", "generation", "links", "freshness"]

TOLERANCE = 1e-9
"""Relative difference of step times below which two count as equal, so that rounding never decides what binds."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be trained. Raises UserError for numbers that cannot be."""

    learner_step_s: float
    """T: seconds of learner work per step, above 0."""
    groups_per_batch: int
    """B: groups that one step consumes, at least 1."""
    staleness_bound: int
    """S: learner steps that a group may be old, at least 0."""
    publish_interval: int
    """κ: a snapshot is published after every κ-th step; 1 ≤ κ ≤ S + 1."""
    group_latency_s: float
    """L: seconds from a lease to its scored group at the slow end of a batch, at least 0."""
    accepted_share: float
    """α: share of generated groups that are trained, above 0 and at most 1."""

    def __post_init__(self) -> None:
        _check_positive("learner_step_s (T)", self.learner_step_s, "the seconds of learner work per step")
        _check_count("groups_per_batch (B)", self.groups_per_batch, 1, "the groups that one step consumes")
        _check_count("staleness_bound (S)", self.staleness_bound, 0, "the learner steps that a group may be old")
        _check_count("publish_interval (κ)", self.publish_interval, 1, "the learner steps between two snapshots")
        _check_not_negative("group_latency_s (L)", self.group_latency_s, "the seconds from a lease to its scored group")
        _check_share("accepted_share (α)", self.accepted_share, "the share of generated groups that are trained")
        if self.publish_interval > self.staleness_bound + 1:
            raise UserError(
                f"publish_interval (κ) = {self.publish_interval} exceeds staleness_bound (S) + 1 = {self.staleness_bound + 1}: "
                f"no snapshot could be fresh enough for every step; lower κ to {self.staleness_bound + 1} or raise S to "
                f"{self.publish_interval - 1}"
            )


@dataclass(frozen=True, slots=True)
class Links:
    """What lies between learner and workers; latency D = D_tx + D_fix. Raises UserError for numbers that cannot be."""

    transfer_s: float
    """D_tx: seconds that one snapshot occupies the links, at least 0."""
    fixed_s: float
    """D_fix: the rest (export, encoding, latency, decoding, loading), at least 0."""

    def __post_init__(self) -> None:
        _check_not_negative("transfer_s (D_tx)", self.transfer_s, "the seconds that one snapshot occupies the links")
        _check_not_negative("fixed_s (D_fix)", self.fixed_s, "the seconds of dissemination beside the transfer")

    @property
    def latency_s(self) -> float:
        """D: seconds from the end of a step until workers generate with its version."""
        return self.transfer_s + self.fixed_s


@dataclass(frozen=True, slots=True)
class Condition:
    """The learner never waits for this term if and only if `available` ≥ `needed`."""

    name: ConditionName
    step_time_s: float
    """Seconds per step that this term would allow if it were the only one to wait for."""
    needed: float
    available: float
    unit: str

    @property
    def slack(self) -> float:
        """What is left over, in `unit`; negative by how much the condition fails."""
        return self.available - self.needed


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the closed form says of a workload, its links and its pool."""

    step_time_s: float
    """τ, at least T."""
    utilisation: float
    """U = T/τ, in (0, 1]."""
    binding: Condition
    """What sets the step time; the learner itself when it never waits."""
    conditions: tuple[Condition, ...]
    """Learner, generation, links, freshness."""
    carried_interval: int
    """κ as the links carry it: the configured one or a multiple, where workers skip snapshots that slow links left waiting."""

    @property
    def slack(self) -> float:
        """Slack of the binding condition, in its unit: 0 for the learner, negative for all others."""
        return self.binding.slack


@dataclass(frozen=True, slots=True)
class SerialRule:
    """What the rule κ = S − 1, κB/(αμ) + D ≤ κT asks for."""

    publish_interval: int
    groups_per_s: float | None
    """μ; None where no pool satisfies the rule."""
    obstacle: str | None
    """Why no pool does."""


def conditions(workload: Workload, links: Links, groups_per_s: float) -> tuple[Condition, ...]:
    """The closed form term by term: learner, generation, links, freshness."""
    _check_positive("groups_per_s (μ)", groups_per_s, "the groups that the pool completes per second")
    T, S, κ = workload.learner_step_s, workload.staleness_bound, workload.publish_interval
    D, L = links.latency_s, workload.group_latency_s
    generation_s = workload.groups_per_batch / (workload.accepted_share * groups_per_s)
    g = max(T, generation_s)
    w = S + 2 - κ
    P = _freshness_loop_steps(workload)
    return (
        Condition("learner", T, needed=T, available=T, unit="s"),
        Condition("generation", generation_s, needed=required_throughput(workload), available=groups_per_s, unit="groups/s"),
        Condition("links", links.transfer_s / κ, needed=links.transfer_s, available=κ * T, unit="s"),
        Condition("freshness", (T + D + L + (P - w) * g) / P, needed=D + L, available=(S + 1 - κ) * T, unit="s"),
    )


def step_time_s(workload: Workload, links: Links, groups_per_s: float) -> float:
    """τ: seconds per learner step in the long run.

    Synchronous training, S = 0 and κ = 1, pays every latency at every step: 1 + (2 + 0.5) + 0.8.

    >>> links = Links(transfer_s=2.0, fixed_s=0.5)
    >>> step_time_s(Workload(1.0, 32, 0, 1, 0.8, 1.0), links, groups_per_s=1000.0)
    4.3

    The largest interval, κ = S + 1 = 4, leaves w = 1: one stop of D + L in every 4 steps, (1 + 2.5 + 0.8 + 3)/4.

    >>> step_time_s(Workload(1.0, 32, 3, 4, 0.8, 1.0), links, groups_per_s=1000.0)
    1.825

    No dissemination latency: only S·T = 0.5 s hide L = 0.8 s when S = 1, so (0.5 + 0.8)/2.

    >>> step_time_s(Workload(0.5, 32, 1, 1, 0.8, 1.0), Links(0.0, 0.0), groups_per_s=1000.0)
    0.65

    A pool one slot short, 25 slots where 32 groups/s · 0.8 s = 25.6 are needed: 32/(25/0.8).

    >>> step_time_s(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0), groups_per_s=25 / 0.8)
    1.024
    """
    return max(condition.step_time_s for condition in conditions(workload, links, groups_per_s))


def utilisation(workload: Workload, links: Links, groups_per_s: float) -> float:
    """U = T/τ, in (0, 1]; 1 if and only if αμ ≥ B/T, D + L ≤ (S + 1 − κ)·T and D_tx ≤ κ·T.

    >>> utilisation(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0), groups_per_s=26 / 0.8)
    1.0
    """
    return workload.learner_step_s / step_time_s(workload, links, groups_per_s)


def binding_term(workload: Workload, links: Links, groups_per_s: float) -> Condition:
    """The condition that sets the step time; of equal ones the first of learner, generation, links, freshness.

    >>> pool_too_small = binding_term(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0), groups_per_s=25 / 0.8)
    >>> pool_too_small.name, pool_too_small.slack, pool_too_small.unit
    ('generation', -0.75, 'groups/s')
    """
    return predict(workload, links, groups_per_s).binding


def predict(workload: Workload, links: Links, groups_per_s: float) -> Prediction:
    """Step time, utilisation, what binds and by how much.

    D + L = 2.8 s, of which κ = S − 1 = 3 hides (4 + 1 − 3)·1 = 2 s; the loop takes 1 + 2.8 over 3 steps:

    >>> prediction = predict(Workload(1.0, 32, 4, 3, 0.8, 1.0), Links(2.0, 0.0), groups_per_s=96.0)
    >>> prediction.binding.name, round(prediction.slack, 9), round(prediction.utilisation, 3)
    ('freshness', -0.8, 0.789)
    """
    terms = conditions(workload, links, groups_per_s)
    slowest = max(term.step_time_s for term in terms)
    binding = next(term for term in terms if term.step_time_s >= slowest * (1 - TOLERANCE))
    return Prediction(slowest, workload.learner_step_s / slowest, binding, terms, workload.publish_interval)


def required_throughput(workload: Workload) -> float:
    """μ below which generation makes the learner wait: B/(αT) groups per second.

    >>> required_throughput(Workload(2.0, 32, 4, 2, 0.8, accepted_share=0.5))
    32.0
    """
    return workload.groups_per_batch / (workload.accepted_share * workload.learner_step_s)


def serial_rule(workload: Workload, links: Links) -> SerialRule:
    """The rule that treats generation and dissemination as one after the other: κ = S − 1 and κB/(αμ) + D ≤ κT.

    Kept for comparison: it ignores L and the wait of D + L at κ = S − 1. `workload.publish_interval` plays no part.

    Here 3·32/μ + 2 ≤ 3 asks for 96 groups/s (77 slots at 0.8 s each) where κ = 2 needs 32 groups/s (26 slots):

    >>> serial_rule(Workload(1.0, 32, 4, 2, 0.8, 1.0), Links(2.0, 0.0))
    SerialRule(publish_interval=3, groups_per_s=96.0, obstacle=None)
    """
    κ = workload.staleness_bound - 1
    if κ < 1:
        return SerialRule(κ, None, f"κ = S − 1 = {κ} is below 1")
    left_s = κ * workload.learner_step_s - links.latency_s
    if left_s <= 0:
        return SerialRule(κ, None, f"D = {links.latency_s:.4g} s leaves nothing of κ·T = {κ * workload.learner_step_s:.4g} s")
    return SerialRule(κ, κ * workload.groups_per_batch / (workload.accepted_share * left_s), None)


def ceiling(value: float) -> int:
    """⌈value⌉, blind to rounding errors just above a whole number.

    >>> ceiling(0.3 / 0.1), ceiling(3.0000000000004), ceiling(3.01)
    (3, 3, 4)
    """
    return math.ceil(value * (1 - TOLERANCE / 10) - TOLERANCE / 10)


def _freshness_loop_steps(workload: Workload) -> int:
    """P = κ·⌈w/κ⌉ with w = S + 2 − κ: the fewest steps between two snapshots of which one waits for the other."""
    κ = workload.publish_interval
    return κ * -(-(workload.staleness_bound + 2 - κ) // κ)


def _check_positive(name: str, value: float, meaning: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} = {value!r} is not a finite number above 0: give {meaning}")


def _check_not_negative(name: str, value: float, meaning: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name} = {value!r} is not a finite number from 0 up: give {meaning}")


def _check_share(name: str, value: float, meaning: str) -> None:
    if not 0 < value <= 1:
        raise UserError(f"{name} = {value!r} is not above 0 and at most 1: give {meaning}")


def _check_count(name: str, value: int, minimum: int, meaning: str) -> None:
    if not isinstance(value, int) or value < minimum:
        raise UserError(f"{name} = {value!r} is not a whole number from {minimum} up: give {meaning}")
