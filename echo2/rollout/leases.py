"""Taking leases by long-poll, so that the main thread is free to load a snapshot while there is nothing to generate."""

from __future__ import annotations

import logging
import threading

from echo2.errors import UserError
from echo2.hub.client import HubClient, HubUnavailable
from echo2.protocol import Lease
from echo2.rollout.background import Background
from echo2.rollout.pulse import Pulse

log = logging.getLogger(__name__)
POLL_S = 10.0
REFUSED_PAUSE_S = 0.5


class LeaseTaker(Background):
    """Holds at most one set of leases; asks for the next one when that was taken and `ask` was called."""

    def __init__(self, client: HubClient, pulse: Pulse, slots: int, news: threading.Condition) -> None:
        super().__init__("lease-taker")
        self._client = client
        self._pulse = pulse
        self._slots = slots
        self._news = news
        self._held: tuple[str, list[Lease]] | None = None
        self._wanted = threading.Event()
        self.run_ended = threading.Event()

    @property
    def has_news(self) -> bool:
        """Whether there are leases to take, or the run has ended."""
        return self._held is not None or self.run_ended.is_set()

    def take(self) -> tuple[str, list[Lease]] | None:
        """The worker id that the leases were given to, and the leases; None while there are none. Asks for more if so."""
        with self._news:
            held, self._held = self._held, None
            if held is None:
                self._wanted.set()
        return held

    def _loop(self) -> None:
        while not self.stopping.is_set():
            if not self._wanted.wait(0.5):
                continue
            worker_id = self._pulse.worker_id
            try:
                answer = self._client.lease(worker_id, self._slots, POLL_S)
            except HubUnavailable as error:
                log.warning("%s", error)
                continue
            except UserError as error:
                # The hub has given this worker up; the next heartbeat registers it again.
                if not self.stopping.wait(REFUSED_PAUSE_S):
                    log.warning("%s", error)
                continue
            with self._news:
                if answer.leases:
                    self._wanted.clear()
                    self._held = (worker_id, list(answer.leases))
                elif answer.ended:
                    self.run_ended.set()
                    self.stop()
                self._news.notify_all()
