"""Forwarding of stripes: an owner passes each chunk on to all others and says when that is done.

Invariants: each chunk that was given gets one credit, which names everybody who was left out; a receiver that is slower than
the others holds up nobody: it is left out for a while and catches up by asking.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from echo2.dissemination.broadcast.link import Link
from echo2.dissemination.broadcast.wire import Kind

LAG_S = 0.75
"""How long a chunk may wait for one receiver that is slower than the others, or takes nothing at all."""
LAG_RATIO = 3.0
MEASURED_S = 0.1
"""Uplink's time over which the service time is averaged: acknowledgements are seen some at a time."""


@dataclass(slots=True)
class _Forwarding:
    broadcast: int
    chunk: int
    body: memoryview
    arrived_s: float
    waiting: set[int]
    skipped: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Credit:
    """`chunk` was forwarded to everybody but `skipped`."""

    broadcast: int
    chunk: int
    service_s: float
    """Seconds that the uplink took for each of the last chunks, on average; 0 while that is not known."""
    skipped: tuple[int, ...]


class Relay:
    """What one worker forwards; lives in the thread of its links."""

    def __init__(
        self,
        links: Mapping[int, Link],
        on_credit: Callable[[Credit], None],
        release: Callable[[memoryview], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`links` are the other workers' by number; `release` takes back a body that is in use no longer; by `clock` the uplink
        is measured."""
        self._links = links
        self._on_credit = on_credit
        self._release, self._clock = release, clock
        self._last_done_s = 0.0
        self._services_s: deque[float] = deque()
        self.forwarded_bytes = 0

    def forward(self, broadcast: int, chunk: int, body: memoryview, targets: Iterable[int]) -> None:
        """Send a chunk to each target that can take it."""
        forwarding = _Forwarding(broadcast, chunk, body, self._clock(), set(targets))
        ready = []
        for target in list(forwarding.waiting):
            link = self._links.get(target)
            if link is None or link.closed or link.detached:
                self._skip(forwarding, target)
            else:
                ready.append(link)
        if not ready:
            self._finish(forwarding, 0.0)
        for link in ready:
            link.send(Kind.CHUNK, broadcast, chunk, body, done=self._when_sent(forwarding, link))

    def _when_sent(self, forwarding: _Forwarding, link: Link) -> Callable[[bool], None]:
        def done(sent: bool) -> None:
            if sent:
                forwarding.waiting.discard(link.peer)
                self.forwarded_bytes += len(forwarding.body)
            else:
                self._skip(forwarding, link.peer)
            if not forwarding.waiting:
                self._finish(forwarding, link.round_trip_s if sent else 0.0)

        return done

    def _skip(self, forwarding: _Forwarding, target: int) -> None:
        forwarding.waiting.discard(target)
        forwarding.skipped.append(target)

    def _finish(self, forwarding: _Forwarding, round_trip_s: float) -> None:
        """All is acknowledged, a round trip after the uplink had done its work."""
        now_s = self._clock()
        if not forwarding.skipped:
            self._services_s.append(max(0.0, now_s - max(forwarding.arrived_s + round_trip_s, self._last_done_s)))
            self._release(forwarding.body)
        self._last_done_s = now_s
        while len(self._services_s) > 1 and sum(self._services_s) - self._services_s[0] >= MEASURED_S:
            self._services_s.popleft()
        service_s = statistics.fmean(self._services_s) if self._services_s else 0.0
        self._on_credit(Credit(forwarding.broadcast, forwarding.chunk, service_s, tuple(forwarding.skipped)))


def laggards(links: Iterable[Link]) -> list[Link]:
    """Links that take nothing, and those whose oldest chunk has waited far longer than those of most others."""
    waiting_s = {link: link.waiting_s for link in links if not link.detached}
    usual_s = statistics.median_low(waiting_s.values()) if len(waiting_s) > 1 else math.inf
    return [
        link
        for link, waited_s in waiting_s.items()
        if link.stuck_s > LAG_S or (waited_s > LAG_S and waited_s > LAG_RATIO * usual_s)
    ]
