"""The logs of a run's processes."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 4096


def last_line(log: Path) -> str:
    """The last line that a process wrote, for a message; an error's line comes last."""
    if not log.exists():
        return "nothing"
    lines = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
