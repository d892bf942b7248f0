"""What a snapshot is made of, and the proof that this run's learner made it.

Invariants: a manifest that passed `verify` was signed with the run's key for this run; its chunks cover the payload without gap
or overlap; two snapshots have one identity exactly if version and bytes are equal.
"""

from __future__ import annotations

import hmac
import json
import time
from itertools import pairwise

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from echo2.errors import SnapshotError

KEY_CONTEXT = "echo2 2026-11 snapshot manifest signature"


class SnapshotWithdrawn(SnapshotError):
    """A snapshot that was named is not, or no longer, in the store: ask for the newest one."""


class Manifest(BaseModel):
    """The description of one snapshot; published after its payload."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run_id: str
    version: NonNegativeInt
    base_version: NonNegativeInt | None = None
    """Version that a delta builds on; None for a full snapshot."""
    total_bytes: PositiveInt
    chunk_bytes: PositiveInt
    """Size of every chunk but the last, which may be shorter."""
    chunk_digests: tuple[str, ...] = Field(repr=False)
    """blake3 of each chunk, hexadecimal."""
    weights_digest: str
    """blake3 of the whole payload, hexadecimal."""
    created_unix_s: float
    signature: str = ""

    @model_validator(mode="after")
    def _chunks_cover_payload(self) -> Manifest:
        needed = -(-self.total_bytes // self.chunk_bytes)
        if len(self.chunk_digests) != needed:
            raise ValueError(
                f"{self.total_bytes} bytes in chunks of {self.chunk_bytes} are {needed}, not {len(self.chunk_digests)}"
            )
        return self

    @property
    def snapshot_id(self) -> str:
        """Identity of version and bytes: a resumed run may publish a version again with other weights, and a step that moved
        no weight makes a new version of equal bytes."""
        return f"{self.version}-{self.weights_digest}"

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_digests)

    def byte_range(self, first_chunk: int, count: int = 1) -> tuple[int, int]:
        """Start and length in bytes of `count` chunks from `first_chunk` on, cut at the end of the payload.

        Raises SnapshotError where the snapshot has no such chunks.
        """
        if first_chunk < 0 or count < 1 or first_chunk + count > self.chunk_count:
            raise SnapshotError(
                f"snapshot of version {self.version} has {self.chunk_count} chunks, counted from 0: {count} from {first_chunk} "
                f"on are not among them"
            )
        start = first_chunk * self.chunk_bytes
        return start, min(count * self.chunk_bytes, self.total_bytes - start)


def describe(payload: bytes, run_id: str, version: int, chunk_bytes: int) -> Manifest:
    """The unsigned manifest of a full snapshot."""
    view = memoryview(payload)
    bounds = [*range(0, len(view), chunk_bytes), len(view)]
    return Manifest(
        run_id=run_id,
        version=version,
        total_bytes=len(view),
        chunk_bytes=chunk_bytes,
        chunk_digests=tuple(blake3(view[start:end]).hexdigest() for start, end in pairwise(bounds)),
        weights_digest=blake3(view).hexdigest(),
        created_unix_s=time.time(),
    )


def signing_key(token: str) -> bytes:
    """The key, 32 bytes, that manifests of a run are signed with, from the run's secret token."""
    return blake3(token.encode(), derive_key_context=KEY_CONTEXT).digest()


def sign(manifest: Manifest, key: bytes) -> Manifest:
    """The same manifest with its signature: keyed blake3 over every other field."""
    return manifest.model_copy(update={"signature": _signature(manifest, key)})


def verify(manifest: Manifest, key: bytes, run_id: str) -> None:
    """Raises SnapshotError unless the manifest is of this run and was signed with `key`."""
    if manifest.run_id != run_id:
        raise SnapshotError(
            f"snapshot of version {manifest.version} belongs to run {manifest.run_id!r}, not {run_id!r}: give each run a "
            f"directory and a hub of its own"
        )
    if not hmac.compare_digest(manifest.signature.encode(), _signature(manifest, key).encode()):
        raise SnapshotError(
            f"manifest of version {manifest.version} is not signed with this run's token: it is damaged or forged, or this "
            f"process holds another token; compare the tokens"
        )


def parse_manifest(text: str | bytes) -> Manifest:
    """Read a manifest from JSON; raises SnapshotError. The result is not verified yet."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"]) or "content"
        raise SnapshotError(f"manifest is damaged ({field}: {problem['msg'].lower()}): publish the snapshot again") from None


def _signature(manifest: Manifest, key: bytes) -> str:
    fields = manifest.model_dump(mode="json", exclude={"signature"})
    return blake3(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode(), key=key).hexdigest()
