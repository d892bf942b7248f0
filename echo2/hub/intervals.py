"""What the ledger says of each paid interval: from when to when, on what, how it ended, and whose workers it paid for.

Invariants: read-only; an interval that is paid for still ends, for its length, with the last sign of life in the ledger; every
worker belongs to at most one interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from echo2.hub.database import Database

LAST_SIGN_OF_LIFE = (
    "SELECT MAX(at) FROM (SELECT MAX(last_seen_at_s) AS at FROM workers UNION ALL SELECT MAX(finished_at_s) FROM steps"
    " UNION ALL SELECT MAX(at_s) FROM events UNION ALL SELECT MAX(launched_at_s) FROM paid_intervals)"
)


@dataclass(frozen=True, slots=True)
class PaidInterval:
    """A machine from launch to termination. Times in seconds since the epoch."""

    name: str
    """Of the machine."""
    offer: str
    """The offer's name."""
    price_usd_per_hour: float
    launched_at_s: float
    ended_at_s: float
    running: bool
    """Whether it is paid for still."""
    lost: bool
    """Whether it ended by itself; the fleet ends what it no longer needs."""
    workers: tuple[str, ...]
    """Ids of the workers that it paid for, the first to register first."""
    registered_at_s: float | None
    """When that was; None if none ever did."""

    @property
    def hours(self) -> float:
        """Never negative, though a clock may have gone back."""
        return max(0.0, self.ended_at_s - self.launched_at_s) / 3600

    @property
    def usd(self) -> float:
        """What was paid for it."""
        return self.hours * self.price_usd_per_hour


def machine_of(worker_name: str, machines: Container[str]) -> str:
    """The machine that a worker runs on: it has the machine's name, or with a number after a dot where a machine runs several.

    >>> machine_of("echo2-a-3.1", {"echo2-a-3"}), machine_of("host.example", {"echo2-a-3"})
    ('echo2-a-3', 'host.example')
    """
    prefix = worker_name.rpartition(".")[0]
    return prefix if worker_name not in machines and prefix in machines else worker_name


def read_intervals(database: Database) -> list[PaidInterval]:
    """Every paid interval, oldest first.

    A worker belongs to the interval of its machine in which it registered. The fleet notes when one ended by itself, and that
    note comes after the interval's end and before the next one of the same name.
    """
    now_s = database.value(LAST_SIGN_OF_LIFE) or 0.0
    rows = database.rows("SELECT * FROM paid_intervals ORDER BY launched_at_s")
    launches: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        launches[row["name"]].append(row["launched_at_s"])
    registered: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in database.rows("SELECT name, worker_id, registered_at_s FROM workers ORDER BY registered_at_s"):
        registered[machine_of(row["name"], launches)].append((row["registered_at_s"], row["worker_id"]))
    noted: dict[str, list[float]] = defaultdict(list)
    for row in database.rows("SELECT subject, at_s FROM events WHERE kind = 'worker ended'"):
        noted[row["subject"]].append(row["at_s"])
    found = []
    for row in rows:
        name, launched_s, terminated_s = row["name"], row["launched_at_s"], row["terminated_at_s"]
        next_s = _first_after(launches[name], launched_s, math.inf)
        workers = [(at_s, worker) for at_s, worker in registered[name] if launched_s <= at_s < next_s]
        found.append(
            PaidInterval(
                name=name,
                offer=row["offer"],
                price_usd_per_hour=row["price_usd_per_hour"],
                launched_at_s=launched_s,
                ended_at_s=now_s if terminated_s is None else terminated_s,
                running=terminated_s is None,
                lost=terminated_s is not None and any(terminated_s <= at_s <= next_s for at_s in noted[name]),
                workers=tuple(worker for _, worker in workers),
                registered_at_s=workers[0][0] if workers else None,
            )
        )
    return found


def _first_after(times_s: Sequence[float], after_s: float, otherwise_s: float) -> float:
    return min((at_s for at_s in times_s if at_s > after_s), default=otherwise_s)
