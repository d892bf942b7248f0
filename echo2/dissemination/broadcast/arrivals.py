"""What the broadcast brings to a worker, for a follower that knows what it wants.

Invariants: a payload is handed over only under the manifest that was asked for; nobody waits for a broadcast that makes no
progress; that a worker does without the broadcast is logged once, and once more when it is back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from echo2.dissemination.broadcast.exchange import Delivery
from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.manifest import Manifest
from echo2.errors import WaitTimeout

log = logging.getLogger(__name__)
LOOK_S = 0.2
CONNECT_S = 2.0
"""How long a source may be away before its broadcast is not waited for."""
STALL_S = 3.0
"""How long nothing may arrive before the rest is not waited for."""


class Arrivals(Protocol):
    """Where payloads come from by themselves."""

    def payload(self, manifest: Manifest, stopping: Callable[[], bool]) -> bytes | None:
        """The payload of `manifest` as the broadcast brought it; None if it does not bring it."""

    def close(self) -> None:
        """Take part no longer."""


class BroadcastArrivals:
    """Deliveries of a `Peer`, which is started here."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._newest: Delivery | None = None
        self._missed = False
        peer.start()

    def payload(self, manifest: Manifest, stopping: Callable[[], bool]) -> bytes | None:
        began_s = progressed_s = time.monotonic()
        arrived_bytes = self._peer.received_bytes
        while not stopping():
            if self._newest is not None and self._newest.manifest.payload_digest == manifest.payload_digest:
                self._tell(missed=False)
                return bytes(self._newest.payload)
            if self._newest is not None and self._newest.manifest.version >= manifest.version:
                return None
            now_s = time.monotonic()
            if self._peer.received_bytes > arrived_bytes:
                arrived_bytes, progressed_s = self._peer.received_bytes, now_s
            away = not self._peer.connected and now_s - began_s > CONNECT_S
            if away or now_s - progressed_s > STALL_S:
                self._tell(missed=True, version=manifest.version)
                return None
            self._wait()
        return None

    def close(self) -> None:
        self._peer.stop()

    def _wait(self) -> None:
        try:
            self._newest = self._peer.wait(LOOK_S)
        except WaitTimeout:
            return

    def _tell(self, missed: bool, version: int = 0) -> None:
        if missed and not self._missed:
            reason = f" ({self._peer.last_error})" if self._peer.last_error else ""
            log.warning("version %d is fetched from the hub, since the broadcast does not bring it%s", version, reason)
        elif self._missed and not missed:
            log.warning("the broadcast brings snapshots again")
        self._missed = missed
