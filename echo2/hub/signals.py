"""Long-polls: wait until something may have changed, without polling and without missing a change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


class Signal:
    """Wakes all who wait whenever it fires; lives in one event loop."""

    def __init__(self) -> None:
        self._fired = asyncio.Event()
        self._closed = False

    def fire(self) -> None:
        fired, self._fired = self._fired, asyncio.Event()
        fired.set()

    def close(self) -> None:
        """End every wait, now and from now on."""
        self._closed = True
        self.fire()

    async def poll(self, attempt: Callable[[], Awaitable[Result | None]], wait_s: float) -> Result | None:
        """Try now and after each firing until `attempt` gives something (other than None or empty) or `wait_s` is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            fired = self._fired
            result = await attempt()
            if result or self._closed or loop.time() >= deadline:
                return result
            try:
                await asyncio.wait_for(fired.wait(), deadline - loop.time())
            except TimeoutError:
                return await attempt()
