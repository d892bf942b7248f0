"""How a payload lies in a bucket: its chunks one after the other, each encrypted, under a key that names the payload, and its
manifest beside it.

Invariants: every payload has a salt of its own, kept with it as metadata, so that each range that is read of it can be opened
by itself; nothing of the payload is readable without the run's token.
"""

from __future__ import annotations

from collections.abc import Mapping

from echo2.dissemination.broadcast.cipher import SALT_BYTES, TAG_BYTES, ChunkCipher, ChunkRefused
from echo2.dissemination.manifest import Content, Manifest

SALT = "echo2-salt"


def run_folder(run_id: str) -> str:
    """What the keys of a run's objects begin with."""
    return f"{run_id}/"


def catalog_key(run_id: str) -> str:
    """Where the catalog of a run lies."""
    return f"{run_folder(run_id)}catalog.json"


def payload_key(run_id: str, version: int, payload_digest: str) -> str:
    """Where a payload lies."""
    return f"{run_folder(run_id)}{version}/{payload_digest}"


def manifest_key(run_id: str, version: int, payload_digest: str) -> str:
    """Where the manifest of a payload lies."""
    return f"{payload_key(run_id, version, payload_digest)}.json"


def object_key(manifest: Manifest) -> str:
    """Where the payload lies that `manifest` describes."""
    return payload_key(manifest.run_id, manifest.version, manifest.payload_digest)


def sealed_total_bytes(manifest: Manifest) -> int:
    """Length of the payload's object."""
    return manifest.total_bytes + TAG_BYTES * manifest.chunk_count


def sealed_range(manifest: Manifest, first_chunk: int, count: int) -> tuple[int, int]:
    """Where `count` sealed chunks from `first_chunk` on begin in the object, and their length, in bytes."""
    start, length = manifest.byte_range(first_chunk, count)
    return start + TAG_BYTES * first_chunk, length + TAG_BYTES * count


def metadata_of(salt: bytes) -> dict[str, str]:
    """What is kept with an object."""
    return {SALT: salt.hex()}


def salt_in(metadata: Mapping[str, str]) -> bytes:
    """The salt kept with an object. Raises ChunkRefused where there is none."""
    try:
        salt = bytes.fromhex(metadata.get(SALT, ""))
    except ValueError:
        salt = b""
    if len(salt) != SALT_BYTES:
        raise ChunkRefused(f"its metadata {SALT} is no salt")
    return salt


class SealedPayload:
    """The bytes of an object, sealed as they are read."""

    def __init__(self, manifest: Manifest, payload: Content, cipher: ChunkCipher) -> None:
        self._chunks = range(manifest.chunk_count)
        self._payload = memoryview(payload)
        self._cipher = cipher
        self._next = 0
        self._ahead = bytearray()

    def read(self, amount: int = -1) -> bytes:
        """The next `amount` bytes, fewer only at the end; all of them without an amount."""
        while self._next in self._chunks and (amount < 0 or len(self._ahead) < amount):
            self._ahead += self._cipher.seal(self._next, self._payload)
            self._next += 1
        end = len(self._ahead) if amount < 0 else amount
        piece = bytes(self._ahead[:end])
        del self._ahead[:end]
        return piece
