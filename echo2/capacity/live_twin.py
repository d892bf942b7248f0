"""The twin with workers that somebody else brings and takes away.

Invariants: by the rules of `echo2.capacity.twin`; the number of a worker that left is given to the next that comes; who comes
holds the newest version that has arrived anywhere; who is told to drain takes no lease any more. Money, start-ups and
preemptions are the caller's.
"""

from __future__ import annotations

from echo2.capacity.latencies import Constant, Latency
from echo2.capacity.model import Links, Workload
from echo2.capacity.pool import WorkerKind
from echo2.capacity.twin import ENDLESS, Twin


class LiveTwin(Twin):
    """A pipeline that begins without workers at time 0 and goes on as long as it is asked to."""

    def __init__(self, workload: Workload, links: Links, latency: Latency, seed: int) -> None:
        super().__init__(workload, links, (), latency, Constant(workload.learner_step_s), "newest", seed)
        self._vacant: list[int] = []
        self.generated: list[int] = []
        """Groups that each worker finished."""

    def advance(self, until_s: float) -> None:
        """Simulate up to this time, which is not before the time that was reached."""
        self._advance(ENDLESS, until_s)
        self.now_s = until_s

    def join(self, kind: WorkerKind) -> int:
        """A worker is up, and takes leases from now on; its number, until it leaves."""
        self.arrived.setdefault(kind.added_fixed_s, max(self.arrived.values(), default=0))
        if self._vacant:
            worker = self._vacant.pop()
            self.kinds[worker], self.least_free[worker] = kind, kind.slots if kind.in_calls else 1
            self.generated[worker] = 0
        else:
            worker = self._enrol(kind)
            self.generated.append(0)
        self._come_up(worker)
        return worker

    def drain(self, worker: int) -> None:
        """It takes no lease any more."""
        self.up[worker] = False
        self.limit[worker] = 0

    def is_idle(self, worker: int) -> bool:
        """Whether it has nothing under way."""
        return self.free[worker] == self.kinds[worker].slots

    def leave(self, worker: int, silence_s: float) -> int:
        """It is gone, what it had under way is open to others after so long; returns the groups that it finished."""
        self._lose(worker, silence_s)
        self._vacant.append(worker)
        return self.generated[worker]

    def _finish(self, worker: int, version: int) -> None:
        self.generated[worker] += 1
        super()._finish(worker, version)
