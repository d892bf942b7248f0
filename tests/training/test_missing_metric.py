"""A run whose best checkpoints are to be chosen by a metric that its task turns out not to give."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

SETTINGS = (
    "learner.engine=simulated",
    "worker.engine=simulated",
    "learner.simulated_step_s=0.2",
    "worker.simulated_group_latency_s=0.03",
    "batch.drop_zero_variance=false",
    "task.type=python",
    "task.path=plain_task:PlainTask",
    "run.steps=6",
    "fleet.workers=1",
    "evaluation.every_steps=2",
    "evaluation.prompts=4",
    "learner.keep_best=1",
)


@pytest.mark.parametrize(("name", "given"), [("acuracy", "gave accuracy"), ("eval/acuracy", "gave eval/accuracy")])
def test_the_user_is_told_once_while_the_run_goes_on_and_in_its_events(train, prefect_server, name, given):
    environment = prefect_server.environment | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    command = train(*SETTINGS, f"learner.best_metric={name}", environment=environment)
    assert command.wait() == 0, command.said
    assert command.said.count(f"learner.best_metric = '{name}' has not come") == 1
    with closing(sqlite3.connect(command.run / "ledger.db")) as database:
        events = database.execute("SELECT subject, detail FROM events WHERE kind = 'best metric'").fetchall()
    assert [subject for subject, _ in events] == [name]
    assert given in events[0][1]
    assert json.loads((command.run / "summary.json").read_text())["steps"] == 6
