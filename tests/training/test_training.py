"""Whole runs through Prefect, hub and workers: what they compute, and what they survive."""

import json
import os
import re
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from patience import wait_until
from plain_loop import plain_synchronous_losses
from train_command import REPOSITORY, SMALL, PrefectServer, TrainCommand

from echo2.config import load_config
from echo2.hub.client import HubClient
from echo2.models.preparation import prepare_model

SYNCHRONOUS = ("staleness.bound=0", "fleet.workers=1", "run.steps=6")


def rows(run, sql):
    with closing(sqlite3.connect(run / "ledger.db")) as database:
        return database.execute(sql).fetchall()


def losses(run):
    return [json.loads(m)["loss"] for (m,) in rows(run, "SELECT metrics FROM steps ORDER BY step")]


def steps_done(command):
    if not (command.run / "ledger.db").exists():
        return 0
    try:
        return rows(command.run, "SELECT COUNT(*) FROM steps")[0][0]
    except sqlite3.OperationalError:
        return 0


@pytest.fixture(scope="module")
def synchronous_run(tmp_path_factory, prefect_server):
    """An undisturbed run with S = 0 and one worker."""
    command = TrainCommand(tmp_path_factory.mktemp("synchronous"), prefect_server.environment, *SYNCHRONOUS)
    assert command.wait() == 0, command.said
    assert command.survivors() == []
    return command.run


def test_without_staleness_one_worker_reproduces_a_plain_synchronous_loop(synchronous_run):
    config = load_config([], [*SMALL, *SYNCHRONOUS, "learner.device=cpu"])
    assert losses(synchronous_run) == pytest.approx(plain_synchronous_losses(config, 6), abs=1e-6)
    assert rows(synchronous_run, "SELECT MAX(step - oldest_version) FROM groups WHERE state = 'trained'") == [(0,)]


def test_a_run_leaves_its_summary_curves_and_metrics(synchronous_run):
    summary = json.loads((synchronous_run / "summary.json").read_text())
    wanted = """exact_match_first exact_match_last max_staleness staleness_bound workers versions_disseminated
        busy_share_observed busy_share_window_steps busy_share_observed_in_window busy_share_predicted trained_groups wall_s"""
    assert set(wanted.split()) <= summary.keys()
    assert (summary["trained_groups"], summary["max_staleness"], summary["workers"]) == (24, 0, 1)
    assert 0 < summary["busy_share_observed"] < 1 and 0 < summary["busy_share_predicted"] <= 1
    assert summary["busy_share_window_steps"] == 6, "a run shorter than the window is the window"
    assert summary["busy_share_observed_in_window"] == pytest.approx(summary["busy_share_observed"])
    assert (synchronous_run / "report" / "curves.png").stat().st_size > 1000
    lines = (synchronous_run / "report" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))


def test_prefect_shows_the_steps_the_stages_and_the_artifacts(synchronous_run, prefect_server):
    run_id = json.loads((synchronous_run / "run.json").read_text())["run_id"]
    wanted = {f"step-{step}" for step in range(6)}
    wanted |= {f"{stage}-{version}" for stage in ("export", "announce", "await-workers") for version in range(7)}
    # The server writes task runs in batches, some time after their end.
    wait_until(lambda: wanted <= {task_run["name"] for task_run in prefect_server.find("task_runs")})
    # Prefect keeps artifacts of its own without a key beside those of the run.
    found = [artifact for artifact in prefect_server.find("artifacts") if artifact["key"]]
    artifacts = {artifact["key"]: artifact for artifact in found if artifact["key"].startswith(run_id)}
    assert set(artifacts) == {f"{run_id}-{kind}" for kind in ("progress", "steps", "report")}
    assert artifacts[f"{run_id}-progress"]["data"] == 100.0
    assert all(artifact["flow_run_id"] for artifact in artifacts.values())


def test_a_learner_killed_midway_resumes_to_the_same_losses(synchronous_run, train):
    first = train(*SYNCHRONOUS)
    first.wait_until(lambda: steps_done(first) >= 3)
    first.kill()
    assert first.survivors() == [], "hub and workers end with the learner"
    again = train(*SYNCHRONOUS, "--resume")
    assert again.wait() == 0, again.said
    assert losses(again.run) == pytest.approx(losses(synchronous_run), abs=1e-6)
    states = rows(again.run, "SELECT group_id, state FROM groups ORDER BY group_id")
    assert [group_id for group_id, _ in states] == list(range(len(states))), "no prompt is skipped, none comes twice"
    assert {state for _, state in states} <= {"trained", "filtered"}


def test_two_ranks_train_to_the_losses_of_one(synchronous_run, train):
    command = train(*SYNCHRONOUS, "learner.devices=2")
    assert command.wait() == 0, command.said
    assert command.survivors() == []
    assert losses(command.run) == pytest.approx(losses(synchronous_run), abs=1e-5)


def test_a_rank_that_dies_ends_the_run_with_its_name_and_one_device_goes_on(train):
    command = train("run.steps=500", "learner.devices=2")
    command.wait_until(lambda: steps_done(command) >= 3)
    command.children("echo2.learning.follower")[0].kill()
    assert command.wait(60) == 2, command.said
    assert command.said.splitlines()[-1].startswith("echo2: rank 1 of the learner's 2 ended")
    assert "Traceback" not in command.said
    assert command.survivors() == []
    done = steps_done(command)
    again = train(f"run.steps={done + 2}", "learner.devices=1", "--resume")
    assert again.wait() == 0, again.said
    assert steps_done(again) == done + 2


def test_workers_and_hub_killed_midway_cost_no_group(train):
    command = train("staleness.bound=1", "run.steps=12", "hub.heartbeat_timeout_s=6")
    command.wait_until(lambda: steps_done(command) >= 2)
    victim = command.children("worker --hub")[0]
    victim.kill()
    command.wait_until(lambda: steps_done(command) >= 4)
    command.children("echo2 hub")[0].kill()
    assert command.wait() == 0, command.said
    assert command.survivors() == []
    summary = json.loads((command.run / "summary.json").read_text())
    assert summary["trained_groups"] == 12 * 4
    assert summary["max_staleness"] <= 1
    assert len(rows(command.run, "SELECT 1 FROM paid_intervals WHERE terminated_at_s IS NULL")) == 0
    assert len(rows(command.run, "SELECT 1 FROM paid_intervals")) == 3, "two workers and one replacement"
    ends = rows(command.run, "SELECT kind, detail FROM events WHERE kind IN ('worker ended', 'hub restarted') ORDER BY kind")
    assert ends == [("hub restarted", "killed by SIGKILL"), ("worker ended", "killed by SIGKILL")]
    assert command.said.count("killed by SIGKILL") == 2 and "it said" not in command.said


@pytest.mark.parametrize("notice", [signal.SIGINT, signal.SIGTERM])
def test_a_notice_ends_a_run_in_order_and_it_can_go_on(train, notice):
    command = train("run.steps=500")
    command.wait_until(lambda: steps_done(command) >= 3)
    command.process.send_signal(notice)
    assert command.wait(60) == 130, command.said
    assert "--resume" in command.said and "Traceback" not in command.said
    assert command.survivors() == []
    done = steps_done(command)
    again = train(f"run.steps={done + 2}", "--resume")
    assert again.wait() == 0, again.said
    assert steps_done(again) == done + 2


def test_a_notice_ends_a_run_that_waits_for_a_worker_to_load_its_first_version(train, prefect_server):
    command = train("fleet.workers=0")
    command.wait_until(lambda: "waiting for workers" in command.said)
    with closing(HubClient(re.search(r"--hub (\S+),", command.said)[1], (command.run / "token").read_text().strip())) as hub:
        hub.register("slow")
        assert hub.snapshot_route(None, 30.0)
        command.wait_until(lambda: any(run["name"] == "await-workers-0" for run in prefect_server.find("task_runs")))
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(60) == 130, command.said
    assert "Traceback" not in command.said and "Failed" not in command.said


@pytest.mark.parametrize("after_s", [0.3, 1.0, 2.0, 4.0, 8.0])
def test_ctrl_c_during_the_start_leaves_nothing_behind(train, after_s):
    command = train("run.steps=500")
    begins_s = time.monotonic() + after_s
    # On a busy machine Python itself may not have started by then, and what it does with a Ctrl-C is its own.
    command.wait_until(lambda: time.monotonic() > begins_s and command.cpu_s() > 0.25)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(60) == 130, command.said
    assert "Traceback" not in command.said
    assert command.survivors() == []


@pytest.mark.parametrize("notice", [signal.SIGINT, signal.SIGKILL])
def test_a_temporary_prefect_server_ends_with_its_run(train, tmp_path, notice):
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = train("run.steps=500", environment=environment | {"PREFECT_HOME": str(tmp_path / "prefect")})
    command.wait_until(lambda: command.children("echo2 hub"))
    assert command.children("flows.temporary_server")
    command.process.send_signal(notice)
    command.wait(60)
    assert command.survivors() == []


def test_a_run_whose_every_group_fails_ends_with_the_reason(train, prefect_server):
    environment = prefect_server.environment | {"PYTHONPATH": str(REPOSITORY / "tests" / "hub")}
    command = train(
        "task.type=python", "task.path=bad_scorers:AllFail", "model.warm_start_exact_match=0", environment=environment
    )
    assert command.wait(120) == 2, command.said
    last = command.said.splitlines()[-1]
    assert last.startswith("echo2: ") and "the judge is out" in last and "Traceback" not in command.said


def test_a_task_that_cannot_be_made_is_refused_at_once(train, prefect_server):
    environment = prefect_server.environment | {"PYTHONPATH": str(REPOSITORY / "tests" / "hub")}
    command = train("task.type=python", "task.path=bad_scorers:Unmakeable", environment=environment)
    assert command.wait(20) == 2
    assert "the data set is gone" in command.said and "Traceback" not in command.said
    assert not command.run.exists()


def test_a_terminal_that_cannot_show_greek_ends_a_run_all_the_same(train, prefect_server):
    command = train("run.steps=1", environment=prefect_server.environment | {"PYTHONIOENCODING": "ascii"})
    assert command.wait() == 0, command.said


def test_resuming_a_complete_run_says_so_at_once(synchronous_run, train):
    command = train(*SYNCHRONOUS, "--resume", runs=synchronous_run.parent)
    assert command.wait(30) == 0
    assert "is complete" in command.said and "starting Prefect" not in command.said


def test_a_model_folder_of_the_users_own_is_trained(train, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(prepare_model(load_config([], []), print), folder)
    (folder / "generation_config.json").unlink()
    command = train("run.steps=2", f"model.path={folder}")
    assert command.wait() == 0, command.said
    assert steps_done(command) == 2


def test_a_run_shorter_than_its_staleness_ends(train):
    command = train("run.steps=1", "staleness.bound=6")
    assert command.wait() == 0, command.said
    assert steps_done(command) == 1


def test_segments_follow_each_other_to_the_end(train):
    command = train("run.steps=5", "flow.segment_steps=2")
    assert command.wait() == 0, command.said
    assert steps_done(command) == 5


def test_a_second_learner_in_the_same_run_is_refused(train):
    first = train("run.steps=500")
    first.wait_until(lambda: steps_done(first) >= 1)
    second = train("run.steps=500", "--resume")
    assert second.wait(60) == 2
    assert "in use by another learner" in second.said
    first.process.send_signal(signal.SIGINT)
    first.wait(60)


def test_prefect_going_away_does_not_stop_the_learner(tmp_path, train):
    server = PrefectServer(tmp_path / "prefect")
    command = train("run.steps=30", environment=server.environment)
    command.wait_until(lambda: steps_done(command) >= 3)
    server.kill()
    assert command.wait(240) == 0, command.said
    assert steps_done(command) == 30
    assert command.said.count("training goes on without its record") == 1
    assert "Traceback" not in command.said


def test_prefect_that_was_never_there_is_one_clear_message(tmp_path, train, prefect_server):
    environment = prefect_server.environment | {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
    command = train("run.steps=2", environment=environment)
    assert command.wait(120) == 2
    assert "unset PREFECT_API_URL" in command.said and "Traceback" not in command.said
    assert not (Path(command.run) / "summary.json").exists()
