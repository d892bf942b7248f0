"""The capacity model during a run: what it predicts, what is observed, and a warning when the two part.

Invariants: the ledger is looked at every few seconds, in a thread of its own, so that no step waits for it; what cannot be
looked at costs the run its figures and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from echo2.capacity.drift import DriftWatch
from echo2.errors import UserError
from echo2.hub.inspection import observe_run
from flows.session import Session

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 2.0
LAST_LOOK_S = 5.0


@contextmanager
def watched_capacity(session: Session) -> Iterator[CapacityWatch]:
    """Keep watch during the block."""
    watch, ending = CapacityWatch(session), threading.Event()
    thread = threading.Thread(target=watch.keep_watch, args=(ending,), name="capacity", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ending.set()
        thread.join(LAST_LOOK_S)


class CapacityWatch:
    """Predicted and observed utilisation of one segment."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._drift = DriftWatch(session.config, str(session.run.path))
        self._complained = False

    @property
    def metrics(self) -> dict[str, float]:
        """Utilisation over the last window of steps, and what the reference window predicts; empty before both ended."""
        found = {
            "capacity/predicted_utilisation": self._drift.predicted,
            "capacity/observed_utilisation": self._drift.observed,
        }
        return {name: value for name, value in found.items() if value is not None}

    def keep_watch(self, ending: threading.Event) -> None:
        """Look every few seconds; what is to be told is logged and remembered in the ledger."""
        while not ending.wait(LOOK_INTERVAL_S):
            try:
                self._look()
            except UserError as error:
                if not self._complained:
                    log.warning("the run cannot be held against the capacity model (%s); it goes on", error)
                self._complained = True

    def _look(self) -> None:
        told = self._drift.look(partial(observe_run, self._session.run))
        if told is not None:
            log.warning("%s", told)
            self._session.hub.note(told.kind, told.subject, str(told))
