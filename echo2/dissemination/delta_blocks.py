"""A few megabytes of weights at a time: where the blocks of a snapshot lie, and the difference between two versions of one.

Weights are unsigned integers here, as wide as their number format, so every format is carried bit for bit. Between two versions
most are equal and most others differ by one unit in the last place, hence three parts per block, each a zstd frame:

- gaps: per changed weight the count of unchanged ones before it, one byte each; 255 stands for 255 unchanged weights;
- codes: per changed weight four bits, two to a byte, the first in the low half: c < 15 stands for the difference
  -1, +1, -2, +2, … in that order, modulo the integers' range; 15 says that the difference is among the wide ones;
- wide: the other differences, zigzag-coded (0, -1, +1, -2, …), in byte planes, least significant first.

Invariant: whatever the frames say, nothing outside the block is written, and no more memory is taken than a few times a block.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError, frame_content_size

from echo2.errors import SnapshotError

BLOCK_BYTES = 1 << 21
"""Largest block; part of the format."""
LONGEST_GAP = 255
WIDE_CODE = 15
COMPRESSION_LEVEL = 1
WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Words = NDArray[Any]
"""Weights as unsigned integers."""


class Block(NamedTuple):
    """Bytes `start` to `stop` of a snapshot: weights of `word_bytes` bytes each."""

    start: int
    stop: int
    word_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A snapshot's first `header_bytes` bytes name its tensors; the blocks cover the rest in order."""

    header_bytes: int
    blocks: tuple[Block, ...]


class Frames(NamedTuple):
    """The compressed parts of a block's difference."""

    gaps: bytes
    codes: bytes
    wide: bytes


def layout_of(snapshot: memoryview) -> Layout:
    """Blocks of a safetensors message: neighbouring tensors of one width together, cut every BLOCK_BYTES.

    Raises SnapshotError unless the tensors cover the message without gap or overlap.
    """
    header_bytes = 8 + int.from_bytes(snapshot[:8], "little")
    try:
        tensors = json.loads(bytes(snapshot[8:header_bytes]))
        tensors.pop("__metadata__", None)
        extents = sorted((*tensor["data_offsets"], math.prod(tensor["shape"])) for tensor in tensors.values())
        runs = _runs(extents)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotError(
            f"snapshot of {len(snapshot)} bytes has no safetensors header ({error!r}): publish it again"
        ) from None
    if header_bytes + (runs[-1].stop if runs else 0) != len(snapshot):
        raise _not_weights(snapshot, "it is not as long as its header says")
    blocks = [
        Block(header_bytes + start, header_bytes + min(start + BLOCK_BYTES, run.stop), run.word_bytes)
        for run in runs
        for start in range(run.start, run.stop, BLOCK_BYTES)
    ]
    return Layout(header_bytes, tuple(blocks))


def encode_block(base: memoryview, target: memoryview, word_bytes: int) -> Frames | None:
    """The difference from `base` to `target`, of equal length; None where there is none."""
    old, new = _words(base, word_bytes), _words(target, word_bytes)
    places = np.flatnonzero(old != new)
    if not len(places):
        return None
    steps = new[places] - old[places]
    sign = steps >> (8 * word_bytes - 1)
    zigzag = (steps << 1) ^ (0 - sign)
    codes = np.minimum(zigzag - 1, WIDE_CODE).astype(np.uint8)
    wide = zigzag[codes == WIDE_CODE].view(np.uint8).reshape(-1, word_bytes).T
    compress = ZstdCompressor(level=COMPRESSION_LEVEL).compress
    return Frames(compress(_gap_bytes(places).data), compress(_pairs(codes).data), compress(wide.tobytes()))


def apply_block(weights: memoryview, word_bytes: int, frames: Frames) -> None:
    """Turn `weights`, which hold the base's block, into the target's, in place.

    Raises SnapshotError for frames that cannot be of this block; `weights` are then as they were.
    """
    words = _words(weights, word_bytes)
    decompressor = ZstdDecompressor()
    places = _places(_decompress(decompressor, frames.gaps, 1, len(words)))
    if not len(places) or places[-1] >= len(words):
        raise _damaged(f"it changes weights beyond the block's {len(words)}" if len(places) else "it changes nothing")
    half = -(-len(places) // 2)
    steps = STEPS[word_bytes].take(_decompress(decompressor, frames.codes, half, half), axis=0).ravel()[: len(places)]
    at = np.flatnonzero(steps == 0)
    planes = _decompress(decompressor, frames.wide, len(at) * word_bytes, len(at) * word_bytes)
    steps[at] = _from_zigzag(np.ascontiguousarray(planes.reshape(word_bytes, -1).T).view(WORDS[word_bytes]).ravel())
    words[places] += steps


def longest_frame_bytes(block: Block) -> int:
    """No frame of this block is longer, however little it compresses."""
    raw_bytes = block.stop - block.start
    return raw_bytes + (raw_bytes >> 7) + 256


def _runs(extents: list[tuple[int, int, int]]) -> list[Block]:
    """Extents (start, stop, weights) as the longest runs of one width. Raises ValueError where they do not join."""
    if [start for start, _, _ in extents] != [0, *(stop for _, stop, _ in extents)][: len(extents)]:
        raise ValueError("tensors overlap or leave gaps")
    runs: list[Block] = []
    for start, stop, count in extents:
        word_bytes = (stop - start) // max(1, count)
        if word_bytes not in WORDS or word_bytes * count != stop - start:
            word_bytes = 1
        if runs and runs[-1].word_bytes == word_bytes:
            runs[-1] = runs[-1]._replace(stop=stop)
        elif stop > start:
            runs.append(Block(start, stop, word_bytes))
    return runs


def _words(content: memoryview, word_bytes: int) -> Words:
    return np.frombuffer(content, WORDS[word_bytes])


def _gap_bytes(places: NDArray[np.intp]) -> NDArray[np.uint8]:
    gaps = np.diff(places, prepend=-1) - 1
    if gaps.max() < LONGEST_GAP:
        return gaps.astype(np.uint8)
    jumps, rest = np.divmod(gaps, LONGEST_GAP)
    at = np.cumsum(jumps + 1) - 1
    content = np.full(at[-1] + 1, LONGEST_GAP, np.uint8)
    content[at] = rest
    return content


def _places(gaps: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Positions of the changed weights, ascending."""
    changed = gaps != LONGEST_GAP
    places = np.cumsum(gaps + changed.view(np.uint8), dtype=np.intp)
    places -= 1
    return places if changed.all() else places[changed]


def _pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    pairs = codes[::2].copy()
    pairs[: len(codes) // 2] |= codes[1::2] << 4
    return pairs


def _from_zigzag(zigzag: Words) -> Words:
    return (zigzag >> 1) ^ (0 - (zigzag & 1))


def _pair_steps(word: Any) -> Words:
    """[256, 2]: the two differences that a byte of codes stands for; 0, which is no change, for a wide one."""
    steps = _from_zigzag(np.arange(1, WIDE_CODE + 2, dtype=word))
    steps[WIDE_CODE] = 0
    pairs = np.arange(256)
    return np.stack([steps[pairs & 15], steps[pairs >> 4]], axis=1)


STEPS = {word_bytes: _pair_steps(word) for word_bytes, word in WORDS.items()}


def _decompress(decompressor: ZstdDecompressor, frame: bytes, least_bytes: int, most_bytes: int) -> NDArray[np.uint8]:
    """The frame's content. Raises SnapshotError, before taking memory, if the frame says that it is smaller or larger."""
    try:
        size = frame_content_size(frame)
        if not least_bytes <= size <= most_bytes:
            raise _damaged(f"a part of {size} bytes where {least_bytes} to {most_bytes} are possible")
        return np.frombuffer(decompressor.decompress(frame, max_output_size=size, allow_extra_data=False), np.uint8)
    except ZstdError as error:
        raise _damaged(str(error)) from None


def _not_weights(snapshot: memoryview, reason: str) -> SnapshotError:
    return SnapshotError(f"snapshot of {len(snapshot)} bytes cannot be read ({reason}): publish it again")


def _damaged(reason: str) -> SnapshotError:
    return SnapshotError(f"a block of the delta is damaged ({reason}): take the full snapshot instead")
