"""A worker's threads: each runs one loop, and its failure reaches the main thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Background(ABC):
    """A daemon thread whose `_loop` runs until `stopping`; an error in it is raised again by `raise_if_failed`."""

    def __init__(self, name: str) -> None:
        self.stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the loop to end, up to `timeout_s`."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _guarded(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which ends the worker with it
            self._error = error

    @abstractmethod
    def _loop(self) -> None:
        """What the thread does until `stopping` is set."""
