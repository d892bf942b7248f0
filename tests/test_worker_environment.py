"""A worker's machine: the core alone is installed there, and that is enough to work."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
NOT_ON_A_WORKER = ("prefect", "sky", "fastapi", "starlette", "uvicorn", "pebble", "prometheus_client", "matplotlib", "torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The folder of programs of a fresh environment in which `pip install <repository>` was run."""
    folder = tmp_path_factory.mktemp("worker")
    source = folder / "source"
    # pip builds inside the folder that it is given.
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in ("echo2", "flows", "clouds"):
        shutil.copytree(REPOSITORY / package, source / package, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPOSITORY / file, source / file)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", source], check=True)
    return programs


def outside(folder):
    """The environment of a process that sees nothing of this repository."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder)}


def test_the_core_brings_nothing_that_only_learner_and_hub_need(core, tmp_path):
    tried = "; ".join(f"print({name!r}, importlib.util.find_spec({name!r}) is not None)" for name in NOT_ON_A_WORKER)
    found = subprocess.run(
        [core / "python", "-c", f"import importlib.util; {tried}"],
        env=outside(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line for line in found.stdout.splitlines() if line.endswith("True")] == []


def test_a_worker_with_the_core_alone_delivers_a_batch_and_leaves_on_sigterm(core, make_run, serve, publish, tmp_path):
    run = make_run("batch.groups=2", "batch.members=2", "run.steps=4", "batch.drop_zero_variance=false")
    _, client = serve(run)
    publish(run, client, 0)
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [core / "echo2", "worker", "--hub", client.url, "--name", "remote", "worker.slots=4"],
            env=outside(tmp_path) | {"ECHO2_TOKEN": run.token},
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60

        def keep_waiting():
            assert worker.poll() is None and time.monotonic() < deadline, (tmp_path / "worker.log").read_text()

        batch = client.take_batch(0, keep_waiting)
        assert len(batch.groups) == 2
        assert {member.worker_id.rsplit("-", 1)[0] for group in batch.groups for member in group.members} == {"remote"}
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0, (tmp_path / "worker.log").read_text()
        assert client.live_workers() == []
    finally:
        worker.kill()
        worker.wait()
