"""A run whose workers `echo2 fleet` rents stops with a checkpoint once the budget is spent, and says why."""

import os
import signal
import subprocess
import sys

import pytest
from train_command import REPOSITORY

from clouds.processes import _processes
from echo2.hub.inspection import costs_of
from echo2.run_directory import open_run

CATALOG = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region\nl4,L4,1,7200,3600,here\n"
BUDGET_USD = 30
"""One dollar a second."""


@pytest.mark.slow
def test_the_end_of_the_budget_ends_fleet_and_run_in_order(train, tmp_path):
    folder = tmp_path / "catalog/near"
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text(CATALOG)
    command = train(
        "learner.engine=simulated",
        "learner.simulated_step_s=0.2",
        "worker.engine=simulated",
        "worker.simulated_group_latency_s=0.1",
        "run.steps=5000",
        "staleness.bound=1",
        "fleet.workers=0",
        f"activation.catalog={folder.parent}",
        "activation.cloud=processes",
        f"activation.budget_usd={BUDGET_USD}",
        "activation.pace={period_s=1.0, drain_timeout_s=12.0}",
    )
    command.wait_until(lambda: "hub at" in command.said)
    run = open_run(command.run)
    url = command.said.split("hub at ")[1].split()[0]
    fleet = subprocess.Popen(
        [sys.executable, "-m", "echo2", "fleet", str(command.run), "--hub", url],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert command.wait() == 130, command.said
        assert "stopping after this step with a checkpoint: the fleet of rented machines has ended: " in command.said
        assert f"ended: activation.budget_usd = {BUDGET_USD}" in command.said
        assert any((command.run / "checkpoints").iterdir())
        _, said = fleet.communicate(timeout=60)
        assert fleet.returncode == 2 and f"activation.budget_usd = {BUDGET_USD} lasts no longer" in said.splitlines()[-1]
        assert _processes(run.run_id) == {}
        costs = costs_of(run)
        assert costs.running == 0 and BUDGET_USD / 3 < costs.usd <= BUDGET_USD
    finally:
        fleet.kill()
        for pids in _processes(run.run_id).values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
