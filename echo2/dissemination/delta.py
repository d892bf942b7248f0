"""Lossless deltas: one version's weights from another's, bit for bit, in a small share of the bytes.

A delta is a header (magic, size of the weights, blake3 of the base and of the target), then one message per block of weights
that differs, in ascending order, then an end: the blake3 of all that came before. It can be made and applied while it travels.
What a block holds is `echo2.dissemination.delta_blocks`'s.

Invariants: what is handed over has the digest that was asked for; the base is only read; a delta that is damaged, cut short, of
another base, or built to do harm is refused before anything is handed over, and takes no more memory than the weights.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
from blake3 import blake3

from echo2.dissemination.delta_blocks import Block, Frames, apply_block, encode_block, layout_of, longest_frame_bytes
from echo2.errors import SnapshotError

MAGIC = b"E2D1"
HEADER = struct.Struct("<4sQ32s32s")
BLOCK = struct.Struct("<4I")
"""Number of the block among all, then the lengths of its three frames."""
END = 0xFFFFFFFF
"""In place of a block's number."""
LARGEST_SHARE = 0.5

Content = bytes | bytearray | memoryview
Task = TypeVar("Task")
Result = TypeVar("Result")


class FullIsBetter(Exception):
    """There is no delta worth sending between these weights: send them in full. The message says why."""


def encode_delta(
    base: Content,
    target: Content,
    *,
    base_digest: str | None = None,
    target_digest: str | None = None,
    threads: int = 1,
    largest_share: float = LARGEST_SHARE,
) -> Iterator[bytes]:
    """The delta from `base` to `target`, two safetensors messages, in pieces as they get ready.

    Digests are blake3 in hexadecimal as in the manifests; one that is not given is computed.
    Raises FullIsBetter, at once if the tensors differ in name, shape, or number format, and while iterating when the delta
    grows beyond `largest_share` of the target; SnapshotError for messages that are not safetensors.
    """
    old, new = _view(base), _view(target)
    layout = layout_of(new)
    if len(old) != len(new) or old[: layout.header_bytes] != new[: layout.header_bytes]:
        raise FullIsBetter("the tensors differ in name, shape, or number format")
    digests = [bytes.fromhex(known or _digest(view, threads)) for known, view in ((base_digest, old), (target_digest, new))]
    return _encoded(HEADER.pack(MAGIC, len(new), *digests), old, new, layout.blocks, threads, largest_share * len(new))


def apply_delta(
    base: Content, pieces: Iterable[Content], expected_digest: str, *, base_digest: str | None = None, threads: int = 1
) -> memoryview:
    """The weights that a delta makes of `base`; `pieces` are its bytes, cut anywhere, and are used as they come.

    `expected_digest` is the target's blake3 in hexadecimal, from its manifest; `base_digest` the base's, computed if not
    given. Raises SnapshotError if the delta builds on other weights, makes others than expected, or is damaged: take the full
    snapshot then.
    """
    old = _view(base)
    reader = _Reader(pieces)
    _check_header(reader, old, base_digest or _digest(old, threads), expected_digest)
    layout = layout_of(old)
    # numpy asks for huge pages: in bytes of this size most of the time would go into page faults.
    weights = np.empty(len(old), np.uint8).data
    weights[: layout.header_bytes] = old[: layout.header_bytes]
    hasher = blake3(old[: layout.header_bytes], max_threads=threads)

    def fill(message: tuple[Block, Frames | None]) -> memoryview:
        block, frames = message
        part = weights[block.start : block.stop]
        part[:] = old[block.start : block.stop]
        if frames is not None:
            apply_block(part, block.word_bytes, frames)
        return part

    for part in _in_order(fill, _read_blocks(reader, layout.blocks), threads):
        hasher.update(part)
    if hasher.hexdigest() != expected_digest:
        raise _refused(f"it makes weights of the digest {hasher.hexdigest()[:12]}… instead of {expected_digest[:12]}…")
    return weights.toreadonly()


def _encoded(
    header: bytes, old: memoryview, new: memoryview, blocks: tuple[Block, ...], threads: int, most_bytes: float
) -> Iterator[bytes]:
    def encode(block: Block) -> Frames | None:
        return encode_block(old[block.start : block.stop], new[block.start : block.stop], block.word_bytes)

    hasher = blake3(header)
    size = len(header)
    yield header
    for number, frames in enumerate(_in_order(encode, blocks, threads)):
        if frames is None:
            continue
        message = b"".join((BLOCK.pack(number, *map(len, frames)), *frames))
        size += len(message)
        if size > most_bytes:
            raise FullIsBetter(f"the delta would be larger than {most_bytes / len(new):.0%} of the {len(new)} bytes of weights")
        hasher.update(message)
        yield message
    end = BLOCK.pack(END, 0, 0, 0)
    yield end + hasher.update(end).digest()


class _Reader:
    """The bytes of a delta in the order of their arrival, and the digest of those read."""

    def __init__(self, pieces: Iterable[Content]) -> None:
        self._pieces = iter(pieces)
        self._waiting = bytearray()
        self._hasher = blake3()

    def read(self, count: int) -> bytes:
        """Raises SnapshotError if there are fewer."""
        content = self._take(count)
        self._hasher.update(content)
        return content

    def finish(self) -> None:
        """Raises SnapshotError unless what follows is the digest of all that was read, and nothing else."""
        expected = self._hasher.digest()
        if self._take(len(expected)) != expected:
            raise _refused("its bytes have not the digest at their end")
        if self._waiting or any(self._pieces):
            raise _refused("bytes follow its end")

    def _take(self, count: int) -> bytes:
        while len(self._waiting) < count:
            piece = next(self._pieces, None)
            if piece is None:
                raise _refused("it ends early")
            self._waiting += piece
        content = bytes(self._waiting[:count])
        del self._waiting[:count]
        return content


def _check_header(reader: _Reader, base: memoryview, base_digest: str, expected_digest: str) -> None:
    magic, total_bytes, builds_on, makes = HEADER.unpack(reader.read(HEADER.size))
    if magic != MAGIC:
        raise _refused(f"it begins with {magic!r} instead of {MAGIC!r}")
    if builds_on.hex() != base_digest or total_bytes != len(base):
        raise _refused(f"it builds on weights of the digest {builds_on.hex()[:12]}…, not on {base_digest[:12]}…")
    if makes.hex() != expected_digest:
        raise _refused(f"it makes weights of the digest {makes.hex()[:12]}…, not {expected_digest[:12]}…")


def _read_blocks(reader: _Reader, blocks: tuple[Block, ...]) -> Iterator[tuple[Block, Frames | None]]:
    """Every block in order, with its message if it has one. Raises SnapshotError for numbers and lengths that cannot be."""
    following = 0
    while True:
        number, *lengths = BLOCK.unpack(reader.read(BLOCK.size))
        if number == END:
            reader.finish()
            yield from ((block, None) for block in blocks[following:])
            return
        if not following <= number < len(blocks):
            raise _refused(f"block {number} of {len(blocks)} comes when {following} is next")
        if max(lengths) > longest_frame_bytes(blocks[number]):
            raise _refused(f"block {number} claims {max(lengths)} bytes for a part")
        yield from ((block, None) for block in blocks[following:number])
        yield blocks[number], Frames(*map(reader.read, lengths))
        following = number + 1


def _in_order(work: Callable[[Task], Result], tasks: Iterable[Task], threads: int) -> Iterator[Result]:
    """`map` in so many threads, a few tasks ahead of what has been taken."""
    if threads == 1:
        yield from map(work, tasks)
        return
    remaining = iter(tasks)
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[Result]] = deque(pool.submit(work, task) for task in islice(remaining, 2 * threads))
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(work, task) for task in islice(remaining, 1))


def _view(content: Content) -> memoryview:
    return memoryview(content).toreadonly().cast("B")


def _digest(view: memoryview, threads: int) -> str:
    return blake3(view, max_threads=threads).hexdigest()


def _refused(reason: str) -> SnapshotError:
    return SnapshotError(f"delta cannot be used ({reason}): take the full snapshot instead")
