"""How long a broadcast must take at least, what it costs, and who is dealt which chunk while it runs.

Invariants: pure, without clock or network. The bound holds for every way of dissemination that uses these links alone. A chunk
is dealt once; it leaves an owner's backlog when the owner's credit returns or the owner is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HORIZON_S = 0.4
"""Backlog that an owner may have: long enough to keep its uplink busy over a round trip, short enough to follow its rate."""
SERVICE_WEIGHT = 0.2
"""Weight of the newest credit in the estimate of an owner's service time."""
FASTER_WEIGHT = 0.5
"""The same where the credit shows a faster uplink: an owner may seem slow for want of chunks, never fast."""
HOPE = 0.95
"""Factor on an idle owner's service time for each chunk that goes directly: so that a bad estimate is tried again."""
LEAST_BACKLOG = 3
"""Chunks that an owner may have while there is time, however slow it is, and before its first credit returns: one that it
forwards, one that waits, and one on its way."""
PIPELINE_OVERHEAD = 1.10
"""Measured ratio of the time to the last worker to the bound, on standing connections."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """One worker's link, in bytes per second; a worker that nobody can connect to serves nothing."""

    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    reachable: bool = True
    egress_usd_per_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the bytes come from: the learner's node, or an object store that helps it."""

    uplink_bytes_per_s: float
    egress_usd_per_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """What a broadcast of one snapshot to given links takes and costs; seconds and US dollars."""

    bound_s: float
    binding: str
    """What sets the bound: `source uplink`, `slowest downlink` or `sum of uplinks`."""
    expected_s: float
    egress_usd: float
    star_s: float
    """Time if the source sent a whole copy to every worker."""
    star_egress_usd: float


def fluid_bound_s(total_bytes: int, source: Origin, receivers: Sequence[Receiver], store: Origin | None = None) -> float:
    """T* = max(F/u_source, F/min d_i, N·F/(u_source + Σ u_i)) in seconds; uplinks of unreachable workers are left out.

    An object store counts as one more uplink in the sum.
    """
    return max(_terms_s(total_bytes, source, receivers, store).values())


def plan_broadcast(
    total_bytes: int, source: Origin, receivers: Sequence[Receiver], store: Origin | None = None
) -> BroadcastPlan:
    """Time and money of a broadcast, with a star as the baseline."""
    terms_s = _terms_s(total_bytes, source, receivers, store)
    binding = max(terms_s, key=lambda name: terms_s[name])
    bound_s = terms_s[binding]
    return BroadcastPlan(
        bound_s=bound_s,
        binding=binding,
        expected_s=bound_s * PIPELINE_OVERHEAD,
        egress_usd=_egress_usd(total_bytes, source, receivers, store, bound_s),
        star_s=max(len(receivers) * total_bytes / source.uplink_bytes_per_s, terms_s["slowest downlink"]),
        star_egress_usd=len(receivers) * total_bytes / 1e9 * source.egress_usd_per_gb,
    )


def _terms_s(total_bytes: int, source: Origin, receivers: Sequence[Receiver], store: Origin | None) -> dict[str, float]:
    uplinks = source.uplink_bytes_per_s + sum(r.uplink_bytes_per_s for r in receivers if r.reachable)
    if store is not None:
        uplinks += store.uplink_bytes_per_s
    return {
        "source uplink": total_bytes / source.uplink_bytes_per_s,
        "slowest downlink": total_bytes / min(r.downlink_bytes_per_s for r in receivers),
        "sum of uplinks": len(receivers) * total_bytes / uplinks,
    }


def _egress_usd(
    total_bytes: int, source: Origin, receivers: Sequence[Receiver], store: Origin | None, duration_s: float
) -> float:
    """Owners forward what they can, the source sends the rest to everybody, the store what the source has no time for."""
    count = len(receivers)
    owners = [r for r in receivers if r.reachable and r.uplink_bytes_per_s]
    capacity = sum(r.uplink_bytes_per_s for r in owners)
    forwarded = min((count - 1) * total_bytes, capacity * duration_s)
    striped = forwarded / (count - 1) if count > 1 else 0.0
    direct = count * (total_bytes - striped)
    from_source = min(direct, max(source.uplink_bytes_per_s * duration_s - striped, 0.0)) if store else direct
    usd = (striped + from_source) * source.egress_usd_per_gb
    usd += sum(forwarded * r.uplink_bytes_per_s / capacity * r.egress_usd_per_gb for r in owners)
    if store is not None:
        usd += (direct - from_source) * store.egress_usd_per_gb
    return usd / 1e9


@dataclass(frozen=True, slots=True)
class Deal:
    """Send `chunk` to `owner`, who forwards it to all others; to everybody directly where `owner` is None."""

    chunk: int
    owner: int | None


class Dealer:
    """Deals the chunks of one broadcast by credit.

    A chunk goes to the owner that would have forwarded it soonest, as long as that owner's backlog stays under
    max(min(max(H, 3·service), time remaining), 2·direct + latency), with `service` the time in which it forwards one chunk and
    `direct` that to send one to every receiver; otherwise the source, if it is idle, sends it to everybody.
    """

    def __init__(
        self,
        chunk_count: int,
        chunk_bytes: int,
        receivers: int,
        source_bytes_per_s: float,
        latency_s: float = 0.025,
        horizon_s: float = HORIZON_S,
    ) -> None:
        self._chunk_count = chunk_count
        self._chunk_bytes = chunk_bytes
        self._latency_s = latency_s
        self._horizon_s = horizon_s
        self._backlog: dict[int, set[int]] = {}
        self._service_s: dict[int, float] = {}
        self.receivers = receivers
        """Workers that take part."""
        self.source_bytes_per_s = source_bytes_per_s
        """What the source's uplink carries, as far as is known."""
        self.dealt = 0
        """Chunks dealt so far: those below this number."""

    @property
    def owners(self) -> list[int]:
        return list(self._backlog)

    @property
    def service_s(self) -> Mapping[int, float]:
        """Seconds that each owner takes to forward one chunk to all others; only owners whose rate is known."""
        return self._service_s

    @property
    def longest_threshold_s(self) -> float:
        """Backlog in seconds that some owner may have."""
        return max(map(self.threshold_s, self._service_s), default=self.threshold_s(None))

    def threshold_s(self, owner: int | None) -> float:
        """Backlog in seconds up to which an owner gets more; None for one of unknown uplink."""
        direct_s = self.receivers * self._chunk_bytes / self.source_bytes_per_s
        service_s = 0.0 if owner is None else self._service_s.get(owner, 0.0)
        busy_s = max(self._horizon_s, LEAST_BACKLOG * service_s)
        return max(min(busy_s, self.remaining_s), 2 * direct_s + self._latency_s)

    @property
    def remaining_s(self) -> float:
        """Seconds that all chunks that are not everywhere would take with every uplink busy."""
        rest = (self._chunk_count - self.dealt) * self.receivers
        held = sum(map(len, self._backlog.values())) * (self.receivers - 1)
        uplinks = sum((self.receivers - 1) * self._chunk_bytes / service_s for service_s in self._service_s.values())
        return (rest + held) * self._chunk_bytes / (self.source_bytes_per_s + uplinks)

    def add_owner(self, owner: int, service_s: float | None = None) -> None:
        """Deal to `owner` from now on; `service_s` is what an earlier broadcast showed of its uplink."""
        self._backlog.setdefault(owner, set())
        if service_s is not None:
            self._service_s[owner] = service_s

    def remove_owner(self, owner: int) -> frozenset[int]:
        """Deal nothing more to `owner`; returns the chunks that it had not forwarded."""
        self._service_s.pop(owner, None)
        return frozenset(self._backlog.pop(owner, ()))

    def backlog(self, owner: int) -> frozenset[int]:
        """Chunks that `owner` has not forwarded yet."""
        return frozenset(self._backlog.get(owner, ()))

    def credit(self, owner: int, chunk: int, service_s: float | None) -> bool:
        """`owner` forwarded `chunk`, in `service_s` if that tells of its uplink; False for a chunk not in its backlog."""
        backlog = self._backlog.get(owner)
        if backlog is None or chunk not in backlog:
            return False
        backlog.remove(chunk)
        if service_s is not None:
            known_s = self._service_s.get(owner, service_s)
            weight = SERVICE_WEIGHT if service_s > known_s else FASTER_WEIGHT
            self._service_s[owner] = known_s + weight * (service_s - known_s)
        return True

    def deal(self, source_idle: bool, among: Iterable[int] | None = None) -> Deal | None:
        """The next chunk and its owner, among these or all; None where everything is dealt or it is better to wait."""
        if self.dealt == self._chunk_count:
            return None
        owner = self.soonest(self._backlog if among is None else among)
        if owner is not None and self.wait_s(owner) <= self.threshold_s(owner):
            self._backlog[owner].add(self.dealt)
        elif source_idle and self._directly_pays(owner):
            owner = None
            self._hope()
        elif source_idle and owner is not None and not any(self._backlog.values()):
            # No credit is on its way that could change anything.
            self._backlog[owner].add(self.dealt)
        else:
            return None
        self.dealt += 1
        return Deal(self.dealt - 1, owner)

    def pass_one(self) -> int:
        """Count the next chunk as dealt, which needs no deal; returns it."""
        self.dealt += 1
        return self.dealt - 1

    def _directly_pays(self, soonest: int | None) -> bool:
        """Whether the source could send one chunk to everybody and still be done with the rest before the owners are."""
        if soonest is None:
            return True
        rest = self._chunk_count - self.dealt
        send_s = self._chunk_bytes / self.source_bytes_per_s
        if rest * self.receivers * send_s <= self.wait_s(soonest):
            return True
        source_s = (rest - 1 + self.receivers) * send_s
        chunks_per_s = sum(1 / self._hoped_s(owner) for owner in self._backlog)
        owners_s = (sum(map(len, self._backlog.values())) + rest) / chunks_per_s
        return source_s + self._latency_s + self._hoped_s(soonest) <= owners_s

    def _hoped_s(self, owner: int) -> float:
        """Service time of an owner; one of unknown uplink is taken to have the source's."""
        return self._service_s.get(owner) or max(1, self.receivers - 1) * self._chunk_bytes / self.source_bytes_per_s

    def _hope(self) -> None:
        for owner, backlog in self._backlog.items():
            if not backlog and owner in self._service_s:
                self._service_s[owner] *= HOPE

    def deal_again(self, chunk: int, among: Iterable[int]) -> int | None:
        """The owner among these that forwards a lost chunk soonest, with the chunk in its backlog; None if none is an owner."""
        owner = self.soonest(among)
        if owner is not None:
            self._backlog[owner].add(chunk)
        return owner

    def soonest(self, among: Iterable[int]) -> int | None:
        """The owner among these that would have forwarded one more chunk first; None if none of them is an owner."""
        owners = [owner for owner in among if owner in self._backlog]
        return min(owners, key=lambda owner: (self.wait_s(owner), owner), default=None)

    def wait_s(self, owner: int) -> float:
        """Seconds until `owner` would have forwarded one more chunk."""
        service_s = self._service_s.get(owner, self._horizon_s / LEAST_BACKLOG)
        return (len(self._backlog[owner]) + 1) * service_s
