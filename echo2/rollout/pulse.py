"""Heartbeats, from a thread of their own, so that a worker which is busy is not taken for dead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from echo2.errors import UserError
from echo2.hub.client import HubClient, HubUnavailable
from echo2.protocol import Telemetry
from echo2.rollout.background import Background

log = logging.getLogger(__name__)


class Pulse(Background):
    """Tells the hub every `interval_s` that the worker lives; registers again where the hub has given it up.

    Ends with NameTaken where another process is this worker now.
    """

    def __init__(
        self, client: HubClient, name: str, worker_id: str, interval_s: float, telemetry: Callable[[], Telemetry]
    ) -> None:
        super().__init__("pulse")
        self._client = client
        self._name = name
        self._interval_s = interval_s
        self._telemetry = telemetry
        self.worker_id = worker_id
        """The id under which the hub knows this worker now."""

    def say_goodbye(self, reason: str) -> None:
        """Leave the hub's roster with the last figures, for this `reason` where there is one.

        A hub that is away finds out by itself.
        """
        try:
            self._client.heartbeat(self.worker_id, self._telemetry())
        except HubUnavailable:
            return
        except UserError as error:
            log.info("%s", error)
        with contextlib.suppress(UserError):
            self._client.leave(self.worker_id, reason)

    def _loop(self) -> None:
        while not self.stopping.wait(self._interval_s):
            try:
                self._beat()
            except HubUnavailable as error:
                self._client.warn(error)

    def _beat(self) -> None:
        try:
            self._client.heartbeat(self.worker_id, self._telemetry())
        except HubUnavailable:
            raise
        except UserError as error:
            if not self.stopping.is_set():
                log.warning("%s", error)
                self._register_again()

    def _register_again(self) -> None:
        self.worker_id = self._client.register(self._name).worker_id
        telemetry = self._telemetry()
        if telemetry.version is not None:
            self._client.loaded(self.worker_id, telemetry)
