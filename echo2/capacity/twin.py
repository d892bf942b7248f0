"""The twin at work: hub, workers and learner, event by event. `echo2.capacity.simulation` says what it keeps to.

Invariant: groups of one version differ in nothing but their end, so there are counts by version, and a heap of ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Literal

from echo2.capacity.admission import live_group_limit, oldest_trainable_version
from echo2.capacity.latencies import Latency
from echo2.capacity.model import Links, Workload
from echo2.capacity.pool import WorkerKind
from echo2.errors import UserError

Carry = Literal["every", "newest"]

ENDLESS = 2**60
"""Steps of a run whose end does not bound admission."""

HOPELESS_LOSSES = 1000
"""Times that every worker on average may be preempted within one step before that step is given up."""


class Twin:
    """One simulation; `run` may be called once."""

    def __init__(
        self,
        workload: Workload,
        links: Links,
        kinds: Sequence[WorkerKind],
        latency: Latency,
        learner_step: Latency,
        carry: Carry,
        seed: int,
    ) -> None:
        generator = random.Random(seed)
        self.workload, self.links, self.carry = workload, links, carry
        self.random, self.exponential = generator.random, generator.expovariate
        self.draw_latency_s = latency.sampler(generator)
        self.draw_step_s = learner_step.sampler(generator)
        self.now_s = 0.0
        self.ends: list[tuple[float, int, int, int]] = []
        """(end, serial, worker, version) of every group in a slot."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = 0
        self.total_steps = ENDLESS
        self.kinds: list[WorkerKind] = []
        self.version: list[int] = []
        self.limit: list[int] = []
        self.highest_limit = 0
        self.free: list[int] = []
        self.least_free: list[int] = []
        """Free slots from which on a worker asks for leases."""
        self.asking = 0
        """Workers that do."""
        self.up: list[bool] = []
        self.arrived: dict[float, int] = {}
        self.step, self.learning = 0, False
        self.oldest = oldest_trainable_version(0, workload.staleness_bound)
        self.live = self.leased = self.filtered = self.expired = self.lost = self.unassigned = 0
        self.losses_since_step = 0
        self.in_slots: dict[int, int] = {0: 0}
        self.ready: dict[int, int] = {0: 0}
        self.ready_groups = 0
        self.staleness_counts: list[list[int]] = []
        """Groups of staleness 0 … S that each step trained."""
        self.staleness_max = 0
        self.step_ends_s: list[float] = []
        self.worked_s: list[float] = []
        self.paid_usd: list[float] = []
        self.usd, self.usd_per_s, self.usd_until_s = 0.0, 0.0, 0.0
        self.waiting_snapshots: list[int] = []
        self.links_busy = False
        for kind in [each for each in kinds for _ in range(each.count)]:
            self._enrol(kind)

    def _enrol(self, kind: WorkerKind) -> int:
        """One more worker, which is not up yet; its number."""
        self.kinds.append(kind)
        self.version.append(0)
        self.limit.append(0)
        self.free.append(0)
        self.least_free.append(kind.slots if kind.in_calls else 1)
        self.up.append(False)
        return len(self.kinds) - 1

    def run(self, steps: int, total_steps: int) -> None:
        """Simulate until `steps` steps have ended."""
        self.total_steps = total_steps
        for worker in range(len(self.kinds)):
            self._launch(worker)
        self._advance(steps, math.inf)
        if self.step < steps:
            raise UserError(f"step {self.step} can never start: total_steps = {total_steps} ends the run before it")

    def _advance(self, steps: int, until_s: float) -> None:
        """What happens by `until_s`, or until `steps` steps have ended, or as long as anything does."""
        ends, events = self.ends, self.events
        while self.step < steps:
            if ends and (not events or ends[0][0] < events[0][0]):
                if ends[0][0] > until_s:
                    return
                self.now_s, _, worker, version = heappop(ends)
                self._finish(worker, version)
            elif events and events[0][0] <= until_s:
                self.now_s, _, event = heappop(events)
                event()
            else:
                return

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        self.serial += 1
        heappush(self.events, (time_s, self.serial, event))

    # --- groups

    def _finish(self, worker: int, version: int) -> None:
        """A slot's group is scored and the slot is free."""
        if version >= self.oldest:
            self.in_slots[version] -= 1
            if self.random() < self.workload.accepted_share:
                self.ready[version] += 1
                self.ready_groups += 1
                if not self.learning:
                    self._start_step()
            else:
                self.live -= 1
                self.filtered += 1
        if self.least_free[worker] > 1 or not self._lease(worker):
            self.free[worker] += 1
            self.asking += self.free[worker] == self.least_free[worker]
            if self.asking and self.live < self.highest_limit:
                self._offer()

    def _lease(self, worker: int) -> bool:
        """Give one group to a slot of `worker` if admission allows; an open lease adds no live group."""
        if self.unassigned and self.live - 1 < self.limit[worker]:
            self.unassigned -= 1
        elif self.live < self.limit[worker]:
            self.live += 1
            self.leased += 1
        else:
            return False
        version = self.version[worker]
        self.in_slots[version] += 1
        self.serial += 1
        latency_s = self.draw_latency_s() / self.kinds[worker].speed
        heappush(self.ends, (self.now_s + latency_s, self.serial, worker, version))
        return True

    def _fill(self, worker: int) -> None:
        if self.free[worker] < self.least_free[worker]:
            return
        self.asking -= 1
        while self.free[worker] and self._lease(worker):
            self.free[worker] -= 1
        self.asking += self.free[worker] >= self.least_free[worker]

    def _offer(self) -> None:
        """There is room: let every free slot ask, in the order of the pool."""
        for worker, free in enumerate(self.free):
            if free >= self.least_free[worker]:
                self._fill(worker)
                if self.live >= self.highest_limit and not self.unassigned:
                    return

    def _expire(self) -> None:
        """Drop what is now too old, whether it is ready or still in a slot."""
        for version in [version for version in self.ready if version < self.oldest]:
            ready = self.ready.pop(version)
            dropped = ready + self.in_slots.pop(version)
            self.ready_groups -= ready
            self.live -= dropped
            self.expired += dropped

    # --- the learner

    def _start_step(self) -> None:
        """Train the B oldest groups if as many are ready."""
        missing = self.workload.groups_per_batch
        if self.ready_groups < missing:
            return
        self.ready_groups -= missing
        counts = [0] * (self.workload.staleness_bound + 1)
        for version, ready in self.ready.items():
            taken = min(ready, missing)
            if taken:
                self.ready[version] = ready - taken
                counts[self.step - version] = taken
                self.staleness_max = max(self.staleness_max, self.step - version)
                missing -= taken
        self.staleness_counts.append(counts)
        self.learning = True
        step_s = self.draw_step_s()
        self.worked_s.append(step_s)
        self._at(self.now_s + step_s, self._end_step)

    def _end_step(self) -> None:
        self.learning = False
        self.losses_since_step = 0
        self.step += 1
        self.step_ends_s.append(self.now_s)
        self._pay()
        self.paid_usd.append(self.usd)
        self.oldest = oldest_trainable_version(self.step, self.workload.staleness_bound)
        self._expire()
        if self.step % self.workload.publish_interval == 0:
            self._publish()
        self._start_step()
        if self.live < self.highest_limit:
            self._offer()

    # --- snapshots

    def _publish(self) -> None:
        self.ready[self.step] = self.in_slots[self.step] = 0
        if self.carry == "newest":
            self.waiting_snapshots.clear()
        self.waiting_snapshots.append(self.step)
        if not self.links_busy:
            self._carry_next()

    def _carry_next(self) -> None:
        self.links_busy = bool(self.waiting_snapshots)
        if self.links_busy:
            version = self.waiting_snapshots.pop(0)
            self._at(self.now_s + self.links.transfer_s, partial(self._carried, version))

    def _carried(self, version: int) -> None:
        for added_s in self.arrived:
            self._at(self.now_s + self.links.fixed_s + added_s, partial(self._arrive, added_s, version))
        self._carry_next()

    def _arrive(self, added_s: float, version: int) -> None:
        """From now on the workers at this distance lease with `version`."""
        self.arrived[added_s] = version
        for worker, kind in enumerate(self.kinds):
            if kind.added_fixed_s == added_s and self.up[worker]:
                self._hold(worker, version)

    def _hold(self, worker: int, version: int) -> None:
        bound, batch = self.workload.staleness_bound, self.workload.groups_per_batch
        self.version[worker] = version
        self.limit[worker] = live_group_limit(version, bound, batch, self.total_steps)
        self.highest_limit = max(self.highest_limit, self.limit[worker])
        self._fill(worker)

    # --- workers

    def _launch(self, worker: int) -> None:
        kind = self.kinds[worker]
        self.arrived.setdefault(kind.added_fixed_s, 0)
        self._pay(kind.price_usd_per_hour / 3600)
        self._at(self.now_s + kind.start_up_s, partial(self._come_up, worker))

    def _come_up(self, worker: int) -> None:
        kind = self.kinds[worker]
        self.up[worker] = True
        self.free[worker] = kind.slots
        self.asking += 1
        if kind.preemptions_per_hour:
            self._at(self.now_s + self.exponential(kind.preemptions_per_hour / 3600), partial(self._preempt, worker))
        self._hold(worker, self.arrived[kind.added_fixed_s])

    def _preempt(self, worker: int) -> None:
        """The worker is gone; what it held is open to others once that is noticed, and it comes back after its down time."""
        kind = self.kinds[worker]
        self.losses_since_step += 1
        if self.losses_since_step > HOPELESS_LOSSES * len(self.kinds):
            raise UserError(
                f"step {self.step} never gets its batch: the workers are preempted too early; lower preemptions_per_hour"
            )
        self._pay(-kind.price_usd_per_hour / 3600)
        self._at(self.now_s + kind.down_s, partial(self._launch, worker))
        self._lose(worker, min(kind.detection_s, kind.down_s + kind.start_up_s))

    def _lose(self, worker: int, silence_s: float) -> None:
        """The worker is gone, and its leases are open to others after so long."""
        self.up[worker] = False
        self.asking -= self.free[worker] >= self.least_free[worker]
        self.free[worker] = self.limit[worker] = 0
        held = [version for _, _, owner, version in self.ends if owner == worker]
        self.ends[:] = [end for end in self.ends if end[2] != worker]
        heapify(self.ends)
        self.lost += len(held)
        if silence_s:
            self._at(self.now_s + silence_s, partial(self._reopen, held))
        else:
            self._reopen(held)

    def _reopen(self, held: list[int]) -> None:
        """The leases of a lost worker are open to others, but for what grew too old meanwhile."""
        for version in held:
            if version >= self.oldest:
                self.in_slots[version] -= 1
                self.unassigned += 1
        self._offer()

    def _pay(self, change_usd_per_s: float = 0.0) -> None:
        """Book the rent up to now, then change its rate."""
        self.usd += self.usd_per_s * (self.now_s - self.usd_until_s)
        self.usd_until_s = self.now_s
        self.usd_per_s += change_usd_per_s
