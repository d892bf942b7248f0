"""What a bucket brings to a worker, for a follower that knows what it wants.

Invariants: a payload is handed over only if every chunk passed its tag and its signed digest, and weights that were made of a
chain of deltas only with their own signed digest; a chunk that arrived whole is never asked for again; that a worker does
without the bucket is logged once, and once more when it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from echo2.dissemination.broadcast.arrivals import Arrivals
from echo2.dissemination.broadcast.cipher import ChunkCipher, ChunkRefused
from echo2.dissemination.cores import spare_cores
from echo2.dissemination.delta import apply_delta
from echo2.dissemination.manifest import Content, Manifest, parse_manifest, signing_key, verify
from echo2.dissemination.object_store.bucket import Bucket, ObjectStoreError
from echo2.dissemination.object_store.catalog import CATALOG, Entry, way_to
from echo2.dissemination.object_store.sealing import catalog_key, manifest_key, object_key, salt_in, sealed_range
from echo2.dissemination.receiver import SnapshotSource, SourceUnavailable, retry_pause_s
from echo2.errors import SnapshotError

log = logging.getLogger(__name__)
RANGE_BYTES = 8 * 1024 * 1024
ATTEMPTS = 4


class ObjectStoreArrivals:
    """Payloads out of a bucket."""

    def __init__(self, bucket: Bucket, token: str) -> None:
        self._bucket = bucket
        self._token = token
        self._missed = False
        self._closed = threading.Event()

    def payload(self, manifest: Manifest, stopping: Callable[[], bool]) -> Content | None:
        """Read in ranges side by side; None where the bucket does not bring it, or when stopped meanwhile.

        Weights in full that do not lie there as they are come by way of the nearest ones that do, and deltas after them.
        """
        try:
            way = [manifest] if manifest.is_delta else self._way_to(manifest)
            payload = self._brought(way, lambda: stopping() or self._closed.is_set())
        except ObjectStoreError as error:
            if not self._missed:
                log.warning("version %d is fetched from the hub: %s", manifest.version, error)
            self._missed = True
            return None
        if payload is not None and self._missed:
            log.warning("the object store brings snapshots again")
            self._missed = False
        return payload

    def close(self) -> None:
        """End the reading under way."""
        self._closed.set()

    def _brought(self, way: list[Manifest], stopping: Callable[[], bool]) -> Content | None:
        """The payload, or the weights, that the last of these makes from the others; None when stopped."""
        weights: Content = b""
        for step in way:
            # What failed for the former payload is not waited for as long again.
            payload: Content | None = _Download(self._bucket, step, self._token, stopping).run(1 if self._missed else ATTEMPTS)
            if payload is None:
                return None
            if step.is_delta and len(way) > 1:
                try:
                    wanted, threads = step.weights_digest, spare_cores()
                    payload = apply_delta(weights, [payload], wanted, base_digest=step.base_digest, threads=threads)
                except SnapshotError as error:
                    raise self._damaged(f"delta of version {step.version}", error) from None
            weights = payload
        return weights

    def _way_to(self, manifest: Manifest) -> list[Manifest]:
        """What to fetch, in order, for weights in full. Raises ObjectStoreError where the bucket cannot make them."""
        try:
            entries = CATALOG.validate_json(self._bucket.read(catalog_key(manifest.run_id)))
        except ValidationError as error:
            raise self._damaged("catalog", error.errors()[0]["msg"]) from None
        way = way_to(entries, manifest.snapshot_id)
        if way is None:
            raise ObjectStoreError(f"{self._bucket.location} does not hold the snapshot of version {manifest.version}")
        return [manifest if entry.names(manifest) else self._manifest(manifest.run_id, entry) for entry in way]

    def _manifest(self, run_id: str, entry: Entry) -> Manifest:
        """The signed manifest of what an entry names."""
        text = self._bucket.read(manifest_key(run_id, entry.version, entry.payload_digest))
        try:
            manifest = parse_manifest(text)
            verify(manifest, signing_key(self._token), run_id)
        except SnapshotError as error:
            raise self._damaged(f"manifest of version {entry.version}", error) from None
        if not entry.names(manifest):
            raise self._damaged(f"manifest of version {entry.version}", "the catalog names another one")
        return manifest

    def _damaged(self, what: str, reason: object) -> ObjectStoreError:
        return ObjectStoreError(f"{what} in {self._bucket.location} is damaged ({reason}); who else may write there?")


class BackedSource:
    """A source that falls back on a bucket where its streams break before they bring anything."""

    def __init__(self, source: SnapshotSource, store: Arrivals) -> None:
        """`store` stays the caller's to close, which ends its reading."""
        self._source = source
        self._store = store
        self._used = False

    def wait_newest(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        return self._source.wait_newest(held_id, wait_s)

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[Content]:
        given_bytes = 0
        try:
            for piece in self._source.stream(manifest, first_chunk, count):
                given_bytes += len(piece)
                yield piece
            return
        except SourceUnavailable as error:
            payload = None if given_bytes else self._store.payload(manifest, lambda: False)
            if payload is None:
                raise
            if not self._used:
                log.warning("version %d is taken from the object store: %s", manifest.version, error)
            self._used = True
        start, length = manifest.byte_range(first_chunk, count)
        yield payload[start : start + length]


class _Download:
    """One payload on its way; a range stops at the first chunk that goes wrong, and the round with it."""

    def __init__(self, bucket: Bucket, manifest: Manifest, token: str, stopping: Callable[[], bool]) -> None:
        self._bucket = bucket
        self._manifest = manifest
        self._token = token
        self._stopping = stopping
        self._payload = bytearray(manifest.total_bytes)
        self._missing = set(range(manifest.chunk_count))
        self._failures: Counter[int] = Counter()
        self._halted = threading.Event()
        self._ciphers: dict[bytes, ChunkCipher] = {}

    def run(self, attempts: int) -> bytearray | None:
        """The payload; None when stopped. Raises ObjectStoreError once one chunk could not be had `attempts` times."""
        with ThreadPoolExecutor(self._bucket.concurrency, thread_name_prefix="object-store") as pool:
            while self._missing and not self._stopping():
                self._halted.clear()
                for trouble in [found for found in pool.map(self._fetch, self._ranges()) if found is not None]:
                    chunk, error = trouble
                    self._failures[chunk] += 1
                    if not error.passing or self._failures[chunk] >= attempts:
                        raise error
                if self._missing and not self._stopping():
                    time.sleep(retry_pause_s(max(self._failures.values())))
        return None if self._missing else self._payload

    def _ranges(self) -> list[range]:
        """Runs of chunks that are missing, each as long as a request should be."""
        longest = max(1, RANGE_BYTES // self._manifest.chunk_bytes)
        runs: list[range] = []
        for chunk in sorted(self._missing):
            if runs and chunk == runs[-1].stop and len(runs[-1]) < longest:
                runs[-1] = range(runs[-1].start, chunk + 1)
            else:
                runs.append(range(chunk, chunk + 1))
        return runs

    def _fetch(self, chunks: range) -> tuple[int, ObjectStoreError] | None:
        """Take these chunks; returns the one that could not be had, and why."""
        if self._halted.is_set() or self._stopping():
            return None
        chunk = chunks.start
        try:
            with self._bucket.opened(object_key(self._manifest), *sealed_range(self._manifest, chunk, len(chunks))) as (
                metadata,
                body,
            ):
                cipher = self._cipher(metadata)
                for chunk in chunks:
                    if self._stopping():
                        return None
                    cipher.open_into(chunk, memoryview(body.read(cipher.sealed_bytes(chunk))), memoryview(self._payload))
                    self._missing.discard(chunk)
        except ChunkRefused as error:
            trouble = ObjectStoreError(
                f"chunk {chunk} of {self._manifest.chunk_count} in {self._bucket.location} is damaged ({error}); who else may "
                f"write there?",
                passing=True,
            )
        except ObjectStoreError as error:
            trouble = error
        else:
            return None
        self._halted.set()
        return chunk, trouble

    def _cipher(self, metadata: Mapping[str, str]) -> ChunkCipher:
        salt = salt_in(metadata)
        return self._ciphers.setdefault(salt, ChunkCipher(self._manifest, self._token, salt))
