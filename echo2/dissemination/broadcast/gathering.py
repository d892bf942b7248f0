"""Workers that ask the source for the same chunk soon after each other are answered together.

Invariant: whoever asked for a chunk is answered within `GATHER_S`, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

GATHER_S = 0.05


class Gathering:
    """Who asked for what; lives in the thread of the links."""

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], object], answer: Callable[[int, set[int]], None]
    ) -> None:
        """`answer` is called with a chunk and the numbers of those who asked for it."""
        self._call_later, self._answer = call_later, answer
        self._askers: dict[int, set[int]] = {}

    def ask(self, number: int, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if chunk not in self._askers:
                self._askers[chunk] = set()
                self._call_later(GATHER_S, partial(self._gathered, chunk))
            self._askers[chunk].add(number)

    def _gathered(self, chunk: int) -> None:
        self._answer(chunk, self._askers.pop(chunk))
