"""What a broadcast was like: who had it when, who hindered it, and into what chunks the next is therefore cut."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from echo2.dissemination.manifest import CHUNK_STEP_BYTES, LEAST_CHUNK_BYTES, fitting_chunk_bytes

PASS_ON_S = 0.04
"""Time in which a worker passes one chunk on to all others."""
FIRST_CHUNK_BYTES, MOST_CHUNK_BYTES = 64 * 1024, 1024 * 1024
"""Largest chunks while nothing is known of the uplinks, and at all."""


@dataclass(frozen=True, slots=True)
class BroadcastEvent:
    """Something that somebody did to a broadcast."""

    kind: str
    """`stalled`, `corrupt`, `replayed`, `withheld`, `unlinked`, `malformed`, `left` or `refused`."""
    culprit: str
    """Name of the worker that did it, or address of a stranger."""
    reporter: str
    """Name of who saw it."""
    version: int | None
    detail: str
    unix_s: float = field(default_factory=time.time)

    @property
    def ordinary(self) -> bool:
        """Whether it happens whenever a worker goes."""
        return self.kind in ("left", "unlinked")


@dataclass(frozen=True, slots=True)
class Arrival:
    """How one worker received a version; seconds from the start of the broadcast, and from its announcement for each chunk."""

    worker: str
    done_s: float
    bytes_per_s: float
    chunk_arrivals_s: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class BroadcastRecord:
    """One version's broadcast; `bound_s` is T* for the uplinks as they were seen, 0 while nothing is known of them."""

    version: int
    total_bytes: int
    started_unix_s: float
    bound_s: float
    arrivals: tuple[Arrival, ...]
    """In the order in which the workers had everything."""
    sent_bytes: int
    """What the source sent, control and repeats included."""
    source_uplink_bytes_per_s: float = 0.0
    """As it was seen, or the cap on it; 0 while it is not known."""
    worker_uplink_bytes_per_s: float = 0.0
    """Mean of the workers' uplinks as they were seen, one that passed nothing on as 0."""

    @property
    def first_s(self) -> float | None:
        return self.arrivals[0].done_s if self.arrivals else None

    @property
    def median_s(self) -> float | None:
        return self.arrivals[(len(self.arrivals) - 1) // 2].done_s if self.arrivals else None

    @property
    def last_s(self) -> float | None:
        return self.arrivals[-1].done_s if self.arrivals else None

    @property
    def metrics(self) -> dict[str, float]:
        """By the names of a step's metrics, those that are known; seconds are from the start of the broadcast."""
        found = {
            "version": float(self.version),
            "bound_s": self.bound_s,
            "first_s": self.first_s,
            "median_s": self.median_s,
            "last_s": self.last_s,
            "source_uplink_bytes_per_s": self.source_uplink_bytes_per_s,
            "worker_uplink_bytes_per_s": self.worker_uplink_bytes_per_s,
        }
        return {f"dissemination/{name}": value for name, value in found.items() if value}


def chunk_bytes_after(former: BroadcastRecord | None, total_bytes: int) -> int:
    """Size of the chunks for a payload when the version before was broadcast so.

    A chunk is no larger than a worker passes on to all others in `PASS_ON_S`: then every uplink is soon busy, and the last
    chunk is soon passed on. On fast links it is larger, since each chunk costs processor time.
    """
    others = len(former.arrivals) - 1 if former else 0
    if former is None or others < 1 or not former.worker_uplink_bytes_per_s:
        return fitting_chunk_bytes(total_bytes, FIRST_CHUNK_BYTES)
    passed_on = int(PASS_ON_S * former.worker_uplink_bytes_per_s / others) // CHUNK_STEP_BYTES * CHUNK_STEP_BYTES
    return fitting_chunk_bytes(total_bytes, min(max(passed_on, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES))


RECORD: TypeAdapter[BroadcastRecord] = TypeAdapter(BroadcastRecord)
"""Reads and writes records as JSON."""
