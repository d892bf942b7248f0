"""Ctrl-C and SIGTERM outside the training loop: the command ends at once, and no signal is lost.

Invariant: an interrupt that some library's destructor or callback swallowed is raised again before training begins, and
nothing is printed about it.
"""

from __future__ import annotations

import signal
import sys
import threading

_seen = threading.Event()


def raise_on_signals() -> None:
    """From now on SIGINT and SIGTERM raise KeyboardInterrupt in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_interrupt)
    sys.unraisablehook = _tell_unless_interrupt


def interrupted() -> bool:
    """Whether a signal came."""
    return _seen.is_set()


def raise_if_lost() -> None:
    """Raises KeyboardInterrupt if a signal came and this place was reached all the same."""
    if interrupted():
        raise KeyboardInterrupt


def _tell_unless_interrupt(swallowed: sys.UnraisableHookArgs) -> None:
    # Prefect's handler of SIGTERM, which is in force while it starts a flow, raises a BaseException of its own.
    if issubclass(swallowed.exc_type, Exception):
        sys.__unraisablehook__(swallowed)
    else:
        _seen.set()


def _on_interrupt(*_: object) -> None:
    _seen.set()
    raise KeyboardInterrupt
