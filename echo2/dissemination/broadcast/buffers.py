"""Memory for chunks that arrive.

Invariant: a buffer belongs to whoever took it until it is given back; all have the length of the largest chunk so far.
"""

from __future__ import annotations

from echo2.dissemination.broadcast.wire import MAX_DATA_BYTES, WireError


class Buffers:
    """Reused buffers for chunks that arrive."""

    def __init__(self) -> None:
        self._size = 0
        self._free: list[bytearray] = []

    def take(self, length: int) -> memoryview:
        """A buffer for `length` bytes. Raises WireError for a chunk larger than any can be."""
        if length > MAX_DATA_BYTES:
            raise WireError(f"chunk of {length} bytes where {MAX_DATA_BYTES} are the most")
        if length > self._size:
            self._size = length
            self._free.clear()
        return memoryview(self._free.pop() if self._free else bytearray(self._size))[:length]

    def give(self, view: memoryview) -> None:
        """`view`, from `take`, is no longer used."""
        buffer = view.obj
        if isinstance(buffer, bytearray) and len(buffer) == self._size:
            self._free.append(buffer)
