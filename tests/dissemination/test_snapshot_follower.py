"""Following the newest snapshot in a thread, while its owner does other work."""

import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from echo2.dissemination.manifest import Manifest
from echo2.dissemination.receiver import ReceivedSnapshot, SnapshotFollower, SourceUnavailable
from echo2.dissemination.store import SnapshotStore
from echo2.errors import WaitTimeout

CHUNK_BYTES = 1000


class StoreSource:
    """A source over a store in the same process; `gate` holds streams back after their first piece, `trouble` is raised."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.gate = threading.Event()
        self.gate.set()
        self.streaming = threading.Event()
        self.requests: list[tuple[int, int]] = []
        self.fetched: list[Manifest] = []
        self.calls = 0
        self.held: str | None = None
        self.trouble: Exception | None = None
        self.spoil: Callable[[int, bytes], bytes] = lambda version, piece: piece

    def wait_newest(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        self.calls += 1
        self.held = held_id
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            if self.trouble:
                raise self.trouble
            if route := self.store.route(held_id):
                return route
            time.sleep(0.005)
        return ()

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        self.requests.append((manifest.version, first_chunk))
        self.fetched.append(manifest)
        for chunk in range(first_chunk, first_chunk + count):
            if self.trouble:
                raise self.trouble
            piece = b"".join(self.store.stream(manifest.version, manifest.payload_digest, chunk, 1))
            yield self.spoil(manifest.version, piece)
            self.streaming.set()
            assert self.gate.wait(30)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path, "run-a", "secret")


@pytest.fixture
def source(store: SnapshotStore) -> StoreSource:
    return StoreSource(store)


@pytest.fixture
def follower(source: StoreSource) -> Iterator[SnapshotFollower]:
    follower = SnapshotFollower(source, "run-a", "secret", wait_s=0.2)
    follower.start()
    yield follower
    source.gate.set()
    follower.stop()


def random_payload(seed: int) -> bytes:
    return random.Random(seed).randbytes(10 * CHUNK_BYTES)


def take_next(follower: SnapshotFollower) -> ReceivedSnapshot:
    return follower.wait_first(20)


def test_snapshots_are_handed_over_once_as_published(store: SnapshotStore, follower: SnapshotFollower) -> None:
    manifest = store.publish(0, random_payload(0), CHUNK_BYTES).manifest
    received = follower.wait_first(20)
    assert (received.manifest, received.weights) == (manifest, random_payload(0))
    assert 0 <= received.fetch_s < 20
    assert follower.take() is None
    store.publish(1, random_payload(1), CHUNK_BYTES)
    assert take_next(follower).weights == random_payload(1)


def test_the_owner_is_woken_when_there_is_something_to_take(store: SnapshotStore, source: StoreSource) -> None:
    arrived = threading.Event()
    follower = SnapshotFollower(source, "run-a", "secret", wait_s=0.2, on_arrival=arrived.set)
    follower.start()
    assert not arrived.wait(0.1)
    store.publish(0, random_payload(0), CHUNK_BYTES)
    assert arrived.wait(20)
    assert follower.take() is not None
    follower.stop()


def test_it_finishes_what_it_began_then_jumps_to_the_newest(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    source.gate.clear()
    store.publish(1, random_payload(1), CHUNK_BYTES)
    assert source.streaming.wait(20)
    for version in range(2, 6):
        store.publish(version, random_payload(version), CHUNK_BYTES)
    assert follower.take() is None
    source.gate.set()
    versions = [take_next(follower).manifest.version]
    while versions[-1] != 5:
        versions.append(take_next(follower).manifest.version)
    assert {version for version, _ in source.requests} == {1, 5}


def test_a_busy_owner_gets_only_the_newest(store: SnapshotStore, source: StoreSource, follower: SnapshotFollower) -> None:
    for version in range(3):
        manifest = store.publish(version, random_payload(version), CHUNK_BYTES).manifest
        while source.held != manifest.snapshot_id:
            time.sleep(0.005)
    received = follower.take()
    assert received is not None
    assert received.manifest.version == 2
    assert follower.take() is None


def test_a_snapshot_withdrawn_in_transfer_gives_way_to_the_newest(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    store.publish(3, random_payload(3), CHUNK_BYTES)
    assert take_next(follower).manifest.version == 3
    source.gate.clear()
    source.streaming.clear()
    store.publish(5, random_payload(5), CHUNK_BYTES)
    assert source.streaming.wait(20)
    store.withdraw_after(2)
    store.publish(2, random_payload(2), CHUNK_BYTES)
    source.gate.set()
    received = take_next(follower)
    assert (received.manifest.version, received.weights) == (2, random_payload(2))
    assert follower.rejected == 0


def test_a_version_published_again_is_taken_only_if_its_bytes_changed(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    store.publish(3, random_payload(3), CHUNK_BYTES)
    take_next(follower)
    store.publish(3, random_payload(3), CHUNK_BYTES)
    time.sleep(0.3)
    assert source.requests == [(3, 0)]
    store.publish(3, random_payload(4), CHUNK_BYTES)
    assert take_next(follower).weights == random_payload(4)


def test_a_new_version_of_equal_bytes_is_taken(store: SnapshotStore, follower: SnapshotFollower) -> None:
    for version in range(2):
        store.publish(version, random_payload(0), CHUNK_BYTES)
        assert take_next(follower).manifest.version == version


def test_a_source_that_comes_back_is_resumed_where_it_broke(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    def break_after_chunk_six(version: int, piece: bytes) -> bytes:
        if piece == random_payload(1)[6 * CHUNK_BYTES : 7 * CHUNK_BYTES]:
            source.trouble = SourceUnavailable("connection reset")
        return piece

    source.spoil = break_after_chunk_six
    store.publish(1, random_payload(1), CHUNK_BYTES)
    while len(source.requests) < 4:
        time.sleep(0.005)
    source.trouble = None
    assert take_next(follower).weights == random_payload(1)
    assert source.requests[0] == (1, 0)
    assert set(source.requests[1:]) == {(1, 7)}


def test_an_unreachable_source_is_tried_with_growing_pauses(source: StoreSource, follower: SnapshotFollower) -> None:
    source.trouble = SourceUnavailable("connection refused")
    time.sleep(0.1)
    before = source.calls
    with pytest.raises(WaitTimeout, match=r"run run-a .* within 1 s: connection refused"):
        follower.wait_first(1.0)
    assert 1 <= source.calls - before <= 12


def test_a_source_that_answers_nothing_at_once_is_not_asked_in_a_busy_loop(source: StoreSource) -> None:
    follower = SnapshotFollower(source, "run-a", "secret", wait_s=0.0)
    follower.start()
    time.sleep(0.5)
    follower.stop()
    assert 2 <= source.calls <= 12


def test_a_damaged_snapshot_is_reported_and_the_next_one_taken(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.dissemination.receiver.LONGEST_PAUSE_S", 0.01)
    source.spoil = lambda version, piece: piece[::-1] if version == 1 else piece
    store.publish(1, random_payload(1), CHUNK_BYTES)
    with pytest.raises(WaitTimeout, match="chunk 0 of 10"):
        follower.wait_first(0.5)
    assert follower.rejected >= 1
    assert "version 1: chunk 0 of 10" in str(follower.last_error)
    store.publish(2, random_payload(2), CHUNK_BYTES)
    assert take_next(follower).weights == random_payload(2)
    assert follower.last_error is None


def test_stopping_ends_a_transfer(store: SnapshotStore, source: StoreSource, follower: SnapshotFollower) -> None:
    def dawdle(version: int, piece: bytes) -> bytes:
        time.sleep(1.0)
        return piece

    source.spoil = dawdle
    store.publish(1, random_payload(1), CHUNK_BYTES)
    assert source.streaming.wait(20)
    start_s = time.monotonic()
    follower.stop()
    assert time.monotonic() - start_s < 5.0
    assert follower.take() is None
    with pytest.raises(WaitTimeout):
        follower.wait_first(20)
    assert time.monotonic() - start_s < 6.0
    assert len(source.requests) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_the_thread_reaches_the_owner(source: StoreSource, follower: SnapshotFollower) -> None:
    source.trouble = ZeroDivisionError("a defect")
    with pytest.raises(RuntimeError, match="thread died"):
        follower.wait_first(20)


# --- deltas


def weights_of(version: int, size: int = 20_000) -> bytes:
    """Weights of which a version differs from the one before in a few."""
    values = np.random.default_rng(0).integers(0, 2**16, size, np.uint16)
    for step in range(version):
        values[np.random.default_rng(step + 1).integers(0, size, 50)] += np.uint16(1)
    return save({"w": values.view(np.float16)})


def publish_chain(store: SnapshotStore, first: int, last: int) -> None:
    former = None
    for version in range(first, last + 1):
        former = store.publish(version, weights_of(version), CHUNK_BYTES, former)


def test_a_holder_of_the_version_before_fetches_the_delta_only(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    former = store.publish(0, weights_of(0), CHUNK_BYTES)
    first = take_next(follower)
    store.publish(1, weights_of(1), CHUNK_BYTES, former)
    second = take_next(follower)
    assert (first.weights, second.weights) == (weights_of(0), weights_of(1))
    assert [manifest.is_delta for manifest in dict.fromkeys(source.fetched)] == [False, True]
    assert second.fetched_bytes < first.fetched_bytes / 20


def test_who_missed_versions_takes_the_chain_of_deltas_and_who_comes_late_the_newest_in_full(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    former = store.publish(0, weights_of(0), CHUNK_BYTES)
    take_next(follower)
    source.trouble = SourceUnavailable("away")
    for version in range(1, 5):
        former = store.publish(version, weights_of(version), CHUNK_BYTES, former)
    source.fetched.clear()
    source.trouble = None
    assert take_next(follower).weights == weights_of(4)
    assert [manifest.version for manifest in dict.fromkeys(source.fetched)] == [1, 2, 3, 4]
    late = StoreSource(store)
    other = SnapshotFollower(late, "run-a", "secret", wait_s=0.2)
    other.start()
    assert take_next(other).weights == weights_of(4)
    assert [(manifest.version, manifest.is_delta) for manifest in dict.fromkeys(late.fetched)] == [(4, False)]
    other.stop()


def test_a_delta_that_makes_other_weights_is_given_up_for_the_whole(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    """As by a defect at the learner's side: every signature and chunk is right, the result is not."""
    former = store.publish(0, weights_of(0), CHUNK_BYTES)
    take_next(follower)
    wrong = former._replace(weights=weights_of(3))
    store.publish(1, weights_of(1), CHUNK_BYTES, wrong)
    assert take_next(follower).weights == weights_of(1)
    assert follower.rejected == 1
    assert [manifest.is_delta for manifest in dict.fromkeys(source.fetched)] == [False, True, False]


def test_a_delta_out_of_order_is_refused_before_it_is_fetched_and_the_whole_taken(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a defect of the hub: of a chain it names the last delta only."""
    former = store.publish(0, weights_of(0), CHUNK_BYTES)
    take_next(follower)
    honest = store.route
    monkeypatch.setattr(store, "route", lambda held_id: () if held_id else honest(None))
    for version in (1, 2):
        former = store.publish(version, weights_of(version), CHUNK_BYTES, former)
    monkeypatch.setattr(store, "route", lambda held_id: honest(held_id)[-1:])
    assert take_next(follower).weights == weights_of(2)
    assert follower.rejected == 1
    assert [(manifest.version, manifest.is_delta) for manifest in dict.fromkeys(source.fetched)] == [(0, False), (2, False)]


def test_a_delta_takes_the_memory_of_its_result_and_little_more(
    store: SnapshotStore, source: StoreSource, follower: SnapshotFollower
) -> None:
    size = 16_000_000
    former = store.publish(0, weights_of(0, size), 1_000_000)
    take_next(follower)
    source.trouble = SourceUnavailable("away")
    weights = weights_of(1, size)
    store.publish(1, weights, 1_000_000, former)
    tracemalloc.start()
    source.trouble = None
    received = take_next(follower)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert received.weights == weights
    assert peak_bytes < 1.3 * len(weights)


def test_a_version_that_was_published_anew_is_no_base_for_its_former_deltas(store: SnapshotStore) -> None:
    publish_chain(store, 0, 2)
    held = store.manifest(1).snapshot_id
    assert [manifest.is_delta for manifest in store.route(held)] == [True]
    store.publish(1, weights_of(7), CHUNK_BYTES)
    (route,) = store.route(held)
    assert not route.is_delta
    (route,) = store.route(store.manifest(1).snapshot_id)
    assert not route.is_delta


def test_what_is_no_set_of_tensors_or_changed_too_much_has_no_delta(store: SnapshotStore) -> None:
    former = store.publish(0, random_payload(0), CHUNK_BYTES)
    assert store.publish(1, random_payload(1), CHUNK_BYTES, former).delta is None
    former = store.publish(2, weights_of(0), CHUNK_BYTES)
    noise = save({"w": np.random.default_rng(9).integers(0, 2**16, 20_000, np.uint16).view(np.float16)})
    assert store.publish(3, noise, CHUNK_BYTES, former).delta is None
