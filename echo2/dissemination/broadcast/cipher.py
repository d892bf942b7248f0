"""Encryption of chunks on the wire.

Invariants: every broadcast has a key of its own, so that a nonce, the chunk's number, is never used twice for different bytes
even if a version is published again; the same chunk of the same broadcast encrypts to the same bytes wherever that is done; the
ciphertext is bound to run, version, identity of the weights and place in the payload.
"""

from __future__ import annotations

import secrets

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from echo2.dissemination.manifest import Manifest

KEY_CONTEXT = "echo2 2026-11 snapshot chunk encryption"
TAG_BYTES = 16
SALT_BYTES = 16


class ChunkRefused(Exception):
    """A chunk is not the one that the manifest describes."""


def fresh_salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)


class ChunkCipher:
    """AES-256-GCM over the chunks of one broadcast."""

    def __init__(self, manifest: Manifest, token: str, salt: bytes) -> None:
        key = blake3(salt + token.encode(), derive_key_context=KEY_CONTEXT).digest()
        self._aead = AESGCM(key)
        self._manifest = manifest
        self._digests = [bytes.fromhex(digest) for digest in manifest.chunk_digests]
        self._about = f"{manifest.run_id}\0{manifest.snapshot_id}\0{manifest.payload_digest}".encode()

    def sealed_bytes(self, chunk: int) -> int:
        """Length of a chunk on the wire."""
        return self._manifest.byte_range(chunk)[1] + TAG_BYTES

    def seal(self, chunk: int, payload: memoryview) -> bytes:
        """The chunk of this payload as it goes over the wire."""
        start, length = self._manifest.byte_range(chunk)
        return self._aead.encrypt(_nonce(chunk), payload[start : start + length], self._about)

    def open_into(self, chunk: int, sealed: memoryview, payload: memoryview) -> None:
        """Decrypt into the chunk's place in the payload; check tag and digest. Raises ChunkRefused; the place is then void."""
        start, length = self._manifest.byte_range(chunk)
        if len(sealed) != length + TAG_BYTES:
            raise ChunkRefused(f"{len(sealed)} bytes instead of {length + TAG_BYTES}")
        place = payload[start : start + length]
        try:
            self._aead.decrypt_into(_nonce(chunk), sealed, self._about, place)
        except InvalidTag:
            raise ChunkRefused("its tag does not fit: it was changed, or is of another broadcast or run") from None
        if blake3(place).digest() != self._digests[chunk]:
            raise ChunkRefused("its digest is not the one in the manifest")


def _nonce(chunk: int) -> bytes:
    return chunk.to_bytes(12, "big")
