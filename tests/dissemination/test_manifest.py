"""Manifests: what they cover, whose they are."""

import random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from echo2.dissemination.manifest import Manifest, Probe, describe, parse_manifest, sign, signing_key, verify
from echo2.errors import SnapshotError

KEY = signing_key("secret")
PAYLOAD = random.Random(0).randbytes(10240)


def signed(version: int = 3) -> Manifest:
    return sign(describe(PAYLOAD, "run-a", version, 1024), KEY)


@given(total_bytes=st.integers(1, 5000), chunk_bytes=st.integers(1, 700))
def test_chunks_cover_the_payload_without_gap_or_overlap(total_bytes: int, chunk_bytes: int) -> None:
    payload = PAYLOAD[:total_bytes]
    manifest = describe(payload, "run-a", 0, chunk_bytes)
    ranges = [manifest.byte_range(chunk) for chunk in range(manifest.chunk_count)]
    assert b"".join(payload[start : start + length] for start, length in ranges) == payload
    assert manifest.byte_range(0, manifest.chunk_count) == (0, total_bytes)


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_digests_are_the_same_however_many_cores_make_them(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.dissemination.manifest.spare_cores", lambda: cores)
    manifest = describe(PAYLOAD, "run-a", 0, 1024)
    assert manifest.payload_digest == blake3(PAYLOAD).hexdigest()
    chunks = [PAYLOAD[start : start + 1024] for start in range(0, len(PAYLOAD), 1024)]
    assert manifest.chunk_digests == tuple(blake3(chunk).hexdigest() for chunk in chunks)


@pytest.mark.parametrize(("first_chunk", "count"), [(-1, 1), (0, 0), (0, 11), (10, 1)])
def test_chunks_that_do_not_exist_are_refused(first_chunk: int, count: int) -> None:
    with pytest.raises(SnapshotError, match="10 chunks"):
        signed().byte_range(first_chunk, count)


def test_a_signed_manifest_survives_the_wire() -> None:
    manifest = parse_manifest(signed().model_dump_json())
    verify(manifest, KEY, "run-a")
    assert manifest == signed().model_copy(update={"created_unix_s": manifest.created_unix_s, "signature": manifest.signature})


@pytest.mark.parametrize(
    "change",
    [
        {"version": 4},
        {"base_id": "2-00"},
        {"chunk_digests": tuple(reversed(signed().chunk_digests))},
        {"weights_digest": "00" * 32},
        {"payload_digest": "00" * 32},
        {"created_unix_s": 0.0},
        {"probe": Probe(token_ids=(1, 2), log_probs=(-0.5,))},
        {"signature": ""},
        {"signature": "é"},
    ],
)
def test_a_forged_manifest_is_refused(change: dict) -> None:
    with pytest.raises(SnapshotError, match="version"):
        verify(signed().model_copy(update=change), KEY, "run-a")


def test_a_manifest_of_another_token_or_run_is_refused() -> None:
    with pytest.raises(SnapshotError, match="token"):
        verify(signed(), signing_key("other"), "run-a")
    with pytest.raises(SnapshotError, match="'run-a', not 'run-b'"):
        verify(signed(), KEY, "run-b")


def test_identity_tells_versions_and_bytes_apart() -> None:
    same = describe(PAYLOAD, "run-a", 3, 512)
    assert same.snapshot_id == signed().snapshot_id
    assert describe(PAYLOAD, "run-a", 4, 1024).snapshot_id != signed().snapshot_id
    assert describe(PAYLOAD[::-1], "run-a", 3, 1024).snapshot_id != signed().snapshot_id


@pytest.mark.parametrize(
    "text", ["", "{", "{}", signed().model_dump_json().replace('"total_bytes":10240', '"total_bytes":99999')]
)
def test_a_damaged_manifest_is_refused(text: str) -> None:
    with pytest.raises(SnapshotError, match="damaged"):
        parse_manifest(text)
