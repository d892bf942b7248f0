"""Replay: the reconciler's own code on a virtual clock, against traces of spot machines, with the twin for hub and learner.

Invariants: `clouds.reconciler.reconcile` decides, and nothing else; it sees what `echo2 fleet` would see, and no trace; the
same arguments give the same result; a zone never has more spot machines than its trace says.

The reconciler is asked every `activation.pace.period_s`, when a machine is ready, and once the hub misses the heartbeats of
one that was taken back. A launch where nothing is left fails, and costs nothing; a machine is paid for from launch to end, and
works `start_up_s` later. Where a trace says that there are fewer machines than run, who goes is drawn by lot, without notice.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from clouds.reconciler import Action, Machine, Memory, reconcile
from clouds.replay_market import TracedMarket
from clouds.traces import TraceSet
from echo2.capacity.live_twin import LiveTwin
from echo2.capacity.offers import Candidate
from echo2.capacity.plan import Plan
from echo2.capacity.pool import WorkerKind
from echo2.capacity.rented_pool import worker_kind
from echo2.capacity.tables import duration, percent
from echo2.config import Config

log = logging.getLogger(__name__)

TOLD_INTERVAL_S = 10.0
"""Time between two words on how far a long replay is."""

SAMPLES = 500
"""Points of a series."""


@dataclass(slots=True)
class Tally:
    """What was rented in one place."""

    launches: int = 0
    """That gave a machine."""
    failed: int = 0
    """That found none."""
    preempted: int = 0
    hours: float = 0.0
    usd: float = 0.0
    """Rent and traffic."""
    generated: int = 0
    """Groups that were finished."""
    could_generate: float = 0.0
    """Groups that would have been, had every paid second been spent on them."""

    @property
    def idle_share(self) -> float:
        """Share of what was paid in which nothing was finished: starts, waiting for leases, what was lost under way."""
        return max(0.0, 1 - self.generated / self.could_generate) if self.could_generate else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment."""

    at_s: float
    available: int
    """Spot machines that all zones had."""
    spot: int
    """Spot machines that worked."""
    on_demand: int
    steps: int
    """That had ended."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it."""

    traces: str
    duration_s: float
    learner_step_s: float
    steps: int
    """That ended."""
    rollouts: int
    """That they trained."""
    places: dict[str, Tally]
    """By zone, and for machines on demand by region."""
    samples: tuple[Sample, ...]
    staleness_max: int

    @property
    def utilisation(self) -> float:
        """Share of the time in which the learner worked; a step under way does not count."""
        return self.steps * self.learner_step_s / self.duration_s

    @property
    def total(self) -> Tally:
        """Over all places."""
        each = self.places.values()
        return Tally(
            sum(tally.launches for tally in each),
            sum(tally.failed for tally in each),
            sum(tally.preempted for tally in each),
            math.fsum(tally.hours for tally in each),
            math.fsum(tally.usd for tally in each),
            sum(tally.generated for tally in each),
            math.fsum(tally.could_generate for tally in each),
        )

    @property
    def usd_per_step(self) -> float:
        """Rent and traffic of all machines by steps; infinite where none ended."""
        return self.total.usd / self.steps if self.steps else math.inf

    @property
    def usd_per_1000_rollouts(self) -> float:
        """The same by rollouts that were trained."""
        return 1000 * self.total.usd / self.rollouts if self.rollouts else math.inf


@dataclass(slots=True)
class _Rented:
    """A machine that is paid for."""

    machine: Machine
    candidate: Candidate
    ready_at_s: float
    counted_at_s: float
    """Up to when its hours are in the books."""
    workers: tuple[int, ...] = ()
    """In the twin, once it is ready."""


class Replay:
    """One replay; `run` may be called once."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        traces: TraceSet,
        market: TracedMarket,
        *,
        machines_each: int = 1,
        replaces: bool = True,
        seed: int = 0,
    ) -> None:
        """`machines_each` machines stand behind every one of the traces and share its fate. Without `replaces`, nothing is done
        any more once the whole need is met for the first time."""
        self._config, self._plan, self._traces, self._market = config, plan, traces, market
        self._pace, self._silence_s = config.activation.pace, config.hub.heartbeat_timeout_s
        self._each, self._replaces = machines_each, replaces
        self._draw = random.Random(f"{seed} {traces.name}")
        self._twin = LiveTwin(plan.workload, plan.links, plan.terms.latency, seed)
        self._capacity = dict.fromkeys((zone.zone for zone in traces.zones), 0)
        self._rented: dict[str, _Rented] = {}
        self._places: dict[str, Tally] = defaultdict(Tally)
        self._memory, self._now_s, self._tick_at_s = Memory(), 0.0, 0.0
        self._filled = False
        self._samples: list[Sample] = []

    def run(self, most_s: float = math.inf) -> Replayed:
        """From the first moment of the traces until the first zone was watched no more, or for `most_s`."""
        duration_s = min(most_s, self._traces.duration_s)
        changes = [*reversed(self._traces.changes())]
        sample_s, next_sample_s, told_at = duration_s / SAMPLES, 0.0, time.monotonic()
        while True:
            ready_at_s = min((each.ready_at_s for each in self._rented.values() if not each.workers), default=math.inf)
            change_at_s = changes[-1][0] if changes else math.inf
            self._now_s = min(duration_s, self._tick_at_s, ready_at_s, change_at_s, next_sample_s)
            self._twin.advance(self._now_s)
            while changes and changes[-1][0] <= self._now_s:
                _, zone, machines = changes.pop()
                self._capacity[zone] = machines * self._each
                self._take_back(zone)
            self._bring_up()
            if next_sample_s <= self._now_s:
                next_sample_s += sample_s
                self._sample()
                if time.monotonic() - told_at >= TOLD_INTERVAL_S:
                    told_at, share = time.monotonic(), percent(self._now_s / duration_s)
                    log.info("%s: %s of %s are replayed", self._traces.name, share, duration(duration_s))
            if self._now_s >= duration_s:
                return self._result(duration_s)
            if self._tick_at_s <= self._now_s:
                self._tick()

    # --- the clouds' side

    def _in_zone(self, zone: str) -> list[str]:
        """Spot machines that are there, launched and draining ones included."""
        return [name for name, each in self._rented.items() if each.candidate.offer.spot and each.candidate.offer.zone == zone]

    def _take_back(self, zone: str) -> None:
        there = self._in_zone(zone)
        for name in self._draw.sample(there, max(0, len(there) - self._capacity[zone])):
            self._places[zone].preempted += 1
            self._end(name, self._silence_s, lost=1)
            self._tick_at_s = min(self._tick_at_s, self._now_s + self._silence_s)

    def _bring_up(self) -> None:
        for each in self._rented.values():
            if not each.workers and each.ready_at_s <= self._now_s:
                kind = self._kind(each.candidate)
                each.workers = tuple(self._twin.join(kind) for _ in range(kind.count))
                each.machine = replace(each.machine, phase="ready")
                self._tick_at_s = self._now_s

    def _kind(self, candidate: Candidate) -> WorkerKind:
        return worker_kind(candidate, 1, self._plan.links, self._plan.terms.latency, self._plan.in_calls, 0.0).standing()

    def _launch(self, action: Action, candidate: Candidate) -> None:
        offer, place = action.offer, action.offer.zone or action.offer.region
        if offer.spot and len(self._in_zone(offer.zone)) >= self._capacity[offer.zone]:
            self._places[place].failed += 1
            return
        self._places[place].launches += 1
        machine = Machine(action.name, offer, "launching", self._now_s)
        self._rented[action.name] = _Rented(machine, candidate, self._now_s + candidate.start_up_s, self._now_s)

    def _end(self, name: str, silence_s: float, lost: int = 0) -> None:
        each = self._rented.pop(name)
        self._count(each, lost)
        place = self._places[each.candidate.offer.zone or each.candidate.offer.region]
        place.generated += sum(self._twin.leave(worker, silence_s) for worker in each.workers)

    def _count(self, each: _Rented, lost: int = 0) -> None:
        """Bring its hours into the books."""
        hours, candidate = (self._now_s - each.counted_at_s) / 3600, each.candidate
        place = self._places[candidate.offer.zone or candidate.offer.region]
        place.hours += hours
        place.usd += hours * candidate.usd_per_hour
        place.could_generate += hours * 3600 * candidate.groups_per_s
        self._market.count(candidate.offer, hours, lost)
        each.counted_at_s = self._now_s

    # --- the fleet's side

    def _tick(self) -> None:
        """One reconciliation, and what it asks for."""
        self._tick_at_s = self._now_s + self._pace.period_s
        if self._filled and not self._replaces:
            return
        for each in self._rented.values():
            self._count(each)
            if each.machine.phase == "draining" and all(map(self._twin.is_idle, each.workers)):
                each.machine = replace(each.machine, phase="done")
        candidates = self._market.look(self._now_s)
        machines = [each.machine for each in self._rented.values()]
        self._memory, actions = reconcile(
            self._memory, candidates, self._market.demand, self._market.limits, machines, self._now_s, self._pace
        )
        by_name = {candidate.offer.name: candidate for candidate in candidates}
        for action in actions:
            if action.kind == "launch":
                self._launch(action, by_name[action.offer.name])
            elif action.kind == "stop":
                self._end(action.name, 0.0)
            elif action.kind == "drain":
                self._drain(self._rented[action.name])
        ready = Counter(each.machine.offer.name for each in self._rented.values() if each.machine.phase == "ready")
        whole = self._memory.goal_groups_per_s >= self._market.demand.needed_groups_per_s
        self._filled = self._filled or (whole and ready == Counter(self._memory.plan))

    def _drain(self, each: _Rented) -> None:
        if each.machine.phase == "ready":
            each.machine = replace(each.machine, phase="draining", draining_since_s=self._now_s)
            for worker in each.workers:
                self._twin.drain(worker)

    # --- what is seen of it

    def _sample(self) -> None:
        working = Counter(each.candidate.offer.spot for each in self._rented.values() if each.workers)
        available, steps = sum(self._capacity.values()), self._twin.step
        self._samples.append(Sample(self._now_s, available, working[True], working[False], steps))

    def _result(self, duration_s: float) -> Replayed:
        for name in list(self._rented):
            self._end(name, 0.0)
        steps, workload = self._twin.step, self._plan.workload
        return Replayed(
            traces=self._traces.name,
            duration_s=duration_s,
            learner_step_s=workload.learner_step_s,
            steps=steps,
            rollouts=steps * workload.groups_per_batch * self._config.batch.members,
            places=dict(sorted(self._places.items())),
            samples=tuple(self._samples),
            staleness_max=self._twin.staleness_max,
        )
