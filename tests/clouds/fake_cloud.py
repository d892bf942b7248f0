"""A cloud that rents, bills, fails, delays and loses replies as it is told, for a process that may be killed at any call."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from clouds.cloud import CloudMachine, CloudTrouble, LaunchFailed
from echo2.capacity.offers import Offer
from echo2.errors import UserError
from echo2.hub.roster import DISMISSED, Roster
from echo2.protocol import Telemetry

LISTED_AFTER_END_S = 3600.0
DRAIN_S = 45.0


class Killed(BaseException):
    """The process that called is no more."""


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, call, /, *arguments, **options):
        future: Future = Future()
        try:
            future.set_result(call(*arguments, **options))
        except UserError as error:
            future.set_exception(error)
        return future


@dataclass
class Chances:
    """Of each call to go wrong in a way."""

    fails: float = 0.0
    """A launch finds no capacity."""
    lost: float = 0.0
    """A request does not arrive."""
    unanswered: float = 0.0
    """It arrives, and the reply is lost."""
    delayed: float = 0.0
    """A machine is there only minutes later."""
    preempted: float = 0.0
    """A machine is taken back in a tick."""
    killed: float = 0.0
    """The caller is killed at a call, before or after it counts."""


class FakeCloud:
    """Machines of all runs, by run and name."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.clock, self.draw, self.chances = clock, random.Random(seed), Chances()
        self.there: dict[tuple[str, str], CloudMachine] = {}
        self.ended: list[tuple[str, CloudMachine]] = []
        self.coming: dict[tuple[str, str], tuple[float, Offer]] = {}
        self.start_up_s = 120.0
        self.silent: set[str] = set()
        """Machines that are there, but not their workers."""
        self.asked: list[str] = []
        """Names of launches that arrived."""

    # --- the cloud's side

    def launch(self, run_id: str, name: str, offer: Offer, workers: int) -> None:
        with self._call():
            self.asked.append(name)
            key = (run_id, name)
            if key in self.there or key in self.coming:
                return
            if self.draw.random() < self.chances.fails:
                raise LaunchFailed("no capacity")
            delay_s = self.draw.uniform(30.0, 1500.0) if self.draw.random() < self.chances.delayed else 0.0
            if delay_s:
                self.coming[key] = (self.clock.now_s + delay_s, offer)
            else:
                self._start(key, offer)

    def machines(self, run_id: str) -> list[CloudMachine]:
        with self._call():
            horizon_s = self.clock.now_s - LISTED_AFTER_END_S
            ended = [machine for owner, machine in self.ended if owner == run_id and machine.ended_at_s > horizon_s]
            return ended + [machine for (owner, _), machine in self.there.items() if owner == run_id]

    def stop(self, run_id: str, name: str) -> None:
        with self._call():
            self.coming.pop((run_id, name), None)
            self._end((run_id, name), "stopped")

    def _call(self) -> _Call:
        return _Call(self)

    def _start(self, key: tuple[str, str], offer: Offer) -> None:
        self.there[key] = CloudMachine(key[1], offer.name, offer.price_usd_per_hour, self.clock.now_s)

    def _end(self, key: tuple[str, str], ending: str) -> None:
        if key in self.there:
            self.ended.append((key[0], replace(self.there.pop(key), ended_at_s=self.clock.now_s, ending=ending)))

    # --- the world's side

    def pass_time(self, seconds: float, roster: Roster, run_id: str) -> None:
        """Machines come up, go, and their workers register, beat and leave."""
        self.clock.now_s += seconds
        for key, (at_s, offer) in list(self.coming.items()):
            if at_s <= self.clock.now_s:
                del self.coming[key]
                self._start(key, offer)
        for key in [key for key in self.there if key[0] == run_id]:
            if self.draw.random() < self.chances.preempted:
                self._end(key, "preempted")
        roster.lose_silent(30.0)
        self._work(roster, run_id)

    def _work(self, roster: Roster, run_id: str) -> None:
        live = {worker.name: worker.worker_id for worker in roster.live_workers()}
        for (owner, name), machine in self.there.items():
            if owner != run_id or name in self.silent or self.clock.now_s - machine.launched_at_s < self.start_up_s:
                continue
            worker_id = live.get(name) or roster.register(name)[0]
            roster.heartbeat(worker_id, Telemetry(version=0))
            if roster.is_draining(worker_id):
                roster.leave(worker_id, DISMISSED)

    def bill_usd(self, run_id: str) -> float:
        """What is paid for the run's machines, those that are there up to now."""
        ended = [machine for owner, machine in self.ended if owner == run_id]
        there = [replace(m, ended_at_s=self.clock.now_s) for (owner, _), m in self.there.items() if owner == run_id]
        return sum(m.price_usd_per_hour * (m.ended_at_s - m.launched_at_s) / 3600 for m in ended + there)

    def live(self, run_id: str) -> list[CloudMachine]:
        return [machine for (owner, _), machine in self.there.items() if owner == run_id]


class _Call:
    """A call over a network that loses requests and replies, by a process that may die."""

    def __init__(self, cloud: FakeCloud) -> None:
        self._cloud = cloud

    def __enter__(self) -> None:
        self._perhaps_die()
        if self._cloud.draw.random() < self._cloud.chances.lost:
            raise CloudTrouble("the request was lost")

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self._perhaps_die()
            if self._cloud.draw.random() < self._cloud.chances.unanswered:
                raise CloudTrouble("the reply was lost")

    def _perhaps_die(self) -> None:
        if self._cloud.draw.random() < self._cloud.chances.killed:
            raise Killed


class MortalLedger:
    """The roster, for a process that may be killed at every call of it."""

    def __init__(self, roster: Roster, cloud: FakeCloud) -> None:
        self._roster, self._cloud = roster, cloud

    def __getattr__(self, name: str) -> Callable:
        method = getattr(self._roster, name)

        def call(*arguments, **options):
            if self._cloud.draw.random() < self._cloud.chances.killed / 4:
                raise Killed
            return method(*arguments, **options)

        return call
