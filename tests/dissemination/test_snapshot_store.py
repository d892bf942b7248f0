"""The store: what readers see while a publisher writes, is replaced, or dies."""

import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from echo2.dissemination.manifest import SnapshotWithdrawn
from echo2.dissemination.store import SnapshotStore
from echo2.errors import SnapshotError

CHUNK_BYTES = 4096


def make_store(folder: Path, run_id: str = "run-a", token: str = "secret") -> SnapshotStore:
    return SnapshotStore(folder, run_id, token)


def random_payload(seed: int, size: int = 100_001) -> bytes:
    return random.Random(seed).randbytes(size)


def hidden_names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.startswith(".v")]


def test_what_was_published_is_read_back_by_another_store(tmp_path: Path) -> None:
    payloads = {version: random_payload(version) for version in (0, 1, 12)}
    published = {
        version: make_store(tmp_path).publish(version, payload, CHUNK_BYTES).manifest for version, payload in payloads.items()
    }
    reader = make_store(tmp_path)
    assert reader.versions() == [0, 1, 12]
    assert reader.newest() == published[12]
    for version, payload in payloads.items():
        assert reader.manifest(version) == published[version]
        assert reader.path(version).read_bytes() == payload
        assert reader.read(version, 5000, 777) == payload[5000:5777]
        digest = published[version].payload_digest
        assert b"".join(reader.stream(version, digest, 3, 22)) == payload[3 * CHUNK_BYTES :]
    assert (tmp_path / "v00000012" / "weights.safetensors").read_bytes() == payloads[12]
    assert (tmp_path / "v00000012" / "manifest.json").is_file()


def test_an_empty_store_has_no_newest(tmp_path: Path) -> None:
    store = make_store(tmp_path / "new")
    assert store.newest() is None
    assert store.versions() == []
    with pytest.raises(SnapshotWithdrawn, match="version 3"):
        store.manifest(3)


def test_reading_beyond_the_payload_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.publish(1, b"0123456789", 4)
    with pytest.raises(SnapshotError, match="ends 5 bytes early"):
        store.read(1, 5, 10)


def test_an_empty_payload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="version 1 is empty"):
        make_store(tmp_path).publish(1, b"", CHUNK_BYTES)


def test_snapshots_of_another_run_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "a").publish(1, b"weights", CHUNK_BYTES)
    with pytest.raises(SnapshotError, match="'run-a', not 'run-b'"):
        make_store(tmp_path / "a", run_id="run-b").newest()
    with pytest.raises(SnapshotError, match="token"):
        make_store(tmp_path / "a", token="other").newest()
    shutil.copytree(tmp_path / "a" / "v00000001", tmp_path / "b" / "v00000001")
    with pytest.raises(SnapshotError, match="'run-a', not 'run-b'"):
        make_store(tmp_path / "b", run_id="run-b").newest()


def test_a_damaged_manifest_is_an_error_and_publishing_again_heals_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.publish(1, b"weights", CHUNK_BYTES)
    (tmp_path / "v00000001" / "manifest.json").write_text("{")
    with pytest.raises(SnapshotError, match="damaged"):
        store.newest()
    assert store.publish(1, b"weights", CHUNK_BYTES).manifest == store.newest()


def test_a_copied_run_can_be_read_replaced_and_removed(tmp_path: Path) -> None:
    make_store(tmp_path / "a").publish(1, b"old", CHUNK_BYTES)
    for version in (1, 2):
        shutil.copytree(tmp_path / "a" / "v00000001", tmp_path / "b" / f"v0000000{version}")
    store = make_store(tmp_path / "b")
    assert store.read(1, 0, 3) == b"old"
    store.publish(1, b"new", CHUNK_BYTES)
    assert store.read(1, 0, 3) == b"new"
    assert store.withdraw_after(1) == [2]
    assert store.versions() == [1]


def test_withdrawing_removes_newer_versions_newest_first(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for version in range(6):
        store.publish(version, random_payload(version), CHUNK_BYTES)
    assert store.withdraw_after(2) == [5, 4, 3]
    assert make_store(tmp_path).versions() == [0, 1, 2]
    with pytest.raises(SnapshotWithdrawn):
        store.read(4, 0, 1)


def test_sweep_keeps_the_newest_and_removes_orphans(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for version in range(5):
        store.publish(version, random_payload(version), CHUNK_BYTES)
    for orphan in ("v00000009", ".v00000010.0123", ".v00000004.4567"):
        (tmp_path / orphan).mkdir()
        (tmp_path / orphan / "weights.safetensors").write_bytes(b"half")
    (tmp_path / ".v00000010.0123.link").symlink_to(".v00000010.0123")
    (tmp_path / "notes.txt").write_text("mine")
    assert store.versions() == [0, 1, 2, 3, 4]
    assert store.sweep(2) == [0, 1, 2]
    assert make_store(tmp_path).versions() == [3, 4]
    assert store.read(4, 0, 100_001) == random_payload(4)
    assert len(hidden_names(tmp_path)) == 2
    assert not (tmp_path / "v00000009").exists()
    assert (tmp_path / "notes.txt").exists()


def test_a_stream_stays_with_its_snapshot_when_that_is_replaced(tmp_path: Path) -> None:
    store, old = make_store(tmp_path), random_payload(1, 3_000_000)
    manifest = store.publish(1, old, CHUNK_BYTES).manifest
    stream = store.stream(1, manifest.payload_digest, 0, manifest.chunk_count)
    first = next(stream)
    store.publish(1, random_payload(2, 3_000_000), CHUNK_BYTES)
    assert first + b"".join(stream) == old
    with pytest.raises(SnapshotWithdrawn):
        store.stream(1, manifest.payload_digest, 0, 1)


def test_a_reader_sees_the_old_snapshot_or_the_new_one_whole(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    payloads = [random_payload(seed, 20_000) for seed in range(2)]
    store.publish(7, payloads[0], CHUNK_BYTES)
    done = threading.Event()

    def republish() -> None:
        for turn in range(100):
            store.publish(7, payloads[turn % 2], CHUNK_BYTES)
        done.set()

    publisher = threading.Thread(target=republish)
    publisher.start()
    reader, whole = make_store(tmp_path), 0
    while not done.is_set() or not whole:
        manifest = reader.newest()
        assert manifest is not None
        try:
            content = b"".join(reader.stream(7, manifest.payload_digest, 0, manifest.chunk_count))
        except SnapshotWithdrawn:
            continue
        assert blake3(content).hexdigest() == manifest.weights_digest
        whole += 1
    publisher.join()
    assert len(hidden_names(tmp_path)) == 1


PUBLISHER = """
import os, sys, time
from pathlib import Path
from echo2.dissemination.store import SnapshotStore

folder, version, hang_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
calls = 0

def hanging(function):
    def call(*arguments):
        global calls
        if calls == hang_at:
            print("hanging", flush=True)
            time.sleep(600)
        calls += 1
        return function(*arguments)
    return call

os.fsync, os.symlink, os.replace = hanging(os.fsync), hanging(os.symlink), hanging(os.replace)
SnapshotStore(folder, "run-a", "secret").publish(version, bytes(1_000_000), 65536)
print("published", flush=True)
"""


def test_sweep_leaves_a_publisher_at_work_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for version in (1, 2):
        store.publish(version, b"weights", CHUNK_BYTES)
    command = [sys.executable, "-c", PUBLISHER, str(tmp_path), "3", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "hanging\n"
        assert store.sweep(1) == []
        assert len(hidden_names(tmp_path)) == 3
        publisher.kill()
    assert store.sweep(1) == [1]
    assert len(hidden_names(tmp_path)) == 1


def publish_until_killed(folder: Path, version: int, hang_at: int) -> None:
    """Publish in a process of its own and kill it at the n-th call that puts something on the disk."""
    command = [sys.executable, "-c", PUBLISHER, str(folder), str(version), str(hang_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "hanging\n"
        publisher.kill()


@pytest.mark.parametrize("hang_at", range(5))
@pytest.mark.parametrize("version", [1, 2])
def test_a_publisher_killed_before_its_last_rename_never_shows_a_version(tmp_path: Path, version: int, hang_at: int) -> None:
    store = make_store(tmp_path)
    first = store.publish(1, b"weights", CHUNK_BYTES).manifest
    publish_until_killed(tmp_path, version, hang_at)
    assert store.versions() == [1]
    assert make_store(tmp_path).newest() == first
    assert store.read(1, 0, 7) == b"weights"
    assert len(hidden_names(tmp_path)) > 1
    store.sweep(5)
    assert len(hidden_names(tmp_path)) == 1
    assert store.publish(2, b"again", CHUNK_BYTES).manifest == store.newest()


def test_a_publisher_killed_after_its_last_rename_has_published_the_whole(tmp_path: Path) -> None:
    publish_until_killed(tmp_path, 2, 5)
    store = make_store(tmp_path)
    assert store.versions() == [2]
    assert store.read(2, 0, 1_000_000) == bytes(1_000_000)
