"""How the learner's time divides into work and waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Laps of one learner step each; all that is not waiting for a batch is work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lap_began = clock()
        self._wait_s = 0.0
        self._first = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._wait_s += self._clock() - began

    def lap(self) -> dict[str, float]:
        """Seconds of work and of waiting since the last lap, and the share that was waiting.

        The first wait, in which the workers start, is told apart.
        """
        now = self._clock()
        total_s, wait_s = now - self._lap_began, self._wait_s
        self._lap_began, self._wait_s = now, 0.0
        if self._first:
            self._first = False
            return {
                "learner/step_s": total_s - wait_s,
                "learner/start_s": wait_s,
                "learner/wait_s": 0.0,
                "learner/idle_share": 0.0,
            }
        return {
            "learner/step_s": total_s - wait_s,
            "learner/wait_s": wait_s,
            "learner/idle_share": wait_s / total_s if total_s > 0 else 0.0,
        }
