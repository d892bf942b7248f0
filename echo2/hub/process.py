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

from echo2.errors import UserError, WaitTimeout
from echo2.hub.address import url_of
from echo2.hub.client import HubClient
from echo2.logs import last_line
from echo2.run_directory import RunDirectory

log = logging.getLogger(__name__)
STOP_S = 10.0


class HubProcess:
    """Starts, watches and stops the hub of `run`."""

    def __init__(self, run: RunDirectory, listener: socket.socket) -> None:
        """`listener` stays the caller's to close."""
        self._run = run
        self._listener = listener
        self.url = url_of(self._listener)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def start(self) -> None:
        """Launch the process; `wait_ready` waits for it."""
        fd = self._listener.fileno()
        command = [sys.executable, "-m", "echo2", "hub", str(self._run.path), "--fd", str(fd), "--parent", str(os.getpid())]
        with (self._run.logs / "hub.log").open("ab") as output:
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
        """Wait until the hub answers; raises UserError with its last words if it ends instead, WaitTimeout after too long."""
        deadline = time.monotonic() + self._run.config.hub.start_timeout_s
        probe = HubClient(self.url, self._run.token, request_timeout_s=2.0, patience_s=0.0)
        try:
            while time.monotonic() < deadline:
                if self._ended():
                    raise UserError(f"the hub ended at its start; it said: {self._last_words()}")
                try:
                    probe.health()
                except WaitTimeout:
                    continue
                return
        finally:
            probe.close()
        raise WaitTimeout(f"the hub did not answer within hub.start_timeout_s = {self._run.config.hub.start_timeout_s:g}")

    def keep_alive(self) -> None:
        """Start the hub again if it ended; to be called about once a second."""
        if self._process is not None and self._ended() and time.monotonic() - self._started_at > 1.0:
            log.warning("the hub ended and is started again; it said: %s", self._last_words())
            self.start()

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

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _last_words(self) -> str:
        return last_line(self._run.logs / "hub.log")
