"""The end of all that works for a run on this node, and of the machines that it has rented.

Invariants: the run stays whole, to be gone on with by `echo2 train --resume`; nothing of another run is touched.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from clouds.keeping import clear_up_run
from echo2.errors import UserError
from echo2.holding import Holder, holder
from echo2.run_directory import open_run

LOOK_INTERVAL_S = 0.2
KILL_TIMEOUT_S = 10.0


def end_run(path: Path, now: bool, timeout_s: float, tell: Callable[[str], None]) -> None:
    """End learner, hub and fleet of the run in `path`, and its rented machines; local workers end with the learner.

    They end in order, within `timeout_s` each, the learner with a checkpoint; with `now` they are killed. Raises UserError
    where there is no such run, or one of them does not end or is on another host.
    """
    run = open_run(path)
    # The fleet's before the learner's, so that nobody rents while the machines are ended.
    processes = {"fleet": run.fleet_lock, "learner": run.learner_lock, "hub": run.hub_lock}
    found = {what: lock for what, lock in processes.items() if holder(lock)}
    for what, lock in found.items():
        _end(what, lock, now, timeout_s, tell)
    stopped = clear_up_run(run).stopped
    if stopped:
        tell(f"machines ended: {', '.join(stopped)}")
    tell(f"nothing of {path} runs here{'' if found or stopped else ', and nothing did'}")


def _end(what: str, lock: Path, now: bool, timeout_s: float, tell: Callable[[str], None]) -> None:
    process = holder(lock)
    if process is None:
        return
    if process.host != socket.gethostname():
        raise UserError(f"the {what} is process {process.pid} on {process.host}: end the run there")
    tell(f"the {what} (process {process.pid}) {'is killed' if now else 'is asked to end'}")
    try:
        os.kill(process.pid, signal.SIGKILL if now else signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise UserError(f"the {what} is process {process.pid} of another user: end the run as that user") from None
    _await_end(what, lock, process, KILL_TIMEOUT_S if now else timeout_s)


def _await_end(what: str, lock: Path, process: Holder, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while holder(lock) == process:
        if time.monotonic() > deadline:
            raise UserError(f"the {what} (process {process.pid}) has not ended within {timeout_s:g} s: wait, or use --now")
        time.sleep(LOOK_INTERVAL_S)
