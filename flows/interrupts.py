"""Ctrl-C and SIGTERM outside the training loop: the command ends at once, and no signal is lost.

Invariant: an interrupt that some library's destructor swallowed is raised again before training begins.
"""

from __future__ import annotations

import signal
import threading

_seen = threading.Event()


def raise_on_signals() -> None:
    """From now on SIGINT and SIGTERM raise KeyboardInterrupt in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_interrupt)


def interrupted() -> bool:
    """Whether a signal came."""
    return _seen.is_set()


def raise_if_lost() -> None:
    """Raises KeyboardInterrupt if a signal came and this place was reached all the same."""
    if interrupted():
        raise KeyboardInterrupt


def _on_interrupt(*_: object) -> None:
    _seen.set()
    raise KeyboardInterrupt
