"""Workers as processes on this machine.

Invariants: the token travels in the environment, not on the command line; each worker's output goes to a file of its own;
workers end when the process that launched them is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from clouds.fleet import WorkerBackend
from echo2.capacity.offers import Offer
from echo2.logs import ending_of


class LocalBackend(WorkerBackend):
    """Launches `echo2 worker` processes; standard output and error go to `log_folder/NAME.log`."""

    def __init__(self, hub_url: str, token: str, log_folder: Path, threads: int, price_usd_per_hour: float) -> None:
        self._hub_url = hub_url
        self._environment = os.environ | {
            "ECHO2_TOKEN": token,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self._log_folder = log_folder
        self._offer = Offer("local", price_usd_per_hour)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def offer(self) -> Offer:
        return self._offer

    def launch(self, name: str) -> None:
        command = [sys.executable, "-m", "echo2", "worker", "--hub", self._hub_url, "--name", name]
        command += ["--parent", str(os.getpid())]
        with (self._log_folder / f"{name}.log").open("ab") as log:
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
