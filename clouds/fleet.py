"""The fleet: the workers that run, kept at what the plan asks for.

Invariants: a worker that died is replaced, with pauses that grow while it keeps dying early; every paid interval is told to the
ledger, from launch to termination; a budget is never exceeded; when the fleet stops, nothing that it started is left.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from clouds.budget import Budget
from echo2.capacity.offers import Offer
from echo2.errors import UserError
from echo2.hub.client import HubClient

log = logging.getLogger(__name__)
EARLY_DEATH_S = 30.0
HOPELESS_DEATHS = 4
LONGEST_BACKOFF_S = 60.0
BUDGET_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 20.0
BUDGET_RESERVE_S = BUDGET_INTERVAL_S + STOP_TIMEOUT_S + 5.0
"""The fleet ends when the budget lasts no longer than it takes to notice and to end every worker, with some to spare."""


class WorkerBackend(ABC):
    """Where workers run: processes on this machine, or one cluster per worker in a cloud."""

    @property
    @abstractmethod
    def offer(self) -> Offer:
        """What the next worker is launched on."""

    @abstractmethod
    def launch(self, name: str) -> None:
        """Start the worker called `name`. Returns once it was asked for, not once it is ready."""

    @abstractmethod
    def running(self) -> set[str]:
        """Names of the workers whose machine or process is there."""

    @abstractmethod
    def terminate(self, names: set[str], timeout_s: float) -> None:
        """End these workers, kindly at first; when this returns they are gone."""

    @abstractmethod
    def ending(self, name: str) -> str:
        """How the worker ended, for a message: by which signal, or with which exit code and last words."""


class Fleet:
    """Keeps `size` workers running on a backend."""

    def __init__(
        self,
        backend: WorkerBackend,
        hub: HubClient,
        size: int,
        restart_backoff_s: float,
        budget_usd: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._hub = hub
        self._names = [f"worker-{number}" for number in range(size)]
        self._backoff_s = restart_backoff_s
        self._clock = clock
        self._budget = Budget(budget_usd, hub.cost_usd, clock)
        self._next_budget_check = -math.inf
        self.over_budget = ""
        """Why the fleet ended itself, for a message; empty while it did not."""
        self._launched_at: dict[str, float] = {}
        self._endings: dict[str, str] = {}
        self._early_deaths = dict.fromkeys(self._names, 0)
        self._not_before = dict.fromkeys(self._names, 0.0)
        self._stopped = False
        self._busy = threading.Lock()

    def reconcile(self) -> None:
        """Replace who died; to be called about once a second."""
        with self._busy:
            if self._stopped or self._ended_by_budget():
                return
            running = self._backend.running()
            for name in self._names:
                if name in running:
                    continue
                if name in self._launched_at:
                    self._mourn(name)
                if self._clock() >= self._not_before[name]:
                    self._launch(name)

    def let_go(self) -> None:
        """From now on whoever leaves is not replaced: the run's last step is done."""
        with self._busy:
            self._stopped = True

    def raise_if_hopeless(self) -> None:
        """Raises UserError once every worker has died early `HOPELESS_DEATHS` times in a row: starting more would not help."""
        if self._names and min(self._early_deaths.values()) >= HOPELESS_DEATHS:
            first = self._names[0]
            raise UserError(
                f"every worker ended {HOPELESS_DEATHS} times right after its start; "
                f"{first} the last time: {self._endings[first]}"
            )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End every worker; none is launched afterwards."""
        with self._busy:
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        self._stopped = True
        self._backend.terminate(set(self._names), timeout_s)
        for name in self._launched_at:
            self._tell(partial(self._hub.close_interval, name))
        self._launched_at.clear()

    def _ended_by_budget(self) -> bool:
        """Whether what is left of the budget is no more than it takes to end in time; then everything is ended."""
        if self._clock() < self._next_budget_check:
            return False
        self._next_budget_check = self._clock() + BUDGET_INTERVAL_S
        usd_per_hour = len(self._names) * self._backend.offer.price_usd_per_hour
        if self._budget.lasts_s(usd_per_hour) > BUDGET_RESERVE_S:
            return False
        self.over_budget = (
            f"activation.budget_usd = {self._budget.limit_usd:g} lasts no longer at {usd_per_hour:g} USD/h: raise it to go on"
        )
        log.warning("the fleet ends: %s", self.over_budget)
        self._end(STOP_TIMEOUT_S)
        return True

    def _launch(self, name: str) -> None:
        offer = self._backend.offer
        self._tell(partial(self._hub.open_interval, name, offer.name, offer.price_usd_per_hour))
        self._backend.launch(name)
        self._launched_at[name] = self._clock()

    def _mourn(self, name: str) -> None:
        lived_s = self._clock() - self._launched_at.pop(name)
        early = lived_s < EARLY_DEATH_S
        self._early_deaths[name] = self._early_deaths[name] + 1 if early else 0
        pause_s = min(LONGEST_BACKOFF_S, self._backoff_s * 2 ** max(0, self._early_deaths[name] - 1))
        self._not_before[name] = self._clock() + pause_s
        ending = self._endings[name] = self._backend.ending(name)
        log.warning("%s ended after %.0f s and is replaced in %.1f s: %s", name, lived_s, pause_s, ending)
        self._tell(partial(self._hub.close_interval, name))
        self._tell(partial(self._hub.note, "worker ended", name, ending))

    def _tell(self, message: Callable[[], None]) -> None:
        """The ledger's record must not keep the fleet from its work; what could not be told is logged."""
        try:
            message()
        except UserError as error:
            log.error("the ledger could not be told: %s", error)
