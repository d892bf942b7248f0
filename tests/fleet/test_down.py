"""`echo2 down`: nothing of a run goes on afterwards, and the run can."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing

import psutil
import pytest
from click.testing import CliRunner
from patience import PATIENCE_S, wait_until

from clouds.processes import _processes
from echo2.cli import echo2
from echo2.errors import UserError
from echo2.holding import Holder, held, holder
from echo2.hub.client import HubClient
from echo2.hub.inspection import inspect_run
from echo2.run_directory import open_run

SIMULATED = ("learner.engine=simulated", "worker.engine=simulated", "model.path=tiny", "batch.groups=4", "batch.members=2")


def down(run, *options):
    return CliRunner().invoke(echo2, ["down", str(run), *options], catch_exceptions=True)


def of_run(path):
    """Processes whose command line names the run, and what descends from them."""
    named = [p for p in psutil.process_iter() if str(path) in " ".join(_words(p))]
    return {q.pid for p in named for q in [p, *_offspring(p)] if q.pid != os.getpid()}


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _offspring(process):
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


@pytest.fixture
def training(tmp_path):
    """A run that trains, with a worker of its own and processes for rented machines."""
    catalog = tmp_path / "catalog/near"
    catalog.mkdir(parents=True)
    columns = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,AvailabilityZone"
    (catalog / "vms.csv").write_text(f"{columns}\nh200,H200,1,7.2,3.6,here,z1\n")
    path = tmp_path / "runs/run"
    settings = [
        *SIMULATED,
        f"run.directory={tmp_path / 'runs'}",
        "run.name=run",
        "run.steps=100000",
        "learner.checkpoint_interval=1000",
        "fleet.workers=1",
        "worker.orphan_timeout_s=5",
        "activation.cloud=processes",
        "activation.max_domain_share=1.0",
        f"activation.catalog={tmp_path / 'catalog'}",
        "activation.pace={period_s=1.0}",
        "capacity.learner_step_s=1.0",
        "capacity.group_latency_s=0.5",
    ]
    with (tmp_path / "log").open("wb") as log:
        started = [subprocess.Popen([sys.executable, "-m", "echo2", "train", *settings], stdout=log, stderr=log)]
        wait_until(lambda: (path / "ledger.db").exists() and inspect_run(path)["step"] >= 3)
        url = re.search(r"hub at (\S+)", (tmp_path / "log").read_text())[1]
        fleet = [sys.executable, "-m", "echo2", "fleet", str(path), "--hub", url]
        started.append(subprocess.Popen(fleet, stdout=log, stderr=log))
        run = open_run(path)
        with closing(HubClient(url, run.token)) as client:
            wait_until(lambda: any(m.name.startswith("echo2-") and m.live for m in client.crew()))
    yield path, started
    for process in started:
        process.kill()
        process.wait()
    for pids in _processes(run.run_id).values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--now",)], ids=["in order", "at once"])
def test_nothing_of_the_run_goes_on_and_the_run_can(training, options):
    path, started = training
    before = of_run(path) | {pid for pids in _processes(open_run(path).run_id).values() for pid in pids}
    assert len(before) >= 4
    done = down(path, *options)
    assert done.exit_code == 0, done.output
    assert "learner" in done.output and "fleet" in done.output and "machines ended" in done.output
    codes = [process.wait(PATIENCE_S) for process in started]
    assert codes[0] == (-signal.SIGKILL if options else 130)
    wait_until(lambda: not any(map(_lives, before)))
    assert _processes(open_run(path).run_id) == {}
    assert bool(list((path / "checkpoints").glob("version-*"))) is not bool(options), "in order ends with a checkpoint"
    again = down(path)
    assert again.exit_code == 0 and "nothing did" in again.output


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_does_not_end_is_named(make_run):
    run = make_run()
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "from pathlib import Path; from echo2.holding import held\n"
    code += "with held(Path(sys.argv[1]), 'busy'): print('held', flush=True); time.sleep(100)"
    stubborn = subprocess.Popen([sys.executable, "-c", code, str(run.learner_lock)], stdout=subprocess.PIPE)
    try:
        assert stubborn.stdout.readline() == b"held\n"
        done = down(run.path, "--timeout-s", "0.5")
        assert isinstance(done.exception, UserError)
        assert f"learner (process {stubborn.pid}) has not ended within 0.5 s" in str(done.exception)
        assert down(run.path, "--now").exit_code == 0
        assert stubborn.wait(10) == -signal.SIGKILL
    finally:
        stubborn.kill()
        stubborn.wait()


def test_what_runs_on_another_host_is_left_to_it(make_run, monkeypatch):
    run = make_run()
    with held(run.learner_lock, "busy"):
        here = holder(run.learner_lock)
        assert here == Holder(socket.gethostname(), os.getpid())
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        done = down(run.path)
        assert isinstance(done.exception, UserError) and f"process {os.getpid()} on {here.host}" in str(done.exception)
    assert holder(run.learner_lock) is None


def test_a_second_hub_of_a_run_is_refused(make_run, serve):
    run = make_run()
    serve(run)
    second = subprocess.run([sys.executable, "-m", "echo2", "hub", str(run.path)], capture_output=True, text=True, timeout=60)
    assert second.returncode == 2 and "is served by another hub" in second.stderr
