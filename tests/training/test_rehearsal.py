"""A whole rehearsal: simulated learner and workers over the real flow, hub, ledger and fleet."""

import json
import sqlite3
from contextlib import closing

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
