"""What travels of a snapshot, and the proof that this run's learner made it: all its weights, or a delta from other ones.

Invariants: a manifest that passed `verify` was signed with the run's key for this run; its chunks cover the payload without gap
or overlap; two snapshots have one identity exactly if version and weights are equal, however they travel.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError, model_validator

from echo2.dissemination.cores import spare_cores
from echo2.errors import SnapshotError

Content = bytes | bytearray | memoryview

CHUNKS = 1000
"""How many a payload is cut into where their size is not given and nothing else limits it."""
LEAST_CHUNK_BYTES, CHUNK_STEP_BYTES = 16 * 1024, 4 * 1024
KEY_CONTEXT = "echo2 2026-11 snapshot manifest signature"


class SnapshotWithdrawn(SnapshotError):
    """A snapshot that was named is not, or no longer, in the store: ask for the newest one."""


class Probe(BaseModel):
    """A prompt, and what a version's learner gives for it, so that an engine can prove which weights it has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    token_ids: tuple[NonNegativeInt, ...]
    log_probs: tuple[float, ...]
    """Of every token but the first, after those before it, at temperature 1."""

    @model_validator(mode="after")
    def _one_for_each(self) -> Probe:
        if len(self.log_probs) != len(self.token_ids) - 1 or not self.log_probs:
            raise ValueError(f"{len(self.log_probs)} log-probabilities for {len(self.token_ids)} tokens")
        return self


class Manifest(BaseModel):
    """The description of one payload; published after it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run_id: str
    version: NonNegativeInt
    base_id: str | None = None
    """`snapshot_id` of the weights that a delta builds on; None where the payload is the weights."""
    total_bytes: PositiveInt
    chunk_bytes: PositiveInt
    """Size of every chunk but the last, which may be shorter."""
    chunk_digests: tuple[str, ...] = Field(repr=False)
    """blake3 of each chunk, hexadecimal."""
    payload_digest: str
    """blake3 of the whole payload, hexadecimal."""
    weights_digest: str
    """blake3 of the weights that the payload is or makes, hexadecimal."""
    created_unix_s: float
    probe: Probe | None = None
    """None where no model stands behind the weights."""
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
        """Identity of version and weights: a resumed run may publish a version again with other weights, and a step that moved
        no weight makes a new version of equal ones."""
        return f"{self.version}-{self.weights_digest}"

    @property
    def is_delta(self) -> bool:
        """Whether the payload makes the weights of other ones."""
        return self.base_id is not None

    @property
    def base_digest(self) -> str:
        """`weights_digest` of the weights that a delta builds on."""
        return (self.base_id or "").partition("-")[2]

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


ROUTE: TypeAdapter[tuple[Manifest, ...]] = TypeAdapter(tuple[Manifest, ...])


def fitting_chunk_bytes(total_bytes: int, most_bytes: int) -> int:
    """Size of the chunks for a payload: a thousandth of it, at least 16 KiB, and never more than `most_bytes`.

    A worker passes each chunk on to N − 1 others, and the last of these is the tail of a broadcast: so it is N/1000 of the
    whole. Smaller ones than 16 KiB cost more in headers than they save.
    """
    thousandth = -(-total_bytes // (CHUNKS * CHUNK_STEP_BYTES)) * CHUNK_STEP_BYTES
    return min(max(thousandth, LEAST_CHUNK_BYTES), most_bytes)


def describe(payload: Content, run_id: str, version: int, chunk_bytes: int, probe: Probe | None = None) -> Manifest:
    """The unsigned manifest of weights that travel in full."""
    view = memoryview(payload)
    digest = _digest(view)
    return Manifest(
        run_id=run_id,
        version=version,
        total_bytes=len(view),
        chunk_bytes=chunk_bytes,
        chunk_digests=_chunk_digests(view, chunk_bytes),
        payload_digest=digest,
        weights_digest=digest,
        created_unix_s=time.time(),
        probe=probe,
    )


def describe_delta(delta: Content, base: Manifest, target: Manifest) -> Manifest:
    """The unsigned manifest of a delta that makes the weights of `target` from those of `base`; its chunks are no larger."""
    view = memoryview(delta)
    chunk_bytes = fitting_chunk_bytes(len(view), target.chunk_bytes)
    changes = {
        "base_id": base.snapshot_id,
        "total_bytes": len(view),
        "chunk_bytes": chunk_bytes,
        "chunk_digests": _chunk_digests(view, chunk_bytes),
        "payload_digest": _digest(view),
        "signature": "",
    }
    return target.model_copy(update=changes)


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
        raise _damaged("manifest", error) from None


def encode_route(route: Sequence[Manifest]) -> bytes:
    """Manifests as one JSON text that `parse_route` reads."""
    return ROUTE.dump_json(tuple(route))


def parse_route(text: str | bytes) -> tuple[Manifest, ...]:
    """Read manifests from JSON; raises SnapshotError. They are not verified yet."""
    try:
        return ROUTE.validate_json(text)
    except ValidationError as error:
        raise _damaged("route", error) from None


def _damaged(what: str, error: ValidationError) -> SnapshotError:
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"]) or "content"
    return SnapshotError(f"{what} is damaged ({field}: {problem['msg'].lower()}): publish the snapshot again")


def _chunk_digests(payload: memoryview, chunk_bytes: int) -> tuple[str, ...]:
    starts, cores = range(0, len(payload), chunk_bytes), spare_cores()
    share = -(-len(starts) // cores)

    def digests(place: int) -> list[str]:
        mine = starts[place * share : (place + 1) * share]
        return [blake3(payload[start : start + chunk_bytes]).hexdigest() for start in mine]

    with ThreadPoolExecutor(cores) as pool:
        return tuple(chain.from_iterable(pool.map(digests, range(cores))))


def _digest(payload: memoryview) -> str:
    return blake3(payload, max_threads=spare_cores()).hexdigest()


def _signature(manifest: Manifest, key: bytes) -> str:
    fields = manifest.model_dump(mode="json", exclude={"signature"})
    return blake3(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode(), key=key).hexdigest()
