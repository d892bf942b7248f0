"""Whole runs that are evaluated on the way, through Prefect, hub and workers."""

import json
import signal
import sqlite3
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echo2.config import load_config
from echo2.metric_names import recorded_names
from echo2.tasks.builtin import is_held_out
from echo2.tasks.catalog import make_task
from echo2.tasks.order import HELD_OUT_FIRST

EVALUATED = ("evaluation.every_steps=4", "evaluation.prompts=24")
SIMULATED = (
    "learner.engine=simulated",
    "worker.engine=simulated",
    "learner.simulated_step_s=0.3",
    "worker.simulated_group_latency_s=0.03",
    "fleet.workers=1",
)
"""Steps that take long enough for an evaluation to end before the next one is due."""


def rows(command, sql):
    if not (command.run / "ledger.db").exists():
        return []
    with closing(sqlite3.connect(command.run / "ledger.db")) as database:
        try:
            return database.execute(sql).fetchall()
        except sqlite3.OperationalError:
            return []


def under_way(command, version):
    """Whether some groups of this evaluation are done and others are not."""
    states = {s for (s,) in rows(command, f"SELECT DISTINCT state FROM groups WHERE evaluation = {version}")}
    return {"evaluated", "leased"} <= states


def figures(command):
    return [json.loads(text) for (text,) in rows(command, "SELECT figures FROM evaluations ORDER BY version")]


def test_evaluations_survive_a_killed_worker_and_a_killed_hub_and_reach_every_record(train):
    many = ("evaluation.prompts=300", "evaluation.samples=4", "evaluation.temperature=1.0", "evaluation.every_steps=8")
    command = train(*many, "run.steps=8", "hub.heartbeat_timeout_s=6")
    command.wait_until(lambda: under_way(command, 0))
    command.children("worker --hub")[0].kill()
    command.wait_until(lambda: under_way(command, 8))
    command.children("echo2 hub")[0].kill()
    assert command.wait() == 0, command.said
    found = figures(command)
    last = found[-1]
    assert (last["eval/version"], last["eval/prompts"], last["eval/failed_prompts"]) == (8, 300, 0)
    assert last["eval/oldest_version"] == last["eval/newest_version"] == 8, "nothing is newer than the last version"
    assert last["eval/pass@4"] >= last["eval/pass@2"] >= last["eval/pass@1"] == last["eval/exact_match"] > 0
    assert rows(command, "SELECT COUNT(*) FROM groups WHERE state = 'trained'") == [(8 * 4,)]
    lines = [json.loads(line) for line in (command.run / "report" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 7 and last.items() <= lines[-1].items()
    came = set().union(*lines) - {"step"}
    named = recorded_names(load_config([command.run / "config.toml"]), {"exact_match"})
    assert came - named == set()
    assert {name for name in named - came if not name.startswith(("capacity/", "dissemination/"))} == set()
    board = EventAccumulator(str(command.run / "tensorboard")).Reload()
    newest = board.Scalars("eval/pass@1")[-1]
    assert (newest.step, newest.value) == (7, pytest.approx(last["eval/pass@1"]))
    assert json.loads((command.run / "summary.json").read_text())["evaluations"] == found
    assert "| evaluation of version | made by versions |" in (command.run / "report" / "report.md").read_text()
    assert "held-out pass@1" in command.said


def test_every_version_that_is_due_is_evaluated_on_prompts_that_are_never_trained(train):
    command = train(*EVALUATED, *SIMULATED, "run.steps=12", "staleness.bound=1", "staleness.publish_interval=2")
    assert command.wait() == 0, command.said
    assert [f["eval/version"] for f in figures(command)] == [0, 4, 8, 12]
    assert all(f["eval/prompts"] == 24 for f in figures(command))
    told = [json.loads(metrics) for (metrics,) in rows(command, "SELECT metrics FROM steps ORDER BY step")]
    assert [metrics["eval/version"] for metrics in told if "eval/version" in metrics] == [0, 4, 8, 12]
    task = make_task(load_config([command.run / "config.toml"]).task, 0)
    assert all(is_held_out(task.prompt(HELD_OUT_FIRST + place)) for place in range(24))
    trained = [n for (n,) in rows(command, "SELECT group_id FROM groups WHERE evaluation IS NULL")]
    assert not any(is_held_out(task.prompt(n)) for n in trained)


def test_a_last_version_that_no_interval_publishes_is_published_to_be_evaluated(train):
    settings = ("evaluation.every_steps=2", "run.steps=3", "staleness.bound=1", "staleness.publish_interval=2")
    command = train(*EVALUATED, *SIMULATED, *settings)
    assert command.wait() == 0, command.said
    assert [f["eval/version"] for f in figures(command)][-1] == 3


def test_ctrl_c_during_the_last_evaluation_ends_the_run_without_it(train):
    command = train("evaluation.every_steps=500", "evaluation.prompts=20000", "run.steps=3")
    command.wait_until(lambda: under_way(command, 3))
    command.process.send_signal(signal.SIGINT)
    command.wait(60)
    assert "is not evaluated, since the run was asked to stop" in command.said
    assert "Traceback" not in command.said and command.survivors() == []
    assert rows(command, "SELECT COUNT(*) FROM steps") == [(3,)]


def test_a_last_version_that_cannot_be_published_ends_the_run_instead_of_being_waited_for(train):
    command = train("evaluation.every_steps=500", *SIMULATED, "learner.simulated_step_s=2", "run.steps=3")
    command.wait_until(lambda: rows(command, "SELECT COUNT(*) FROM steps") == [(2,)])
    snapshots = command.run / "snapshots"
    snapshots.rename(command.run / "taken away")
    snapshots.write_text("no folder")
    assert command.wait(60) != 0 and "snapshots" in command.said
