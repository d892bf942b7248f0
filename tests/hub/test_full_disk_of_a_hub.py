"""A hub whose disk is full: what it has acknowledged stays, what it cannot keep it refuses, and then it goes on."""

import pytest
from patience import wait_until
from test_hub_service import group_of, join
from test_observations import SETTINGS, KnownRun

from echo2.errors import DiskError, UserError
from echo2.hub.client import HubDiskError
from echo2.hub.inspection import inspect_run
from echo2.report import reported_steps, write_report

MB = 1 << 20
FEW = ("batch.groups=4", "batch.members=2", "batch.drop_zero_variance=false", "run.steps=1", "sampling.max_completion_tokens=4")
JOURNAL_INDEX_BYTES = 32768
"""Without these SQLite does not even open a file to write to it."""
FULL = r"ledger .+/ledger\.db cannot be written \(database or disk is full\): make room on its disk"


def fill(disk, client):
    """Leave no room on the disk, nor in the ledger's journal."""
    disk.fill()
    with pytest.raises(HubDiskError, match=FULL):
        while True:
            client.note("test", "disk", "")


def test_a_full_ledger_refuses_groups_and_tells_the_learner_until_there_is_room(make_run, serve, publish, small_disk):
    disk = small_disk(4 * MB)
    run = make_run(*FEW, runs=disk.path)
    hub, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    leases = client.lease(worker_id, 4, 5.0).leases
    assert client.post(worker_id, [group_of(leases[0])]) == ["accepted"]
    wait_until(lambda: client.status()["groups"]["ready"] == 1)
    fill(disk, client)
    with pytest.raises(HubDiskError, match=FULL):
        client.post(worker_id, [group_of(lease) for lease in leases[1:]])
    with pytest.raises(HubDiskError, match=FULL):
        client.take_batch(0)
    assert client.status()["groups"]["ready"] == 1
    disk.make_room()
    assert client.post(worker_id, [group_of(lease) for lease in leases[1:]]) == ["accepted"] * 3
    assert len(client.take_batch(0).groups) == 4
    assert hub.url == client.url and "hub restarted" not in {event["kind"] for event in client.status()["events"]}


def test_a_hub_does_not_start_on_a_full_disk_and_says_why(make_run, serve, small_disk):
    disk = small_disk(4 * MB)
    run = make_run(*FEW, runs=disk.path)
    hub, _ = serve(run)
    hub.stop()
    disk.fill(JOURNAL_INDEX_BYTES)
    hub.start()
    with pytest.raises(UserError, match=f"^{FULL}"):
        hub.wait_ready()


def test_workers_keep_what_a_full_hub_cannot_and_hand_it_in_once_there_is_room(
    make_run, serve, publish, start_worker, small_disk, tmp_path
):
    disk = small_disk(4 * MB)
    slow = ("worker.simulated_group_latency_s=2", "worker.slots=4", f"worker.spool_directory={tmp_path / 'spool'}")
    run = make_run(*FEW, *slow, "worker.heartbeat_interval_s=0.2", runs=disk.path)
    _, client = serve(run)
    worker = start_worker(client, run.token)
    publish(run, client, 0)
    wait_until(lambda: client.status()["groups"]["leased"] == 4)
    fill(disk, client)
    wait_until(lambda: len(list((tmp_path / "spool").rglob("*.group"))) == 4)
    disk.make_room()
    wait_until(lambda: client.status()["groups"]["ready"] == 4)
    assert len(client.take_batch(0).groups) == 4
    assert worker.poll() is None
    assert (tmp_path / "w.log").read_text().count("make room on its disk") == 1


def test_a_report_that_has_no_room_is_named_and_counts_as_not_written(make_run, small_disk):
    disk = small_disk(4 * MB)
    known = KnownRun(make_run(*SETTINGS, runs=disk.path))
    known.step(known.workers)
    status = inspect_run(known.run.path)
    steps = [{"step": 0, "learner/step_s": 1.0, "learner/wait_s": 0.0}]
    disk.fill(3 * 4096)
    with pytest.raises(DiskError, match=r"demo/report cannot be written \(No space left on device\): make room on its disk"):
        write_report(known.run, status, steps, False, None)
    assert reported_steps(known.run) == 0
    disk.make_room()
    write_report(known.run, status, steps, False, None)
    assert reported_steps(known.run) == 1
    known.database.close()
