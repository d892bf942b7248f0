"""Copies of the published snapshots in a bucket, for workers that get them from there.

Invariants: a copy is there before its version is to be seen, or not at all; a bucket that fails holds nobody up for long and
ends no run: it is told once, and workers use the hub; only this run's objects are ever removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from echo2.dissemination.broadcast.cipher import ChunkCipher, fresh_salt
from echo2.dissemination.manifest import Content, Manifest
from echo2.dissemination.object_store.bucket import Bucket, ObjectStoreError
from echo2.dissemination.object_store.sealing import (
    SealedPayload,
    metadata_of,
    object_key,
    run_folder,
    sealed_total_bytes,
    version_of,
)

log = logging.getLogger(__name__)
PAUSE_S = 30.0
"""How long a bucket that failed is left alone."""


class Mirror:
    """Puts each version of one run into a bucket and removes old ones; used by one thread at a time."""

    def __init__(self, bucket: Bucket, run_id: str, token: str, retain: int, on_trouble: Callable[[str], None]) -> None:
        """`on_trouble` is told once that copies, or the removal of old ones, begin to fail, and why."""
        self._bucket = bucket
        self._run_id = run_id
        self._token = token
        self._retain = retain
        self._on_trouble = on_trouble
        self._told: set[str] = set()
        self._paused_until_s = 0.0

    def put(self, payloads: Sequence[tuple[Manifest, Content]]) -> None:
        """Copy the payloads of one version, in full and as a delta; the newest `retain` versions up to it stay."""
        if time.monotonic() < self._paused_until_s:
            return
        version = payloads[0][0].version
        try:
            for manifest, payload in payloads:
                self._upload(manifest, payload)
        except ObjectStoreError as error:
            self._paused_until_s = time.monotonic() + PAUSE_S
            self._tell("copies", f"version {version} is not in the object store, and workers fetch it from the hub: {error}")
            return
        self._untell("copies")
        try:
            self._sweep(version, {object_key(manifest) for manifest, _ in payloads})
        except ObjectStoreError as error:
            self._tell("removal", f"old snapshots stay in the object store: {error}")
            return
        self._untell("removal")

    def _upload(self, manifest: Manifest, payload: Content) -> None:
        salt = fresh_salt()
        sealed = SealedPayload(manifest, payload, ChunkCipher(manifest, self._token, salt))
        self._bucket.upload(object_key(manifest), sealed, sealed_total_bytes(manifest), metadata_of(salt))

    def _sweep(self, newest: int, newest_keys: set[str]) -> None:
        """A version above the newest one is of a past that a resume took back, and so are other weights of the newest."""
        folder = run_folder(self._run_id)
        versions = {key: version for key in self._bucket.keys(folder) if (version := version_of(key)) is not None}
        kept = sorted({version for version in versions.values() if version <= newest})[-self._retain :]
        for key, version in versions.items():
            if version not in kept or (version == newest and key not in newest_keys):
                self._bucket.delete(key)
        self._bucket.abort_uploads(folder)

    def _tell(self, what: str, trouble: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._on_trouble(trouble)

    def _untell(self, what: str) -> None:
        if what in self._told:
            self._told.discard(what)
            log.warning("the object store works again (%s)", what)
