"""Prefect's server and `echo2 train` as processes under test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
from patience import wait_until

REPOSITORY = Path(__file__).parent.parent.parent
SMALL = ("batch.groups=4", "batch.members=4", "worker.slots=4", "learner.checkpoint_interval=2", "flow.artifact_interval_s=2")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class PrefectServer:
    """A `prefect server start` with a home of its own."""

    def __init__(self, home):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api"
        self.environment = os.environ | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def _answers(self):
        assert self._process.poll() is None, "Prefect's server ended at its start"
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except OSError:
            return False

    def find(self, kind):
        """All records of a kind, such as `task_runs`, that the server holds."""
        found = []
        while True:
            query = json.dumps({"offset": len(found), "limit": 200}).encode()
            request = urllib.request.Request(f"{self.url}/{kind}/filter", query, {"Content-Type": "application/json"})
            page = json.load(urllib.request.urlopen(request, timeout=30))
            found += page
            if len(page) < 200:
                return found

    def kill(self):
        for process in [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]:
            process.kill()
        self._process.wait()


class TrainCommand:
    """`echo2 train` as a process of its own."""

    def __init__(self, runs, environment, *arguments, name="run", logs=None):
        """What it says goes to a file in `logs`, or else beside the run."""
        self.run = runs / name
        self._log = (logs or runs) / f"{name}.out"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "echo2", "train", f"run.directory={runs}", f"run.name={name}", *SMALL, *arguments],
                env=environment,
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family = {}

    @property
    def said(self):
        return self._log.read_text()

    def children(self, command):
        """The processes started so far whose command line has `echo2 COMMAND`."""
        self.remember()
        return [p for p in self._family.values() if p.is_running() and command in _command_line(p)]

    def cpu_s(self):
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def remember(self):
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._family[child.pid] = child
        except psutil.NoSuchProcess:
            return

    def wait_until(self, condition, timeout_s=120):
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.remember()
            assert self.process.poll() is None, f"it ended early:\n{self.said}"
            assert time.monotonic() < deadline, f"it did not come to that:\n{self.said}"
            time.sleep(0.05)

    def wait(self, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.remember()
            assert time.monotonic() < deadline, f"it did not end:\n{self.said}"
            time.sleep(0.1)
        return self.process.returncode

    def survivors(self, within_s=15):
        """Processes that it started and that are still there `within_s` after its end."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            left = [_command_line(p) for p in self._family.values() if _alive(p)]
            if not left:
                return []
            time.sleep(0.2)
        return left

    def kill(self):
        self.remember()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def _alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
