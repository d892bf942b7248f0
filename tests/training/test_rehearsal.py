"""A whole rehearsal: simulated learner and workers over the real flow, hub, ledger and fleet."""

import json
import re
import signal
import sqlite3
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REHEARSAL = (
    "learner.engine=simulated",
    "learner.simulated_step_s=0.1",
    "learner.simulated_snapshot_bytes=200_000",
    "worker.engine=simulated",
    "worker.slots=1",
    "worker.simulated_group_latency_s=0.1",
    "worker.simulated_latency_cv=0.5",
    "dissemination.uplink_bytes_per_s=4e6",
    "batch.drop_zero_variance=false",
    "staleness.bound=1",
    "run.steps=16",
    "flow.segment_steps=8",
)


def rows(run, sql):
    with closing(sqlite3.connect(run / "ledger.db")) as database:
        return database.execute(sql).fetchall()


def a_snapshot_was_loaded(run):
    try:
        return (run / "ledger.db").exists() and rows(run, "SELECT 1 FROM disseminations")
    except sqlite3.OperationalError:
        return False


def steps_done(run):
    try:
        return (run / "ledger.db").exists() and rows(run, "SELECT COUNT(*) FROM steps")[0][0]
    except sqlite3.OperationalError:
        return 0


def check_trackers(run):
    """Each record has what the ledger has."""
    committed = [(step, json.loads(metrics)) for step, metrics in rows(run, "SELECT step, metrics FROM steps ORDER BY step")]
    lines = [json.loads(line) for line in (run / "report" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [metrics | {"step": step} for step, metrics in committed]
    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in ("reward", "learner/step_s"):
        wanted = [(step, pytest.approx(metrics[name], rel=1e-6)) for step, metrics in committed]
        assert [(event.step, event.value) for event in shown.Scalars(name)] == wanted


def test_metrics_come_once_in_a_run_that_was_killed_and_goes_on(train):
    first = train(*REHEARSAL, "learner.checkpoint_interval=3")
    first.wait_until(lambda: steps_done(first.run) >= 4)
    first.kill()
    assert first.survivors() == []
    before = (first.run / "report" / "metrics.jsonl").read_text()
    assert before.endswith("\n") and len(before.splitlines()) >= 3, "steps are written as they are committed"
    again = train(*REHEARSAL, "--resume")
    assert again.wait() == 0, again.said
    assert steps_done(again.run) == 16
    assert re.search(r"16 steps: \d+ s of training since it began; \d+ s since it was resumed with start and end\n", again.said)
    check_trackers(again.run)


def test_a_record_that_cannot_be_written_does_not_stop_the_run(train):
    first = train(*REHEARSAL, "run.steps=1", "tracking.tensorboard=false")
    assert first.wait() == 0, first.said
    (first.run / "tensorboard").write_text("a file in the folder's place")
    again = train(*REHEARSAL, "run.steps=3", "--resume")
    assert again.wait() == 0, again.said
    assert steps_done(again.run) == 3
    assert again.said.count("metrics no longer go to TensorBoard") == 1 and "Traceback" not in again.said


def test_a_rehearsal_trains_all_steps_over_two_segments_and_a_killed_worker(train, tmp_path):
    command = train(*REHEARSAL, f"model.cache_directory={tmp_path / 'cache'}")
    command.wait_until(lambda: command.children("worker --hub"))
    command.wait_until(lambda: a_snapshot_was_loaded(command.run))
    command.children("worker --hub")[0].kill()
    assert command.wait() == 0, command.said
    assert command.survivors() == []
    summary = json.loads((command.run / "summary.json").read_text())
    assert (summary["steps"], summary["trained_groups"]) == (16, 64)
    assert summary["max_staleness"] <= 1
    assert summary["groups"]["failed"] == 0
    assert len(rows(command.run, "SELECT 1 FROM paid_intervals")) >= 5, "two workers in each segment and a replacement"
    assert (
        min(step_s for (step_s,) in rows(command.run, "SELECT metrics ->> 'learner/step_s' FROM steps WHERE step >= 0")) >= 0.1
    )
    fetches_s = [fetch_s for (fetch_s,) in rows(command.run, "SELECT fetch_s FROM disseminations WHERE version > 0")]
    assert max(fetches_s) > 0.04, "200 kB at 4 MB/s less the burst, for two workers at a time"
    assert [path.name for path in sorted((command.run / "checkpoints").iterdir())] == ["version-00000014", "version-00000016"]
    assert not (tmp_path / "cache").exists(), "no model was made"
    assert re.search(r"16 steps: \d+ s of training, \d+ s with start and end\n", command.said)
    check_trackers(command.run)


def test_a_notice_ends_a_run_whose_last_version_is_still_on_its_way(train):
    slow = ("learner.simulated_snapshot_bytes=400_000", "dissemination.uplink_bytes_per_s=40_000")
    command = train(*REHEARSAL, *slow, "dissemination.timeout_s=3600", "flow.segment_steps=1")
    command.wait_until(lambda: steps_done(command.run) >= 1)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait(120) == 130, command.said
    assert "Traceback" not in command.said
    assert command.survivors() == []


def test_the_start_tells_of_a_cap_under_which_snapshots_come_too_late(train):
    command = train(*REHEARSAL, "dissemination.uplink_bytes_per_s=100")
    command.wait_until(lambda: "are starting" in command.said)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait(120) == 130, command.said
    assert command.said.count("warning: dissemination.uplink_bytes_per_s = 100 lets a snapshot in full, about 200 kB,") == 1


def test_a_ledger_older_than_the_checkpoint_is_refused(train):
    first = train(*REHEARSAL, "run.steps=2")
    assert first.wait() == 0, first.said
    file = first.run / "checkpoints" / "version-00000002" / "state.json"
    state = json.loads(file.read_text())
    assert state["cursor"] == rows(first.run, "SELECT COUNT(*) FROM groups")[0][0] >= 8
    file.write_text(json.dumps(state | {"cursor": 1000}))
    again = train(*REHEARSAL, "run.steps=4", "--resume")
    assert again.wait(60) == 2
    assert "written when it had 1000: restore the ledger.db" in again.said.splitlines()[-1]
