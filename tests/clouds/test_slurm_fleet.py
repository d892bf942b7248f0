"""The demo on a cluster of Slurm, by `echo2 fleet` and SkyPilot: it learns, outlives a preemption, and leaves nothing."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from machines import (
    ENVIRONMENT,
    INSIDE,
    REPOSITORY,
    WORKERS,
    Daemons,
    SkyPilot,
    launches_and_losses,
    processes_with,
    protect,
    ready,
)
from patience import PATIENCE_S, wait_until
from slurm_cluster import HEAD, SlurmCluster

from clouds.cloud import LaunchFailed, SetupFailed
from clouds.skypilot import SkyCloud
from echo2.capacity.offers import Offer
from echo2.hub.client import HubClient
from echo2.hub.inspection import costs_of
from echo2.run_directory import open_run

pytestmark = [
    pytest.mark.skipif(not INSIDE, reason="SkyPilot has an environment of its own: make test-clouds"),
    pytest.mark.timeout(1800),
]
PORT = 8700
NICE = 15
HUB = f"http://{HEAD}:{PORT}"
CATALOG = """InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,AvailabilityZone
1CPU--1GB--L4:1,L4,1,,1.2,lab,spot
1CPU--1GB--L4:1,L4,1,3.6,,lab,ondemand
"""
SPOT, ON_DEMAND = "slurm/lab/spot/1CPU--1GB--L4:1/spot", "slurm/lab/ondemand/1CPU--1GB--L4:1"
SETTINGS = (
    "run.name=slurm",
    # More than it will take: the test ends the run.
    "run.steps=2000",
    "evaluation.every_steps=0",
    "fleet.workers=0",
    f"hub.host={HEAD}",
    f"hub.port={PORT}",
    "worker.orphan_timeout_s=10",
    "activation.pace={period_s=15.0, silence_timeout_s=20.0, first_block_s=120.0}",
    # Such that the roofline's estimate for completions of this length on an L4, 2.77 groups/s, asks for two of them.
    "activation.completion_tokens=4096",
    "capacity.learner_step_s=10.0",
    "capacity.transfer_s=0.1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def sky(folder):
    protect(ENVIRONMENT, WORKERS)
    made = SkyPilot(folder / "sky")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def slurm(folder, sky):
    made = SlurmCluster(folder / "slurm", ("n0", "n1", "n2"))
    sky.write(".slurm/config", made.ssh_config)
    sky.write(".sky/config.yaml", f"allowed_clouds: [slurm]\n{made.sky_config}")
    sky.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def task(folder):
    """The shipped task for Slurm, with the environment and the code of this repository."""
    content = yaml.safe_load((REPOSITORY / "examples/worker.slurm.yaml").read_text())
    content["envs"] |= {"ECHO2_ENVIRONMENT": str(WORKERS), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    # SkyPilot comes first: learner and workers take all that two cores have.
    content["run"] = f"renice --priority {NICE} $$\n{content['run']}"
    file = folder / "worker.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture
def daemons(tmp_path):
    made = Daemons(tmp_path / "logs")
    yield made
    made.stop()
    print(made.said())


def test_the_demo_learns_on_slurm_outlives_a_preemption_and_leaves_nothing(folder, sky, slurm, task, daemons):
    catalog = folder / "catalog/slurm"
    catalog.mkdir(parents=True)
    (catalog / "vms.csv").write_text(CATALOG)
    rented = (f"activation.catalog={catalog.parent}", f"activation.worker_task={task}", f"run.directory={folder / 'runs'}")
    learner = daemons.echo2(WORKERS, "train", "configs/demo.toml", *SETTINGS, *rented, environment=sky.environment)
    os.setpriority(os.PRIO_PROCESS, learner.pid, NICE)
    path = folder / "runs/slurm"
    wait_until((path / "ledger.db").exists)
    run = open_run(path)
    client = HubClient(HUB, run.token, patience_s=PATIENCE_S)
    client.health()
    fleet = daemons.echo2(ENVIRONMENT, "fleet", str(path), "--hub", HUB, environment=sky.environment)
    names = wait_until(lambda: len(ready(client)) == 2 and ready(client))
    assert launches_and_losses(run) == {SPOT: (2, 0)}, "the cheaper partition"
    wait_until(lambda: client.status()["step"] >= 3)
    (victim, *_) = [name for name, _, _ in slurm.jobs() if name.startswith(min(names))]
    slurm.preempt(victim)
    wait_until(lambda: len(ready(client) - {min(names)}) == 2)
    next_best = {SPOT: (2, 1), ON_DEMAND: (1, 0)}
    wait_until(lambda: launches_and_losses(run) == next_best)
    wait_until(lambda: exact_match(client)[1] > exact_match(client)[0] + 0.2)
    learner.send_signal(signal.SIGINT)
    assert learner.wait(PATIENCE_S) == 130
    assert fleet.wait(PATIENCE_S) == 0
    assert slurm.jobs() == [] and sky.clusters() == []
    costs = costs_of(run)
    assert costs.running == 0 and launches_and_losses(run) == next_best and 0 < costs.usd < 1
    assert wait_until(lambda: not processes_with("echo2 worker"))
    # Of what Slurm preempts, a process of SkyPilot that ends last may leave a lock file.
    left = {folder.name for folder in (slurm.home / ".sky_clusters").iterdir()}
    assert left <= {victim}, "nor the files of what was stopped"


def exact_match(client):
    """Mean over the first three and over the last ten steps."""
    values = [step["exact_match"] for step in client.steps()]
    return sum(values[:3]) / 3, sum(values[-10:]) / len(values[-10:])


@pytest.fixture
def cloud(task, sky, monkeypatch):
    """SkyPilot in this process."""
    for name in os.environ.keys() - sky.environment.keys():
        monkeypatch.delenv(name)
    for name, value in sky.environment.items():
        monkeypatch.setenv(name, value)
    return lambda file=task: SkyCloud(file, HUB, "token", gpus_per_worker=1, queue_timeout_s=8.0)


def test_a_full_partition_is_told_from_a_worker_that_cannot_be_set_up(cloud, slurm, task, folder):
    offer = Offer("slurm", 1.2, "lab", "spot", "1CPU--1GB--L4:1", "L4", 1, spot=True)
    broken = folder / "broken.yaml"
    broken.write_text(yaml.safe_dump(yaml.safe_load(task.read_text()) | {"setup": "pip install /no/such/package"}))
    slurm.occupy(slurm.nodes[1:])
    with ThreadPoolExecutor(1) as executor:
        setup = executor.submit(cloud(broken).launch, "run-2", "echo2-run-2-0", offer, 1)
        wait_until(lambda: any(name.startswith("echo2-run-2-0") for name, _, _ in slurm.jobs()))
        other = cloud()
        with pytest.raises(LaunchFailed, match="Failed to acquire resources in spot") as failure:
            other.launch("run-2", "echo2-run-2-1", offer, 1)
        assert not isinstance(failure.value, SetupFailed)
        with pytest.raises(SetupFailed, match="FAILED_SETUP"):
            setup.result()
    slurm.vacate()
    there, never = sorted(other.machines("run-2"), key=lambda machine: machine.name)
    assert (there.name, there.offer, there.price_usd_per_hour, there.ended_at_s) == ("echo2-run-2-0", SPOT, 1.2, None)
    assert never.launched_at_s == never.ended_at_s, "what was not had costs nothing"
    other.stop("run-2", "echo2-run-2-0")
    assert all(machine.ended_at_s for machine in other.machines("run-2")) and slurm.jobs() == []
