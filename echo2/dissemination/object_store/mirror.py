"""Copies of the published snapshots in a bucket, for workers that get them from there.

Invariants: what a version needs beyond the one before, its delta or else all of it, is there before it is to be seen, or not
at all; every version that the catalog names can be made from nothing; a bucket that fails holds nobody up for long and ends no
run: it is told once, and workers use the hub; only this run's objects are ever removed.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from echo2.dissemination.broadcast.cipher import ChunkCipher, fresh_salt
from echo2.dissemination.manifest import Content, Manifest
from echo2.dissemination.object_store.bucket import Bucket, ObjectStoreError
from echo2.dissemination.object_store.catalog import CATALOG, Entries, Entry, entry_of, needed, since_anchor, way_to
from echo2.dissemination.object_store.sealing import (
    SealedPayload,
    catalog_key,
    manifest_key,
    metadata_of,
    payload_key,
    run_folder,
    sealed_total_bytes,
)

log = logging.getLogger(__name__)
PAUSE_S = 30.0
"""How long a bucket that failed is left alone."""


class Mirror:
    """Puts the versions of one run into a bucket and removes what nobody needs; `put` is for one thread at a time.

    A version travels as the delta from the one before. After every `anchor_interval` deltas, or once they come to more bytes
    than the whole, a version is copied in full too, while the run goes on.
    """

    def __init__(
        self, bucket: Bucket, run_id: str, token: str, retain: int, anchor_interval: int, on_trouble: Callable[[str], None]
    ) -> None:
        """`on_trouble` is told once that copies, or the removal of old ones, begin to fail, and why; from any thread."""
        self._bucket = bucket
        self._run_id = run_id
        self._token = token
        self._retain = retain
        self._anchor_interval = anchor_interval
        self._on_trouble = on_trouble
        self._told: set[str] = set()
        self._paused_until_s = 0.0
        self._lock = threading.Lock()
        self._entries: Entries | None = None
        self._unneeded: set[str] = set()
        self._chore: threading.Thread | None = None

    def put(self, payloads: Sequence[tuple[Manifest, Content]]) -> None:
        """Copy what is needed of one version's payloads, the last of which is in full; the newest `retain` versions stay."""
        if time.monotonic() < self._paused_until_s:
            return
        whole, weights = payloads[-1]
        version = whole.version
        try:
            held = {entry.snapshot_id for entry in self._opened()}
            manifest, payload = payloads[0] if payloads[0][0].base_id in held else payloads[-1]
            # What is of this version or newer is of a past that a resume took back.
            self._copy(manifest, payload, lambda former: tuple(entry for entry in former if entry.version < version))
        except ObjectStoreError as error:
            self._paused_until_s = time.monotonic() + PAUSE_S
            self._tell("copies", f"version {version} is not in the object store, and workers fetch it from the hub: {error}")
            return
        self._untell("copies")
        if self._chore is None or not self._chore.is_alive():
            self._chore = threading.Thread(target=self._tidy, args=(whole, weights), name="object-store", daemon=True)
            self._chore.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the removal and the copy in full that go on after `put`; whether they have ended."""
        if self._chore is not None:
            self._chore.join(timeout_s)
        return self._chore is None or not self._chore.is_alive()

    def end_run(self) -> None:
        """The run is over: what makes its newest version stays, all else of it is removed."""
        if self._entries is None:
            return
        newest = max(self._entries, key=lambda entry: entry.version)
        try:
            self._record(lambda entries: way_to(entries, newest.snapshot_id) or entries)
            self._bucket.abort_uploads(run_folder(self._run_id))
        except ObjectStoreError as error:
            self._tell("removal", f"snapshots of a run that is over stay in the object store: {error}")
            return
        self._remove_unneeded()

    def _opened(self) -> Entries:
        """The catalog as an earlier process left it, the first time; what it does not name is to be removed."""
        if self._entries is None:
            folder, catalog = run_folder(self._run_id), catalog_key(self._run_id)
            self._bucket.abort_uploads(folder)
            keys = set(self._bucket.keys(folder))
            entries: Entries = ()
            if catalog in keys:
                try:
                    entries = CATALOG.validate_json(self._bucket.read(catalog))
                except ValidationError:
                    log.warning("%s is damaged: snapshots are copied anew", catalog)
            self._unneeded = keys - {catalog} - self._all_keys(entries)
            self._entries = entries
        return self._entries

    def _copy(self, manifest: Manifest, payload: Content, keep: Callable[[Entries], Entries] = lambda former: former) -> None:
        """Payload and manifest, each in place of a former one, then the catalog with what is to be kept of the former one."""
        keys = self._keys_of(entry_of(manifest))
        with self._lock:
            self._unneeded -= set(keys)
        salt = fresh_salt()
        sealed = SealedPayload(manifest, payload, ChunkCipher(manifest, self._token, salt))
        try:
            self._bucket.upload(keys[0], sealed, sealed_total_bytes(manifest), metadata_of(salt))
            self._upload_text(keys[1], manifest.model_dump_json().encode())
            self._record(lambda former: (*keep(former), entry_of(manifest)))
        except ObjectStoreError:
            with self._lock:
                self._unneeded |= set(keys) - self._all_keys(self._entries or ())
            raise

    def _record(self, change: Callable[[Entries], Entries]) -> None:
        """Make the catalog what `change` makes of it, without what is needed no more, which then may be removed."""
        with self._lock:
            former = self._entries or ()
            entries = needed(change(former), self._retain)
            self._upload_text(catalog_key(self._run_id), CATALOG.dump_json(entries))
            self._entries = entries
            self._unneeded |= self._all_keys(former) - self._all_keys(entries)

    def _upload_text(self, key: str, text: bytes) -> None:
        self._bucket.upload(key, io.BytesIO(text), len(text), {})

    def _keys_of(self, entry: Entry) -> tuple[str, str]:
        """Of payload and manifest."""
        place = (self._run_id, entry.version, entry.payload_digest)
        return payload_key(*place), manifest_key(*place)

    def _all_keys(self, entries: Entries) -> set[str]:
        return {key for entry in entries for key in self._keys_of(entry)}

    def _tidy(self, whole: Manifest, weights: Content) -> None:
        """Once a version is there: remove what is needed no more, and copy the version in full if it is time."""
        self._remove_unneeded()
        chain = since_anchor(self._entries or ())
        if len(chain) < self._anchor_interval and sum(entry.total_bytes for entry in chain) <= whole.total_bytes:
            return
        try:
            self._copy(whole, weights)
        except ObjectStoreError as error:
            self._tell("anchor", f"version {whole.version} is not in the object store in full, only as a delta: {error}")
            return
        self._untell("anchor")
        self._remove_unneeded()

    def _remove_unneeded(self) -> None:
        try:
            for key in sorted(self._unneeded):
                with self._lock:
                    # What was copied again meanwhile stays.
                    if key in self._unneeded:
                        self._bucket.delete(key)
                        self._unneeded.discard(key)
        except ObjectStoreError as error:
            self._tell("removal", f"old snapshots stay in the object store: {error}")
            return
        self._untell("removal")

    def _tell(self, what: str, trouble: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._on_trouble(trouble)

    def _untell(self, what: str) -> None:
        if what in self._told:
            self._told.discard(what)
            log.warning("the object store works again (%s)", what)
