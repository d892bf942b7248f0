"""What the source's uplink carries.

Invariant: while something waits to be sent, what is sent is what the uplink carries, unless a cap is told.
"""

from __future__ import annotations

import time

FIRST_BYTES_PER_S = 25e6
RATE_WEIGHT = 0.2


class Uplink:
    """As it is capped, or was seen."""

    def __init__(self, cap_bytes_per_s: float | None) -> None:
        self.bytes_per_s = cap_bytes_per_s or FIRST_BYTES_PER_S
        self.known = cap_bytes_per_s is not None
        """Whether that is a cap or was seen; else it is a first guess."""
        self._capped = self.known
        self._sent_bytes, self._at_s, self._busy = 0, time.monotonic(), False

    def observe(self, sent_bytes: int, busy: bool) -> None:
        """So much was sent in all until now, and whether more waits; to be called some ten times a second."""
        now_s = time.monotonic()
        if busy and self._busy and not self._capped:
            rate = (sent_bytes - self._sent_bytes) / (now_s - self._at_s)
            self.bytes_per_s += RATE_WEIGHT * (max(rate, 1.0) - self.bytes_per_s)
            self.known = True
        self._sent_bytes, self._at_s, self._busy = sent_bytes, now_s, busy
