"""Snapshots of a run by way of the workers: real hub and worker processes."""

import signal
import time

import numpy as np
import pytest
from safetensors.numpy import save

from echo2.curves import write_broadcast
from echo2.dissemination.broadcast.record import FIRST_CHUNK_BYTES
from echo2.dissemination.store import SnapshotStore

FETCHED = "is fetched from the hub"


def weights_of(version, size=200_000):
    values = np.random.default_rng(0).integers(0, 2**16, size, np.uint16)
    for step in range(version):
        values[np.random.default_rng(step + 1).integers(0, size, size // 50)] += np.uint16(1)
    return save({"w": values.view(np.float16)})


class Learner:
    """Publishes versions with their deltas, as the learner's side does."""

    def __init__(self, run, client):
        self.run, self.client = run, client
        self.store = SnapshotStore(run.snapshots, run.run_id, run.token)
        self.former = None

    def publish(self, version):
        chunk_bytes = self.run.config.dissemination.chunk_bytes or FIRST_CHUNK_BYTES
        self.former = self.store.publish(version, weights_of(version), chunk_bytes, self.former)
        self.client.announce(version)

    def loaded_by(self, version, count, timeout_s=30):
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            loaded, waiting = self.client.await_receivers(version, 1.0)
            if len(loaded) >= count and not waiting:
                return loaded
        raise AssertionError(f"version {version} was loaded by {loaded} only")


@pytest.fixture
def learner(make_run, serve):
    run = make_run("batch.groups=2", "batch.members=2", "dissemination.chunk_bytes=16384", "hub.heartbeat_timeout_s=6")
    return Learner(run, serve(run)[1])


def logs(tmp_path, names):
    return {name: (tmp_path / f"{name}.log").read_text() for name in names}


def test_workers_have_every_version_without_fetching_it_from_the_hub(learner, start_worker, tmp_path):
    for name in "abc":
        start_worker(learner.client, learner.run.token, name, "worker.simulated_group_latency_s=0.05")
    learner.publish(0)
    learner.loaded_by(0, 3)
    for version in range(1, 5):
        learner.publish(version)
        learner.loaded_by(version, 3)
    assert not any(FETCHED in log for log in logs(tmp_path, "abc").values())


def test_it_is_told_which_worker_had_a_version_when(learner, start_worker, tmp_path):
    for name in "abc":
        start_worker(learner.client, learner.run.token, name, "worker.simulated_group_latency_s=0.05")
    for version in (0, 1):
        learner.publish(version)
        learner.loaded_by(version, 3)
    record = learner.client.broadcast_record(1)
    assert sorted(arrival.worker for arrival in record.arrivals) == ["a", "b", "c"]
    assert record.total_bytes == learner.former.delta.total_bytes < learner.former.manifest.total_bytes / 2
    assert all(len(arrival.chunk_arrivals_s) == learner.former.delta.chunk_count for arrival in record.arrivals)
    metrics = record.metrics
    assert 0 < metrics["dissemination/first_s"] <= metrics["dissemination/median_s"] <= metrics["dissemination/last_s"] < 10
    assert learner.client.broadcast_record(7) is None
    write_broadcast(tmp_path / "broadcast.png", record)
    assert (tmp_path / "broadcast.png").read_bytes().startswith(b"\x89PNG")


def test_a_worker_that_comes_late_gets_the_whole_and_then_deltas(learner, start_worker, tmp_path):
    start_worker(learner.client, learner.run.token, "a", "worker.simulated_group_latency_s=0.05")
    for version in range(3):
        learner.publish(version)
        learner.loaded_by(version, 1)
    start_worker(learner.client, learner.run.token, "late", "worker.simulated_group_latency_s=0.05")
    learner.loaded_by(2, 2)
    learner.publish(3)
    learner.loaded_by(3, 2)


def asleep(learner, start_worker, name):
    """Two workers that have version 0, of which this one then sleeps; gives its process."""
    start_worker(learner.client, learner.run.token, "a", "worker.simulated_group_latency_s=0.05")
    sleeper = start_worker(learner.client, learner.run.token, name, "worker.simulated_group_latency_s=0.05")
    learner.publish(0)
    learner.loaded_by(0, 2)
    sleeper.send_signal(signal.SIGSTOP)
    return sleeper


def test_a_worker_that_slept_takes_the_deltas_that_it_missed(learner, start_worker):
    sleeper = asleep(learner, start_worker, "sleeper")
    for version in range(1, 4):
        learner.publish(version)
    sleeper.send_signal(signal.SIGCONT)
    learner.loaded_by(3, 2)


def test_a_worker_whose_version_is_no_longer_kept_takes_the_whole(make_run, serve, start_worker):
    run = make_run("staleness.bound=0", "dissemination.retain_snapshots=1", "dissemination.chunk_bytes=16384")
    learner = Learner(run, serve(run)[1])
    sleeper = asleep(learner, start_worker, "sleeper")
    for version in range(1, 4):
        learner.publish(version)
    assert learner.store.versions() == [3]
    sleeper.send_signal(signal.SIGCONT)
    learner.loaded_by(3, 2)


def test_a_worker_that_joins_after_a_restart_of_the_hub_gets_the_newest(make_run, serve, start_worker, tmp_path):
    run = make_run("batch.groups=2", "batch.members=2", "dissemination.chunk_bytes=16384", "hub.heartbeat_timeout_s=6")
    process, client = serve(run)
    learner = Learner(run, client)
    start_worker(client, run.token, "a", "worker.simulated_group_latency_s=0.05")
    for version in range(3):
        learner.publish(version)
        learner.loaded_by(version, 1)
    process.stop()
    process.start()
    process.wait_ready()
    start_worker(client, run.token, "late", "worker.simulated_group_latency_s=0.05")
    learner.loaded_by(2, 2)
    learner.publish(3)
    learner.loaded_by(3, 2)
    assert not any(FETCHED in log for log in logs(tmp_path, ["a", "late"]).values())


def test_a_killed_worker_does_not_keep_a_version_from_the_others(learner, start_worker):
    for name in "ab":
        start_worker(learner.client, learner.run.token, name, "worker.simulated_group_latency_s=0.05")
    doomed = start_worker(learner.client, learner.run.token, "doomed", "worker.simulated_group_latency_s=0.05")
    learner.publish(0)
    learner.loaded_by(0, 3)
    doomed.kill()
    learner.publish(1)
    assert len(learner.loaded_by(1, 2)) == 2


def test_workers_find_the_broadcast_again_after_a_restart_of_the_hub(make_run, serve, start_worker, tmp_path):
    run = make_run("batch.groups=2", "batch.members=2", "dissemination.chunk_bytes=16384", "hub.heartbeat_timeout_s=6")
    process, client = serve(run)
    learner = Learner(run, client)
    start_worker(client, run.token, "a", "worker.simulated_group_latency_s=0.05")
    learner.publish(0)
    learner.loaded_by(0, 1)
    process.stop()
    process.start()
    process.wait_ready()
    time.sleep(6)
    for version in (1, 2):
        learner.publish(version)
        learner.loaded_by(version, 1)
    assert FETCHED not in logs(tmp_path, "a")["a"].splitlines()[-1]


def test_without_peers_each_worker_fetches_from_the_hub(make_run, serve, start_worker):
    run = make_run("batch.groups=2", "batch.members=2", "dissemination.peers=false")
    learner = Learner(run, serve(run)[1])
    for name in "ab":
        start_worker(learner.client, run.token, name, "worker.simulated_group_latency_s=0.05")
    for version in range(3):
        learner.publish(version)
        learner.loaded_by(version, 2)
