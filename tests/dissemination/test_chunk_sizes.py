"""Into what chunks a payload is cut, by what the last broadcast saw."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.dissemination.broadcast.record import (
    FIRST_CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    PASS_ON_S,
    Arrival,
    BroadcastRecord,
    chunk_bytes_after,
)
from echo2.dissemination.manifest import CHUNK_STEP_BYTES, LEAST_CHUNK_BYTES, describe, describe_delta

GB = 10**9


def seen(workers: int, uplink_bytes_per_s: float) -> BroadcastRecord:
    arrivals = tuple(Arrival(f"w{number}", 1.0, 1.0, ()) for number in range(workers))
    return BroadcastRecord(1, GB, 0.0, 1.0, arrivals, GB, worker_uplink_bytes_per_s=uplink_bytes_per_s)


@pytest.mark.parametrize("former", [None, seen(0, 1e6), seen(1, 1e6), seen(8, 0.0)], ids=["none", "nobody", "one", "unseen"])
def test_where_no_uplink_was_seen_the_first_size_is_taken(former) -> None:
    assert chunk_bytes_after(former, GB) == FIRST_CHUNK_BYTES


@given(st.integers(2, 200), st.floats(1e3, 1e12), st.integers(1, 10**12))
def test_a_chunk_is_passed_on_in_time_and_is_a_small_part_of_the_whole(workers, uplink_bytes_per_s, total_bytes) -> None:
    size = chunk_bytes_after(seen(workers, uplink_bytes_per_s), total_bytes)
    assert LEAST_CHUNK_BYTES <= size <= MOST_CHUNK_BYTES
    assert size % CHUNK_STEP_BYTES == 0
    if size > LEAST_CHUNK_BYTES:
        assert size * (workers - 1) <= PASS_ON_S * uplink_bytes_per_s
        assert (size - CHUNK_STEP_BYTES) * 1000 < total_bytes


def test_sixteen_workers_of_200_mbit_per_s_get_chunks_that_leave_in_40_ms() -> None:
    assert chunk_bytes_after(seen(16, 25e6), GB) == 64 * 1024


def test_the_chunks_of_a_small_delta_are_smaller_than_those_of_the_whole() -> None:
    base, target = (describe(bytes([version]) * 10_000_000, "run-a", version, 128 * 1024) for version in (1, 2))
    assert describe_delta(bytes(200_000), base, target).chunk_bytes == LEAST_CHUNK_BYTES
