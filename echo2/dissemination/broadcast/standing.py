"""How far others may depend on a worker to pass chunks on, from one broadcast to the next.

Invariants: who stalled in one broadcast is dealt nothing to pass on in those after it, until it has received as many of them as
are asked for without falling silent; whoever stalls again has to receive twice as many; only time in which a stripe lay at the
worker counts against it, and only while the source was there to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from echo2.dissemination.broadcast.link import LONGEST_DETACH_S, Link
from echo2.dissemination.broadcast.peer import Member
from echo2.dissemination.broadcast.relay import LAG_S

MOST_PROBATION_VERSIONS = 64
ALIVE_S = 0.5
"""Who has told of its progress within this time is there."""
DOUBT_S, DOUBTED_SERVICES = 0.5, 3
"""Who returned no credit for so long, and for so many times what a chunk takes it, is dealt nothing of a new version."""


class Standing:
    """What the source saw of one worker; outlives broadcasts and connections."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: set[tuple[int, int]] = set()
        self._quiet_since_s = 0.0
        self._owes_since_s: float | None = None
        self._back_s = -math.inf
        self._accused = False
        self._next_probation_versions = 1
        self.probation_versions = 0
        """Versions that it has to receive promptly before others depend on it again."""

    @property
    def on_probation(self) -> bool:
        return self.probation_versions > 0

    @property
    def quiet_s(self) -> float:
        """Seconds for which it has had stripes and returned no credit; 0 while it has none."""
        return self._clock() - self._quiet_since_s if self._held else 0.0

    @property
    def silent_s(self) -> float:
        """Seconds for which it told nothing of a broadcast that it has not got; 0 while there is none."""
        return self._clock() - self._owes_since_s if self._owes_since_s is not None else 0.0

    @property
    def in_reach(self) -> bool:
        """Whether others can pass chunks on to it: one that stood still they leave out for a while yet."""
        return self.silent_s <= ALIVE_S and self._clock() - self._back_s > LONGEST_DETACH_S

    def announced(self) -> None:
        """It is to tell what it has of a broadcast."""
        if self._owes_since_s is None:
            self._owes_since_s = self._clock()

    def told(self, everything: bool) -> None:
        """It told what it has, which may be `everything`."""
        if self.silent_s > LAG_S:
            self._back_s = self._clock()
        self._owes_since_s = None if everything else self._clock()

    def took(self, broadcast: int, chunk: int) -> None:
        """A stripe has arrived at its machine."""
        if not self._held:
            self._quiet_since_s = self._clock()
        self._held.add((broadcast, chunk))

    def returned(self, broadcast: int, chunk: int, served: bool) -> None:
        """It said what became of a stripe: whether somebody got it."""
        self._held.discard((broadcast, chunk))
        self._quiet_since_s = self._clock()
        self._accused = self._accused and not served

    def forget(self, broadcast: int) -> None:
        """A broadcast is withdrawn: nobody waits for anything of it."""
        self._held = {held for held in self._held if held[0] != broadcast}

    def reconnected(self) -> None:
        """What it had is lost."""
        self._held.clear()
        self._owes_since_s = None
        self._accused = False

    def suspend(self) -> None:
        """Others waited for it in vain."""
        if not self.on_probation:
            self.probation_versions = self._next_probation_versions
            self._next_probation_versions = min(2 * self.probation_versions, MOST_PROBATION_VERSIONS)

    def accuse(self) -> bool:
        """Whether that is to be told: once until it passes something on again."""
        accused, self._accused = self._accused, True
        return not accused

    def received(self) -> None:
        """It got a version, begun while it was on probation, and never fell silent meanwhile."""
        self.probation_versions = max(0, self.probation_versions - 1)

    def served(self) -> None:
        """It passed on all that it was dealt of a version."""
        self._next_probation_versions = 1


@dataclass(slots=True)
class Worker:
    """A connected worker as the source knows it; outlives broadcasts."""

    member: Member
    link: Link
    standing: Standing
    uplink_bytes_per_s: float | None = None
    distrusted: bool = False

    def relays(self, service_s: float | None) -> bool:
        """Whether others may depend on it in a new broadcast, where it takes `service_s`, if that is known, for a chunk."""
        doubted = self.standing.quiet_s > max(DOUBT_S, DOUBTED_SERVICES * (service_s or 0.0))
        return self.member.reachable and not (self.distrusted or self.standing.on_probation or doubted)
