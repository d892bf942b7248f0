"""The snapshots of a run on disk: one process publishes, any number read.

Invariants: a version is visible only after its payloads and then its manifests are on the disk; a reader sees the old snapshot
or the new one, whole; a publisher that dies leaves the visible versions as they were. `v00000012` is a link to a hidden folder
that is never written again, so that one atomic rename replaces payloads and manifests together. Every version is there in full;
its delta from the one before lies beside it where that is smaller.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from echo2.dissemination.cores import spare_cores
from echo2.dissemination.delta import FullIsBetter, encode_delta
from echo2.dissemination.manifest import (
    Content,
    Manifest,
    Probe,
    SnapshotWithdrawn,
    describe,
    describe_delta,
    parse_manifest,
    sign,
    signing_key,
    verify,
)
from echo2.dissemination.route import Offer, cheapest_route
from echo2.durability import filling, naming, sync
from echo2.errors import SnapshotError

PAYLOAD_NAME, DELTA_NAME = "weights.safetensors", "delta"
MANIFEST_NAME, DELTA_MANIFEST_NAME = "manifest.json", "delta.json"
READ_BYTES = 1024 * 1024
VERIFIED_MANIFESTS = 64
VISIBLE = r"v(\d{8,})"
OURS = r"\.?v\d{8,}.*"


Mirroring = Callable[[Sequence[tuple[Manifest, Content]]], None]
"""Takes the payloads of one version, the smallest first."""


class Published(NamedTuple):
    """A version's manifests and weights."""

    manifest: Manifest
    delta: Manifest | None
    weights: Content


class SnapshotStore:
    """A folder of snapshots, `folder/v00000012/{weights.safetensors, manifest.json, delta, delta.json}`, of one run."""

    def __init__(self, folder: Path, run_id: str, token: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._key = signing_key(token)
        self._verified: dict[tuple[str, int, int], Manifest] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def publish(
        self,
        version: int,
        payload: Content,
        chunk_bytes: int,
        base: Published | None = None,
        mirror: Mirroring | None = None,
        probe: Probe | None = None,
    ) -> Published:
        """Make `payload` the snapshot of `version`, in place of a former one; when this returns, it is on the disk.

        With `base`, the delta from there is published too where it is smaller. `mirror` is called before anybody sees the
        version, so that who reads its manifest finds its copies. Raises SnapshotError for an empty payload, DiskError for
        a full disk.
        """
        if not payload:
            raise SnapshotError(f"snapshot of version {version} is empty: a payload must hold weights")
        manifest = sign(describe(payload, self._run_id, version, chunk_bytes, probe), self._key)
        files: dict[str, Content] = {PAYLOAD_NAME: payload, MANIFEST_NAME: manifest.model_dump_json().encode()}
        payloads: list[tuple[Manifest, Content]] = [(manifest, payload)]
        published = Published(manifest, None, payload)
        delta = _delta(base, published) if base else None
        if base and delta:
            of_delta = sign(describe_delta(delta, base.manifest, manifest), self._key)
            files |= {DELTA_NAME: delta, DELTA_MANIFEST_NAME: of_delta.model_dump_json().encode()}
            payloads.insert(0, (of_delta, delta))
            published = Published(manifest, of_delta, payload)
        if mirror is not None:
            mirror(payloads)
        self._place(self._folder / _name(version), files)
        return published

    def _place(self, link: Path, files: dict[str, Content]) -> None:
        """Make `link` lead to a new folder with these files."""
        hidden = self._folder / f".{link.name}.{secrets.token_hex(8)}"
        with naming(link), self._writing():
            with filling(hidden):
                for name, content in files.items():
                    (hidden / name).write_bytes(content)
            former = _target(link)
            if former == link.name:
                _delete(link)
            new_link = hidden.with_name(hidden.name + ".link")
            new_link.symlink_to(hidden.name)
            new_link.replace(link)
            sync(self._folder)
            if former not in (None, link.name):
                _delete(self._folder / former)

    def versions(self) -> list[int]:
        """Versions that can be read, oldest first."""
        complete = [entry.name for entry in self._folder.iterdir() if entry.is_symlink() or (entry / MANIFEST_NAME).is_file()]
        return sorted(int(found[1]) for name in complete if (found := re.fullmatch(VISIBLE, name)))

    def newest(self) -> Manifest | None:
        """Manifest of the highest version; None where there is none. Raises SnapshotError if it is damaged or another run's."""
        for version in reversed(self.versions()):
            try:
                return self.manifest(version)
            except SnapshotWithdrawn:
                continue
        return None

    def route(self, held_id: str | None) -> tuple[Manifest, ...]:
        """What to fetch, in order, to go from the snapshot called `held_id` to the newest: the fewest bytes.

        Empty where that is held, or where there is no snapshot. Raises SnapshotError if one is damaged or another run's.
        """
        full, deltas = self._manifests()
        if not full or full[max(full)].snapshot_id == held_id:
            return ()
        held_version = next((version for version, manifest in full.items() if manifest.snapshot_id == held_id), None)
        # A version that was published anew is no base for the deltas of its former weights.
        bases = {version: base for version, delta in deltas.items() if (base := _version_of(delta.base_id, full)) is not None}
        offers = [Offer(version, None, manifest.total_bytes) for version, manifest in full.items()]
        offers += [Offer(version, base, deltas[version].total_bytes) for version, base in bases.items()]
        route = cheapest_route(held_version, max(full), offers) or ()
        return tuple((full if offer.base_version is None else deltas)[offer.version] for offer in route)

    def _manifests(self) -> tuple[dict[int, Manifest], dict[int, Manifest]]:
        """Of the snapshots in full and of the deltas, by version."""
        full, deltas = {}, {}
        for version in self.versions():
            try:
                full[version], folder = self._resolve(version)
                with contextlib.suppress(FileNotFoundError):
                    deltas[version] = self._read_manifest(folder / DELTA_MANIFEST_NAME)
            except SnapshotWithdrawn:
                continue
        return full, deltas

    def manifest(self, version: int) -> Manifest:
        """The verified manifest of `version` in full. Raises SnapshotWithdrawn if there is none, SnapshotError if damaged."""
        return self._resolve(version)[0]

    def smallest(self, version: int) -> tuple[Manifest, Path]:
        """What a holder of the version before needs: the delta, else the weights. Raises SnapshotWithdrawn if there is none."""
        manifest, folder = self._resolve(version)
        with contextlib.suppress(FileNotFoundError):
            return self._read_manifest(folder / DELTA_MANIFEST_NAME), folder / DELTA_NAME
        return manifest, folder / PAYLOAD_NAME

    def path(self, version: int) -> Path:
        """File that holds the weights of `version`. Raises SnapshotWithdrawn if there is none."""
        return self._resolve(version)[1] / PAYLOAD_NAME

    def read(self, version: int, start: int, length: int) -> bytes:
        """`length` bytes of the weights from `start` on. Raises SnapshotWithdrawn, or SnapshotError if there are fewer."""
        return b"".join(_pieces(version, self.path(version), start, length))

    def stream(self, version: int, payload_digest: str, first_chunk: int, count: int) -> Iterator[bytes]:
        """The bytes of `count` chunks in pieces, all from the payload of that digest, even if it is replaced meanwhile.

        Raises SnapshotWithdrawn if that payload is not in the store, SnapshotError if it has no such chunks.
        """
        manifest, folder = self._resolve(version)
        file = folder / PAYLOAD_NAME
        if manifest.payload_digest != payload_digest:
            file = folder / DELTA_NAME
            try:
                manifest = self._read_manifest(folder / DELTA_MANIFEST_NAME)
            except FileNotFoundError:
                raise _withdrawn(version) from None
        if manifest.payload_digest != payload_digest:
            raise _withdrawn(version)
        return _pieces(version, file, *manifest.byte_range(first_chunk, count))

    def withdraw_after(self, version: int) -> list[int]:
        """Remove every version newer than `version`, newest first, and say which; a resumed run makes them anew."""
        with self._writing():
            newer = [v for v in reversed(self.versions()) if v > version]
            self._remove(newer)
        return newer

    def sweep(self, retain: int) -> list[int]:
        """Keep the newest `retain` versions, remove older ones and what dead publishers left; returns the versions removed.

        Never waits for a publisher at work: then it removes nothing, and the next sweep does.
        """
        try:
            with self._writing(wait=False):
                old = self.versions()[:-retain]
                self._remove(old)
                self._remove_orphans()
        except BlockingIOError:
            return []
        return old

    def _remove(self, versions: list[int]) -> None:
        for version in versions:
            link = self._folder / _name(version)
            target = _target(link)
            _delete(link)
            if target not in (None, link.name):
                _delete(self._folder / target)
        sync(self._folder)

    def _remove_orphans(self) -> None:
        visible = {_name(version) for version in self.versions()}
        used = visible | {_target(self._folder / name) for name in visible}
        for entry in list(self._folder.iterdir()):
            if re.fullmatch(OURS, entry.name) and entry.name not in used:
                _delete(entry)

    def _resolve(self, version: int) -> tuple[Manifest, Path]:
        """Manifest in full and folder of one and the same snapshot."""
        link = self._folder / _name(version)
        while (target := _target(link)) is not None:
            try:
                return self._read_manifest(self._folder / target / MANIFEST_NAME), self._folder / target
            except FileNotFoundError:
                if target == _target(link):
                    break
        raise _withdrawn(version)

    def _read_manifest(self, file: Path) -> Manifest:
        """The verified manifest in `file`, parsed once: a large model's has some 100,000 digests."""
        status = file.stat()
        key = (str(file), status.st_ino, status.st_mtime_ns)
        manifest = self._verified.get(key)
        if manifest is None:
            try:
                manifest = parse_manifest(file.read_bytes())
                verify(manifest, self._key, self._run_id)
            except SnapshotError as error:
                raise SnapshotError(f"{file}: {error}, or remove {file.parent}") from None
            if len(self._verified) >= VERIFIED_MANIFESTS:
                self._verified.clear()
            self._verified[key] = manifest
        return manifest

    @contextmanager
    def _writing(self, wait: bool = True) -> Iterator[None]:
        """One writer at a time; the system drops the lock of a process that dies. Raises BlockingIOError if not to wait."""
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield


def _delta(base: Published, target: Published) -> bytes | None:
    """The delta between two snapshots; None where it is not worth while, or where they are no safetensors messages."""
    known, wanted = base.manifest.weights_digest, target.manifest.weights_digest
    try:
        pieces = encode_delta(base.weights, target.weights, base_digest=known, target_digest=wanted, threads=spare_cores())
        return b"".join(pieces)
    except (FullIsBetter, SnapshotError):
        return None


def _version_of(snapshot_id: str | None, manifests: Mapping[int, Manifest]) -> int | None:
    return next((version for version, manifest in manifests.items() if manifest.snapshot_id == snapshot_id), None)


def _name(version: int) -> str:
    return f"v{version:08d}"


def _target(link: Path) -> str | None:
    """Name of the folder that a version is kept in: its own where it is no link, as in a copied run; None for none."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return link.name


def _delete(entry: Path) -> None:
    if entry.is_symlink():
        entry.unlink()
    else:
        shutil.rmtree(entry)


def _withdrawn(version: int) -> SnapshotWithdrawn:
    return SnapshotWithdrawn(f"snapshot of version {version} is not, or no longer, in the store: ask for the newest one")


def _pieces(version: int, payload: Path, start: int, length: int) -> Iterator[bytes]:
    try:
        file = payload.open("rb")
    except FileNotFoundError:
        raise _withdrawn(version) from None
    with file:
        file.seek(start)
        while length > 0:
            piece = file.read(min(length, READ_BYTES))
            if not piece:
                raise SnapshotError(f"payload of version {version} ends {length} bytes early in {payload}: publish it again")
            length -= len(piece)
            yield piece
