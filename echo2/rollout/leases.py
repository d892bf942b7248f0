"""Taking leases by long-poll, so that the main thread goes on generating, or loads a snapshot, meanwhile."""

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
    """Holds at most one set of leases; asks for the next one when that was taken and there is room for it."""

    def __init__(self, client: HubClient, pulse: Pulse, news: threading.Condition) -> None:
        super().__init__("lease-taker")
        self._client = client
        self._pulse = pulse
        self._news = news
        self._room = 0
        self._held: tuple[str, list[Lease]] | None = None
        self._wanted = threading.Event()
        self.dismissed = threading.Event()

    @property
    def has_news(self) -> bool:
        """Whether there are leases to take, or this worker may leave."""
        return self._held is not None or self.dismissed.is_set()

    def take(self, room: int) -> tuple[str, list[Lease]] | None:
        """The worker id that leases were given to, and the leases, if there are any; else asks for as many as `room`.

        Leases that were asked for earlier are given whatever room there is now.
        """
        with self._news:
            held, self._held = self._held, None
            self._room = 0 if held else room
            if self._room:
                self._wanted.set()
            else:
                self._wanted.clear()
        return held

    def _loop(self) -> None:
        while not self.stopping.is_set():
            room = self._room if self._wanted.wait(0.5) else 0
            if not room:
                continue
            worker_id = self._pulse.worker_id
            try:
                answer = self._client.lease(worker_id, room, POLL_S)
            except HubUnavailable as error:
                self._client.warn(error)
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
                    self.dismissed.set()
                    self.stop()
                self._news.notify_all()
