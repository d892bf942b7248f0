"""A thread that runs an event loop, and its sense of time.

Invariants: an error that nobody expected in the task of one connection ends that connection alone, any other one the thread;
while the thread does not come to run, the clock by which it judges others stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)
TICK_S = 0.1
LONGEST_GAP_S = 0.25
"""Most that passes on the clock of a thread between two ticks."""


class Attention:
    """Seconds in which a thread was there to look; what was late while it was kept from running may not have been late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked_s, self._attended_s = clock(), 0.0

    def now_s(self) -> float:
        return self._attended_s + min(self._clock() - self._ticked_s, LONGEST_GAP_S)

    def tick(self) -> None:
        """The thread is there; to be called every `TICK_S`."""
        self._attended_s, self._ticked_s = self.now_s(), self._clock()


class LoopThread(ABC):
    """A thread that runs an event loop until `stop`; an error in it is raised by `raise_if_failed`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: BaseException | None = None
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._attention = Attention()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close every connection and end the thread."""
        if self._thread.ident is None:
            self.closing()
            self._loop.close()
        elif self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._end)
            self._thread.join(timeout_s)

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def spawn(self, work: Coroutine[Any, Any, None], connection: str = "") -> None:
        """Run `work` in the loop; only from the loop's thread. An error in it ends the thread, unless `connection` says whose
        connection it is about."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, connection))

    @abstractmethod
    def opened(self) -> None:
        """Called in the thread before anything else."""

    @abstractmethod
    def tick(self) -> None:
        """Called in the thread every `TICK_S`."""

    @abstractmethod
    def closing(self) -> None:
        """Called in the thread when it ends."""

    def failed(self, error: BaseException) -> None:
        """The thread cannot go on."""
        self._error = error
        log.error("the broadcast's thread %s died", self._thread.name, exc_info=error)
        self._end()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            self._loop.stop()

    def _ended(self, task: asyncio.Task[None], connection: str) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if connection:
            log.error("the connection with %s cannot be made", connection, exc_info=error)
        else:
            self.failed(error)

    def _open(self) -> None:
        self._attention.tick()
        self.opened()
        self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._attention.tick()
        self.tick()
        self._loop.call_later(TICK_S, self._tick)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda _, context: self.failed(context.get("exception") or RuntimeError(str(context))))
        try:
            self._loop.call_soon(self._open)
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            self.closing()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.close()
