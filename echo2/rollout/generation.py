"""What a worker has under way: groups from their leases until they are in the outbox.

Invariants: no more than `slots` groups are begun at a time; what was drawn of a group is handed in after every
`worker.hand_in_tokens` tokens of its members at the latest; on leaving, all that was drawn is handed in and the leases are
returned; memory that runs out costs no token, only slots.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo2.config_sections import WorkerSection
from echo2.errors import UserError
from echo2.protocol import GroupRollouts, Lease, Sampling
from echo2.rollout.engine import Engine, OutOfMemory
from echo2.rollout.outbox import Outbox

log = logging.getLogger(__name__)
NEWEST_GROUPS = 512
"""Over which the percentiles of latencies are taken."""


@dataclass(slots=True)
class _Holding:
    """A lease under way."""

    worker_id: str
    attempt: int
    began_s: float
    handed_in_at: int
    """The engine's step after which all that was drawn was handed in."""


class Generation:
    """Drives an engine; used by one thread."""

    def __init__(self, engine: Engine, sampling: Sampling, settings: WorkerSection, outbox: Outbox) -> None:
        self._engine = engine
        self._sampling = sampling
        self._interval = settings.hand_in_tokens
        self._outbox = outbox
        self._held: dict[int, _Holding] = {}
        self._steps = 0
        self._groups = self._tokens = 0
        self._generating_s = 0.0
        self._latencies_s: deque[float] = deque(maxlen=NEWEST_GROUPS)
        self.slots = settings.slots
        """Groups that may be under way; fewer after memory ran out."""

    @property
    def under_way(self) -> int:
        return self._engine.under_way

    @property
    def room(self) -> int:
        """Groups that may begin now."""
        return self._engine.room(self.slots)

    def begin(self, worker_id: str, leases: Iterable[Lease]) -> None:
        """Take up the leases that were given to `worker_id`."""
        for lease in leases:
            if lease.group_id in self._held:
                # Its lease ran out and came back here.
                self._drop([lease.group_id])
            failed = self._engine.begin(lease, self._sampling)
            if failed is None:
                self._held[lease.group_id] = _Holding(worker_id, lease.attempt, time.monotonic(), self._steps)
            else:
                self._outbox.put(worker_id, failed)

    def step(self) -> None:
        """Draw at most one token of each member, and hand in what is done or due. Raises UserError if not one group fits."""
        self._drop([group_id for group_id, attempt in self._outbox.take_unwanted() if self._is_held(group_id, attempt)])
        if not self._held:
            return
        began_s = time.monotonic()
        try:
            done = self._engine.step()
        except OutOfMemory as error:
            self._make_do(error)
            return
        self._steps += 1
        for group in done:
            holding = self._held.pop(group.group_id)
            self._hand_in(holding, group)
            self._groups += 1
            self._latencies_s.append(time.monotonic() - holding.began_s)
        due = [group_id for group_id, held in self._held.items() if self._steps - held.handed_in_at >= self._interval]
        self._hand_in_parts(due)
        self._generating_s += time.monotonic() - began_s

    def leave(self) -> None:
        """Hand in all that was drawn, return the leases, and have nothing under way."""
        self._hand_in_parts(list(self._held))
        owners = {held.worker_id for held in self._held.values()}
        for worker_id in sorted(owners):
            self._outbox.put_return(worker_id, sorted(g for g, held in self._held.items() if held.worker_id == worker_id))
        self._drop(list(self._held))

    def figures(self) -> dict[str, Any]:
        """What `Telemetry` says of it."""
        open_tokens = self._engine.open_tokens
        latencies_s = self._latencies_s
        median_s, slow_s, slowest_s = np.percentile(latencies_s, (50, 90, 99)).tolist() if latencies_s else [None] * 3
        return {
            "groups": self._groups,
            "tokens": self._tokens + open_tokens,
            "open_tokens": open_tokens,
            "generating_s": self._generating_s,
            "slots": self._engine.limit(self.slots),
            "latency_p50_s": median_s,
            "latency_p90_s": slow_s,
            "latency_p99_s": slowest_s,
        }

    def _is_held(self, group_id: int, attempt: int) -> bool:
        return group_id in self._held and self._held[group_id].attempt == attempt

    def _hand_in(self, holding: _Holding, group: GroupRollouts) -> None:
        self._outbox.put(holding.worker_id, group)
        self._tokens += sum(len(rollout.token_ids) for rollout in group.rollouts)

    def _hand_in_parts(self, group_ids: Sequence[int]) -> None:
        for group in self._engine.parts(group_ids):
            self._hand_in(self._held[group.group_id], group)
        for group_id in group_ids:
            self._held[group_id].handed_in_at = self._steps

    def _drop(self, group_ids: Sequence[int]) -> None:
        self._engine.drop(group_ids)
        for group_id in group_ids:
            del self._held[group_id]

    def _make_do(self, error: OutOfMemory) -> None:
        """Memory ran out: give back what is under way, with all that was drawn, and begin half as much from now on."""
        if self.slots == 1:
            raise UserError(
                f"one group at a time does not fit this worker's memory ({error}): lower batch.members or "
                f"sampling.max_completion_tokens, or take a larger machine"
            ) from error
        self.slots = max(1, self.slots // 2)
        told = f"memory ran out with {self.under_way} groups under way: {self.slots} at a time from now on"
        log.warning("%s (%s)", told, error)
        self._outbox.put_note("worker out of memory", next(iter(self._held.values())).worker_id, told)
        self.leave()
