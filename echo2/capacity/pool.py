"""The pool that the twin runs: kinds of workers, each with its slots, speed, distance, reliability and price.

Invariants: frozen values; impossible numbers are refused with a UserError that names them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from echo2.errors import UserError


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """`count` equal workers."""

    count: int
    """Workers of this kind, at least 1."""
    slots: int = 1
    """Groups that one worker generates at a time, at least 1."""
    in_calls: bool = False
    """Whether it takes leases only when all its slots are free, as an engine does that generates a set of groups at a time."""
    speed: float = 1.0
    """What the latency distribution's draws are divided by, above 0."""
    added_fixed_s: float = 0.0
    """D_fix of this kind beyond that of the links, at least 0."""
    start_up_s: float = 0.0
    """From launch, and from relaunch after a preemption, until it takes leases."""
    preemptions_per_hour: float = 0.0
    """Rate λ while up; the times between are exponential."""
    down_s: float = 0.0
    """From a preemption to the relaunch; not paid."""
    detection_s: float = 0.0
    """From a preemption until its leases are open to others, at the latest when it takes leases again: the worker's successor
    is known by its name."""
    price_usd_per_hour: float = 0.0
    """Price of one worker, start-up included."""

    def standing(self) -> WorkerKind:
        """The same without what the twin would do to it: start, take back, and pay for it."""
        return replace(self, start_up_s=0.0, preemptions_per_hour=0.0, price_usd_per_hour=0.0)

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("slots", self.slots)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"a worker kind's {name} = {value!r} is not a whole number from 1 up: give how many there are")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise UserError(f"a worker kind's speed = {self.speed!r} is not a finite number above 0: give a factor, 1 for par")
        for name in ("added_fixed_s", "start_up_s", "preemptions_per_hour", "down_s", "detection_s", "price_usd_per_hour"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"a worker kind's {name} = {value!r} is not a finite number from 0 up: give its figure")


@dataclass(frozen=True, slots=True)
class Pool:
    """All workers of a run.

    >>> pool = Pool((WorkerKind(count=8, slots=4), WorkerKind(count=2, slots=8, speed=2.0)))
    >>> pool.slots, pool.groups_per_s(mean_latency_s=2.0)
    (48, 32.0)
    """

    kinds: tuple[WorkerKind, ...]

    def __post_init__(self) -> None:
        if not self.kinds:
            raise UserError("a pool without workers completes nothing: give at least one worker kind")

    @property
    def slots(self) -> int:
        """Groups that all workers generate at a time."""
        return sum(kind.count * kind.slots for kind in self.kinds)

    def groups_per_s(self, mean_latency_s: float) -> float:
        """μ: groups per second that the pool completes while all of it is up and no slot is idle."""
        return sum(kind.count * kind.slots * kind.speed for kind in self.kinds) / mean_latency_s


class PoolUnit(NamedTuple):
    """What a pool grows by: one slot that is filled as it gets free, a part of one or, in calls, a whole worker."""

    slots: int = 1
    in_calls: bool = False
    effective_slots: float = 1.0
    """Slots that are busy on average while there is work; of a worker in calls some wait for the call's slowest group."""


SLOT = PoolUnit()

UNITS_OF_A_NEED = 64
"""Units that the least throughput a learner needs is made of at least, so that its whole slots do not raise the need."""


def unit_of_slots(least_slots: float) -> PoolUnit:
    """A slot or, where so few slots keep up with the learner that whole ones would much exceed what it needs, a part of one.

    >>> unit_of_slots(200.0) == SLOT, unit_of_slots(0.064).effective_slots
    (True, 0.001)
    """
    return PoolUnit(effective_slots=min(1.0, least_slots / UNITS_OF_A_NEED) or 1.0)
