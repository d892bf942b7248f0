"""The cap on what leaves by one uplink, kept for everybody who sends there.

Invariants: within any t seconds no more than rate · (t + BURST_S) bytes and one piece leave, whichever threads send them;
pieces leave in the order in which they were asked for, so that users who ask for one piece at a time share the cap evenly, and
none waits for more than a piece of each other one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PIECE_S = 0.01
"""Pieces take about this long at the full rate, within the limits below."""
LEAST_PIECE_BYTES = 1024
MOST_PIECE_BYTES = 256 * 1024
BURST_S = 0.05
"""How much unused time may be caught up, so that waking late costs no throughput; at least a piece's."""


class Pacer:
    """A token bucket of `bytes_per_s`; for any thread."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self.piece_bytes = int(min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, bytes_per_s * PIECE_S)))
        """Most that is to be asked for at once."""
        # What is given back after others have asked may leave at once, a piece at most: the burst has room for it.
        self._catch_up_s = max(0.0, BURST_S - self.piece_bytes / bytes_per_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def reserve(self, length: int) -> float:
        """Seconds until so many bytes may leave; whoever asks later waits for them."""
        with self._lock:
            now_s = self._clock()
            self._free_at_s = max(self._free_at_s, now_s - self._catch_up_s) + length / self.bytes_per_s
            return max(0.0, self._free_at_s - now_s)

    def give_back(self, length: int) -> None:
        """So many bytes that were asked for do not leave after all; for one of the users, since the burst has room for one."""
        with self._lock:
            self._free_at_s -= length / self.bytes_per_s


class Allowance:
    """A pacer's user whose senders do not wait: they are refused, and called when they may send. Lives in one thread."""

    def __init__(
        self, pacer: Pacer, call_later: Callable[[float, Callable[[], None]], object], on_allowed: Callable[[], None]
    ) -> None:
        """`on_allowed` is to call the senders that were refused."""
        self._pacer = pacer
        self._call_later = call_later
        self._on_allowed = on_allowed
        self._reserved_bytes = 0
        self._due = False

    def take(self, wanted: int) -> int:
        """How many of the wanted bytes may leave now, a piece at most; what then does not is to be given back."""
        if not self._reserved_bytes:
            self._reserved_bytes = min(wanted, self._pacer.piece_bytes)
            wait_s = self._pacer.reserve(self._reserved_bytes)
            self._due = wait_s == 0.0
            if not self._due:
                self._call_later(wait_s, self._allow)
        if not self._due:
            return 0
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        taken = min(wanted, reserved)
        self._pacer.give_back(reserved - taken)
        return taken

    def give_back(self, length: int) -> None:
        """So many of the bytes taken last were not sent."""
        self._pacer.give_back(length)

    def _allow(self) -> None:
        self._due = True
        self._on_allowed()
        if self._due:
            self._pacer.give_back(self._reserved_bytes)
            self._reserved_bytes = 0
