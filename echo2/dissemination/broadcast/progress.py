"""What the source knows of one worker in one broadcast.

Invariant: what a worker has and what it was told only grow; a worker that comes back begins anew. Times are those of the clock
by which the source judges who is late.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Sets of chunks are bit sets."""

    known: bool
    """Whether it has told what it had when it joined."""
    reported_s: float
    """When it last told what it has, or joined."""
    on_probation: bool
    """Whether nobody depended on it when it joined."""
    have: int = 0
    """Chunks that it has."""
    told: int = 0
    """Chunks that it was told to ask for."""
    heard_s: dict[int, float] = field(default_factory=dict)
    """When a chunk of each owner last arrived there."""
    prompt: bool = True
    """Whether it never fell silent."""

    def report(self, now_s: float, silent_s: float) -> None:
        """It told of itself; more than `silent_s` after the last time is not prompt."""
        self.prompt = self.prompt and now_s - self.reported_s <= silent_s
        self.reported_s = now_s
