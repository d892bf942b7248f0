"""The hub's uplink, paced where it has a cap.

Invariants: within any t seconds no more than rate · (t + BURST_S) bytes and one piece leave; streams that run at the same time
send a piece each in turn, so that they share the cap evenly; waiting costs no work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from starlette.concurrency import iterate_in_threadpool

PIECE_S = 0.02
"""Pieces take about this long at the full rate, within the limits below."""
LEAST_PIECE_BYTES = 1024
MOST_PIECE_BYTES = 256 * 1024
BURST_S = 0.05
"""How much unused time may be caught up, so that waking late costs no throughput."""


class Uplink:
    """Shares `bytes_per_s` among all streams; 0 sets no cap. Lives in one event loop."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._piece_bytes = int(min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, bytes_per_s * PIECE_S)))
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = clock()

    async def paced(self, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        """The same bytes, each as soon as its turn has come and the link has had the time to carry it."""
        async for piece in iterate_in_threadpool(pieces):
            if not self._bytes_per_s:
                yield piece
                continue
            for start in range(0, len(piece), self._piece_bytes):
                part = piece[start : start + self._piece_bytes]
                await self._carry(len(part))
                yield part

    async def _carry(self, length: int) -> None:
        now_s = self._clock()
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + length / self._bytes_per_s
        if self._free_at_s > now_s:
            await self._sleep(self._free_at_s - now_s)
