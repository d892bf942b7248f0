"""When the engine takes the version that has arrived.

Invariants: an engine that has nothing under way takes it at once; where something is, `drain` begins no new group until that is
finished, and `in_flight` goes on until the version is staged, so that all that generation waits for is the exchange; what
arrives while a version is staged waits for the next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from echo2.dissemination.receiver import ReceivedSnapshot, SnapshotFollower
from echo2.rollout.engine import Engine


class Updates:
    """The newest snapshot, from its arrival until it is due."""

    def __init__(
        self, follower: SnapshotFollower, engine: Engine, mode: Literal["drain", "in_flight"], on_staged: Callable[[], None]
    ) -> None:
        """`on_staged` is called in another thread when a version that was being staged may be due."""
        self._follower = follower
        self._engine = engine
        self._mode = mode
        self._on_staged = on_staged
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._waiting: ReceivedSnapshot | None = None
        self._staging: Future[float] | None = None
        self.staged_s = 0.0
        """How long the snapshot that `due` gave last was staged; 0 if it was not."""

    @property
    def hold_up(self) -> bool:
        """Whether no group may begin before the version that waits was loaded."""
        return self._mode == "drain" and self._waiting is not None

    @property
    def news(self) -> bool:
        """Whether `due` may give something, or take something up."""
        return self._follower.has_arrival if self._staging is None else self._staging.done()

    def due(self) -> ReceivedSnapshot | None:
        """The snapshot to load now, if there is one. Raises SnapshotError if it could not be staged."""
        if self._staging is None:
            self._waiting = self._follower.take() or self._waiting
        if self._waiting is None or not self._may_load(self._waiting):
            return None
        snapshot, self._waiting = self._waiting, None
        self.staged_s = 0.0 if self._staging is None else self._staging.result()
        self._staging = None
        return snapshot

    def _may_load(self, snapshot: ReceivedSnapshot) -> bool:
        if self._staging is None:
            if not self._engine.under_way:
                return True
            if self._mode == "drain":
                return False
            self._staging = self._thread.submit(self._stage, snapshot)
            self._staging.add_done_callback(lambda _: self._on_staged())
        return self._staging.done()

    def _stage(self, snapshot: ReceivedSnapshot) -> float:
        began_s = time.monotonic()
        self._engine.stage(snapshot.weights)
        return time.monotonic() - began_s
