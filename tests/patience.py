"""How tests wait for what a thread or another process does."""

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""A busy machine takes its time."""


def wait_until(condition: Callable[[], object], patience_s: float = PATIENCE_S):
    """What `condition` gives, once that is true. Raises AssertionError after `patience_s`."""
    end_s, pause_s = time.monotonic() + patience_s, 0.01
    while not (found := condition()):
        assert time.monotonic() < end_s, f"it did not come to that within {patience_s:g} s"
        time.sleep(pause_s)
        # Some conditions cost a process to look at.
        pause_s = min(1.1 * pause_s, 0.25)
    return found
