"""The hub's end of the broadcast: each announced snapshot goes to the workers by way of each other.

Invariants: what is broadcast is what the store holds, as a delta where it has one; a worker that the broadcast does not serve
fetches from the hub over HTTP; what workers are accused of is handed to the caller, never acted on here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from echo2.config import Config
from echo2.dissemination.broadcast.record import BroadcastEvent, BroadcastRecord
from echo2.dissemination.broadcast.source import Broadcast, Source
from echo2.dissemination.pacing import Pacer
from echo2.dissemination.store import SnapshotStore
from echo2.errors import SnapshotError

KEPT_RECORDS = 8


class Broadcaster:
    """A broadcast source over the snapshots of a store."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        token: str,
        store: SnapshotStore,
        pacer: Pacer | None,
        former_port: int,
        on_event: Callable[[BroadcastEvent], None],
    ) -> None:
        """Listens on the configured port, else on `former_port` so that workers find it again after a restart, else on any.
        They get then what they have not received of the newest snapshot.

        Raises OSError if a configured port cannot be had, SnapshotError if the newest snapshot is damaged.
        """
        self._store = store
        self._broadcasts: dict[int, Broadcast] = {}
        self._latest: Broadcast | None = None

        def source(port: int) -> Source:
            return Source(run_id, token, host=config.hub.host, port=port, pacer=pacer, on_event=on_event)

        try:
            self._source = source(config.dissemination.port or former_port)
        except OSError:
            if config.dissemination.port:
                raise
            self._source = source(0)
        self._source.start()
        if (newest := store.newest()) is not None:
            self.announce(newest.version)

    @property
    def port(self) -> int:
        """Where workers connect to."""
        return self._source.address[1]

    def announce(self, version: int) -> None:
        """Bring the snapshot of `version` to every connected worker, once however often it is asked for.

        Raises SnapshotError if the store does not hold it whole.
        """
        manifest, file = self._store.smallest(version)
        if self._latest is not None and self._latest.manifest.signature == manifest.signature:
            return
        self._broadcasts[version] = self._latest = self._source.broadcast(manifest, _mapped(file, manifest.total_bytes))
        for old in sorted(self._broadcasts)[:-KEPT_RECORDS]:
            del self._broadcasts[old]

    def record(self, version: int) -> BroadcastRecord | None:
        """What the broadcast of `version` was like so far; None if it has not begun or is long over."""
        broadcast = self._broadcasts.get(version)
        return broadcast.record if broadcast else None

    def stop(self) -> None:
        """Close every connection."""
        self._source.stop()


def _mapped(file: Path, size_bytes: int) -> memoryview:
    """The file's bytes; they stay readable when the file is deleted. Raises SnapshotError where they are not so many."""
    with file.open("rb") as opened:
        found_bytes = os.fstat(opened.fileno()).st_size
        if found_bytes != size_bytes:
            raise SnapshotError(
                f"{file} has {found_bytes} of {size_bytes} bytes: publish the snapshot again, or remove {file.parent}"
            )
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
