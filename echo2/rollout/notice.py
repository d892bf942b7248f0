"""What tells a worker's process to end: SIGTERM, as when a spot machine is taken back, and SIGINT.

Invariants: no notice is lost, however early it comes; only who waits for what may never come is interrupted by one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A notice came; like KeyboardInterrupt, it is no Exception that somebody on the way could take for a failure."""


class Notice:
    """Both signals of this process, from now on; to be made in the main thread."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self._interrupting = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raises Interrupted amidst the block when a notice comes, and at its begin if one has come."""
        self._interrupting = True
        try:
            if self.given.is_set():
                raise Interrupted
            yield
        finally:
            self._interrupting = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.given.set()
        if self._interrupting:
            self._interrupting = False
            raise Interrupted
