"""The hub's process."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from echo2.hub.address import listen, url_of
from echo2.hub.app import create_app
from echo2.lifeline import end_with_parent
from echo2.run_directory import open_run

GRACE_S = 1


def serve(run_path: Path, listening_fd: int | None, parent_pid: int | None) -> None:
    """Serve the run until SIGTERM; a hub that failed ends with exit code 1.

    With `listening_fd` the socket is the parent's, so that it outlives this process.
    """
    run = open_run(run_path)
    if parent_pid is not None:
        end_with_parent(parent_pid, lambda: os.kill(os.getpid(), signal.SIGTERM))
    config = run.config.hub
    listener = socket.socket(fileno=listening_fd) if listening_fd is not None else listen(config.host, config.port)
    print(f"hub of run {run.run_id} listens on {url_of(listener)}", flush=True)
    settings = uvicorn.Config(
        create_app(run), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=75
    )
    server = _HubServer(settings)
    server.run(sockets=[listener])
    if server.failed:
        sys.exit(1)


class _HubServer(uvicorn.Server):
    """Ends long-polls first, since a server waits for the requests under way before it stops."""

    failed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        hub = getattr(self.config.app.state, "hub", None)  # type: ignore[union-attr]
        if hub is not None:
            hub.release_waiters()
            self.failed = hub.failed
        if self.failed:
            # The signal was the hub's own: it ends with an exit code, not as if somebody had killed it.
            self.should_exit = True
            return
        super().handle_exit(sig, frame)
