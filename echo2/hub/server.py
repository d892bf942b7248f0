"""The hub's process."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from echo2.holding import held
from echo2.hub.address import listen, url_of
from echo2.hub.app import create_app
from echo2.hub.service import Hub
from echo2.lifeline import end_with_parent
from echo2.logs import say
from echo2.run_directory import RunDirectory, open_run

GRACE_S = 1
KEEP_ALIVE_S = 75


def serve(run_path: Path, listening_fd: int | None, parent_pid: int | None) -> None:
    """Serve the run until SIGTERM; a hub that failed ends with exit code 1.

    With `listening_fd` the socket is the parent's, so that it outlives this process. Raises UserError where there is no such
    run, where it has a hub, where an address is taken, and where the hub cannot begin with what the run holds.
    """
    run = open_run(run_path)
    with held(run.hub_lock, f"run {run.path} is served by another hub: stop that first"):
        failed = _serve(run, listening_fd, parent_pid)
    if failed:
        sys.exit(1)


def _serve(run: RunDirectory, listening_fd: int | None, parent_pid: int | None) -> bool:
    """Returns whether the hub failed."""
    if parent_pid is not None:
        end_with_parent(parent_pid, lambda: os.kill(os.getpid(), signal.SIGTERM))
    config = run.config.hub
    listener = socket.socket(fileno=listening_fd) if listening_fd is not None else listen(config.host, config.port)
    say(f"hub of run {run.run_id} listens on {url_of(listener)}")
    server = _HubServer(run)
    server.run(sockets=[listener])
    return server.failed


class _HubServer(uvicorn.Server):
    """The hub's life within uvicorn's, though not as the application's lifespan: of that uvicorn would bury what is wrong
    with a start under a traceback.

    Long-polls are ended first, since a server waits for the requests under way before it stops.
    """

    failed = False

    def __init__(self, run: RunDirectory) -> None:
        app = create_app(run)
        self._hub = app.state.hub = Hub(run)
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises what the hub's start raises, once all that it began has ended."""
        try:
            await self._hub.start()
        except BaseException:
            await self._hub.stop()
            raise
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._hub.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._hub.release_waiters()
        self.failed = self._hub.chores.failed
        if self.failed:
            # The signal was the hub's own: it ends with an exit code, not as if somebody had killed it.
            self.should_exit = True
            return
        super().handle_exit(sig, frame)
