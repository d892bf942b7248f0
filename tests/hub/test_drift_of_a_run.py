"""Drift in a real run: hub and simulated workers as processes, a learner that only sleeps, and workers that are killed."""

import time

import pytest

from echo2.capacity import drift
from echo2.hub.inspection import observe_run

STEP_S, CALL_S = 0.15, 0.3
SETTINGS = (
    "batch.groups=8",
    "batch.members=2",
    "batch.drop_zero_variance=false",
    "run.steps=400",
    "sampling.max_completion_tokens=2",
    "staleness.bound=4",
    "worker.slots=6",
    f"worker.simulated_group_latency_s={CALL_S}",
    "worker.heartbeat_interval_s=0.3",
    "dissemination.retain_snapshots=5",
)


class SleepingLearner:
    """Takes batches, sleeps, commits and publishes, as the training flow does."""

    def __init__(self, run, client, publish):
        self._run, self._client, self._publish = run, client, publish
        self._step = 0
        self._lap_began = time.monotonic()

    def train(self, steps):
        for _ in range(steps):
            began = time.monotonic()
            self._client.take_batch(self._step)
            wait_s = time.monotonic() - began
            time.sleep(STEP_S)
            self._publish(self._run, self._client, self._step + 1, b"weights" * 100)
            now = time.monotonic()
            times = {"learner/step_s": now - self._lap_began - wait_s, "learner/wait_s": wait_s}
            self._client.commit(self._step, times, self._step)
            self._lap_began = now
            self._step += 1


@pytest.fixture
def watched_run(make_run, serve, publish, start_worker, monkeypatch):
    monkeypatch.setattr(drift, "WINDOW_S", 2.0)
    run = make_run(*SETTINGS)
    _, client = serve(run)
    publish(run, client, 0, b"weights" * 100)
    workers = [start_worker(client, run.token, name) for name in ("a", "b", "c", "d")]
    client.await_receivers(0, 30.0)
    while len(client.live_workers()) < 4:
        time.sleep(0.1)
    return run, SleepingLearner(run, client, publish), workers


def test_workers_that_are_killed_are_told_as_a_fall_of_μ(watched_run):
    run, learner, workers = watched_run
    watch, told = drift.DriftWatch(run.config, str(run.path)), []

    def train(rounds):
        for _ in range(rounds):
            learner.train(12)
            told.append(watch.look(lambda since_s: observe_run(run, since_s)))

    def departures():
        return [found for found in told if isinstance(found, drift.Departure)]

    train(7)
    assert departures() == [], "an undisturbed run departs from nothing"
    assert watch.predicted > 0.9 and watch.observed > 0.8
    for worker in workers[1:]:
        worker.kill()
    train(6)
    (departure,) = departures()
    assert departure.term == "μ", str(departure)
    assert departure.observed < departure.predicted - 0.1
    assert departure.explained == pytest.approx(departure.observed, abs=0.2)
    assert "3 of 4 workers are gone" in str(departure)
