"""What the hub sends of snapshots over HTTP, as its share of the uplink.

Invariants: all streams together are one user of the pacer, which they take turns at, a piece each; waiting costs no work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from starlette.concurrency import iterate_in_threadpool

from echo2.dissemination.pacing import Pacer


class Uplink:
    """Paces the streams of one event loop."""

    def __init__(self, pacer: Pacer | None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Without a pacer nothing is held back."""
        self._pacer = pacer
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def paced(self, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        """The same bytes, each as soon as its turn has come and the link has had the time to carry it."""
        async for piece in iterate_in_threadpool(pieces):
            if self._pacer is None:
                yield piece
                continue
            for start in range(0, len(piece), self._pacer.piece_bytes):
                part = piece[start : start + self._pacer.piece_bytes]
                async with self._turn:
                    await self._sleep(self._pacer.reserve(len(part)))
                yield part
