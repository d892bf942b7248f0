"""Workers as processes on this machine.

Invariants: the token travels in the environment, not on the command line; each worker's output goes to a file of its own;
workers end when the process that launched them is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from clouds.fleet import WorkerBackend
from echo2.capacity.offers import Offer
from echo2.config import Config
from echo2.errors import ConfigError
from echo2.logs import ending_of, open_log
from echo2.rollout.environment import LACKING, READY

ASK_TIMEOUT_S = 120.0
"""Longest that another environment may take to say whether it can run a worker; torch takes its time to import."""


def check_python(python: str) -> None:
    """Raises ConfigError if `fleet.python` names a program that is not there or may not be run; empty stands for this one."""
    if python and shutil.which(python) is None:
        raise ConfigError(f"fleet.python = {python!r} is no program: name an environment's bin/python, or leave it empty")


def check_workers(config: Config) -> None:
    """Raises ConfigError if the workers of `config.fleet` could not run here; asks the Python that is to run them."""
    python, worker = config.fleet.python, config.worker
    check_python(python)
    if not config.fleet.workers:
        return
    command = [python or sys.executable, "-m", "echo2.rollout.environment", worker.engine, worker.device]
    said = f"fleet.python = {python!r}" if python else f"fleet.python is empty, and {sys.executable}"
    try:
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{said} does not run as a Python ({error}): name an environment's bin/python") from None
    answer = (asked.stdout.strip() or asked.stderr.strip() or "nothing").splitlines()[-1]
    if asked.returncode == LACKING:
        raise ConfigError(f"{said} cannot run fleet.workers = {config.fleet.workers}: {answer}")
    if asked.returncode or answer != READY:
        raise ConfigError(
            f"{said} does not run echo2, it says {answer!r}: pip install echo2 there, or name another environment"
        )


class LocalBackend(WorkerBackend):
    """Launches `echo2 worker` processes; standard output and error go to `log_folder/NAME.log`."""

    def __init__(
        self, hub_url: str, token: str, log_folder: Path, threads: int, price_usd_per_hour: float, python: str = ""
    ) -> None:
        """`python` is the program that workers run with; empty for the one that runs this. Raises ConfigError for none."""
        check_python(python)
        self._hub_url = hub_url
        self._environment = os.environ | {
            "ECHO2_TOKEN": token,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self._python = python or sys.executable
        self._log_folder = log_folder
        self._offer = Offer("local", price_usd_per_hour)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def offer(self) -> Offer:
        return self._offer

    def launch(self, name: str) -> None:
        command = [self._python, "-m", "echo2", "worker", "--hub", self._hub_url, "--name", name]
        command += ["--parent", str(os.getpid())]
        with open_log(self._log_folder / f"{name}.log") as log:
            # A session of its own, so that Ctrl-C reaches only the learner, which then ends the workers in order.
            self._processes[name] = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def running(self) -> set[str]:
        return {name for name, process in self._processes.items() if process.poll() is None}

    def terminate(self, names: set[str], timeout_s: float) -> None:
        ending = [self._processes[name] for name in names & self.running()]
        for process in ending:
            process.terminate()
        deadline = time.monotonic() + timeout_s
        for process in ending:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ending(self, name: str) -> str:
        return ending_of(self._processes[name].wait(), self._log_folder / f"{name}.log")
