"""One broadcast as a worker has it: the chunks that arrived, and whom to ask for those that nobody will send.

Invariants: a chunk counts as had only after its tag and its digest in the signed manifest were right, and is not written again
after that; a chunk is asked from one provider at a time; memory that somebody still looks at is never used again.
"""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from echo2.dissemination.broadcast.cipher import ChunkCipher
from echo2.dissemination.manifest import Manifest

SOURCE = 0
"""The source's number; workers count from 1."""
LARGE_PAGE_BYTES = 2 * 1024 * 1024
SPARE_ROOMS = 2
ASKED_AT_ONCE = 4
"""Chunks that are asked of one provider before it has sent any."""
PATIENCE_S = 1.5
"""How long a provider that was asked may be silent; doubles each time it is passed over."""
LACKS_BEFORE_SOURCE = 2
"""Peers that say they lack a chunk before the source is asked for it."""
TRIED_IN_VAIN = 16
"""Chunks that nobody free is known to have, before the rest is left for later."""
RECHECK_S = 0.5


def chunks_of(bits: int) -> Iterator[int]:
    """The chunks in a bit set, lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def bits_of(chunks: Iterable[int]) -> int:
    bits = 0
    for chunk in chunks:
        bits |= 1 << chunk
    return bits


class Rooms:
    """Memory for payloads: costs nothing until it is written to, and is used again once nobody looks at it any more."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []

    def take(self, total_bytes: int) -> memoryview:
        """Room for a payload; its contents are arbitrary."""
        for room in self._spare:
            if total_bytes <= len(room) <= 2 * total_bytes + LARGE_PAGE_BYTES:
                self._spare.remove(room)
                return memoryview(room)[:total_bytes]
        size = -(-total_bytes // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            room.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(room)[:total_bytes]

    def give(self, payload: memoryview) -> None:
        """`payload`, from `take`, is used no longer here; others may still look at it, and then its room is not used again."""
        room = payload.obj
        payload.release()
        assert isinstance(room, mmap.mmap)
        if len(self._spare) == SPARE_ROOMS:
            self._spare.pop(0)
        try:
            room.resize(len(room))
        except BufferError:
            return
        self._spare.append(room)


class Reception:
    """The payload as it grows."""

    def __init__(self, manifest: Manifest, cipher: ChunkCipher, room: memoryview) -> None:
        """`room` is written to and must have the payload's length."""
        self.manifest = manifest
        self.cipher = cipher
        self.payload = room
        self.have = 0
        """Bit set of the chunks that arrived."""
        self.begun_s = time.monotonic()
        self.arrivals_s = [0.0] * manifest.chunk_count
        """Seconds from the announcement to each chunk's arrival."""
        self.catch_up = CatchUp()
        self.all = (1 << manifest.chunk_count) - 1
        """Bit set of every chunk."""

    def under(self, manifest: Manifest, cipher: ChunkCipher) -> Reception:
        """What is here of another broadcast of the same payload; this one is no longer used."""
        successor = Reception(manifest, cipher, self.payload)
        successor.have = self.have
        return successor

    @property
    def complete(self) -> bool:
        return self.have == self.all

    def accept(self, chunk: int, sealed: memoryview) -> bool:
        """Take a chunk; False if it is here already. Raises ChunkRefused if it is not what the manifest describes."""
        if self.have >> chunk & 1:
            return False
        self.cipher.open_into(chunk, sealed, self.payload)
        self.have |= 1 << chunk
        self.arrivals_s[chunk] = time.monotonic() - self.begun_s
        return True

    def seal(self, chunk: int) -> bytes:
        """A chunk that is here, as it goes over the wire."""
        return self.cipher.seal(chunk, self.payload)


@dataclass(slots=True)
class _Provider:
    asked: dict[int, float] = field(default_factory=dict)
    lacking: int = 0
    last_chunk_s: float = 0.0
    patience_s: float = PATIENCE_S
    barred_until_s: float = 0.0


class CatchUp:
    """Chunks that must be asked for, spread over everybody who may have them; the source is asked last."""

    def __init__(self) -> None:
        self.wanted = 0
        """Bit set of the chunks to ask for."""
        self._asked = 0
        self._providers: dict[int, _Provider] = {}
        self._recheck_s = 0.0

    def want(self, bits: int) -> None:
        self.wanted |= bits

    def got(self, chunk: int, now_s: float) -> None:
        bit = 1 << chunk
        if not self.wanted & bit:
            return
        self.wanted &= ~bit
        self._asked &= ~bit
        for provider in self._providers.values():
            if provider.asked.pop(chunk, None) is not None:
                provider.last_chunk_s = now_s

    def heard(self, number: int, now_s: float) -> None:
        """`number` is sending, and will come to what it was asked for."""
        self._provider(number).last_chunk_s = now_s

    def lacks(self, number: int, chunks: Collection[int]) -> None:
        """`number` has not got these."""
        provider = self._provider(number)
        bits = bits_of(chunks)
        provider.lacking |= bits
        self._return(provider, bits)

    def gone(self, number: int) -> None:
        """`number` can no longer be asked."""
        provider = self._providers.pop(number, None)
        if provider is not None:
            self._return(provider, bits_of(provider.asked))

    def pass_over(self, number: int, now_s: float) -> None:
        """`number` sends nothing: it is asked nothing for a while, longer each time."""
        provider = self._provider(number)
        self._return(provider, bits_of(provider.asked))
        provider.barred_until_s = now_s + 2 * provider.patience_s
        provider.patience_s *= 2

    def overdue(self, now_s: float) -> list[int]:
        """Providers that sent nothing of what they were asked for too long; it is asked from others from now on."""
        late = []
        for number, provider in self._providers.items():
            if provider.asked and now_s - max(provider.last_chunk_s, min(provider.asked.values())) > provider.patience_s:
                self.pass_over(number, now_s)
                late.append(number)
        return late

    def asks(self, peers: Collection[int], source: bool, now_s: float) -> dict[int, list[int]]:
        """What to ask of whom now, given the peers that are connected and whether the source is."""
        self._forget_lacks(now_s)
        asks: dict[int, list[int]] = {}
        open_bits = self.wanted & ~self._asked
        if not open_bits:
            return asks
        able = [number for number in peers if self._provider(number).barred_until_s <= now_s]
        in_vain = 0
        for chunk in chunks_of(open_bits):
            free = [number for number in able if len(self._provider(number).asked) < ASKED_AT_ONCE]
            source_free = source and len(self._provider(SOURCE).asked) < ASKED_AT_ONCE
            number = self._choose(chunk, able, free, source_free)
            if number is not None:
                self._provider(number).asked[chunk] = now_s
                self._asked |= 1 << chunk
                asks.setdefault(number, []).append(chunk)
                continue
            in_vain += 1
            if in_vain == TRIED_IN_VAIN or not (free or source_free):
                break
        return asks

    def _choose(self, chunk: int, able: list[int], free: list[int], source_free: bool) -> int | None:
        lacking = sum(self._provider(number).lacking >> chunk & 1 for number in able)
        if lacking >= min(LACKS_BEFORE_SOURCE, len(able)):
            return SOURCE if source_free else None
        having = [number for number in free if not self._provider(number).lacking >> chunk & 1]
        return min(having, key=lambda number: (len(self._provider(number).asked), random.random()), default=None)

    def _provider(self, number: int) -> _Provider:
        return self._providers.setdefault(number, _Provider())

    def _return(self, provider: _Provider, bits: int) -> None:
        for chunk in chunks_of(bits):
            if provider.asked.pop(chunk, None) is not None:
                self._asked &= ~(1 << chunk)

    def _forget_lacks(self, now_s: float) -> None:
        if now_s >= self._recheck_s:
            self._recheck_s = now_s + RECHECK_S
            for provider in self._providers.values():
                provider.lacking = 0
