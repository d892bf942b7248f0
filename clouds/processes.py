"""Processes on this machine in place of rented machines, to rehearse a fleet without paying for one.

Invariants: those of `Cloud`; a machine is whatever processes carry its run and name in their environment, so that nothing is
lost with the process that launched it; what is known of those that ended is in a folder. One that ended by itself
was there until its last sign of life: until it was last seen, or its workers last wrote to their logs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from clouds.cloud import CloudMachine, LaunchFailed
from echo2.capacity.offers import Offer
from echo2.durability import write_atomically
from echo2.logs import last_line, open_log

MARK = "ECHO2_MACHINE"
STOP_TIMEOUT_S = 25.0
POLL_S = 0.1


class ProcessCloud:
    """Workers of one run as processes that outlive whoever launched them."""

    def __init__(self, hub_url: str, token: str, folder: Path, log_folder: Path, threads: int) -> None:
        """`folder` keeps what is known of machines; standard output and error go to `log_folder`/NAME.log."""
        self._hub_url, self._folder, self._log_folder = hub_url, folder, log_folder
        self._environment = os.environ | {"ECHO2_TOKEN": token, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._busy = threading.Lock()
        folder.mkdir(exist_ok=True)

    def launch(self, run_id: str, name: str, offer: Offer, workers: int) -> None:
        with self._busy:
            if name in _processes(run_id):
                return
            if (self._folder / f"{name}.json").exists():
                raise LaunchFailed(f"{name} has ended already")
            # Written first: whoever is killed here leaves a machine that has ended, and never a process that nobody knows of.
            self._remember(CloudMachine(name, offer.name, offer.price_usd_per_hour, time.time()))
            for number in range(workers):
                self._start(name if workers == 1 else f"{name}.{number}", f"{run_id}/{name}")

    def machines(self, run_id: str) -> list[CloudMachine]:
        with self._busy:
            there = _processes(run_id)
            return [self._as_it_is(file, there) for file in sorted(self._folder.glob("*.json"))]

    def stop(self, run_id: str, name: str) -> None:
        with self._busy:
            for pid in _processes(run_id).get(name, ()):
                _send(pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while pids := _processes(run_id).get(name):
                if time.monotonic() > deadline:
                    for pid in pids:
                        _send(pid, signal.SIGKILL)
                time.sleep(POLL_S)
            file = self._folder / f"{name}.json"
            if file.exists():
                os.utime(file)
                self._as_it_is(file, {}, "stopped")

    def _start(self, worker: str, mark: str) -> None:
        with open_log(self._log_folder / f"{worker}.log") as log:
            subprocess.Popen(
                [sys.executable, "-m", "echo2", "worker", "--hub", self._hub_url, "--name", worker],
                env=self._environment | {MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _as_it_is(self, file: Path, there: Container[str], ending: str = "") -> CloudMachine:
        """The machine that `file` is about, which has ended where it is not `there`."""
        machine = CloudMachine(**json.loads(file.read_text(encoding="utf-8")))
        if machine.name in there:
            # Its time of change says when the machine was last seen.
            os.utime(file)
        elif machine.ended_at_s is None:
            ending = ending or f"its last words: {last_line(self._log_folder / f'{machine.name}.log')}"
            logs = [self._log_folder / f"{machine.name}.log", *self._log_folder.glob(f"{machine.name}.*.log")]
            ended_at_s = max(sign.stat().st_mtime for sign in (file, *logs) if sign.exists())
            machine = replace(machine, ended_at_s=ended_at_s, ending=ending)
            self._remember(machine)
        return machine

    def _remember(self, machine: CloudMachine) -> None:
        write_atomically(self._folder / f"{machine.name}.json", json.dumps(asdict(machine)) + "\n")


def _processes(run_id: str) -> dict[str, list[int]]:
    """Ids of the processes of the run's machines, by machine; those of others cannot be read, or carry another mark."""
    found: dict[str, list[int]] = defaultdict(list)
    for pid, variables in _environments():
        mark = next((variable for variable in variables if variable.startswith(f"{MARK}={run_id}/")), None)
        if mark is not None:
            found[mark.rpartition("/")[2]].append(pid)
    return dict(found)


def _environments() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            content = (folder / "environ").read_bytes()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
        # One that ended and was not waited for has none any more.
        yield int(folder.name), content.decode(errors="replace").split("\0")


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
