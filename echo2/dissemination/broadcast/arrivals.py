"""What the broadcast brings to a worker, for a follower that knows what it wants.

Invariants: a payload is handed over only under the manifest that was asked for; nobody waits for a broadcast that makes no
progress, nor for what it will not bring; that a worker does without the broadcast is logged once, and once more when it is
back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from echo2.dissemination.broadcast.exchange import Outlook
from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.manifest import Content, Manifest
from echo2.errors import WaitTimeout

log = logging.getLogger(__name__)
LOOK_S = 0.05
CONNECT_S = 3.0
"""How long a source may be away, or look whether this worker can be reached, before its broadcast is not waited for."""
ANNOUNCE_S = 1.0
"""How long a payload may be without announcement while nothing else arrives, before it is not waited for."""
STALL_S = 3.0
"""How long nothing may arrive of a payload that was announced, before the rest is not waited for."""
AGAIN_S = 0.2
"""How long an announcement is waited for when the one before did not come."""


class Arrivals(Protocol):
    """Where payloads come from by themselves."""

    def payload(self, manifest: Manifest, stopping: Callable[[], bool]) -> Content | None:
        """The payload of `manifest`, which stays as it is; None if it does not come."""

    def close(self) -> None:
        """Take part no longer."""


class BroadcastArrivals:
    """Deliveries of a `Peer`, which is started here."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._missed = False
        peer.start()

    def payload(self, manifest: Manifest, stopping: Callable[[], bool]) -> Content | None:
        progressed_s, arrived_bytes = time.monotonic(), self._peer.received_bytes
        connected = self._peer.connected
        while not stopping():
            delivery = self._peer.delivered(manifest)
            if delivery is not None:
                self._tell(missed=False)
                return delivery.payload
            outlook = self._peer.outlook(manifest)
            if outlook is Outlook.OVERTAKEN:
                return None
            if self._peer.received_bytes > arrived_bytes:
                progressed_s, arrived_bytes = time.monotonic(), self._peer.received_bytes
            if self._peer.connected and not connected:
                progressed_s, connected = time.monotonic(), True
            if time.monotonic() - progressed_s > self._patience_s(outlook):
                self._tell(missed=True, version=manifest.version)
                return None
            self._wait()
        return None

    def close(self) -> None:
        self._peer.stop()

    def _patience_s(self, outlook: Outlook) -> float:
        """How long nothing may arrive."""
        if outlook is Outlook.COMING:
            return STALL_S
        if self._peer.connected:
            return AGAIN_S if self._missed else ANNOUNCE_S
        return 0.0 if self._missed else CONNECT_S

    def _wait(self) -> None:
        try:
            self._peer.wait(LOOK_S)
        except WaitTimeout:
            return

    def _tell(self, missed: bool, version: int = 0) -> None:
        if missed and not self._missed:
            reason = f" ({self._peer.last_error})" if self._peer.last_error else ""
            log.warning("version %d is fetched from the hub, since the broadcast does not bring it%s", version, reason)
        elif self._missed and not missed:
            log.warning("the broadcast brings snapshots again")
        self._missed = missed
