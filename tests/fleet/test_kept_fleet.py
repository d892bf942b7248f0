"""`echo2 fleet` with processes for machines: it reaches the plan, outlives kill −9, replaces who died, and leaves nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until

from clouds.keeping import Cleared, clear_up, keep_fleet
from clouds.processes import _processes
from echo2.errors import UserError
from echo2.hub.inspection import costs_of

REPOSITORY = Path(__file__).parent.parent.parent
COLUMNS = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,AvailabilityZone\n"
PACE = "{period_s=1.0, silence_timeout_s=2.0, drain_timeout_s=5.0, first_block_s=1.0, start_timeout_s=60.0}"


@pytest.fixture
def make_rented(make_run, tmp_path):
    """Makes a run of a large model whose workers are simulated, and for which the catalog's machines are two at the least."""
    folder = tmp_path / "catalog/near"
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text(COLUMNS + "h200,H200,1,7200.0,3600.0,here,z1\nh200,H200,1,7200.0,4320.0,there,z2\n")
    settings = (
        f"model.path={REPOSITORY / 'examples/Qwen3-8B'}",
        "model.dtype=bfloat16",
        "batch.groups=64",
        "sampling.max_completion_tokens=4096",
        "staleness.bound=4",
        "capacity.learner_step_s=109.0",
        "capacity.group_latency_s=60.0",
        "worker.slots=40",
        # So slow that none is measured meanwhile, which would change the plan.
        "worker.simulated_group_latency_s=60.0",
        "worker.heartbeat_interval_s=0.3",
        "hub.heartbeat_timeout_s=3.0",
        "worker.orphan_timeout_s=4.0",
        "activation.completion_tokens=2048",
        f"activation.catalog={tmp_path / 'catalog'}",
        f"activation.pace={PACE}",
        "activation.cloud=processes",
    )
    runs = []

    def make(*others):
        runs.append(make_run(*settings, *others))
        return runs[-1]

    yield make
    for made in runs:
        for pids in _processes(made.run_id).values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run(make_rented):
    return make_rented()


@pytest.fixture
def keep(tmp_path):
    """Starts `echo2 fleet` on a run."""
    started = []

    def start(run, client):
        with (tmp_path / "fleet.log").open("ab") as log:
            command = [sys.executable, "-m", "echo2", "fleet", str(run.path), "--hub", client.url]
            started.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ready(client):
    return {member.name for member in client.crew() if member.live and member.ready}


def launches_and_losses(run):
    return {cost.offer: (cost.launches, cost.lost) for cost in costs_of(run).offers}


@pytest.mark.slow
def test_the_fleet_reaches_the_plan_outlives_kill_9_replaces_who_died_and_leaves_nothing(run, serve, publish, keep):
    hub, client = serve(run)
    publish(run, client, 0)
    first = keep(run, client)
    names = wait_until(lambda: len(ready(client)) == 2 and ready(client))
    first.kill()
    first.wait()
    assert _processes(run.run_id).keys() == names, "machines outlive the process that launched them"
    second = keep(run, client)
    lost = min(names)
    for pid in _processes(run.run_id)[lost]:
        os.kill(pid, signal.SIGKILL)
    others = wait_until(lambda: len(ready(client) - {lost}) == 2 and ready(client) - {lost})
    assert others > names - {lost}, "the one that was well is kept"
    # The ledger has a machine from the next look at the cloud on, and the worker may be ready before that.
    next_best = {"near/here/z1/h200/spot": (2, 1), "near/there/z2/h200/spot": (1, 0)}
    wait_until(lambda: launches_and_losses(run) == next_best)
    hub.stop()
    assert second.wait(PATIENCE_S) == 0
    assert _processes(run.run_id) == {}
    costs = costs_of(run)
    assert costs.running == 0 and costs.usd > 0.5, "a dollar a second for each"
    assert launches_and_losses(run) == next_best, "who ended for want of a hub was not taken back"


SHORT = (
    "run.steps=1",
    "batch.groups=2",
    "batch.members=2",
    "batch.drop_zero_variance=false",
    "sampling.max_completion_tokens=32",
    "activation.completion_tokens=16",
    "worker.simulated_group_latency_s=0.5",
    # So late that only the end of the run ends anything.
    "worker.orphan_timeout_s=3600.0",
)


def do_the_only_step(client):
    """As the learner would, without what it trains."""
    client.take_batch(0)
    client.commit(0, {}, 0)


@pytest.mark.slow
def test_the_end_of_the_run_is_the_end_of_the_fleet_however_seldom_it_looks_and_nobody_is_lost(
    make_rented, serve, publish, keep
):
    rarely = f"activation.pace={PACE.replace('period_s=1.0', 'period_s=3600.0')}"
    run = make_rented(*SHORT, rarely)
    with run.held():
        hub, client = serve(run)
        publish(run, client, 0)
        keeper = keep(run, client)
        do_the_only_step(client)
        wait_until(lambda: not ready(client))
        hub.stop()
    assert keeper.wait(PATIENCE_S) == 0
    assert _processes(run.run_id) == {} and costs_of(run).running == 0
    assert sum(cost.launches for cost in costs_of(run).offers) > 0 == sum(cost.lost for cost in costs_of(run).offers)


def test_a_fleet_of_a_run_that_is_over_says_so_and_ends_without_waiting_for_its_hub(
    make_rented, serve, publish, start_worker, keep, tmp_path
):
    run = make_rented(*SHORT)
    hub, client = serve(run)
    publish(run, client, 0)
    start_worker(client, run.token)
    do_the_only_step(client)
    hub.stop()
    assert keep(run, client).wait(PATIENCE_S) == 0
    assert f"the run in {run.path} is over" in (tmp_path / "fleet.log").read_text()


def test_a_ledger_that_is_none_is_told_before_anything_is_rented(make_rented):
    run = make_rented()
    run.ledger.write_text("this is no database " * 1000)
    with pytest.raises(UserError, match=r"ledger\.db is damaged or not the ledger of a run"):
        keep_fleet(run.path, "http://127.0.0.1:9")


@pytest.mark.slow
def test_the_janitor_ends_what_a_dead_run_left_and_nothing_else(run, serve, publish, keep):
    hub, client = serve(run)
    publish(run, client, 0)
    keeper = keep(run, client)
    names = wait_until(lambda: len(ready(client)) == 2 and ready(client))
    assert clear_up(run.path.parent) == {}, "a fleet that is kept is left alone"
    keeper.kill()
    keeper.wait()
    with run.held():
        assert clear_up(run.path.parent) == {}, "and so is one whose learner is there"
    assert _processes(run.run_id).keys() == names
    hub.stop()
    assert clear_up(run.path.parent) == {run.path.name: Cleared(stopped=tuple(sorted(names)))}
    assert _processes(run.run_id) == {} and costs_of(run).running == 0
    assert clear_up(run.path.parent) == {}
