"""D_tx from what travels and the links that it takes: T* of a broadcast, or a copy to each worker.

Invariants: pure; T* has its one definition in `echo2.dissemination.broadcast.plan`; where bytes or an uplink are not known
nothing is said; what a run saw counts more than what the configuration lets expect.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echo2.capacity.tables import counted, duration
from echo2.dissemination.broadcast.plan import BroadcastPlan, Origin, Receiver, plan_broadcast

if TYPE_CHECKING:
    from echo2.config import Config

KB, MB, GB = 1e3, 1e6, 1e9


@dataclass(frozen=True, slots=True)
class SeenLinks:
    """What a run saw of its snapshots and links; None for what it did not."""

    full_bytes: float | None = None
    delta_bytes: float | None = None
    source_bytes_per_s: float | None = None
    """The hub's uplink."""
    worker_bytes_per_s: float | None = None
    """A worker's uplink, the mean of all."""


UNSEEN = SeenLinks()


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a version's way to the workers is made of."""

    full_bytes: float
    delta_bytes: float | None
    """None where deltas are not smaller."""
    deltas: bool
    """Whether versions travel as deltas, where these are smaller."""
    peers: bool
    """Whether workers pass on to each other."""
    source_bytes_per_s: float
    worker_uplink_bytes_per_s: float | None
    """None where that is not known; with `peers` it is."""
    worker_downlink_bytes_per_s: float = math.inf

    @property
    def sent_bytes(self) -> float:
        """F: what each worker gets of a version."""
        return self.delta_bytes if self.deltas and self.delta_bytes is not None else self.full_bytes

    def seconds(self, workers: int) -> float:
        """D_tx: T* and what a broadcast was measured to take beyond it, or the time of a copy for each worker.

        100 MB of 1 GB to 8 workers that pass on 12.5 MB/s each, from a hub that sends 50 MB/s: T* = 8 · 100 / (50 + 8 · 12.5) =
        5.33 s, and 5.87 s with what comes on top; in full ten times that. Each on its own: 8 · 100 / 50 s.

        >>> link = Transfer(1e9, 1e8, True, True, 50e6, 12.5e6)
        >>> round(link.seconds(8), 2), round(replace(link, deltas=False).seconds(8), 2), replace(link, peers=False).seconds(8)
        (5.87, 58.67, 16.0)

        Twice the workers bring their uplinks along; twice the hub's uplink helps less than it would help copies:

        >>> round(link.seconds(16), 2), round(replace(link, source_bytes_per_s=100e6).seconds(8), 2)
        (7.04, 4.4)
        """
        planned = self._plan(workers)
        return planned.expected_s if self.peers else planned.star_s

    def told(self, workers: int) -> str:
        """What D_tx is made of, and the link that sets it."""
        size = quantity_of_bytes(self.sent_bytes)
        planned = self._plan(workers)
        if self.peers:
            factor = planned.expected_s / planned.bound_s
            return f"{factor:.3g} · T* of a broadcast of {size} to {counted(workers, 'worker')}: {planned.binding} binds"
        by_copies = planned.star_s > self.sent_bytes / self.worker_downlink_bytes_per_s
        binding = "source uplink" if by_copies else "slowest downlink"
        return f"{size} from the hub to each of {counted(workers, 'worker')}: {binding} binds"

    def _plan(self, workers: int) -> BroadcastPlan:
        receiver = Receiver(self.worker_uplink_bytes_per_s or 0.0, self.worker_downlink_bytes_per_s)
        return plan_broadcast(round(self.sent_bytes), Origin(self.source_bytes_per_s), [receiver] * workers)


def transfer_of(config: Config, seen: SeenLinks = UNSEEN) -> Transfer | None:
    """How versions travel in a run of this configuration; None where bytes or an uplink are not known."""
    given, dissemination = config.capacity, config.dissemination
    full_bytes = seen.full_bytes or told_bytes(config)
    source_bytes_per_s = dissemination.uplink_bytes_per_s or seen.source_bytes_per_s
    worker_bytes_per_s = given.worker_uplink_bytes_per_s if seen.worker_bytes_per_s is None else seen.worker_bytes_per_s
    if not full_bytes or not source_bytes_per_s or (dissemination.peers and worker_bytes_per_s is None):
        return None
    delta_bytes = seen.delta_bytes
    if delta_bytes is None and deltas_pay(config):
        delta_bytes = given.delta_share * full_bytes
    return Transfer(
        full_bytes=full_bytes,
        delta_bytes=delta_bytes if delta_bytes is not None and delta_bytes < full_bytes else None,
        deltas=dissemination.deltas,
        peers=dissemination.peers,
        source_bytes_per_s=source_bytes_per_s,
        worker_uplink_bytes_per_s=worker_bytes_per_s,
        worker_downlink_bytes_per_s=given.worker_downlink_bytes_per_s or math.inf,
    )


def told_bytes(config: Config) -> int:
    """Bytes of a snapshot in full as far as the configuration tells; 0 where it does not."""
    simulated = config.learner.engine == "simulated"
    return config.capacity.snapshot_bytes or (config.learner.simulated_snapshot_bytes if simulated else 0)


def deltas_pay(config: Config) -> bool:
    """Whether deltas are smaller: in float32 most weights change with every step, and a simulated learner changes all."""
    return config.learner.engine != "simulated" and config.model.dtype == "bfloat16"


def cap_warning(config: Config, full_bytes: float) -> str:
    """That a snapshot in full cannot reach the workers in time under the cap on the hub's uplink, with figures; else empty.

    `full_bytes` is its size, 0 for unknown. The least time is that of one copy where workers pass on, else of one for each.
    """
    cap_bytes_per_s, limit_s = config.dissemination.uplink_bytes_per_s, config.dissemination.timeout_s
    copies = 1 if config.dissemination.peers else max(1, config.fleet.workers)
    if not cap_bytes_per_s or copies * full_bytes / cap_bytes_per_s <= limit_s:
        return ""
    staleness = config.staleness
    fresh_steps = staleness.bound + 1 - staleness.publish_interval
    fresh_s = fresh_steps * config.capacity.learner_step_s
    each = " for each of them" if copies > 1 else ""
    return (
        f"dissemination.uplink_bytes_per_s = {cap_bytes_per_s:g} lets a snapshot in full, about {quantity_of_bytes(full_bytes)}"
        f"{each}, reach the workers after {duration(copies * full_bytes / cap_bytes_per_s)} at the soonest, over "
        f"dissemination.timeout_s = {limit_s:g}, and versions are fresh for {counted(fresh_steps, 'step')} (S + 1 − κ), "
        f"{duration(fresh_s)} at capacity.learner_step_s = {config.capacity.learner_step_s:g}: a cap of "
        f"{quantity_of_bytes(copies * full_bytes / limit_s)}/s is the least that is of use"
    )


def changed_transfer(
    measured_in: Config, config: Config, seen: SeenLinks, given: Collection[str]
) -> tuple[Transfer | None, Transfer | None]:
    """How versions travelled in a run that was measured, and would with another configuration.

    Keys of [capacity] that the user has `given` count instead of what was seen.
    """
    if seen.full_bytes and seen.delta_bytes is None and measured_in.dissemination.deltas:
        # The run would have sent deltas, had they been smaller.
        seen = replace(seen, delta_bytes=seen.full_bytes)
    asked = seen
    if "capacity.snapshot_bytes" in given or "capacity.delta_share" in given:
        asked = replace(asked, full_bytes=None if "capacity.snapshot_bytes" in given else seen.full_bytes, delta_bytes=None)
    if "capacity.worker_uplink_bytes_per_s" in given:
        asked = replace(asked, worker_bytes_per_s=None)
    return transfer_of(measured_in, seen), transfer_of(config, asked)


@dataclass(frozen=True, slots=True)
class Variation:
    """Another way for versions to travel."""

    name: str
    workers: int
    transfer: Transfer


def variations(transfer: Transfer, workers: int) -> tuple[Variation, ...]:
    """As it is, with more workers, with a faster uplink, with deltas on or off, with workers that pass on or do not.

    >>> link = Transfer(1e9, 1e8, True, True, 50e6, 12.5e6)
    >>> for variation in variations(link, 8):
    ...     print(variation.name, round(variation.transfer.seconds(variation.workers), 2))
    as planned, 8 workers 5.87
    16 workers 7.04
    source uplink of 100 MB/s 4.4
    in full, 1 GB 58.67
    each from the hub 16.0
    """
    faster = replace(transfer, source_bytes_per_s=2 * transfer.source_bytes_per_s)
    found = [
        Variation(f"as planned, {counted(workers, 'worker')}", workers, transfer),
        Variation(f"{2 * workers} workers", 2 * workers, transfer),
        Variation(f"source uplink of {quantity_of_bytes(faster.source_bytes_per_s)}/s", workers, faster),
    ]
    if transfer.delta_bytes is not None:
        other = replace(transfer, deltas=not transfer.deltas)
        name = f"{'as deltas' if other.deltas else 'in full'}, {quantity_of_bytes(other.sent_bytes)}"
        found.append(Variation(name, workers, other))
    if transfer.worker_uplink_bytes_per_s is not None:
        name = "each from the hub" if transfer.peers else "by way of each other"
        found.append(Variation(name, workers, replace(transfer, peers=not transfer.peers)))
    return tuple(found)


def quantity_of_bytes(count: float) -> str:
    """Bytes in a unit that suits them.

    >>> quantity_of_bytes(2.5e6), quantity_of_bytes(1.19e9)
    ('2.5 MB', '1.19 GB')
    """
    unit, name = (GB, "GB") if count >= GB else (MB, "MB") if count >= MB else (KB, "kB")
    return f"{count / unit:.3g} {name}"
