"""Files that one process at a time holds while it does its part in a run, and that say which one.

Invariant: a file is held as long as its holder lives, and no longer, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from echo2.durability import naming
from echo2.errors import InUse, UserError, WaitTimeout

WRITES_WITHIN_S = 1.0
TURN_PAUSE_S = 0.1


class Holder(NamedTuple):
    """A process, by the name of its host and its number there."""

    host: str
    pid: int


@contextmanager
def held(file: Path, busy: str) -> Iterator[None]:
    """Hold `file`, which is made if need be, for this process; raises InUse that says `busy` if another one does.

    Raises DiskError where it cannot be written.
    """
    # Opened so that the holder's name stays, should there be one, and without a buffer that would be written once more.
    with naming(file):
        lock = file.open("ab", buffering=0)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(busy) from None
        with naming(file):
            lock.truncate(0)
            lock.write(f"{socket.gethostname()} {os.getpid()}".encode())
        yield


@contextmanager
def held_in_turn(file: Path, timeout_s: float, what: str) -> Iterator[None]:
    """Hold `file` as `held` does, once nobody else does; raises WaitTimeout that names who held it for `timeout_s`, and `what`
    it does so for.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as holding:
        while True:
            try:
                holding.enter_context(held(file, what))
                break
            except InUse:
                if time.monotonic() > deadline and (other := holder(file)) is not None:
                    told = f"process {other.pid} on {other.host} has held {file} for {timeout_s:g} s"
                    raise WaitTimeout(f"{told} {what}: look after it, or end it") from None
            time.sleep(TURN_PAUSE_S)
        yield


def holder(file: Path) -> Holder | None:
    """Who holds `file`; None if nobody does. Raises UserError where the holder has not written its name."""
    deadline = time.monotonic() + WRITES_WITHIN_S
    while True:
        try:
            with file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except FileNotFoundError:
            return None
        except BlockingIOError:
            host, _, pid = file.read_text().partition(" ")
        if pid.isdecimal():
            return Holder(host, int(pid))
        if time.monotonic() > deadline:
            raise UserError(f"{file} is held by a process that it does not name: look for it with `lsof {file}`")
        time.sleep(0.05)
