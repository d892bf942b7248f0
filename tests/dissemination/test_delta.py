"""Deltas between two versions of a model's weights: what they carry, and when there is none."""

import json
import random

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from echo2.dissemination.delta import FullIsBetter, apply_delta, encode_delta
from echo2.dissemination.delta_blocks import BLOCK_BYTES, layout_of
from echo2.errors import SnapshotError
from echo2.models.loading import export_weights

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.int64]


def digest(content) -> str:
    return blake3(content).hexdigest()


def tensor_of(content: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as numbers of that format, whatever they say."""
    return torch.frombuffer(bytearray(content), dtype=dtype) if content.size else torch.empty(0, dtype=dtype)


def message_of(*tensors: tuple[str, list[int], bytes]) -> bytes:
    """A safetensors message with tensors in the given order, also where that puts them at odd places."""
    entries, start = {}, 0
    for number, (dtype, shape, content) in enumerate(tensors):
        entries[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(content)]}
        start += len(content)
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(content for _, _, content in tensors)


def round_trip(base: bytes, target: bytes, threads: int = 1) -> int:
    """Length of the delta, which must make the target of the base, cut anywhere."""
    delta = b"".join(encode_delta(base, target, threads=threads, largest_share=3.0))
    cut = random.Random(len(delta)).randrange(len(delta))
    assert apply_delta(base, [delta[:cut], b"", delta[cut:]], digest(target), threads=threads) == target
    return len(delta)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    dtype=st.sampled_from(DTYPES),
    weights=st.integers(0, 3000),
    changed_share=st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    largest_step=st.sampled_from([1, 7, 8, 200, 2**15, 2**63 - 1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_weights_of_any_format_arrive_bit_for_bit(dtype, weights, changed_share, largest_step, seed) -> None:
    draw = np.random.default_rng(seed)
    width = dtype.itemsize
    words = draw.integers(0, 256, weights * width, np.uint8).view(f"u{width}")
    steps = draw.integers(-largest_step, largest_step, weights, endpoint=True).astype(f"i{width}").view(f"u{width}")
    changed = words + steps * (draw.random(weights) < changed_share)
    tensors = [{"w": tensor_of(version.view(np.uint8), dtype), "none": torch.empty(0, 3)} for version in (words, changed)]
    round_trip(*map(save, tensors))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(places=st.sets(st.integers(0, 299_999), min_size=1, max_size=8), width=st.sampled_from([1, 2, 4]))
def test_gaps_of_any_length_are_kept(places, width) -> None:
    base = np.zeros(300_000, f"u{width}")
    target = base.copy()
    target[list(places)] = 1
    length = round_trip(*(message_of(("X", [300_000], version.tobytes())) for version in (base, target)))
    assert length < 1024


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65_534, 65_535, 65_536, 131_071, 262_143])
def test_gaps_at_the_edges_of_a_byte_are_kept(gap) -> None:
    base = np.zeros(300_000, np.uint16)
    target = base.copy()
    target[[5, 6 + gap]] = 0xFFFF
    round_trip(*(message_of(("BF16", [300_000], version.tobytes())) for version in (base, target)))


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_of_several_widths_and_at_odd_places_span_many_blocks(threads) -> None:
    shapes = {
        "I8": (2 * BLOCK_BYTES + 3, 1.0),
        "BF16": (BLOCK_BYTES + 1, 2.0),
        "F32": (9, 4.0),
        "F4": (154, 0.5),
        "X": (2, 2.5),
    }
    draw = np.random.default_rng(0)
    old = [np.zeros(int(count * width), np.uint8) for count, width in shapes.values()]
    new = [array + (draw.random(len(array)) < 0.01).astype(np.uint8) for array in old]
    base, target = (
        message_of(*((name, [shapes[name][0]], array.tobytes()) for name, array in zip(shapes, arrays, strict=True)))
        for arrays in (old, new)
    )
    assert [block.word_bytes for block in layout_of(memoryview(base)).blocks] == [1, 1, 1, 2, 2, 2, 4, 1]
    round_trip(base, target, threads)


def test_threads_do_not_change_the_delta() -> None:
    draw = np.random.default_rng(0)
    base = draw.integers(0, 2**16, 5 * BLOCK_BYTES // 2, np.uint16)
    target = base + (draw.random(len(base)) < 0.01).astype(np.uint16)
    messages = [message_of(("BF16", [len(base)], version.tobytes())) for version in (base, target)]
    assert list(encode_delta(*messages, threads=1)) == list(encode_delta(*messages, threads=3))


def test_equal_weights_need_almost_nothing() -> None:
    weights = save({"w": torch.randn(1000, 2000).bfloat16()})
    assert round_trip(weights, weights) < 150


def test_a_model_without_weights_has_a_delta() -> None:
    empty = message_of(("F32", [0], b""))
    assert round_trip(empty, empty) < 150


def test_a_step_of_adam_is_a_fiftieth_of_the_weights() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(768, 768)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    base = export_weights(model, "bfloat16")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    target = export_weights(model, "bfloat16")
    assert base != target
    assert round_trip(base, target) <= 0.022 * len(target)


def test_digests_that_are_known_need_not_be_computed() -> None:
    base, target = (save({"w": torch.arange(1000.0) + step}) for step in (0, 1))
    computed = b"".join(encode_delta(base, target, largest_share=3.0))
    given_digests = encode_delta(base, target, base_digest=digest(base), target_digest=digest(target), largest_share=3.0)
    assert b"".join(given_digests) == computed
    assert apply_delta(base, [computed], digest(target), base_digest=digest(base)) == target


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(6, 4), "v": torch.zeros(3)},
        {"w": torch.zeros(4, 6), "u": torch.zeros(3)},
        {"w": torch.zeros(4, 6)},
        {"w": torch.zeros(4, 6), "v": torch.zeros(3), "u": torch.zeros(1)},
        {"w": torch.zeros(4, 6, dtype=torch.int32), "v": torch.zeros(3)},
        {"w": torch.zeros(4, 6).half(), "v": torch.zeros(3)},
    ],
    ids=["shape", "name", "fewer", "more", "format", "width"],
)
def test_other_tensors_are_sent_in_full(other) -> None:
    base = save({"w": torch.zeros(4, 6), "v": torch.zeros(3)})
    with pytest.raises(FullIsBetter, match="differ in name, shape"):
        encode_delta(base, save(other))


def test_a_base_cut_short_has_no_delta() -> None:
    weights = save({"w": torch.zeros(4)})
    with pytest.raises(FullIsBetter, match="differ in name, shape"):
        encode_delta(weights[:-1], weights)


def test_a_delta_that_grows_too_large_is_given_up_on_the_way() -> None:
    draw = np.random.default_rng(0)
    base, target = (draw.integers(0, 2**16, 4 * BLOCK_BYTES, np.uint16) for _ in range(2))
    pieces = encode_delta(*(message_of(("BF16", [len(version)], version.tobytes())) for version in (base, target)))
    sent = [next(pieces) for _ in range(3)]
    with pytest.raises(FullIsBetter, match="larger than 50%"):
        sent.extend(pieces)
    assert sum(map(len, sent)) <= base.nbytes / 2


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x05",
        (2**62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        message_of(("U8", [3], b"abc")) + b"d",
        message_of(("U8", [3], b"abc"))[:-1],
        message_of(("U8", [3], b"abc")).replace(b"[0, 3]", b"[1, 4]"),
        message_of(("U8", [3], b"abc")).replace(b'"shape": [3]', b'"shape": 3'),
        message_of(("U8", [3], b"abc"), ("U8", [3], b"def")).replace(b"[3, 6]", b"[2, 6]"),
    ],
)
def test_what_is_no_safetensors_message_has_no_delta(damaged) -> None:
    with pytest.raises(SnapshotError, match=f"snapshot of {len(damaged)} bytes"):
        encode_delta(damaged, damaged)
