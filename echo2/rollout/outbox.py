"""What a worker has to tell the hub, in order, until the hub has acknowledged it.

Invariants: generation never waits for the network; a group stays here until the hub has it or refuses it; the order of a load
and the groups generated after it is kept.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from echo2.errors import UserError
from echo2.hub.client import HubClient, HubUnavailable
from echo2.protocol import GroupRollouts, Telemetry
from echo2.rollout.background import Background

log = logging.getLogger(__name__)


class Outbox(Background):
    """Sends groups, returns and load reports one after the other."""

    def __init__(self, client: HubClient, news: threading.Condition) -> None:
        super().__init__("outbox")
        self._client = client
        self._news = news
        self._pending: queue.Queue[Callable[[], object] | None] = queue.Queue()

    def put(self, worker_id: str, group: GroupRollouts) -> None:
        self._pending.put(lambda: self._client.post(worker_id, group))

    def put_return(self, worker_id: str, group_ids: list[int]) -> None:
        self._pending.put(lambda: self._client.return_leases(worker_id, group_ids))

    def put_loaded(self, worker_id: str, telemetry: Telemetry) -> None:
        self._pending.put(lambda: self._client.loaded(worker_id, telemetry))

    def close(self, timeout_s: float) -> None:
        """Send what is left, for at most `timeout_s`, and end; what could not be sent is counted in the log."""
        timeout_s = max(0.0, timeout_s)
        self._pending.put(None)
        self.join(timeout_s)
        self.stop()
        if not self._pending.empty():
            log.error("%d messages to hub %s could not be sent within %g s", self._pending.qsize(), self._client.url, timeout_s)

    def _loop(self) -> None:
        while True:
            send = self._pending.get()
            if send is None:
                return
            while not self._sent(send):
                if self.stopping.is_set():
                    return
                time.sleep(0.1)

    def _sent(self, send: Callable[[], object]) -> bool:
        try:
            send()
        except HubUnavailable as error:
            log.warning("%s", error)
            return False
        except UserError as error:
            log.error("%s", error)
        return True
