"""Calibration: the terms of the capacity model from what a run observed, each with its interval.

Invariants: pure functions of what the ledger says; seconds, and groups per second; newer observations weigh more; a term that
was not observed is missing by name, never guessed.

**What is observed.** T is the learner's work per step, export and checkpoint included, so D begins where the step ends. D_tx is
the time of a version's broadcast until the last worker has it or, without broadcasts, its longest transfer, since a hub serves
all workers at once; D_fix is the rest of the mean time until workers generate with it. L runs from a group's last lease to its
scores. μ of a worker is taken while it is as good as full: a call is a set of groups that it leased together, and counts where
at least `FULL_SHARE` of the most groups that it ever had under way were under way halfway through; the seconds per group of
these calls are averaged. So μ·L is the slots that the pool has, also where it has more than it needs and makes many small calls
in between.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from echo2.capacity.estimates import Estimate, decayed, robust_mean, share, total
from echo2.capacity.latencies import Empirical
from echo2.capacity.terms import TermName, Terms
from echo2.capacity.transfer import UNSEEN, SeenLinks
from echo2.errors import UserError

HALF_LIFE_STEPS = 32
"""Steps, and versions, after which an observation weighs half."""

HALF_LIFE_GROUPS = 512
"""Groups after which an observation weighs half."""

SAME_CALL_S = 0.01
"""Leases of one worker that are closer than this were given in one call."""

FULL_SHARE = 0.75
"""Share of its slots from which on a worker counts as full."""

LARGEST_CALLS = 4
"""The n-th largest call decides how many groups a worker can have under way, so that a single one does not."""

LEAST_BROADCASTS = 2
"""Versions that must have been broadcast for D_tx to be theirs."""

LATENCY_POINTS = 256
"""Quantiles that the latencies are thinned to."""

FARTHEST_SHARE = 0.005
"""Share of the latencies at the slow end that are drawn in: a group that hung is no part of the distribution."""

HOW_TO_MEASURE: dict[TermName, str] = {
    "T": "needs two steps",
    "L": "needs groups scored from two calls of workers",
    "D_tx": "needs two versions made by steps and loaded by workers",
    "D_fix": "needs two versions made by steps and loaded by workers",
    "α": "needs a group that was scored",
    "μ": "needs two full calls of a worker that is still there",
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """A committed step."""

    step: int
    finished_at_s: float
    work_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class GroupTime:
    """A group that was generated and scored."""

    worker: str
    leased_at_s: float
    posted_at_s: float
    scored_at_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """A worker that generates with a version from now on."""

    version: int
    transfer_s: float
    latency_s: float
    """From the end of the step that made the version."""


@dataclass(frozen=True, slots=True)
class Observations:
    """What a run observed, everything oldest first."""

    steps: Sequence[StepTime] = ()
    groups: Sequence[GroupTime] = ()
    """By the time of their scores."""
    accepted: Sequence[bool] = ()
    """Of every group that was scored or failed: whether it was, or is to be, trained. Groups that expired are left out, since
    the model says itself what expires."""
    loads: Sequence[Load] = ()
    broadcasts_s: Mapping[int, float] = field(default_factory=dict)
    """Of each version that was broadcast, the seconds until the last worker had what was sent of it."""
    links: SeenLinks = UNSEEN
    workers: Sequence[str] = ()
    """Workers that are there now, or were when the run ended."""

    @property
    def utilisation(self) -> float | None:
        """The learner's share of work in its time; None before it did any."""
        work_s = math.fsum(step.work_s for step in self.steps)
        wait_s = math.fsum(step.wait_s for step in self.steps)
        return work_s / (work_s + wait_s) if work_s else None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The terms as measured; None for one that was not observed."""

    learner_step_s: Estimate | None
    """T."""
    group_latency_s: Estimate | None
    """The mean of L."""
    latency: Empirical | None
    """L as a distribution."""
    transfer_s: Estimate | None
    """D_tx."""
    fixed_s: Estimate | None
    """D_fix."""
    accepted_share: Estimate | None
    """α."""
    worker_groups_per_s: Mapping[str, Estimate]
    """μ of each worker that is there and was full at times."""
    workers: int
    """Workers that are there."""
    worker_slots: int
    """Groups that a worker has under way when it is full, on average; 1 where that was not observed."""
    broadcast: bool
    """Whether D_tx is that of broadcasts."""
    links: SeenLinks

    @property
    def groups_per_s(self) -> Estimate | None:
        """μ of all workers; one that was not measured is taken for as fast as the others are on average."""
        measured = total(list(self.worker_groups_per_s.values()))
        return None if measured is None else measured.times(self.workers / len(self.worker_groups_per_s))

    @property
    def estimates(self) -> dict[TermName, Estimate | None]:
        """By the model's symbols."""
        return {
            "T": self.learner_step_s,
            "L": self.group_latency_s,
            "D_tx": self.transfer_s,
            "D_fix": self.fixed_s,
            "α": self.accepted_share,
            "μ": self.groups_per_s,
        }

    @property
    def missing(self) -> list[TermName]:
        """Terms that were not measured."""
        return [name for name, found in self.estimates.items() if found is None]

    def figures(self) -> dict[str, Any]:
        """For JSON, by names that carry units; a term that was not measured is absent."""
        names = ("learner_step_s", "group_latency_s", "transfer_s", "fixed_s", "accepted_share", "groups_per_s")
        found = {name: getattr(self, name) for name in names}
        return {name: _figure(estimate) for name, estimate in found.items() if estimate is not None} | {
            "worker_groups_per_s": {worker: _figure(estimate) for worker, estimate in self.worker_groups_per_s.items()},
            "workers": self.workers,
        }

    def terms(self, place: str) -> Terms:
        """The terms as measured in `place`; raises UserError that names those which are missing or impossible."""
        T, L, D_tx, D_fix, α, μ = self.estimates.values()
        if not (T and L and self.latency and D_tx and D_fix and α and μ):
            lacking = ", ".join(f"{name} ({HOW_TO_MEASURE[name]})" for name in self.missing)
            raise UserError(f"{place} has not measured {lacking}: let it train on")
        return Terms(
            learner_step_s=T.value,
            latency=self.latency,
            groups_per_s=μ.value,
            accepted_share=α.value,
            transfer_s=D_tx.value,
            fixed_s=D_fix.value,
            workers=self.workers,
            worker_slots=self.worker_slots,
            provenance={
                "T": _measured(place, T, "steps"),
                "L": _measured(place, L, "groups"),
                "D_tx": _measured(place, D_tx, "broadcasts" if self.broadcast else "versions"),
                "D_fix": _measured(place, D_fix, "versions"),
                "α": _measured(place, α.times(100), "groups", " %"),
                "μ": _measured(place, μ.times(1 / self.workers), "calls", " groups/s per worker"),
            },
            links_seen=self.links,
        )


def calibrate(observations: Observations) -> Calibration:
    """The terms that these observations give."""
    steps_s = [step.work_s for step in observations.steps]
    loaded = {load.version for load in observations.loads}
    broadcasts_s = {version: seconds for version, seconds in observations.broadcasts_s.items() if version in loaded}
    if len(broadcasts_s) < LEAST_BROADCASTS:
        broadcasts_s = {}
    transfers_s, fixed_s = _disseminations(observations.loads, broadcasts_s)
    calls = _calls(observations.groups)
    latency = _latency(observations.groups)
    between_calls = robust_mean([call.mean_latency_s for call in calls], [call.weight * call.size for call in calls])
    of_worker = {worker: [call for call in calls if call.worker == worker] for worker in observations.workers}
    speeds = {worker: _groups_per_s(own) for worker, own in of_worker.items()}
    slots = [_most_under_way(own) for own in of_worker.values() if own]
    return Calibration(
        learner_step_s=robust_mean(steps_s, _weights(len(steps_s), HALF_LIFE_STEPS)),
        group_latency_s=between_calls.around(latency.mean_s, len(observations.groups)) if latency and between_calls else None,
        latency=latency,
        transfer_s=robust_mean(transfers_s, _weights(len(transfers_s), HALF_LIFE_STEPS)),
        fixed_s=robust_mean(fixed_s, _weights(len(fixed_s), HALF_LIFE_STEPS)),
        accepted_share=share(observations.accepted, _weights(len(observations.accepted), HALF_LIFE_GROUPS)),
        worker_groups_per_s={worker: speed for worker, speed in speeds.items() if speed is not None},
        workers=len(observations.workers),
        worker_slots=round(fmean(slots)) if slots else 1,
        broadcast=bool(broadcasts_s),
        links=observations.links,
    )


def _weights(count: int, half_life: float) -> list[float]:
    return decayed(range(count - 1, -1, -1), half_life)


def _disseminations(loads: Sequence[Load], broadcasts_s: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """D_tx and D_fix of each version, oldest first; where there were broadcasts, of the versions that were."""
    versions: dict[int, list[Load]] = defaultdict(list)
    for load in loads:
        versions[load.version].append(load)
    transfers_s, fixed_s = [], []
    for version in sorted(broadcasts_s or versions):
        transfer_s = broadcasts_s.get(version) or max(load.transfer_s for load in versions[version])
        transfers_s.append(transfer_s)
        fixed_s.append(max(0.0, fmean(load.latency_s for load in versions[version]) - transfer_s))
    return transfers_s, fixed_s


@dataclass(frozen=True, slots=True)
class _Call:
    """Groups that one worker leased together."""

    worker: str
    size: int
    busy_s: float
    """Seconds from their lease, or from the end of the call before if that is later, to the last post."""
    under_way: int
    """Groups that the worker had under way halfway to the first post."""
    mean_latency_s: float
    weight: float
    """By its age."""


def _calls(groups: Sequence[GroupTime]) -> list[_Call]:
    """The calls of all workers, in the order of their ends within a worker."""
    of_worker: dict[str, list[tuple[int, GroupTime]]] = defaultdict(list)
    for age, group in zip(range(len(groups) - 1, -1, -1), groups, strict=True):
        of_worker[group.worker].append((age, group))
    return [call for worker, aged in of_worker.items() for call in _calls_of(worker, aged)]


def _calls_of(worker: str, aged: list[tuple[int, GroupTime]]) -> list[_Call]:
    aged = sorted(aged, key=lambda entry: entry[1].leased_at_s)
    sets: list[list[tuple[int, GroupTime]]] = []
    for entry in aged:
        if sets and entry[1].leased_at_s - sets[-1][-1][1].leased_at_s < SAME_CALL_S:
            sets[-1].append(entry)
        else:
            sets.append([entry])
    leases_s = [group.leased_at_s for _, group in aged]
    posts_s = sorted(group.posted_at_s for _, group in aged)
    calls, former_end_s = [], -math.inf
    for members in sorted(sets, key=lambda members: max(group.posted_at_s for _, group in members)):
        leased_s, end_s = members[0][1].leased_at_s, max(group.posted_at_s for _, group in members)
        half_s = (members[-1][1].leased_at_s + min(group.posted_at_s for _, group in members)) / 2
        calls.append(
            _Call(
                worker=worker,
                size=len(members),
                busy_s=end_s - max(leased_s, former_end_s),
                under_way=bisect_right(leases_s, half_s) - bisect_left(posts_s, half_s),
                mean_latency_s=fmean(group.scored_at_s - group.leased_at_s for _, group in members),
                weight=decayed([min(age for age, _ in members)], HALF_LIFE_GROUPS)[0],
            )
        )
        former_end_s = end_s
    return calls


def _most_under_way(calls: Sequence[_Call]) -> int:
    return max(1, sorted((call.under_way for call in calls), reverse=True)[:LARGEST_CALLS][-1])


def _groups_per_s(calls: Sequence[_Call]) -> Estimate | None:
    """μ of the worker that made these calls; None where fewer than two were full."""
    if not calls:
        return None
    most = _most_under_way(calls)
    full = [call for call in calls if call.under_way >= FULL_SHARE * most]
    each_s = robust_mean([call.busy_s / call.size for call in full], [call.weight * call.size for call in full])
    return None if each_s is None or each_s.value <= 0 else each_s.inverse()


def _latency(groups: Sequence[GroupTime]) -> Empirical | None:
    """The weighted distribution of L, as the means of equal shares of it, from the fastest to the slowest."""
    if not groups:
        return None
    latencies_s = sorted(group.scored_at_s - group.leased_at_s for group in groups)
    slowest_s = latencies_s[len(groups) - 1 - math.ceil(FARTHEST_SHARE * len(groups))] if len(groups) > 1 else latencies_s[0]
    weights = _weights(len(groups), HALF_LIFE_GROUPS)
    drawn_in = sorted(
        (min(max(0.0, group.scored_at_s - group.leased_at_s), slowest_s), weight)
        for group, weight in zip(groups, weights, strict=True)
    )
    points = min(LATENCY_POINTS, len(groups))
    portion = math.fsum(weights) / points
    samples_s: list[float] = []
    filled = sum_s = 0.0
    for seconds, weight in drawn_in:
        while len(samples_s) < points - 1 and filled + weight >= portion:
            part = portion - filled
            samples_s.append((sum_s + part * seconds) / portion)
            weight, filled, sum_s = weight - part, 0.0, 0.0
        filled, sum_s = filled + weight, sum_s + weight * seconds
    samples_s.append(sum_s / filled if filled else drawn_in[-1][0])
    return Empirical(tuple(samples_s))


def _figure(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "count": estimate.count}


def _measured(place: str, estimate: Estimate, observed: str, unit: str = "") -> str:
    return f"measured in {place}: {estimate.low:.3g} … {estimate.high:.3g}{unit} (95 %, {estimate.count} {observed})"
