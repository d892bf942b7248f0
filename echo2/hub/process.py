"""The hub as a child process that can be restarted without anyone losing its address.

Invariants: the listening socket belongs to the parent, so requests that arrive while the hub restarts wait instead of failing;
the hub ends with its parent.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import closing

from echo2.errors import UserError, WaitTimeout
from echo2.hub.address import url_of
from echo2.hub.client import HubClient
from echo2.logs import ending_of, open_log, refusal_in
from echo2.run_directory import RunDirectory

log = logging.getLogger(__name__)
STOP_S = 10.0


class HubProcess:
    """Starts, watches and stops the hub of `run`."""

    def __init__(self, run: RunDirectory, listener: socket.socket) -> None:
        """`listener` stays the caller's to close."""
        self._run = run
        self._log = run.logs / "hub.log"
        self._listener = listener
        self.url = url_of(self._listener)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._untold_endings: list[str] = []

    def start(self) -> None:
        """Launch the process; `wait_ready` waits for it."""
        fd = self._listener.fileno()
        command = [sys.executable, "-m", "echo2", "hub", str(self._run.path), "--fd", str(fd), "--parent", str(os.getpid())]
        with open_log(self._log) as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._started_at = time.monotonic()

    def wait_ready(self) -> None:
        """Wait until the hub answers; raises WaitTimeout after too long, and UserError if it ends instead: with its own
        sentence where it refused to start."""
        deadline = time.monotonic() + self._run.config.hub.start_timeout_s
        with closing(HubClient(self.url, self._run.token, request_timeout_s=2.0, patience_s=0.0)) as probe:
            while time.monotonic() < deadline:
                if (ending := self._ending()) is not None:
                    raise UserError(self._refusal() or f"the hub ended at its start: {ending}")
                try:
                    probe.health()
                except WaitTimeout:
                    continue
                return
        raise WaitTimeout(f"the hub did not answer within hub.start_timeout_s = {self._run.config.hub.start_timeout_s:g}")

    def keep_alive(self) -> None:
        """Start the hub again if it ended, and tell the ledger once it is back; to be called about once a second."""
        ending = self._ending()
        if ending is None:
            self._tell_endings()
        elif time.monotonic() - self._started_at > 1.0:
            log.warning("the hub ended and is started again: %s", ending)
            self._untold_endings.append(ending)
            self.start()

    def _tell_endings(self) -> None:
        if not self._untold_endings:
            return
        with closing(HubClient(self.url, self._run.token, request_timeout_s=2.0, patience_s=0.0)) as probe:
            try:
                # An event that is sent before the hub answers might be taken up twice.
                probe.health()
            except WaitTimeout:
                return
            while self._untold_endings:
                probe.note("hub restarted", "hub", self._untold_endings[0])
                del self._untold_endings[0]

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ending(self) -> str | None:
        """How the process ended; None while it runs."""
        code = self._code()
        return None if code is None else ending_of(code, self._log)

    def _refusal(self) -> str | None:
        code = self._code()
        return None if code is None else refusal_in(code, self._log)

    def _code(self) -> int | None:
        return self._process.poll() if self._process is not None else None
