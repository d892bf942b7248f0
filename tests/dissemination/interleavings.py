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
from echo2.dissemination.broadcast.cipher import ChunkCipher, fresh_salt
from echo2.dissemination.broadcast.link import Link
from echo2.dissemination.broadcast.peer import LoopThread, Peer
from echo2.dissemination.broadcast.record import BroadcastEvent
from echo2.dissemination.manifest import Manifest, describe
from echo2.dissemination.receiver import SnapshotFollower, SourceUnavailable
from echo2.dissemination.store import Published, SnapshotStore
from echo2.hub.broadcaster import Broadcaster

WEIGHTS = 100_000
CHUNK_BYTES = 4096
UPLINK_BYTES_PER_S = 2_000_000
SETTINGS = [f"dissemination.uplink_bytes_per_s={UPLINK_BYTES_PER_S}", "hub.host='127.0.0.1'"]


class Hub:
    """Learner and hub: publishes, broadcasts, answers workers, and knows the weights of every version that ever was."""

    def __init__(self, folder: Path) -> None:
        self.events: list[BroadcastEvent] = []
        self.weights: dict[str, bytes] = {}
        self._store = SnapshotStore(folder, RUN_ID, TOKEN)
        self._values = np.random.default_rng(0).integers(0, 2**16, WEIGHTS, np.uint16)
        self._former: Published | None = None
        self._version = -1
        self._port = 0
        self._serve()

    @property
    def newest(self) -> Manifest | None:
        return self._store.newest()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    @property
    def source(self) -> LoopThread:
        return self._broadcaster._source

    @property
    def links(self) -> list[Link]:
        return [worker.link for worker in list(self._broadcaster._source._workers.values())]

    def publish(self, changed: int, gap: int = 1) -> None:
        """The version that is `gap` above the last one, with so many weights changed since that one."""
        generator = np.random.default_rng(len(self.weights))
        self._values[generator.integers(0, WEIGHTS, changed)] += generator.integers(1, 1000, changed).astype(np.uint16)
        self._version += gap
        weights = save({"w": self._values.view(np.float16)})
        # Known before any worker can have it.
        self.weights[describe(weights, RUN_ID, self._version, CHUNK_BYTES).snapshot_id] = weights
        self._former = self._store.publish(self._version, weights, CHUNK_BYTES, self._former)
        self._broadcaster.announce(self._version)

    def resume(self, versions_back: int) -> None:
        """The learner died and goes on from an earlier version; what it publishes next has other weights than before."""
        kept = self._store.versions()[: -versions_back or None]
        if kept:
            self._store.withdraw_after(kept[-1])
            self._version, self._former = kept[-1], None

    def restart(self, away_s: float) -> None:
        """The hub goes, and comes back at the same port."""
        self._broadcaster.stop()
        time.sleep(away_s)
        self._serve()

    def stop(self) -> None:
        self._broadcaster.stop()

    def route(self, held_id: str | None) -> tuple[Manifest, ...]:
        return self._store.route(held_id)

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        return self._store.stream(manifest.version, manifest.payload_digest, first_chunk, count)

    def _serve(self) -> None:
        config = load_config([], SETTINGS)
        self._broadcaster = Broadcaster(config, RUN_ID, TOKEN, self._store, None, self._port, self.events.append)
        self._port = self._broadcaster.port


class Worker:
    """A worker as far as snapshots go: whenever it tells a version, its weights are compared with the learner's."""

    def __init__(self, hub: Hub, name: str, serving: bool) -> None:
        self.name = name
        self.told: list[Manifest] = []
        self.wrong: list[str] = []
        self.streams: Counter[str] = Counter()
        """How often each payload was asked of the hub."""
        self.awake = threading.Event()
        self.awake.set()
        self._hub = hub
        self.peer = Peer(RUN_ID, TOKEN, name, hub.address, host="127.0.0.1", serving=serving)
        arrivals = BroadcastArrivals(self.peer)
        self.follower = SnapshotFollower(self, RUN_ID, TOKEN, arrivals=arrivals, wait_s=0.2, on_arrival=self._arrived)
        self.follower.start()

    def wait_newest(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        """What the hub answers; nothing while this worker sleeps."""
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            if self.awake.is_set() and (route := self._hub.route(held_id)):
                return route
            time.sleep(0.01)
        return ()

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        if not self.awake.is_set():
            raise SourceUnavailable("this worker sleeps")
        self.streams[manifest.payload_digest] += 1
        return self._hub.stream(manifest, first_chunk, count)

    def has(self, manifest: Manifest) -> bool:
        """Whether that is what it told last."""
        return bool(self.told) and self.told[-1].snapshot_id == manifest.snapshot_id

    def leave(self) -> None:
        """Go in good order."""
        self.follower.stop()

    def kill(self) -> None:
        """Go as by kill -9: every connection breaks."""

        def die() -> None:
            source = self.peer._exchange.source
            for link in [*self.peer._links.values(), *([source] if source else [])]:
                reset(link)
            self.peer._end()

        in_loop(self.peer, die)
        self.follower.stop()

    def block(self, seconds: float) -> None:
        """Do nothing at all on any connection for a while."""
        self.peer._loop.call_soon_threadsafe(time.sleep, seconds)

    def _arrived(self) -> None:
        snapshot = self.follower.take()
        assert snapshot is not None
        if bytes(snapshot.weights) != self._hub.weights[snapshot.manifest.snapshot_id]:
            self.wrong.append(f"{self.name} has wrong weights as version {snapshot.manifest.version}")
        self.told.append(snapshot.manifest)


def in_loop(thread: LoopThread, call: Callable[[], None]) -> None:
    """Call something in the thread of the links, and wait for it."""
    done = threading.Event()
    thread._loop.call_soon_threadsafe(lambda: (call(), done.set()))
    assert done.wait(10), f"{thread._thread.name} did not come to it within 10 s"


def reset(link: Link) -> None:
    """Break a connection: what is under way on it is lost, in the middle of a chunk perhaps, and both ends see an error."""
    if not link.closed:
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()


class Adversary:
    """Makes a worker's relay misbehave."""

    WAYS = ("flip_a_bit", "replay", "serve_another_run", "trickle")

    def __init__(self, worker: Worker, way: str, seed: int) -> None:
        self.name, self.way = worker.name, way
        self._links = worker.peer._links
        self._random = random.Random(seed)
        self._seen: list[tuple[int, int, bytes]] = []
        relay = worker.peer._exchange.relay
        self._honest = relay.forward
        relay.forward = getattr(self, way)  # type: ignore[method-assign]

    def flip_a_bit(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        wrong = bytearray(body)
        wrong[self._random.randrange(len(wrong))] ^= 1 << self._random.randrange(8)
        self._honest(broadcast, chunk, memoryview(wrong), targets)

    def replay(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        """Chunks of an earlier broadcast in place of this one's."""
        self._seen = [*self._seen[-50:], (broadcast, chunk, bytes(body))]
        earlier = [seen for number, _, seen in self._seen if number != broadcast and len(seen) == len(body)]
        self._honest(broadcast, chunk, memoryview(bytearray(earlier[0] if earlier else body)), targets)

    def serve_another_run(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        payload = self._random.randbytes(CHUNK_BYTES * (chunk + 1))
        cipher = ChunkCipher(describe(payload, "run-b", 1, CHUNK_BYTES), TOKEN, fresh_salt())
        self._honest(broadcast, chunk, memoryview(bytearray(cipher.seal(chunk, memoryview(payload)))), targets)

    def trickle(self, broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
        """About one byte a second."""
        for link in self._links.values():
            link._grant = lambda wanted: 1 if int(time.monotonic() * 1000) % 1000 < 2 else 0
        self._honest(broadcast, chunk, body, targets)
