"""Deltas that are damaged, out of place, or built to do harm: refused before anything is handed over."""

import struct
import tracemalloc

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save
from zstandard import ZstdCompressor

from echo2.dissemination.delta import BLOCK, END, HEADER, MAGIC, apply_delta, encode_delta
from echo2.dissemination.delta_blocks import BLOCK_BYTES
from echo2.dissemination.receiver import SourceUnavailable
from echo2.errors import SnapshotError

WEIGHTS = 4000
DRAW = np.random.default_rng(0)
VERSIONS = [save({"w": (DRAW.integers(0, 50, WEIGHTS) == 0).cumsum().astype(np.uint16) * factor}) for factor in (1, 2, 3)]
BASE, TARGET, NEXT = VERSIONS


def digest(content) -> str:
    return blake3(content).hexdigest()


def delta_between(base: bytes, target: bytes) -> bytes:
    return b"".join(encode_delta(base, target, largest_share=3.0))


DELTA = delta_between(BASE, TARGET)


def refuse(delta: bytes, match: str = "take the full snapshot", base: bytes = BASE, expected: bytes = TARGET, **known) -> None:
    """The delta must be refused, with the base as it was."""
    held = bytearray(base)
    with pytest.raises(SnapshotError, match=match):
        apply_delta(held, [delta], digest(expected), **known)
    assert held == base


def packed(content: bytes, **options) -> bytes:
    return ZstdCompressor(level=1, **options).compress(content)


def sealed(
    *messages: bytes, base: bytes = BASE, target: bytes = TARGET, total_bytes: int | None = None, magic: bytes = MAGIC
) -> bytes:
    """A delta with a right digest at its end, whatever it says."""
    digests = (bytes.fromhex(digest(content)) for content in (base, target))
    content = HEADER.pack(magic, len(base) if total_bytes is None else total_bytes, *digests)
    content += b"".join(messages) + BLOCK.pack(END, 0, 0, 0)
    return content + blake3(content).digest()


def block(gaps: bytes, codes: bytes, wide: bytes = packed(b""), number: int = 0) -> bytes:
    return BLOCK.pack(number, len(gaps), len(codes), len(wide)) + gaps + codes + wide


ONE_CHANGE = block(packed(b"\0"), packed(b"\0"))


def test_the_sound_delta_is_accepted() -> None:
    assert apply_delta(BASE, [DELTA], digest(TARGET)) == TARGET


def test_a_delta_written_by_hand_means_what_the_format_says() -> None:
    weights = np.zeros(300, np.uint16)
    base = save({"w": weights})
    weights[[1, 259, 260]] = 1, 300, 0xFFFF
    target = save({"w": weights})
    gaps, codes, wide = b"\x01\xff\x02\x00", b"\xf1\x00", b"\x58\x02"
    delta = sealed(block(packed(gaps), packed(codes), packed(wide)), base=base, target=target)
    assert apply_delta(base, [delta], digest(target)) == target
    assert delta_between(base, target) == delta


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_no_changed_byte_goes_unnoticed(flip) -> None:
    for place in range(len(DELTA)):
        refuse(DELTA[:place] + bytes([DELTA[place] ^ flip]) + DELTA[place + 1 :], base_digest=digest(BASE))


def test_a_delta_cut_short_anywhere_is_refused() -> None:
    for length in range(len(DELTA)):
        refuse(DELTA[:length], "ends early", base_digest=digest(BASE))


def test_bytes_after_the_end_are_refused() -> None:
    refuse(DELTA + b"\0", "follow its end")
    with pytest.raises(SnapshotError, match="follow its end"):
        apply_delta(BASE, [DELTA, b"", DELTA], digest(TARGET))


def test_another_base_is_refused() -> None:
    refuse(DELTA, "builds on weights", base=NEXT)
    refuse(DELTA, "instead of", base=NEXT, base_digest=digest(BASE))


def test_a_delta_is_not_applied_twice() -> None:
    once = bytes(apply_delta(BASE, [DELTA], digest(TARGET)))
    refuse(DELTA, "builds on weights", base=once)
    refuse(DELTA, "instead of", base=once, base_digest=digest(BASE))


def test_deltas_are_not_applied_out_of_order() -> None:
    refuse(delta_between(TARGET, NEXT), "builds on weights", expected=NEXT)


def test_a_delta_to_other_weights_than_expected_is_refused_by_its_first_bytes() -> None:
    refuse(DELTA[: HEADER.size], "it makes weights of the digest", expected=NEXT)


def test_a_source_that_breaks_off_is_passed_on_and_leaves_the_base_alone() -> None:
    def pieces():
        yield DELTA[: len(DELTA) // 2]
        raise SourceUnavailable("gone")

    held = bytearray(BASE)
    with pytest.raises(SourceUnavailable):
        apply_delta(held, pieces(), digest(TARGET))
    assert held == BASE


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fault_in_a_late_block_is_refused_in_any_thread(threads) -> None:
    base = save({"w": np.zeros(4 * BLOCK_BYTES, np.uint8)})
    changes = [block(packed(b"\0"), packed(b"\0"), number=number) for number in range(3)]
    delta = sealed(*changes, block(packed(b"\xff" * 9000 + b"\1"), packed(b"\0"), number=3), base=base)
    with pytest.raises(SnapshotError, match="beyond the block"):
        apply_delta(base, [delta], digest(TARGET), threads=threads)


@pytest.mark.parametrize(
    ("delta", "match"),
    [
        (sealed(ONE_CHANGE, magic=b"E2D9"), "E2D9"),
        (sealed(ONE_CHANGE, total_bytes=2**60), "builds on"),
        (sealed(), "instead of"),
        (sealed(ONE_CHANGE), "instead of"),
        (sealed(ONE_CHANGE, ONE_CHANGE), "block 0 of 1 comes when 1"),
        (sealed(block(packed(b"\0"), packed(b"\0"), number=1)), "block 1 of 1"),
        (sealed(BLOCK.pack(0, 0xFFFFFFFF, 0, 0)), "claims 4294967295 bytes"),
        (sealed(block(b"", b"", b"")), "damaged"),
        (sealed(block(packed(b""), packed(b""))), "0 bytes where 1 to"),
        (sealed(block(packed(b"\xff" * 9), packed(b""))), "changes nothing"),
        (sealed(block(packed(b"\xff" * 15 + b"\xfe"), packed(b"\0"))), "beyond the block"),
        (sealed(block(packed(b"\0" * (WEIGHTS + 1)), packed(b"\0" * WEIGHTS))), f"{WEIGHTS + 1} bytes where"),
        (sealed(block(packed(b"\0\0\0"), packed(b"\0"))), "1 bytes where 2"),
        (sealed(block(packed(b"\0\0\0"), packed(b"\0\0\0"))), "3 bytes where 2"),
        (sealed(block(packed(b"\0"), packed(b"\x0f"))), "0 bytes where 2"),
        (sealed(block(packed(b"\0"), packed(b"\0"), packed(b"\1\0"))), "2 bytes where 0"),
        (sealed(block(packed(b"\0", write_content_size=False), packed(b"\0"))), "-1 bytes where"),
        (sealed(block(packed(b"\0") + packed(b"\0"), packed(b"\0"))), "damaged"),
        (sealed(block(b"\x50\x2a\x4d\x18" + struct.pack("<I", 1) + b"\0", packed(b"\0"))), "damaged"),
    ],
)
def test_a_delta_built_to_deceive_is_refused(delta, match) -> None:
    refuse(delta, match)


def test_the_last_weight_can_be_changed_but_none_after_it() -> None:
    weights = np.zeros(256, np.uint16)
    base = save({"w": weights})
    weights[-1] = 1
    target = save({"w": weights})
    assert apply_delta(base, [delta_between(base, target)], digest(target)) == target
    beyond = sealed(block(packed(b"\xff\1"), packed(b"\0")), base=base)
    refuse(beyond, "beyond the block's 256", base=base)


def test_a_bomb_takes_no_memory() -> None:
    bomb = packed(bytes(1 << 28))
    lying = bytearray(packed(bytes(1 << 20)))
    lying[5:9] = struct.pack("<I", WEIGHTS)
    tracemalloc.start()
    try:
        refuse(sealed(block(bomb, packed(b"\0"))), "bytes where")
        refuse(sealed(block(packed(b"\0"), bomb)), "bytes where")
        refuse(sealed(block(bytes(lying), packed(b"\0"))), "damaged")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
