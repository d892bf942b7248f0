"""Taking a snapshot from wherever it is offered, while the worker goes on generating.

Invariants: what is handed over is bit-equal to what the learner published, and was the newest when its transfer began; a chunk
that arrived whole is never asked for again; a delta that does not make the right weights is given up for the whole; every retry
waits.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from echo2.dissemination.broadcast.arrivals import Arrivals
from echo2.dissemination.cores import spare_cores
from echo2.dissemination.delta import apply_delta
from echo2.dissemination.manifest import Content, Manifest, SnapshotWithdrawn, signing_key, verify
from echo2.errors import SnapshotError, WaitTimeout

FIRST_PAUSE_S = 0.05
PIECE_BYTES = 1024 * 1024
LONGEST_PAUSE_S = 5.0

Fetch = Callable[[int, int], Iterator[Content]]
"""(first_chunk, count) → the bytes of these chunks, in pieces of any size."""


class SourceUnavailable(Exception):
    """A source that cannot be reached or broke off: worth another try."""


class SnapshotSource(Protocol):
    """Where snapshots come from."""

    def wait_newest(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        """What to fetch, in order, to go from the snapshot called `held_id` to the newest: deltas, or one in full.

        Empty after `wait_s` without a newer one. Raises SourceUnavailable.
        """

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[Content]:
        """The bytes of these chunks. Raises SourceUnavailable, or SnapshotWithdrawn where there is no such payload now."""


@dataclass(frozen=True, slots=True)
class ReceivedSnapshot:
    """Weights that arrived whole, by the manifest that they came with last."""

    manifest: Manifest
    weights: Content
    fetch_s: float
    """From the first byte asked for to the last one, and the making of the weights."""
    fetched_bytes: int


def receive(
    manifest: Manifest,
    fetch: Fetch,
    key: bytes,
    run_id: str,
    *,
    attempts: int = 5,
    break_attempts: float = 5,
    pause: Callable[[float], None] = time.sleep,
) -> bytearray:
    """The payload that `manifest` describes.

    A chunk that arrives damaged or cut short is asked for again, `attempts` times in all. A source that breaks off is resumed
    at the chunk it had reached, until it broke `break_attempts` times without progress (infinity: for ever). `pause` sleeps
    in between.
    Raises SnapshotError for a manifest that is not this run's or when attempts are used up; passes SnapshotWithdrawn on.
    """
    verify(manifest, key, run_id)
    assembly = _Assembly(manifest)
    damages = breaks = 0
    while not assembly.complete:
        reached = assembly.chunk
        try:
            _transfer(assembly, fetch, manifest)
        except (_ChunkDamaged, SourceUnavailable) as error:
            if assembly.chunk > reached:
                damages = breaks = 0
            damages += isinstance(error, _ChunkDamaged)
            breaks += isinstance(error, SourceUnavailable)
            if damages >= attempts or breaks >= break_attempts:
                raise SnapshotError(
                    f"snapshot of version {manifest.version}: chunk {assembly.chunk} of {manifest.chunk_count} could not be "
                    f"had in {damages + breaks} attempts ({error}): check the link to the hub and the hub's disk"
                ) from error
            pause(retry_pause_s(damages + breaks))
    return assembly.finish()


def retry_pause_s(failures: int) -> float:
    """Seconds to wait after the n-th failure in a row: doubling up to 5 s, less up to a half so that workers spread out."""
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))
    return longest_s * random.uniform(0.5, 1.0)


def _pieces(payload: Content) -> Iterator[memoryview]:
    view = memoryview(payload)
    return (view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))


class _ChunkDamaged(Exception):
    pass


class _Assembly:
    """The payload as it grows: chunks below `chunk` have arrived and are right."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._payload = bytearray(manifest.total_bytes)
        self._filled_bytes = 0
        self.chunk = 0

    @property
    def complete(self) -> bool:
        return self.chunk == self._manifest.chunk_count

    def restart_chunk(self) -> None:
        """Forget the beginning of a chunk that was not finished."""
        self._filled_bytes = 0

    def feed(self, piece: Content) -> None:
        """Take the next bytes; what goes beyond the payload is left. Raises _ChunkDamaged at the first wrong chunk."""
        rest = memoryview(piece)
        while rest and not self.complete:
            start, length = self._manifest.byte_range(self.chunk)
            part = rest[: length - self._filled_bytes]
            rest = rest[len(part) :]
            self._payload[start + self._filled_bytes : start + self._filled_bytes + len(part)] = part
            self._filled_bytes += len(part)
            if self._filled_bytes == length:
                digest = blake3(memoryview(self._payload)[start : start + length]).hexdigest()
                if digest != self._manifest.chunk_digests[self.chunk]:
                    raise _ChunkDamaged("its digest is not the one in the manifest")
                self.chunk += 1
                self._filled_bytes = 0

    def finish(self) -> bytearray:
        """The payload. Raises SnapshotError if it is not what the manifest promises."""
        if blake3(self._payload).hexdigest() != self._manifest.payload_digest:
            raise SnapshotError(
                f"snapshot of version {self._manifest.version}: every chunk is right but the whole has not the digest in its "
                f"manifest: publish it again"
            )
        return self._payload


def _transfer(assembly: _Assembly, fetch: Fetch, manifest: Manifest) -> None:
    """One stream from the first missing chunk to the end. Raises _ChunkDamaged or SourceUnavailable where it goes wrong."""
    assembly.restart_chunk()
    stream = fetch(assembly.chunk, manifest.chunk_count - assembly.chunk)
    try:
        for piece in stream:
            assembly.feed(piece)
            if assembly.complete:
                return
    finally:
        if isinstance(stream, Generator):
            stream.close()
    raise _ChunkDamaged("the stream ended within it")


class _Stopped(Exception):
    pass


class SnapshotFollower:
    """A thread that keeps fetching the newest snapshot, so that its owner can go on generating until the next one is whole.

    A transfer that has begun is finished, then the newest version is next, whatever was published between. Counters may be read
    from any thread.
    """

    def __init__(
        self,
        source: SnapshotSource,
        run_id: str,
        token: str,
        *,
        arrivals: Arrivals | None = None,
        wait_s: float = 20.0,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        """`wait_s` is the length of one long-poll; `on_arrival` is called in the thread when there is something to take.

        What `arrivals` bring is not fetched from `source`; they are closed with the follower.
        """
        self._source = source
        self._arrivals = arrivals
        self._run_id = run_id
        self._key = signing_key(token)
        self._wait_s = wait_s
        self._on_arrival = on_arrival
        self._thread = threading.Thread(target=self._run, name="snapshot-follower", daemon=True)
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._received: ReceivedSnapshot | None = None
        self._ended = False
        self.rejected = 0
        """Snapshots refused: damaged after every attempt, forged, or another run's."""
        self.last_error: str | None = None
        """Why the newest snapshot could not be had at the last try; None after one was."""

    def start(self) -> None:
        self._thread.start()

    @property
    def has_arrival(self) -> bool:
        """Whether there is a snapshot to take."""
        return self._received is not None

    def take(self) -> ReceivedSnapshot | None:
        """The newest snapshot that arrived since the last call, if any. Raises RuntimeError if the thread died of a defect."""
        with self._changed:
            self._raise_if_dead()
            received, self._received = self._received, None
            return received

    def wait_first(self, timeout_s: float) -> ReceivedSnapshot:
        """`take`, but waits for a snapshot to arrive. Raises WaitTimeout after `timeout_s`, or when stopped meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._received is not None or self._ended, timeout_s)
        received = self.take()
        if received is None:
            reason = f": {self.last_error}" if self.last_error else ""
            raise WaitTimeout(f"no snapshot of run {self._run_id} arrived within {timeout_s:g} s{reason}")
        return received

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread, waiting up to `timeout_s`; a long-poll under way ends by itself and delivers nothing."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._arrivals is not None:
            self._arrivals.close()

    def _raise_if_dead(self) -> None:
        if self._ended and not self._stopping.is_set():
            raise RuntimeError("the snapshot follower's thread died: its traceback is in the log")

    def _run(self) -> None:
        try:
            self._follow()
        except _Stopped:
            return
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _follow(self) -> None:
        held: ReceivedSnapshot | None = None
        failures = 0
        while True:
            try:
                route = self._source.wait_newest(held.manifest.snapshot_id if held else None, self._wait_s)
                if not route or (held and route[-1].snapshot_id == held.manifest.snapshot_id):
                    self._pause(FIRST_PAUSE_S)
                    continue
                received = self._receive(route, held)
            except (SourceUnavailable, SnapshotError) as error:
                failures += 1
                if isinstance(error, SnapshotError) and not isinstance(error, SnapshotWithdrawn):
                    # Whatever was wrong, from nothing held the next route is a snapshot in full.
                    self.rejected, held = self.rejected + 1, None
                self.last_error = str(error)
                self._pause(retry_pause_s(failures))
                continue
            held, failures, self.last_error = received, 0, None
            with self._changed:
                self._received = received
                self._changed.notify_all()
            self._on_arrival()

    def _receive(self, route: tuple[Manifest, ...], held: ReceivedSnapshot | None) -> ReceivedSnapshot:
        """Fetch what the route names and make the weights. Raises SnapshotError where that cannot be done."""
        start_s = time.monotonic()
        weights, held_id = (held.weights, held.manifest.snapshot_id) if held else (b"", None)
        for manifest in route:
            if manifest.base_id not in (None, held_id):
                raise SnapshotError(f"snapshot of version {manifest.version} builds on {manifest.base_id}, which is not held")
            payload = self._fetch(manifest)
            if manifest.is_delta:
                pieces, wanted = _pieces(payload), manifest.weights_digest
                payload = apply_delta(weights, pieces, wanted, base_digest=manifest.base_digest, threads=spare_cores())
            weights, held_id = payload, manifest.snapshot_id
        fetched_bytes = sum(manifest.total_bytes for manifest in route)
        return ReceivedSnapshot(route[-1], weights, time.monotonic() - start_s, fetched_bytes)

    def _fetch(self, manifest: Manifest) -> Content:
        """The payload, as it arrives by itself or else from the source. Raises SnapshotError if it cannot be had."""
        verify(manifest, self._key, self._run_id)
        if self._arrivals is not None:
            arrived = self._arrivals.payload(manifest, self._stopping.is_set)
            if arrived is not None:
                return arrived

        def fetch(first_chunk: int, count: int) -> Iterator[Content]:
            for piece in self._source.stream(manifest, first_chunk, count):
                if self._stopping.is_set():
                    raise _Stopped
                yield piece

        return receive(manifest, fetch, self._key, self._run_id, break_attempts=math.inf, pause=self._pause)

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise _Stopped
