"""How many cores digests and deltas may take, beside a learner or an engine that goes on."""

from __future__ import annotations

import os

MOST_CORES = 8
"""Beyond these the memory, not the cores, is what digests and deltas wait for."""


def spare_cores() -> int:
    """Half of the cores that this process may use, at least 1 and at most 8."""
    return min(max(1, len(os.sched_getaffinity(0)) // 2), MOST_CORES)
