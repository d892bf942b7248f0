"""What SkyPilot is asked for, by its own parsing where it is installed, and what the worker's task does on a machine."""

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from patience import wait_until

from clouds.skypilot import label_of, offer_name, read_task
from echo2.capacity.offers import Offer
from echo2.errors import UserError

FILE = Path(__file__).parents[2] / "examples/worker.sky.yaml"
SPOT = Offer("aws", 2.0, "ap-south-1", "aps1-az2", "p5.4xlarge", "H100", 1, spot=True)
WORKER = """#!/bin/bash
echo "$@ gpus $CUDA_VISIBLE_DEVICES" >> "$HOME/started"
trap 'echo "told to leave" >> "$HOME/started"; exit 0' TERM
while sleep 0.05; do :; done
"""


@pytest.fixture
def machine(tmp_path):
    """Runs the task's script in a home of its own, with a worker that writes down how it was started."""
    binary = tmp_path / "echo2-worker/bin/echo2"
    binary.parent.mkdir(parents=True)
    binary.write_text(WORKER)
    binary.chmod(0o755)
    started = []

    def run(**environment):
        given = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "ECHO2_HUB": "http://h:1", **environment}
        started.append(
            subprocess.Popen(["bash", "-c", yaml.safe_load(FILE.read_text())["run"]], env=given, start_new_session=True)
        )
        return started[-1], tmp_path / "started"

    yield run
    for process in started:
        # With its workers, which a process that is killed leaves behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lines_of(file, count):
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= count)
    return sorted(file.read_text().splitlines())


def test_a_machine_runs_a_worker_for_each_of_its_shares_of_gpus_and_hands_on_the_notice(machine):
    process, started = machine(ECHO2_NAME="echo2-a-3", ECHO2_WORKERS="2", ECHO2_GPUS_PER_WORKER="4")
    assert lines_of(started, 2) == [
        "worker --hub http://h:1 --name echo2-a-3.0 gpus 0,1,2,3",
        "worker --hub http://h:1 --name echo2-a-3.1 gpus 4,5,6,7",
    ]
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    assert lines_of(started, 4)[:2] == ["told to leave"] * 2


def test_a_single_worker_has_the_machines_name_and_one_by_hand_the_hosts(machine):
    _, started = machine(ECHO2_NAME="echo2-a-3", ECHO2_WORKERS="1", ECHO2_GPUS_PER_WORKER="1")
    assert lines_of(started, 1) == ["worker --hub http://h:1 --name echo2-a-3 gpus 0"]
    started.unlink()
    machine(ECHO2_NAME="", ECHO2_WORKERS="1", ECHO2_GPUS_PER_WORKER="1")
    host = os.uname().nodename
    assert lines_of(started, 1) == [f"worker --hub http://h:1 --name {host} gpus 0"]


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((0, 2), 2), ((2, 0), 2)])
@pytest.mark.parametrize("file", [FILE, FILE.with_name("worker.slurm.yaml")], ids=["sky", "slurm"])
def test_a_job_fails_if_one_of_its_workers_does(file, codes, code, tmp_path):
    binaries = tmp_path / "echo2-worker/bin"
    binaries.mkdir(parents=True)
    fails = "".join(f'[[ "$*" == *.{place}* ]] && exit {code}\n' for place, code in enumerate(codes))
    for name, script in (("echo2", fails), ("python", fails), ("scontrol", "exit 0")):
        (binaries / name).write_text(f"#!/bin/bash\n{script}")
        (binaries / name).chmod(0o755)
    given = {"HOME": str(tmp_path), "PATH": f"{binaries}:{os.environ['PATH']}", "ECHO2_HUB": "http://h:1", "ECHO2_NAME": "m"}
    given |= {"ECHO2_WORKERS": "2", "ECHO2_GPUS_PER_WORKER": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    given |= {"ECHO2_ENVIRONMENT": str(binaries.parent), "SLURM_JOB_ID": "1"}
    script = yaml.safe_load(file.read_text())["run"]
    assert subprocess.run(["bash", "-c", script], env=given, timeout=30).returncode == code


UV = """#!/bin/bash
echo "uv $@" >> "$HOME/installed"
for last; do :; done
[ "$1" = venv ] && mkdir -p "$last/bin" && printf '#!/bin/bash' > "$last/bin/python" && chmod +x "$last/bin/python"
exit 0
"""


def set_up(home, engine):
    """Runs the task's set-up, with a stand-in for uv; returns what that was asked for since."""
    uv, installed = home / ".local/bin/uv", home / "installed"
    uv.parent.mkdir(parents=True, exist_ok=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    installed.unlink(missing_ok=True)
    given = {"HOME": str(home), "PATH": os.environ["PATH"], "ECHO2_ENGINE": engine}
    subprocess.run(["bash", "-c", yaml.safe_load(FILE.read_text())["setup"]], env=given, check=True, stdout=subprocess.DEVNULL)
    return installed.read_text().splitlines()


def test_the_set_up_makes_a_python_that_is_new_enough_and_installs_the_engine_of_the_run_also_if_repeated(tmp_path):
    home = tmp_path / "echo2-worker"
    install = f"uv pip install --python {home}/bin/python "
    assert set_up(tmp_path, "vllm") == [f"uv venv --python 3.11 --seed {home}", f"{install}.[vllm]"]
    assert set_up(tmp_path, "transformers") == [f"{install}.[transformers]"]


def test_a_task_that_takes_no_hub_or_no_token_is_refused(tmp_path):
    task = read_task(FILE)
    for part in ("envs", "secrets"):
        file = tmp_path / "task.yaml"
        file.write_text(yaml.safe_dump({key: value for key, value in task.items() if key != part}))
        with pytest.raises(UserError, match=r"task\.yaml"):
            read_task(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_task(tmp_path / "none.yaml")


def test_labels_are_as_every_cloud_allows_them():
    assert label_of("My.Run_1-0f3c") == "my-run_1-0f3c"
    assert len(label_of("x" * 100)) == 63 and label_of("-a-") == "a"


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    pytest.importorskip("sky")
    shutil.copytree(FILE.parent / "catalog/v8", tmp_path / ".sky/catalogs/v8")
    zones = "AvailabilityZoneName,AvailabilityZone\nap-south-1b,aps1-az2\n"
    (tmp_path / ".sky/catalogs/v8/aws/az_mappings-0123abcd.csv").write_text(zones)
    from clouds.skypilot import SkyCloud

    return SkyCloud(FILE, "http://hub:8700", "the-token", gpus_per_worker=2, ports=(8701,), engine="vllm")


def test_skypilot_reads_the_task_with_place_market_labels_ports_and_the_token_as_a_secret(cloud):
    task = cloud.task("run-1", "echo2-run-1-0", SPOT, 2)
    (resources,) = task.resources
    assert (str(resources.cloud), resources.region, resources.zone) == ("AWS", "ap-south-1", "ap-south-1b")
    assert resources.use_spot and resources.instance_type == "p5.4xlarge" and resources.disk_size == 64
    assert resources.labels == {"echo2-run": "run-1", "echo2-machine": "echo2-run-1-0", "echo2-offer": SPOT.name}
    assert offer_name(resources) == SPOT.name, "by which the plan knows it again"
    assert resources.ports == ["8701"]
    assert task.envs["ECHO2_HUB"] == "http://hub:8700" and task.envs["ECHO2_NAME"] == "echo2-run-1-0"
    assert (task.envs["ECHO2_WORKERS"], task.envs["ECHO2_GPUS_PER_WORKER"]) == ("2", "2")
    assert task.envs["ECHO2_ENGINE"] == "vllm", "which the run asks for"
    assert list(task.secrets) == ["ECHO2_TOKEN"] and "the-token" not in str(task.envs) + task.run + task.setup
    assert "echo2 worker" in task.run and "pip install" in task.setup


def test_skypilot_reads_the_task_as_it_is_for_a_launch_by_hand(cloud):
    import sky

    task = sky.Task.from_yaml_config(read_task(FILE), [("ECHO2_HUB", "http://hub:8700")], [("ECHO2_TOKEN", "t")])
    assert {name for resources in task.resources for name in resources.accelerators} == {"L4", "A10G", "RTX4090"}


def test_a_zone_that_the_account_has_not_is_no_machine(cloud):
    from clouds.cloud import LaunchFailed

    with pytest.raises(LaunchFailed, match="no zone euw2-az3"):
        cloud.task("run-1", "m-0", replace(SPOT, region="eu-west-2", zone="euw2-az3"), 1)


def test_on_slurm_the_partition_is_the_market_and_the_labels_have_offer_and_price(cloud, monkeypatch):
    from sky.clouds import Slurm

    monkeypatch.setattr(Slurm, "validate_region_zone", lambda self, region, zone: (region, zone))
    offer = Offer("slurm", 0.25, "lab", "spot", "4CPU--16GB--L4:1", "L4", 1, spot=True)
    (resources,) = cloud.task("run-1", "m-0", offer, 1).resources
    assert (str(resources.cloud), resources.region, resources.zone, resources.use_spot) == ("Slurm", "lab", "spot", False)
    assert resources.instance_type == "4CPU--16GB--L4:1" and resources.ports is None
    assert offer_name(resources) == offer.name and resources.labels["echo2-usd-per-hour"] == "0.25"


def test_what_skypilot_raises_is_told_apart(cloud):
    from sky import exceptions

    from clouds.cloud import CloudTrouble, LaunchFailed, MachineFailed
    from clouds.skypilot import _told_apart

    cases = [
        (exceptions.ResourcesUnavailableError("\x1b[31mno capacity\x1b[0m"), LaunchFailed, "Error: no capacity$"),
        (
            exceptions.ResourcesUnavailableError("sorry", failover_history=[ValueError("it is full")]),
            LaunchFailed,
            "it is full",
        ),
        (exceptions.CommandError(1, "pip install", "failed to set up", None), MachineFailed, "CommandError"),
        (ConnectionError("the server is away"), CloudTrouble, "the server is away"),
    ]
    for raised, kind, told in cases:
        with pytest.raises(kind, match=told) as caught, _told_apart("m-0"):
            raise raised
        assert type(caught.value) is kind
