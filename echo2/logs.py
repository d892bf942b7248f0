"""The logs of a run's processes, and how these ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from echo2.durability import FULL, naming
from echo2.errors import REFUSED, SPEAKER

TAIL_BYTES = 4096


def say(line: str) -> None:
    """One line on standard output, at once; a disk that has no room for it keeps nobody from going on."""
    try:
        print(line, flush=True)
    except OSError as error:
        if error.errno not in FULL:
            raise


def drop_unwritten() -> None:
    """Write out what standard output and error hold, at the end of the process.

    What they do not take is forgotten, or else the interpreter would make an exit code of its own of it.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_log(file: Path) -> BinaryIO:
    """The end of a log, for a process to write to. Raises DiskError where it cannot be had."""
    with naming(file):
        return file.open("ab")


def last_line(log: Path) -> str:
    """The last line that a process wrote, for a message; an error's line comes last."""
    lines = _tail(log)
    return lines[-1] if lines else "nothing"


def refusal_in(returncode: int, log: Path) -> str | None:
    """The sentence with which an `echo2` command refused to go on; None where it ended otherwise."""
    lines = _tail(log)
    begins = [number for number, line in enumerate(lines) if line.startswith(SPEAKER)]
    if returncode != REFUSED or not begins:
        return None
    return "\n".join(lines[begins[-1] :]).removeprefix(SPEAKER)


def ending_of(returncode: int, log: Path) -> str:
    """How a process ended, for a message: its signal or exit code, and its last words where it ended itself with an error.

    `returncode` is as `subprocess` gives it. Who was killed had no time to say why, so its last line would mislead.
    """
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)}"
    return f"exit code {returncode}; it said: {last_line(log)}" if returncode else "exit code 0"


def _tail(log: Path) -> list[str]:
    if not log.exists():
        return []
    return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()


def _signal_name(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")
