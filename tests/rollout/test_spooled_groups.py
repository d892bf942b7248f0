"""Groups that a worker finishes while its hub is away."""

from pathlib import Path

import numpy as np
import pytest
from model_runs import look
from patience import wait_until

from echo2.durability import PARTIAL
from echo2.errors import ConfigError
from echo2.protocol import BodyError, GroupRollouts, Rollout
from echo2.rollout.spool import Spool

FEW = ("batch.groups=4", "batch.members=2", "batch.drop_zero_variance=false", "worker.slots=4", "run.steps=1")


def group(group_id):
    whole = Rollout(0, np.arange(3, dtype=np.int32), np.full(3, -0.5, np.float32), np.zeros(3, np.int32), "stop")
    return GroupRollouts(group_id, 1, (whole,))


def test_groups_lie_in_order_until_they_are_forgotten(tmp_path):
    spool = Spool(tmp_path, "run-1", "w")
    for group_id in range(12):
        spool.keep("w-abc", group(group_id))
    again = Spool(tmp_path, "run-1", "w")
    again.keep("w-def", group(12))
    found = [again.read(path) for path in again.left()]
    assert [(worker_id, kept.group_id) for worker_id, kept in found] == [("w-abc", n) for n in range(12)] + [("w-def", 12)]
    assert found[3][1].rollouts[0].token_ids.tolist() == [0, 1, 2]
    assert Spool(tmp_path, "run-2", "w").left() == Spool(tmp_path, "run-1", "v").left() == []
    for path in again.left():
        again.forget(path)
    assert not again.folder.exists()


def test_what_a_killed_writer_left_goes_with_the_last_group(tmp_path):
    spool = Spool(tmp_path, "run-1", "w")
    path = spool.keep("w-abc", group(0))
    path.with_name(f".000000001-w-abc.group.123{PARTIAL}").write_bytes(b"cut off")
    again = Spool(tmp_path, "run-1", "w")
    assert again.left() == [path]
    again.forget(path)
    assert not again.folder.exists()


def test_whatever_else_lies_in_the_folder_stays(tmp_path):
    spool = Spool(tmp_path, "run-1", "w")
    path = spool.keep("w-abc", group(0))
    (spool.folder / ".nfs0001").touch()
    spool.forget(path)
    assert [file.name for file in spool.folder.iterdir()] == [".nfs0001"]


def test_what_another_worker_of_the_name_has_handed_in_is_settled(tmp_path):
    spool = Spool(tmp_path, "run-1", "w")
    paths = [spool.keep("w-abc", group(group_id)) for group_id in range(2)]
    other = Spool(tmp_path, "run-1", "w")
    for path in paths:
        other.forget(path)
    for path in paths:
        assert spool.read(path) is None
        spool.forget(path)
    assert not spool.folder.exists()


def test_a_damaged_file_is_said_to_be(tmp_path):
    spool = Spool(tmp_path, "run-1", "w")
    path = spool.keep("w-abc", group(0))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BodyError):
        spool.read(path)


@pytest.mark.parametrize("directory", ["/dev/null", "/dev/null/x", "/proc/nope", "/proc/self", "~nobody-at-all/x", "a\0b"])
def test_a_directory_that_cannot_hold_groups_is_refused(directory):
    with pytest.raises(ConfigError) as refused:
        Spool(Path(directory), "run-1", "w")
    assert f"worker.spool_directory = {directory!r} cannot keep" in str(refused.value) and "(None)" not in str(refused.value)


@pytest.mark.parametrize("blocked", ["run-1", "run-1/w"])
def test_a_file_where_the_folder_of_the_groups_would_be_is_refused(tmp_path, blocked):
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        Spool(tmp_path, "run-1", "w")


def test_a_directory_is_made_when_it_is_tried_out_and_nothing_in_it(tmp_path):
    Spool(tmp_path / "a" / "spool", "run-1", "w")
    assert list((tmp_path / "a").rglob("*")) == [tmp_path / "a" / "spool"]


def test_a_worker_without_a_place_for_its_groups_does_not_start(make_run, serve, start_worker, tmp_path):
    run = make_run("worker.spool_directory=/proc/nope")
    _, client = serve(run)
    assert start_worker(client, run.token).wait(60) == 2
    said = (tmp_path / "w.log").read_text().splitlines()[-1]
    assert said.startswith("echo2: worker.spool_directory = '/proc/nope' cannot keep the groups")
    assert client.live_workers() == []


@pytest.fixture
def cut_off(make_run, serve, publish, start_worker, tmp_path):
    """Gives run, hub, client and worker once the worker has four groups under way and its hub is gone."""

    def make(orphan_timeout_s):
        settings = ("worker.simulated_group_latency_s=2", f"worker.orphan_timeout_s={orphan_timeout_s}")
        limits = ("worker.request_timeout_s=1", "hub.lease_timeout_s=600", "hub.heartbeat_timeout_s=300")
        run = make_run(*FEW, *settings, *limits, f"worker.spool_directory={tmp_path / 'spool'}")
        hub, client = serve(run)
        worker = start_worker(client, run.token)
        publish(run, client, 0)
        wait_until(lambda: client.status()["groups"]["leased"] == 4)
        hub.stop()
        return run, hub, client, worker

    return make


def spooled(tmp_path):
    return list((tmp_path / "spool").rglob("*.group"))


def assert_handed_in(run, client, tmp_path):
    """All four groups, without a second attempt."""
    assert len(client.take_batch(0).groups) == 4
    wait_until(lambda: not spooled(tmp_path))
    assert {row["attempt"] for row in look(run, "SELECT attempt FROM rollouts")} == {1}


def test_groups_outlive_worker_and_hub_and_are_handed_in_by_the_next_worker(cut_off, start_worker, tmp_path):
    run, hub, client, worker = cut_off(orphan_timeout_s=6)
    assert worker.wait(60) == 2, "it ends by itself"
    assert len(spooled(tmp_path)) == 4
    assert "groups wait in" in (tmp_path / "w.log").read_text()
    spooled(tmp_path)[0].with_name(f".000000004-w.group.1{PARTIAL}").write_bytes(b"of one that was killed amidst a fifth")
    hub.start()
    hub.wait_ready()
    worker = start_worker(client, run.token)
    assert_handed_in(run, client, tmp_path)
    wait_until(lambda: not (tmp_path / "spool" / run.run_id / "w").exists())
    client.commit(0, {}, 0)
    assert worker.wait(60) == 0 and "Traceback" not in (tmp_path / "w.log").read_text()


def test_a_worker_keeps_generating_while_the_hub_is_away_and_hands_in_when_it_is_back(cut_off, tmp_path):
    run, hub, client, worker = cut_off(orphan_timeout_s=300)
    wait_until(lambda: len(spooled(tmp_path)) == 4)
    hub.start()
    hub.wait_ready()
    assert_handed_in(run, client, tmp_path)
    assert worker.poll() is None
