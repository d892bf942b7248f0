"""Receiving one snapshot over a stream that damages, loses, doubles, reorders and breaks."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.dissemination.manifest import Manifest, SnapshotWithdrawn, describe, sign, signing_key
from echo2.dissemination.receiver import SourceUnavailable, receive
from echo2.errors import SnapshotError

KEY = signing_key("secret")
CHUNK_BYTES = 64


def signed(payload: bytes, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    return sign(describe(payload, "run-a", 7, chunk_bytes), KEY)


@dataclass(frozen=True)
class Fault:
    kind: str
    piece: int


class FaultyStream:
    """The n-th request suffers the n-th fault, if there is one; keeps what was asked for and how much was read."""

    def __init__(self, payload: bytes, piece_bytes: int, faults: list[Fault], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.payload, self.piece_bytes, self.chunk_bytes, self.faults = payload, piece_bytes, chunk_bytes, faults
        self.requests: list[tuple[int, int]] = []
        self.read_bytes = 0

    def fetch(self, first_chunk: int, count: int) -> Iterator[bytes]:
        fault = self.faults[len(self.requests)] if len(self.requests) < len(self.faults) else None
        self.requests.append((first_chunk, count))
        if fault and fault.kind == "refuse":
            raise SourceUnavailable("connection refused")
        rest = self.payload[first_chunk * self.chunk_bytes : (first_chunk + count) * self.chunk_bytes]
        pieces = [rest[i : i + self.piece_bytes] for i in range(0, len(rest), self.piece_bytes)]
        for piece in self._spoil(pieces, fault):
            if piece is None:
                raise SourceUnavailable("connection reset")
            self.read_bytes += len(piece)
            yield piece

    def _spoil(self, pieces: list[bytes], fault: Fault | None) -> list[bytes | None]:
        if fault is None:
            return [*pieces, b"more than was asked for"]
        at = fault.piece % len(pieces)
        piece = pieces[at]
        spoiled: dict[str, list[bytes | None]] = {
            "corrupt": [*pieces[:at], bytes([piece[0] ^ 1]) + piece[1:], *pieces[at + 1 :]],
            "shorten": [*pieces[:at], piece[1:], *pieces[at + 1 :]],
            "drop": [*pieces[:at], *pieces[at + 1 :]],
            "double": [*pieces[:at], piece, *pieces[at:]],
            "swap": [*pieces[:at], *reversed(pieces[at : at + 2]), *pieces[at + 2 :]],
            "truncate": [*pieces[:at]],
            "break": [*pieces[:at], None],
        }
        return spoiled[fault.kind]


FAULTS = st.builds(
    Fault, st.sampled_from(["corrupt", "shorten", "drop", "double", "swap", "truncate", "break", "refuse"]), st.integers(0, 200)
)


@settings(max_examples=400, deadline=None)
@given(
    size=st.integers(1, 1500), piece_bytes=st.integers(1, 200), faults=st.lists(FAULTS, max_size=12), attempts=st.integers(1, 4)
)
def test_any_faults_end_bit_equal_or_in_an_error_after_bounded_attempts(
    size: int, piece_bytes: int, faults: list[Fault], attempts: int
) -> None:
    payload = random.Random(size).randbytes(size)
    manifest = signed(payload)
    stream = FaultyStream(payload, piece_bytes, faults)
    pauses: list[float] = []
    try:
        received = receive(
            manifest, stream.fetch, KEY, "run-a", attempts=attempts, break_attempts=attempts, pause=pauses.append
        )
    except SnapshotError as error:
        assert "version 7: chunk" in str(error)
        assert len(stream.requests) <= len(faults)
        repeats = stream.requests[len(stream.requests) + 1 - attempts :]
        assert len(set(repeats)) <= 1
    else:
        assert received == payload
        assert len(pauses) == len(stream.requests) - 1 <= len(faults)
    firsts = [first for first, _ in stream.requests]
    assert firsts == sorted(firsts)
    assert all(first + count == manifest.chunk_count for first, count in stream.requests)
    assert max(firsts.count(first) for first in firsts) < 2 * attempts + 1
    assert stream.read_bytes <= size + len(stream.requests) * (CHUNK_BYTES + 2 * piece_bytes + 23)


def test_a_chunk_that_stays_damaged_is_named() -> None:
    payload = random.Random(0).randbytes(1000)
    stream = FaultyStream(payload, CHUNK_BYTES, [Fault("corrupt", 5)] + [Fault("corrupt", 0)] * 10)
    with pytest.raises(SnapshotError, match="version 7: chunk 5 of 16 could not be had in 3 attempts"):
        receive(signed(payload), stream.fetch, KEY, "run-a", attempts=3, pause=lambda _: None)
    assert stream.requests == [(0, 16), (5, 11), (5, 11)]


def test_a_broken_stream_resumes_from_where_it_stopped() -> None:
    payload = random.Random(0).randbytes(1000)
    stream = FaultyStream(payload, 10, [Fault("break", 70), Fault("break", 9)])
    assert receive(signed(payload), stream.fetch, KEY, "run-a", pause=lambda _: None) == payload
    assert stream.requests == [(0, 16), (10, 6), (11, 5)]


def test_breaks_without_bound_outlast_any_number_of_them() -> None:
    payload = random.Random(0).randbytes(1000)
    stream = FaultyStream(payload, 10, [Fault("refuse", 0)] * 100)
    pauses: list[float] = []
    received = receive(signed(payload), stream.fetch, KEY, "run-a", break_attempts=math.inf, pause=pauses.append)
    assert received == payload
    assert len(pauses) == 100
    assert pauses[0] < 0.2 < 2.0 < pauses[-1] <= 5.0


def test_a_withdrawn_snapshot_is_not_asked_for_again() -> None:
    requests = []

    def fetch(first_chunk: int, count: int) -> Iterator[bytes]:
        requests.append(first_chunk)
        raise SnapshotWithdrawn("version 7 is gone")

    with pytest.raises(SnapshotWithdrawn):
        receive(signed(b"weights"), fetch, KEY, "run-a", pause=lambda _: None)
    assert requests == [0]


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    payload = random.Random(0).randbytes(1000)
    manifest = sign(signed(payload).model_copy(update={"payload_digest": "00" * 32}), KEY)
    with pytest.raises(SnapshotError, match="version 7: every chunk is right but the whole"):
        receive(manifest, FaultyStream(payload, 100, []).fetch, KEY, "run-a")


def test_nothing_is_fetched_for_a_forged_manifest() -> None:
    stream = FaultyStream(b"weights", 100, [])
    with pytest.raises(SnapshotError, match="token"):
        receive(signed(b"weights"), stream.fetch, signing_key("other"), "run-a")
    assert stream.requests == []
