"""What the source knows of one worker in one broadcast.

Invariant: what a worker has and what it was told only grow; a worker that comes back begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Sets of chunks are bit sets, times those of the monotonic clock."""

    known: bool
    """Whether it has told what it had when it joined."""
    have: int = 0
    """Chunks that it has."""
    told: int = 0
    """Chunks that it was told to ask for."""
    heard_s: dict[int, float] = field(default_factory=dict)
    """When a chunk of each owner last arrived there."""
    quiet_since_s: float = 0.0
    """When it last returned a credit, or got a backlog."""
    reported_s: float = -math.inf
    """When it last told what it has."""
