"""What lies in a bucket of one run's snapshots, kept there as an object of its own so that a worker can tell what to fetch.

Invariants: pure; an entry stands for a payload and its manifest that lie there whole; every version in a catalog can be made
from nothing, by one in full and the deltas after it; no version has two identities; a catalog only steers, since whatever it
names is checked against a signed manifest.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter

from echo2.dissemination.manifest import Manifest
from echo2.dissemination.route import Offer, cheapest_route


class Entry(BaseModel):
    """One payload, by what its manifest says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: NonNegativeInt
    snapshot_id: str
    base_id: str | None
    """`snapshot_id` that a delta builds on; None for a payload in full."""
    payload_digest: str
    total_bytes: PositiveInt

    def names(self, manifest: Manifest) -> bool:
        """Whether `manifest` is the one that this entry stands for."""
        return self == entry_of(manifest)


Entries = tuple[Entry, ...]
CATALOG: TypeAdapter[Entries] = TypeAdapter(Entries)
"""Reads and writes catalogs as JSON."""


def entry_of(manifest: Manifest) -> Entry:
    """The entry of the payload that `manifest` describes."""
    return Entry(
        version=manifest.version,
        snapshot_id=manifest.snapshot_id,
        base_id=manifest.base_id,
        payload_digest=manifest.payload_digest,
        total_bytes=manifest.total_bytes,
    )


def way_to(entries: Iterable[Entry], snapshot_id: str) -> Entries | None:
    """What to fetch, in order, to have these weights from nothing: the fewest bytes. None if they cannot be made."""
    found = {}
    versions = {entry.snapshot_id: entry.version for entry in entries}
    for entry in entries:
        base_version = None if entry.base_id is None else versions.get(entry.base_id)
        if entry.base_id is None or base_version is not None:
            found[Offer(entry.version, base_version, entry.total_bytes)] = entry
    way = cheapest_route(None, versions[snapshot_id], found) if snapshot_id in versions else None
    return None if way is None else tuple(found[offer] for offer in way)


def needed(entries: Entries, retain: int) -> Entries:
    """The entries that make the newest `retain` versions, from the last one in full that is not newer than all of these."""
    kept = sorted({entry.version for entry in entries})[-retain:]
    anchor = max((entry.version for entry in entries if entry.base_id is None and entry.version <= kept[0]), default=kept[0])
    return tuple(entry for entry in entries if entry.version > anchor or (entry.version == anchor and entry.base_id is None))


def since_anchor(entries: Entries) -> Entries:
    """The deltas after the last version in full."""
    anchor = max((entry.version for entry in entries if entry.base_id is None), default=-1)
    return tuple(entry for entry in entries if entry.version > anchor)
