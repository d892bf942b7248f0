"""No orphans: a child process ends when the process that started it is gone, even by kill −9."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

POLL_INTERVAL_S = 0.5


def end_with_parent(parent_pid: int, end: Callable[[], None]) -> None:
    """Call `end` once, from a daemon thread, when `parent_pid` is no longer this process's parent."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(POLL_INTERVAL_S)
        end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
