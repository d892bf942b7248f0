"""Prefect's server for a run that was given none: it begins and ends with the learner's process, even by kill −9.

Its records stay in Prefect's home, where a server that is started later shows them. `prefect server start` and PREFECT_API_URL
give a run a lasting one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from echo2.errors import UserError, WaitTimeout
from echo2.hub.address import listen, url_of
from echo2.lifeline import end_with_parent

START_TIMEOUT_S = 180.0
STOP_S = 10.0


@contextlib.contextmanager
def server_for_run() -> Iterator[None]:
    """Within the block Prefect uses the server that it is set to use, or else a temporary one.

    The temporary one goes on until this process ends, since Prefect sends its last events then. Raises UserError if a server
    that Prefect is set to use does not answer, WaitTimeout if a temporary one does not start.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    address = PREFECT_API_URL.value()
    if address:
        if not _answers(address):
            raise UserError(f"Prefect's server at {address} does not answer: start it, or unset PREFECT_API_URL")
        yield
        return
    with listen("127.0.0.1", 0) as listener:
        address = f"{url_of(listener)}/api"
        process = _start(listener.fileno())
    atexit.register(_stop, process)
    _wait_ready(process, address)
    with temporary_settings({PREFECT_API_URL: address}):
        yield


def _start(listening_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "flows.temporary_server", str(listening_fd), str(os.getpid())],
        env=os.environ | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[listening_fd],
        start_new_session=True,
    )


def _wait_ready(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(address):
        if process.poll() is not None:
            raise UserError(f"Prefect's temporary server ended with exit code {process.returncode}: is PREFECT_HOME writable?")
        if time.monotonic() > deadline:
            raise WaitTimeout(f"Prefect's temporary server did not answer within {START_TIMEOUT_S:g} s")


def _answers(address: str) -> bool:
    import httpx

    try:
        httpx.get(f"{address.rstrip('/')}/health", timeout=2.0)
    except httpx.TransportError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(listening_fd: int, parent_pid: int) -> None:
    """Serve Prefect's API on a socket of the parent's until the parent is gone."""
    end_with_parent(parent_pid, lambda: os.kill(os.getpid(), signal.SIGKILL))
    import uvicorn

    uvicorn.run(
        "prefect.server.api.server:create_app", factory=True, fd=listening_fd, log_level="error", timeout_graceful_shutdown=2
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
