"""Ctrl-C and SIGTERM outside the training loop: the command ends at once, and no signal is lost.

Invariants: a signal counts from when it arrives, whichever handler is in force and whatever becomes of what that raises; one
that some library's destructor or callback swallowed is raised again before training begins, and nothing is printed about it;
nothing but a signal counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
SIGNALS_AT_A_TIME = 4096


class _Arrivals:
    """The signals that have come, as the interpreter notes them before it calls a handler.

    Handlers do not know: Prefect has its own of SIGTERM while it runs a flow.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._came = False
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def came(self) -> bool:
        self._came = self._came or not self._take().isdisjoint(INTERRUPTS)
        return self._came

    def note(self) -> None:
        """One has come, should the interpreter have told somebody else of it: an event loop takes its place for that."""
        self._came = True

    def forget_newest(self) -> None:
        self._take()

    def _take(self) -> set[int]:
        """The numbers of those since the last look."""
        with contextlib.suppress(BlockingIOError):
            return set(os.read(self._reader, SIGNALS_AT_A_TIME))
        return set()


_arrivals: _Arrivals | None = None


def raise_on_signals() -> None:
    """From now on SIGINT and SIGTERM raise KeyboardInterrupt in the main thread."""
    global _arrivals
    if _arrivals is None:
        _arrivals = _Arrivals()
    for number in INTERRUPTS:
        signal.signal(number, _on_interrupt)
    sys.unraisablehook = _tell_unless_interrupt


def interrupted() -> bool:
    """Whether a signal came that was not answered."""
    return _arrivals is not None and _arrivals.came()


def answer() -> None:
    """What has just come does not count, since its handler does what it asks for."""
    if _arrivals is not None:
        _arrivals.forget_newest()


def raise_if_lost() -> None:
    """Raises KeyboardInterrupt if a signal came and this place was reached all the same."""
    if interrupted():
        raise KeyboardInterrupt


def _tell_unless_interrupt(swallowed: sys.UnraisableHookArgs) -> None:
    if issubclass(swallowed.exc_type, Exception) or not interrupted():
        sys.__unraisablehook__(swallowed)


def _on_interrupt(*_: object) -> None:
    if _arrivals is not None:
        _arrivals.note()
    raise KeyboardInterrupt
