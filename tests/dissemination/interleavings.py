"""A run's dissemination as a whole, with a real store, broadcast and followers, and all that can befall it.

What the hub does over HTTP, to say what to fetch and to stream it, is called here in the same process.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from broadcasts import RUN_ID, TOKEN
from safetensors.numpy import save

from echo2.config import load_config
from echo2.dissemination.broadcast.arrivals import BroadcastArrivals
from echo2.dissemination.broadcast.link import Link
from echo2.dissemination.broadcast.peer import LoopThread, Peer
from echo2.dissemination.broadcast.record import BroadcastEvent
from echo2.dissemination.manifest import Manifest
from echo2.dissemination.receiver import SnapshotFollower, SourceUnavailable
from echo2.dissemination.store import SnapshotStore
from echo2.hub.broadcaster import Broadcaster

WEIGHTS = 100_000
CHUNK_BYTES = 4096
UPLINK_BYTES_PER_S = 2_000_000
ACCUSATIONS = {"corrupt", "replayed", "malformed"}
"""What no honest worker is ever said to have done."""


class Hub:
    """The snapshots of a run, their broadcast, and which weights each version has: what everything else is held against."""

    def __init__(self, folder: Path) -> None:
        self.events: list[BroadcastEvent] = []
        self.weights: dict[str, bytes] = {}
        self._store = SnapshotStore(folder, RUN_ID, TOKEN)
        self._values = np.random.default_rng(0).integers(0, 2**16, WEIGHTS, np.uint16)
        self._former = None
        self._version = -1
        self._config = load_config([], [f"dissemination.uplink_bytes_per_s={UPLINK_BYTES_PER_S}", "hub.host='127.0.0.1'"])
        self._broadcaster = self._serve(0)

    @property
    def newest(self) -> Manifest | None:
        return self._store.newest()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._broadcaster.port

    @property
    def links(self) -> list[Link]:
        return [worker.link for worker in list(self._broadcaster._source._workers.values())]

    @property
    def thread(self) -> LoopThread:
        return self._broadcaster._source

    def publish(self, changed: int, gap: int = 1) -> None:
        """The next version, with so many weights changed since the one before."""
        places = np.random.default_rng(self._version + 1).integers(0, WEIGHTS, changed)
        self._values[places] += np.random.default_rng(self._version + 2).integers(1, 2**10, changed).astype(np.uint16)
        self._version += gap
        weights = save({"w": self._values.view(np.float16)})
        manifest = self._store.publish(self._version, weights, CHUNK_BYTES, self._former)
        self._former = manifest
        self.weights[manifest.manifest.snapshot_id] = weights
        self._broadcaster.announce(self._version)

    def resume(self, versions_back: int) -> None:
        """The learner died and goes on from an earlier version; what it publishes next has other weights."""
        kept = self._store.versions()[: -versions_back or None]
        if kept:
            self._store.withdraw_after(kept[-1])
            self._version, self._former = kept[-1], None
            self._values += np.uint16(1)

    def restart(self, away_s: float) -> None:
        """The hub goes and comes back at the same port."""
        port = self._broadcaster.port
        self._broadcaster.stop()
        time.sleep(away_s)
        self._broadcaster = self._serve(port)

    def stop(self) -> None:
        self._broadcaster.stop()

    def _serve(self, port: int) -> Broadcaster:
        return Broadcaster(self._config, RUN_ID, TOKEN, self._store, port, self.events.append)

    def route(self, held_id: str | None) -> tuple[Manifest, ...]:
        return self._store.route(held_id)

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        return self._store.stream(manifest.version, manifest.payload_digest, first_chunk, count)


class Worker:
    """A worker as far as snapshots go: it tells every version that it has, and is held to it at once."""

    def __init__(self, hub: Hub, name: str, serving: bool) -> None:
        self.name = name
        self.told: list[Manifest] = []
        self.wrong: list[str] = []
        self.streamed: Counter[str] = Counter()
        self.awake = threading.Event()
        self.awake.set()
        self._hub = hub
        self.peer = Peer(RUN_ID, TOKEN, name, hub.address, host="127.0.0.1", serving=serving)
        self.follower = SnapshotFollower(
            self, RUN_ID, TOKEN, arrivals=BroadcastArrivals(self.peer), wait_s=0.2, on_arrival=self._arrived
        )
        self.follower.start()

    def wait_newest(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        """As the hub answers; a worker that sleeps gets no answer."""
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            if self.awake.is_set() and (route := self._hub.route(held_id)):
                return route
            time.sleep(0.01)
        return ()

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        if not self.awake.is_set():
            raise SourceUnavailable("asleep")
        self.streamed[manifest.payload_digest] += 1
        return self._hub.stream(manifest, first_chunk, count)

    def has(self, manifest: Manifest) -> bool:
        return bool(self.told) and self.told[-1].snapshot_id == manifest.snapshot_id

    def leave(self) -> None:
        """In order: nothing is said, connections are closed."""
        self.follower.stop()

    def _arrived(self) -> None:
        snapshot = self.follower.take()
        assert snapshot is not None
        if bytes(snapshot.weights) != self._hub.weights[snapshot.manifest.snapshot_id]:
            self.wrong.append(f"{self.name} holds wrong weights as version {snapshot.manifest.version}")
        self.told.append(snapshot.manifest)


def in_loop(thread: LoopThread, call: Callable[..., None], *arguments: object) -> None:
    """Call something where the links live, and wait for it."""
    done = threading.Event()
    thread._loop.call_soon_threadsafe(lambda: (call(*arguments), done.set()))
    done.wait(5)


def reset(link: Link) -> None:
    """Break a connection: what is under way on it is lost, both ends see an error."""
    if not link.closed:
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()


def kill(worker: Worker) -> None:
    """As kill -9: every connection breaks at once."""
    peer = worker.peer

    def die() -> None:
        for link in [*peer._links.values(), *([peer._exchange.source] if peer._exchange.source else [])]:
            reset(link)
        peer._end()

    in_loop(peer, die)
    worker.follower.stop()


class Adversary:
    """Makes a worker's relay misbehave; counts how often it did."""

    def __init__(self, worker: Worker, way: str) -> None:
        self.name, self.way, self.deeds = worker.name, way, 0
        relay = worker.peer._exchange.relay
        self._peer = worker.peer
        self._honest = relay.forward
        self._kept: list[tuple[int, bytes]] = []
        relay.forward = getattr(self, way)  # type: ignore[method-assign]

    def flip(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        wrong = bytearray(body)
        wrong[random.randrange(len(wrong))] ^= 1
        self._spoilt(broadcast, chunk, wrong, targets)

    def other_run(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        """Bytes that another run's source sealed, which are noise here."""
        self._spoilt(broadcast, chunk, bytearray(random.randbytes(len(body))), targets)

    def other_version(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        """Chunks of an earlier broadcast in place of this one's."""
        earlier = [bytearray(kept) for number, kept in self._kept if number != broadcast and len(kept) == len(body)]
        self._kept = [*self._kept[-20:], (broadcast, bytes(body))]
        if earlier:
            self._spoilt(broadcast, chunk, earlier[0], targets)
        else:
            self._honest(broadcast, chunk, body, targets)

    def trickle(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        """One byte a second."""
        self.deeds += 1
        for link in self._peer._links.values():
            link._grant = lambda wanted: 1 if int(time.monotonic() * 1000) % 1000 < 2 else 0
        self._honest(broadcast, chunk, body, targets)

    def _spoilt(self, broadcast: int, chunk: int, wrong: bytearray, targets: object) -> None:
        self.deeds += 1
        self._honest(broadcast, chunk, memoryview(wrong), targets)
