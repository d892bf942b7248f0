"""The fleet keeps its size, tells the ledger what is paid for, and ends everything that it started."""

import os
import signal
from itertools import pairwise

import pytest

from clouds.fleet import HOPELESS_DEATHS, Fleet, WorkerBackend
from clouds.local import LocalBackend
from echo2.capacity.offers import Offer
from echo2.errors import ConfigError, UserError


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class FakeBackend(WorkerBackend):
    """Workers that are there until a test says otherwise."""

    def __init__(self):
        self.there = set()
        self.launches = []

    @property
    def offer(self):
        return Offer("fake", 1.5)

    def launch(self, name):
        self.there.add(name)
        self.launches.append(name)

    def running(self):
        return set(self.there)

    def terminate(self, names, timeout_s):
        self.there -= names

    def ending(self, name):
        return "killed by SIGKILL"


class FakeHub:
    """Remembers what a ledger would be told."""

    def __init__(self):
        self.open, self.closed, self.events, self.away = [], [], [], False
        self.spent_usd = lambda: 0.0

    def open_interval(self, name, offer, price_usd_per_hour):
        self._answer()
        self.open.append((name, offer, price_usd_per_hour))

    def close_interval(self, name):
        self._answer()
        self.closed.append(name)

    def note(self, kind, subject, detail):
        self._answer()
        self.events.append((kind, subject, detail))

    def cost_usd(self):
        self._answer()
        return self.spent_usd()

    def _answer(self):
        if self.away:
            raise UserError("the hub restarts")


@pytest.fixture
def parts():
    backend, hub, clock = FakeBackend(), FakeHub(), Clock()
    return Fleet(backend, hub, 2, restart_backoff_s=1.0, clock=clock), backend, hub, clock


def test_a_worker_that_died_is_replaced_and_both_intervals_are_paid_for(parts):
    fleet, backend, hub, clock = parts
    fleet.reconcile()
    assert backend.there == {"worker-0", "worker-1"}
    clock.now = 100.0
    backend.there.discard("worker-1")
    fleet.reconcile()
    clock.now = 101.0
    fleet.reconcile()
    assert backend.launches == ["worker-0", "worker-1", "worker-1"]
    assert hub.open == [("worker-0", "fake", 1.5), ("worker-1", "fake", 1.5), ("worker-1", "fake", 1.5)]
    assert hub.closed == ["worker-1"]
    assert hub.events == [("worker ended", "worker-1", "killed by SIGKILL")]
    fleet.stop()
    assert backend.there == set()
    assert sorted(hub.closed) == ["worker-0", "worker-1", "worker-1"]


def test_pauses_grow_while_a_worker_keeps_dying_early(parts):
    fleet, backend, _, clock = parts
    fleet.reconcile()
    launched_at = []
    for tick in range(400):
        clock.now = tick / 10
        backend.there.discard("worker-0")
        before = len(backend.launches)
        fleet.reconcile()
        if len(backend.launches) > before:
            launched_at.append(clock.now)
    gaps = [later - earlier for earlier, later in pairwise(launched_at)]
    assert gaps == sorted(gaps) and gaps[-1] >= 4 * gaps[0]


def test_a_fleet_whose_workers_all_die_at_once_is_given_up_with_how_they_ended(parts):
    fleet, backend, _, clock = parts
    for _ in range(HOPELESS_DEATHS + 1):
        clock.now += 70.0 if backend.launches else 0.0
        fleet.reconcile()
        backend.there.clear()
        fleet.reconcile()
    with pytest.raises(UserError, match="worker-0 the last time: killed by SIGKILL"):
        fleet.raise_if_hopeless()


def test_a_hub_that_restarts_does_not_keep_the_fleet_from_its_work(parts):
    fleet, backend, hub, clock = parts
    fleet.reconcile()
    hub.away = True
    clock.now = 100.0
    backend.there.clear()
    fleet.reconcile()
    clock.now = 102.0
    fleet.reconcile()
    assert backend.there == {"worker-0", "worker-1"}


def test_nothing_is_launched_after_the_stop(parts):
    fleet, backend, _, _ = parts
    fleet.reconcile()
    fleet.stop()
    fleet.reconcile()
    assert backend.there == set()


@pytest.mark.parametrize("away_from_s", [float("inf"), 100.0], ids=["the hub answers", "the hub goes away"])
def test_a_budget_ends_the_fleet_just_before_it_would_be_exceeded(parts, away_from_s):
    _, backend, hub, clock = parts
    # Two workers at 1.5 USD/h spend 3 USD in an hour.
    fleet = Fleet(backend, hub, 2, restart_backoff_s=1.0, budget_usd=3.0, clock=clock)
    hub.spent_usd = lambda: 3.0 * clock.now / 3600
    ended_s = None
    for second in range(4000):
        clock.now = float(second)
        hub.away = second >= away_from_s
        fleet.reconcile()
        if not backend.there and ended_s is None:
            ended_s = second
    assert 3550 <= ended_s <= 3580, "in time to end every worker, and no sooner"
    assert "budget_usd = 3" in fleet.over_budget and backend.launches == ["worker-0", "worker-1"]


def test_a_spent_budget_launches_nothing(parts):
    _, backend, hub, clock = parts
    hub.spent_usd = lambda: 3.1
    fleet = Fleet(backend, hub, 2, restart_backoff_s=1.0, budget_usd=3.0, clock=clock)
    fleet.reconcile()
    assert backend.launches == [] and fleet.over_budget


def ending_of_a_local_worker(folder, hub_url, notice=None):
    """How a worker process ended, by itself or with a signal from outside."""
    backend = LocalBackend(hub_url, "token", folder, threads=1, price_usd_per_hour=0.0)
    (folder / "w.log").write_text("a warning of an earlier process\n")
    backend.launch("w")
    process = backend._processes["w"]
    if notice is not None:
        os.kill(process.pid, notice)
    process.wait(30)
    return backend.ending("w")


def test_a_local_worker_that_was_killed_is_told_by_its_signal_and_not_by_its_last_line(tmp_path):
    assert ending_of_a_local_worker(tmp_path, "http://127.0.0.1:9", signal.SIGKILL) == "killed by SIGKILL"
    assert ending_of_a_local_worker(tmp_path, "http://127.0.0.1:9", signal.SIGRTMIN + 1) == "killed by signal 35"


def test_local_workers_can_have_a_python_of_their_own(tmp_path):
    own = tmp_path / "python"
    own.write_text('#!/bin/sh\necho "$@"\n')
    with pytest.raises(ConfigError, match=f"fleet.python = '{own}'"):
        LocalBackend("http://127.0.0.1:9", "token", tmp_path, threads=1, price_usd_per_hour=0.0, python=str(own))
    own.chmod(0o755)
    backend = LocalBackend("http://127.0.0.1:9", "token", tmp_path, threads=1, price_usd_per_hour=0.0, python=str(own))
    backend.launch("w")
    assert backend._processes["w"].wait(30) == 0
    assert (tmp_path / "w.log").read_text().startswith("-m echo2 worker --hub http://127.0.0.1:9 --name w")


def test_a_local_worker_that_ended_itself_is_told_by_its_exit_code_and_last_words(tmp_path):
    assert ending_of_a_local_worker(tmp_path, "nonsense").startswith("exit code 2; it said: echo2: hub address 'nonsense'")
