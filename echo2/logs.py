"""The logs of a run's processes, and how these ended."""

from __future__ import annotations

import signal
from pathlib import Path

TAIL_BYTES = 4096


def last_line(log: Path) -> str:
    """The last line that a process wrote, for a message; an error's line comes last."""
    if not log.exists():
        return "nothing"
    lines = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"


def ending_of(returncode: int, log: Path) -> str:
    """How a process ended, for a message: its signal or exit code, and its last words where it ended itself with an error.

    `returncode` is as `subprocess` gives it. Who was killed had no time to say why, so its last line would mislead.
    """
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)}"
    return f"exit code {returncode}; it said: {last_line(log)}" if returncode else "exit code 0"


def _signal_name(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")
