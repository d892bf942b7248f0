"""Prefect's server for a run that was given none: it begins and ends with the learner's process, even by kill −9.

Its records stay in Prefect's home, where a server that is started later shows them. `prefect server start` and PREFECT_API_URL
give a run a lasting one.

Invariant: of several runs with the same home one at a time starts its server, since a server first brings the database there
up to date.
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
from pathlib import Path

from echo2.errors import UserError, WaitTimeout
from echo2.holding import held_in_turn
from echo2.hub.address import listen, url_of
from echo2.lifeline import end_with_parent

START_TIMEOUT_S = 180.0
STOP_S = 10.0
LOCK_NAME, LOG_NAME = "echo2-server.lock", "echo2-server.log"
"""In Prefect's home."""


def check_settings() -> None:
    """Raises UserError where Prefect could not even be imported, for what its environment or its profiles say."""
    try:
        from prefect.settings import load_profiles

        load_profiles()
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"Prefect's settings cannot be used ({reason}): mend the PREFECT_… variable, or profiles.toml in Prefect's home"
        ) from None


@contextlib.contextmanager
def server_for_run() -> Iterator[None]:
    """Within the block Prefect uses the server that it is set to use, or else a temporary one.

    The temporary one goes on until this process ends, since Prefect sends its last events then. Raises UserError if
    Prefect's settings name no server that answers, or no home that can be used, WaitTimeout if a temporary one does not start.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    address = PREFECT_API_URL.value()
    if address:
        _require_prefect(address)
        yield
        return
    address = _start_in_turn(PREFECT_HOME.value())
    with temporary_settings({PREFECT_API_URL: address}):
        yield


def _start_in_turn(home: Path) -> str:
    """The address of a server that keeps its records in `home`, once it answers."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with held_in_turn(home / LOCK_NAME, START_TIMEOUT_S, "to start Prefect's server there"):
            with listen("127.0.0.1", 0) as listener:
                address = f"{url_of(listener)}/api"
                process = _start(listener.fileno(), home / LOG_NAME)
            atexit.register(_stop, process)
            _wait_ready(process, address, home / LOG_NAME)
    except OSError as error:
        raise UserError(f"PREFECT_HOME = {home} cannot be used ({error.strerror}): name a folder that you may write") from None
    return address


def _start(listening_fd: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.temporary_server", str(listening_fd), str(os.getpid())],
            env=os.environ | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[listening_fd],
            start_new_session=True,
        )


def _wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(address):
        if process.poll() is not None:
            raise UserError(f"Prefect's temporary server ended with exit code {process.returncode}: {log} says why")
        if time.monotonic() > deadline:
            raise WaitTimeout(f"Prefect's temporary server did not answer within {START_TIMEOUT_S:g} s: look into {log}")


def _answers(address: str) -> bool:
    import httpx

    try:
        httpx.get(f"{address.rstrip('/')}/health", timeout=2.0)
    except (httpx.TransportError, httpx.InvalidURL):
        return False
    return True


def _require_prefect(address: str) -> None:
    """Raises UserError where nothing answers at `address`, or something else than a server that this Prefect can speak to."""
    import httpx
    from prefect.client.orchestration import get_client

    if not _answers(address):
        raise UserError(f"Prefect's server at {address} does not answer: start it, or unset PREFECT_API_URL")
    with get_client(sync_client=True) as client:
        trouble = client.api_healthcheck()
        try:
            client.raise_for_api_version_mismatch()
        except (RuntimeError, httpx.HTTPError) as error:
            trouble = trouble or error
    if trouble is not None:
        refused = isinstance(trouble, httpx.HTTPStatusError)
        reason = f"it answers with status {trouble.response.status_code}" if refused else str(trouble).splitlines()[0]
        raise UserError(
            f"PREFECT_API_URL = {address} leads to no Prefect server that this run can use ({reason}): check that it ends in "
            "/api, as http://127.0.0.1:4200/api does, and its key"
        )


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
